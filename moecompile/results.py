"""What a call returns beside its loss: this data rank's part, spread over the ranks of tp and cp where the program left it cut.

A result that lies whole on every rank of an axis is a plain tensor. One that is cut is a DTensor of the shape that the plain model
would give for this data rank's batch, so that its parts are not taken for the whole.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .compat import StridedShard
from .mesh import joined
from .placement.types import Replicate, Shard
from .program import Output
from .runtime.process_groups import ProcessGroups

# Ranks that differ in these alone pass the same batch; in the order of the mesh.
_AXES = ("cp", "tp")


class Results:
    """Hands out the results of one program on this rank."""

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups = groups
        self._axes = [axis for axis in _AXES if groups.size(axis) > 1]
        self._meshes: dict[tuple[tuple[str, ...], str], DeviceMesh] = {}

    def hand_out(self, item: Output, value: Tensor, parts: int, *, differentiable: bool) -> Tensor:
        """``value`` as the caller sees it; ``parts`` microbatches were joined to make it.

        Where it is ``differentiable``, the gradients that ranks pass for a result which all of them hold whole count once: those of one
        data rank, and of all where it is no part of the batch, such as a mean over it.
        """
        cuts = {axis: placed for axis, placed in item.placements if axis in self._axes and isinstance(placed, Shard)}
        if differentiable and value.requires_grad:
            whole = [axis for axis in self._axes if axis not in cuts]
            if not isinstance(dict(item.placements).get("dp"), Shard):
                whole.append("dp")
            copies = math.prod(self.groups.size(axis) for axis in whole)
            value = value if copies == 1 else _Once.apply(value, copies)  # type: ignore[no-untyped-call]
        return self._spread(value, cuts, _joined_outer(item, parts)) if cuts else value

    def _spread(self, value: Tensor, cuts: dict[str, Shard], more: dict[str, int]) -> Tensor:
        axes = tuple(cuts)  # the outer first: each cuts what those before it left
        shape = list(value.shape)
        for axis, placed in cuts.items():
            shape[placed.dim] *= self.groups.size(axis)
        placements = [_as_dtensor(cuts[axis], more.get(axis, 1)) for axis in axes]
        stride = torch.empty(shape, device="meta").stride()
        mesh = self._mesh(axes, value.device.type)
        made: Tensor = DTensor.from_local(
            value.contiguous(), mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )
        return made

    def _mesh(self, axes: tuple[str, ...], device: str) -> DeviceMesh:
        """The ranks over which a result of this data rank is cut."""
        if (axes, device) not in self._meshes:
            groups = [self.groups.group(axis) for axis in axes]
            if len(axes) == 1:
                made = DeviceMesh.from_group(groups[0], device, mesh_dim_names=axes)
            else:
                ranks = torch.tensor(self.groups.ranks(joined(axes))).reshape(
                    [self.groups.size(axis) for axis in _AXES]
                )
                ranks = ranks.permute([_AXES.index(axis) for axis in axes]).contiguous()
                made = DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=axes)
            self._meshes[axes, device] = made
        return self._meshes[axes, device]


def _joined_outer(item: Output, parts: int) -> dict[str, int]:
    """Microbatches are joined along the dim that dp cuts: what cuts the same dim then does so in each of them."""
    placed = dict(item.placements)
    batch = placed.get("dp", Replicate())
    return {
        axis: parts
        for axis, found in placed.items()
        if isinstance(batch, Shard) and isinstance(found, Shard) and found.dim == batch.dim
    }


def _as_dtensor(placed: Shard, times: int) -> Any:
    outer = placed.outer * times
    return torch.distributed.tensor.Shard(placed.dim) if outer == 1 else StridedShard(placed.dim, split_factor=outer)


class _Once(torch.autograd.Function):
    """A result that several ranks hold whole, each of which passes a gradient for it: together they count as one."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, copies: int) -> Tensor:
        ctx.copies = copies
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return grads[0] / ctx.copies, None
