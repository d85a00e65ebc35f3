"""Reductions the runtime makes outside a graph: gradients that were accumulated before they were reduced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .compat import foreach_copy_
from .placement.types import Partial
from .program import Output
from .runtime.process_groups import ProcessGroups


def partial_axes(item: Output) -> tuple[str, ...]:
    """The axes on which an output is a sum still to be taken."""
    return tuple(axis for axis, placed in item.placements if isinstance(placed, Partial))


def add_up(value: Tensor, axes: Sequence[str], groups: ProcessGroups) -> None:
    """Sum a tensor in place over one axis after another."""
    for axis in axes:
        if groups.size(axis) > 1:
            dist.all_reduce(value, group=groups.group(axis))


REDUCE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def reduce_flat(tensors: Sequence[tuple[str, Tensor]], groups: ProcessGroups) -> None:
    """Sum each tensor in place over its axis, in the plan's type; one flat exchange per axis and dtype, in the order given."""
    wanted = groups.mesh.plan.reduce_dtype
    buckets: dict[tuple[str, torch.dtype], list[Tensor]] = {}
    for axis, tensor in tensors:
        if axis and groups.size(axis) > 1 and tensor.numel():
            buckets.setdefault((axis, tensor.dtype), []).append(tensor.as_subclass(Tensor))
    for (axis, _), members in buckets.items():
        flat = torch.cat([item.reshape(-1) for item in members])
        flat = flat if wanted is None else flat.to(REDUCE_DTYPES[wanted])
        dist.all_reduce(flat, group=groups.group(axis))
        parts = torch.split(flat, [item.numel() for item in members])
        foreach_copy_(members, [part.view_as(item) for part, item in zip(parts, members, strict=True)])


class Unreduced:
    """Gradients that backward calls under ``no_sync`` left in ``.grad``: n times this rank's share each, for an axis of n ranks.

    Their mean is the sum of the shares. What every rank adds to ``.grad`` itself, such as the penalty on a weight, counts once in it.
    """

    def __init__(self) -> None:
        self._axes: dict[nn.Parameter, str] = {}

    def __bool__(self) -> bool:
        return bool(self._axes)

    def leave(self, param: nn.Parameter, axis: str) -> None:
        """Note that the mean over ``axis`` of a gradient is still to be taken."""
        self._axes[param] = axis

    def reduce(self, groups: ProcessGroups) -> None:
        """Take the mean of all that was left; what was set to None since is gone. Collective."""
        held = [(axis, param.grad) for param, axis in self._axes.items() if param.grad is not None]
        reduce_flat(held, groups)
        for axis, grad in held:
            if axis and groups.size(axis) > 1:
                grad.as_subclass(Tensor).div_(groups.size(axis))
        self._axes.clear()

    def check(self, params: Iterable[Tensor], what: str) -> None:
        """RuntimeError if one of them has a gradient that is this rank's share."""
        if self._axes and any(param.grad is not None for param in params if param in self._axes):
            raise RuntimeError(
                f"{what}: the gradients were accumulated under no_sync() and are this rank's share; run the last forward and backward "
                "outside of it first."
            )
