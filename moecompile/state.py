"""A parallel model's state under the plain model's names and in global shapes.

One rank holds parts. Here a part becomes a tensor that knows the whole (``spread``), a whole becomes this rank's part
(``part``), and parts become wholes again (``gather``). Optimizer state follows its parameter, so it goes the same ways.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from .compat import tree_flatten
from .mesh import ATTENTION_AXES, EXPERT_AXES, joined
from .meta_init import fill
from .owned import OwnedTensor, Part, PartTensor, StagedTensor, StripedTensor, gathered
from .placement.types import Shard as Striped
from .runtime import control
from .runtime.process_groups import ProcessGroups
from .weights import Cut, Weights, nothing_of, padded


class State:
    """Where each weight of one parallel model lies, and the ways between parts and wholes. Made by `ParallelModel`."""

    def __init__(self, weights: Weights, groups: ProcessGroups) -> None:
        self.weights, self.groups = weights, groups
        self._meshes: dict[tuple[str, str], DeviceMesh] = {}
        self.loaded: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # to be cut with the model, if that comes later
        self.bare = False  # whether the plain module's own state_dict() gives out this rank's parts as they are
        self.unreduced = False  # whether gradients of calls under no_sync are still those of this rank alone

    def use(self, groups: ProcessGroups) -> None:
        """Communicate over other groups, for a model that was moved to another kind of device."""
        self.groups, self._meshes = groups, {}

    def check_reduced(self, what: str) -> None:
        """RuntimeError where ``what`` would take gradients of this rank alone for the model's."""
        if self.unreduced and any(param.grad is not None for param in self.weights.model.parameters()):
            raise RuntimeError(
                f"{what} came while .grad still holds what each rank computed alone, for a call under no_sync(); make the last call before "
                "it, forward and backward, outside of no_sync(), or set the gradients to None."
            )

    # -- parts to global shapes, without communication ---------------------------------------------------------------
    def spread(self, name: str, local: Tensor) -> Tensor:
        """What this rank holds of ``name`` (the weight itself, its gradient or moments) as a tensor of the global shape.

        A weight that is not cut stays a plain tensor, one that is cut in blocks over one axis becomes a DTensor, one that is cut in
        stripes or over several axes a StripedTensor, an expert of its own an OwnedTensor.
        """
        if name in self.weights.stages:
            return self._staged(name, local.detach())
        cut = self.weights.cut_of(name)
        if cut is None:
            return local
        local = local.detach()
        if cut.owner is not None:
            held = local if self.weights.is_local(cut) else None
            return OwnedTensor.of(held, cut.shape, local, cut.owner, self.groups.group_name(cut.axis), self._parts(cut))
        if not _is_plain(cut):
            return StripedTensor.of(local, cut.shape, self._parts(cut))
        mesh = self._device_mesh(cut.axis, local.device.type)
        stride = torch.empty(cut.shape, device="meta").stride()
        placements = self._placements(cut)
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(cut.shape), stride=stride)

    def _staged(self, name: str, local: Tensor) -> Tensor:
        """A weight that some pipeline stages hold, whole or in parts."""
        place = self._stage_place(name)
        return StagedTensor.of(local if place[1] else None, self.weights.global_shape(name), local, place)

    def _stage_place(self, name: str) -> tuple[int, bool, tuple[Any, ...], str]:
        """The first pipeline rank that holds a weight, whether this one does, how it is held there, and the group."""
        cut, inner = self.weights.cut_of(name), tuple[Any, ...]()
        if cut is not None and cut.owner is not None:
            inner = (self.weights.is_local(cut), (self._parts(cut), cut.owner, self.groups.group_name(cut.axis)))
        elif cut is not None:
            inner = (True, (self._parts(cut),))
        return self.weights.stages[name][0], self.weights.holds(name), inner, self.groups.group_name("pp")

    def spread_all(self, found: MutableMapping[str, Any], prefix: str = "") -> None:
        """Replace the cut tensors of a plain ``state_dict`` by ones of global shape, in place."""
        for name in self.weights.shapes:
            value = found.get(prefix + name)
            if isinstance(value, Tensor) and not isinstance(value, (DTensor, PartTensor)):
                found[prefix + name] = self.spread(name, value)

    def own_state(self) -> dict[str, Any]:
        """The plain module's ``state_dict()`` with this rank's parts as they are."""
        self.bare = True
        try:
            found: dict[str, Any] = self.weights.model.state_dict()
            return found
        finally:
            self.bare = False

    def _placements(self, cut: Cut) -> list[Replicate | Shard]:
        return [*([Replicate()] if self._replicated(cut.axis) else []), Shard(cut.parts[0][1].dim)]

    def _parts(self, cut: Cut) -> tuple[Part, ...]:
        """Where this rank's part of a weight lies that DTensor cannot describe."""
        mesh, rank, groups = self.weights.mesh, self.groups.rank, self.groups
        return tuple(
            Part(placed, mesh.axis_index(axis, rank), groups.size(axis), groups.group_name(axis))
            for axis, placed in cut.parts
        )

    def _replicated(self, axis: str) -> bool:
        return self.groups.size(_replicas(axis)) > 1

    def _device_mesh(self, axis: str, device: str) -> DeviceMesh:
        """The ranks over which weights are cut on an axis, and their replicas; made of the groups that the programs use."""
        if (axis, device) not in self._meshes:
            if self._replicated(axis):
                ranks = torch.tensor(self.groups.mesh.groups(axis))
                groups = [self.groups.group(_replicas(axis)), self.groups.group(axis)]
                made = DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=(_replicas(axis), axis))
            else:
                made = DeviceMesh.from_group(self.groups.group(axis), device, mesh_dim_names=(axis,))
            self._meshes[axis, device] = made
        return self._meshes[axis, device]

    def split_all(self, found: MutableMapping[str, Any], prefix: str = "") -> None:
        """Replace the entries of a state by this rank's parts, in place; names that are not the model's stay."""
        for name in self.weights.shapes:
            value = found.get(prefix + name)
            if isinstance(value, Tensor):
                found[prefix + name] = self.part(name, value)

    # -- wholes to parts ---------------------------------------------------------------------------------------------
    def part(self, name: str, value: Tensor) -> Tensor:
        """This rank's part of a value of ``name`` that is whole, or spread by this or another parallel model.

        Raises RuntimeError for another shape than the plain model's, and for a DTensor that was pickled on another rank.
        Collective when the value is spread otherwise than here.
        """
        shape = self.weights.global_shape(name)
        if tuple(value.shape) != shape:
            raise RuntimeError(
                f"the state of '{name}' has shape {list(value.shape)}, but the plain model's is {list(shape)}; pass the whole tensor "
                "(as in the plain model's own state_dict), or a tensor of that global shape."
            )
        if isinstance(value, StagedTensor) and name in self.weights.stages:
            if value.placed_as(*self._stage_place(name)):
                held = value.to_local()
                return nothing_of(shape, value) if held is None else held
            return self.take(name, whole(value))
        cut = self.weights.cut_of(name)
        local = self._as_held(value, cut)
        return local if local is not None else self.take(name, whole(value))

    def take(self, name: str, value: Tensor) -> Tensor:
        """This rank's part of a whole plain tensor."""
        if not self.weights.holds(name):
            return nothing_of(value.shape, value)
        cut = self.weights.cut_of(name)
        if cut is None:
            return value
        if cut.owner is not None and not self.weights.is_local(cut):
            return nothing_of(value.shape, value)
        return cut.part(value, self.weights.mesh, self.groups.rank)

    def keep(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[str, Tensor], Tensor]:
        """Turns a whole new weight into this rank's share, on the device of the call's tensors."""
        leaves, _ = tree_flatten((args, kwargs))
        device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
        return lambda name, value: self.take(name, value).to(device, copy=True)

    def _as_held(self, value: Tensor, cut: Cut | None) -> Tensor | None:
        """The local part of a value that already lies as the weight does; None where it lies otherwise."""
        owner = None if cut is None else cut.owner
        if isinstance(value, OwnedTensor) and cut is not None and owner is not None:
            local = value.to_local() if self.weights.is_local(cut) else nothing_of(value.shape, value)
            return local if value.placed_as(self._parts(cut), owner, self.groups.group_name(cut.axis)) else None
        if isinstance(value, StripedTensor) and cut is not None and not _is_plain(cut):
            return value.to_local() if value.placed_as(self._parts(cut)) else None
        if isinstance(value, DTensor):
            _check_own(value)
            same = cut is not None and value.device_mesh == self._meshes.get((cut.axis, value.device.type))
            if same and cut is not None and _is_plain(cut) and list(value.placements) == self._placements(cut):
                return value.to_local()
        return None

    # -- parts to plain wholes, collective ---------------------------------------------------------------------------
    def gather(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole plain copies of what all ranks hold, by name and in the order of ``parts``; equal on all ranks.

        Every rank passes the same names. Two names of one weight get one tensor, as in the plain model.
        """
        done: dict[str, Tensor] = {}
        for name in parts:
            first = self.weights.first_name(name)
            if first in done:
                continue
            stack = self.weights.stack_of(name)
            if stack is not None and name not in self.weights.stages and all(member in parts for member in stack):
                done.update(self._gather_stack(stack, parts))
            else:
                done[first] = whole(self.spread(name, parts[name].detach().as_subclass(Tensor)))
        return {name: done[self.weights.first_name(name)] for name in parts}

    def _gather_stack(self, names: tuple[str, ...], parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All experts of one stack in one exchange over each axis."""
        cut = self.weights.cuts[names[0]]
        local = [parts[name].detach().as_subclass(Tensor) for name in self.weights.local_names(names)]
        owners = [] if cut.owner is None else [(cut.axis, Striped(0))]
        sizes, steps = [len(names), *cut.shape], []
        for axis, placed in [*owners, *((axis, placed.moved(placed.dim + 1)) for axis, placed in cut.parts)]:
            steps.append((axis, placed, sizes[placed.dim]))
            sizes[placed.dim] = -(-sizes[placed.dim] // self.groups.size(axis))
        out = torch.stack([padded(item, sizes[1:]) for item in local])
        for axis, placed, size in reversed(steps):
            out = gathered(out, placed, size, self.groups.size(axis), self.groups.group(axis))
        return {self.weights.first_name(name): item.clone() for name, item in zip(names, out.unbind(0), strict=True)}


def _is_plain(cut: Cut) -> bool:
    """Whether DTensor can say how a weight lies: in blocks, over one axis."""
    return cut.owner is None and cut.stripes == 1 and not cut.more


def _replicas(axis: str) -> str:
    """The axes of the same mesh and stage over which what an axis cuts is repeated."""
    mesh = EXPERT_AXES if axis.split("+")[0] in EXPERT_AXES else ATTENTION_AXES
    return joined(other for other in mesh[1:] if other not in axis.split("+"))


def full_state(state: State, found: Mapping[str, Any]) -> dict[str, Any]:
    """A snapshot of a plain module's ``state_dict``, of which this rank holds parts; collective."""
    empty = next((name for name, value in found.items() if isinstance(value, Tensor) and value.is_meta), None)
    if empty is not None:
        raise RuntimeError(
            f"'{empty}' is on the meta device and gets its values at the first call; call the model once, or pass example= to "
            "parallelize."
        )
    parts = {name: value for name, value in found.items() if isinstance(value, Tensor) and name in state.weights.shapes}
    wholes = state.gather(parts)
    return {name: wholes.get(name, copy.deepcopy(value)) for name, value in found.items()}


def fill_meta(model: nn.Module, found: Mapping[str, Any]) -> None:
    """Give parameters and buffers that have no data yet their values from a state."""
    for name, item in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        value = found.get(name)
        if item.is_meta and isinstance(value, Tensor) and not value.is_meta:
            fill(item, value.detach().to(item.dtype, copy=True))


def save_pretrained(state: State, directory: Any, *args: Any, **kwargs: Any) -> None:
    """Hugging Face's method of the same name, given the whole weights: rank 0 writes, all ranks wait; collective."""
    model, error = state.weights.model, None
    if kwargs.get("state_dict") is None:
        kwargs["state_dict"] = full_state(state, state.own_state())
    if state.groups.rank == 0 and kwargs.get("is_main_process", True):
        try:
            model.save_pretrained(directory, *args, **kwargs)  # type: ignore[operator]
        except Exception as found:
            error = found
    control.agree(state.groups, "save_pretrained", error)


def full_gradients(state: State) -> dict[str, Tensor | None]:
    """Whole plain gradients of all parameters, None where there is none; collective.

    Raises CaptureError on all ranks if they do not have gradients of the same parameters.
    """
    grads = {name: param.grad for name, param in state.weights.model.named_parameters()}
    held = {name: grad.as_subclass(Tensor) for name, grad in grads.items() if grad is not None}
    control.agree(state.groups, "\n".join(f"a gradient of {name}" for name in held))
    wholes = state.gather(held)
    return {name: wholes.get(name) for name in grads}


def whole(value: Tensor) -> Tensor:
    """A plain tensor with all of a value: itself for a plain one, gathered (collective) for one spread over ranks."""
    if isinstance(value, PartTensor):
        return value.full_tensor()
    if isinstance(value, DTensor):
        _check_own(value)
        return value.full_tensor()
    return value.detach().clone()


def _check_own(value: DTensor) -> None:
    """A DTensor unpickled from another rank's file still claims to be that rank's part: refuse it."""
    here = (value.device_mesh.mesh == dist.get_rank()).nonzero().tolist()
    claimed = value.device_mesh.get_coordinate()
    if not here or claimed is None or list(claimed) != here[0]:
        raise RuntimeError(
            f"the state holds a DTensor that was saved by another rank (coordinate {claimed} of its mesh), so its experts would be "
            "duplicated here; save with torch.distributed.checkpoint, or torch.save(moecompile.full_state_dict(model))."
        )
