"""A model's parameters as one rank holds them: cut in place, under the user's own Parameter objects.

A parameter that the plan cuts keeps its identity; only its data becomes this rank's share. Experts that are modules of their
own become views into one stacked tensor, which is what the graph reads; an expert of another rank becomes empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .errors import CaptureError
from .mesh import Mesh, joined
from .placement.types import Shard
from .program import Input, InputKind


@dataclass(frozen=True)
class Cut:
    """How one parameter or buffer of the plain model is spread: dim ``dim`` over ``axis``, or whole on one rank of it.

    ``shape`` is the global shape. ``stripes`` > 1: the dim holds so many projections side by side, each of which is cut. For an
    expert that is a parameter of its own ``owner`` is the index on ``axis`` of the rank that holds it and ``dim`` is None.
    ``more`` are further cuts, over other axes of the same mesh, of what that leaves: experts are cut over ep and over etp.
    """

    axis: str
    shape: tuple[int, ...]
    dim: int | None = 0
    owner: int | None = None
    stripes: int = 1
    more: tuple[tuple[str, Shard], ...] = ()

    @property
    def parts(self) -> tuple[tuple[str, Shard], ...]:
        """The cuts of dims in their order; none for an expert that lies whole on one rank."""
        first = () if self.dim is None else ((self.axis, Shard(self.dim, self.stripes)),)
        return (*first, *self.more)

    @property
    def axes(self) -> str:
        """All axes over which it is spread, as one."""
        return joined(part for axis in (self.axis, *(axis for axis, _ in self.more)) for part in axis.split("+"))

    def is_even(self, mesh: Mesh) -> bool:
        """Whether all ranks that hold some of it hold equally much."""
        shape = list(self.shape)
        for axis, placed in self.parts:
            if shape[placed.dim] % mesh.size(axis):
                return False
            shape[placed.dim] //= mesh.size(axis)
        return True

    def part(self, value: Tensor, mesh: Mesh, rank: int) -> Tensor:
        """What a rank that holds some of it holds of a whole value."""
        for axis, placed in self.parts:
            value = part_of(value, placed, mesh.size(axis), mesh.axis_index(axis, rank))
        return value


class Weights:
    """The tensors behind a program's PARAM and BUFFER inputs on one rank."""

    def __init__(self, model: nn.Module, mesh: Mesh, rank: int) -> None:
        self.model, self.mesh, self.rank = model, mesh, rank
        self.cuts: dict[str, Cut] = {}
        self.shapes = {name: tuple(item.shape) for name, item in _named(model)}
        self.kept: dict[
            tuple[str, ...], Tensor
        ] = {}  # wholes that were gathered from shards, by the names behind an input
        self.stages: dict[str, tuple[int, ...]] = {}  # which indices on pp hold a parameter; all where it is not named
        self._stacks: dict[
            tuple[str, ...], Tensor
        ] = {}  # what programs read in place of Parameters, which are views into it
        self._sizes: dict[tuple[str, ...], tuple[int, ...]] = {}  # of each Parameter in there, padding included
        first: dict[int, str] = {}
        self._first = {name: first.setdefault(id(item), name) for name, item in _named(model)}

    def cut(self, inputs: Iterable[Input]) -> None:
        """Cut every weight that ``inputs`` place and that is still whole; call once per captured program."""
        with torch.no_grad():
            for item in inputs:
                if item.kind not in (InputKind.PARAM, InputKind.BUFFER):
                    continue
                placed = [(axis, found) for axis, found in item.placements if isinstance(found, Shard)]
                if item.stacked:
                    self._stack(item, placed)
                elif placed and item.fqns[0] not in self.cuts:
                    self._slice(item, placed)

    def hold(self, found: Mapping[str, tuple[int, ...]]) -> None:
        """Empty every parameter that only other pipeline stages read; call behind ``cut``."""
        for name, ranks in found.items():
            before = self.stages.get(name)
            if before is not None and not set(ranks) <= set(before):
                raise CaptureError(
                    f"'{name}' lies on pipeline ranks {before}, but this call reads it on {ranks}; write the layout so that both calls of "
                    "the model read it on the same stages."
                )
            if before is None:
                first = self._first.get(name, name)
                self.stages.update({alias: ranks for alias, own in self._first.items() if own == first})
        with torch.no_grad():
            for name in found:
                tensor = find(self.model, name)
                if not self.holds(name) and tensor.numel():
                    _empty(tensor, self.global_shape(name))

    def holds(self, name: str) -> bool:
        """Whether this rank's pipeline stages read a weight."""
        held = self.stages.get(name)
        return held is None or self.mesh.axis_index("pp", self.rank) in held

    def counts(self, name: str) -> bool:
        """Whether a sum over pipeline ranks takes this rank's copy: the first holder's."""
        held = self.stages.get(name)
        return held is None or self.mesh.axis_index("pp", self.rank) == held[0]

    def spread_axis(self, name: str) -> str:
        """The axes over which the parts of a weight lie, stages among them; '' for one that every rank has whole."""
        cut = self.cuts.get(name)
        axes = [*(["pp"] if name in self.stages else []), *(cut.axes.split("+") if cut else [])]
        return joined(axes) if axes else ""

    def cut_dims(self, name: str) -> frozenset[int]:
        """The dims in which a rank that holds some of a weight has a part of it."""
        cut = self.cuts.get(name)
        return frozenset(placed.dim for _, placed in cut.parts) if cut else frozenset()

    def value(self, item: Input) -> Tensor:
        """The local tensor of an input."""
        names = item.fqns if item.stacked else (self._first[item.fqns[0]],)
        if names not in self._stacks or not self.holds(item.fqns[0]):
            return find(self.model, item.fqns[0]).detach()
        stack = self._stacks[names]
        if not self._is_intact(names, stack):
            stack = self._restack(names)
        return stack if item.stacked else stack[0]

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Copy what a forward has left in buffers into the model's own, by name."""
        with torch.no_grad():
            for name, value in values.items():
                find(self.model, name).copy_(value)

    def attached(self, item: Input) -> Tensor:
        """The local tensor of a PARAM input as a differentiable function of the Parameters behind it."""
        shape = item.local_shape(self.mesh)
        if not item.stacked:
            return padded(find(self.model, item.fqns[0]), shape)
        local = self.local_names(item.fqns)
        stack = torch.stack([padded(find(self.model, name), shape[1:]) for name in local])
        # Other ranks' experts are empty here; joined in, they get the empty gradient that a step gives them.
        absent = [find(self.model, name).reshape(-1) for name in item.fqns if name not in local]
        return torch.cat([stack.reshape(-1), *absent]).view_as(stack) if absent else stack

    def parameters_of(self, item: Input) -> list[tuple[nn.Parameter, int | None]]:
        """The Parameters behind an input, each with its place in the local stack; None: held by another rank, or no stack."""
        found = [(parameter(self.model, name), name) for name in item.fqns]
        if not item.stacked:
            return [(found[0][0], None)]
        local = self.local_names(item.fqns)
        return [(param, local.index(name) if name in local else None) for param, name in found]

    def global_shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def first_name(self, name: str) -> str:
        """The first of the names of this weight; tied weights have several."""
        return self._first[name]

    def cut_of(self, name: str) -> Cut | None:
        """How a weight is cut, under whichever of its names; None for one that every rank has whole."""
        return self.cuts.get(name)

    def is_local(self, cut: Cut) -> bool:
        """Whether this rank holds a weight that lies whole on one rank of its axis."""
        return cut.owner == self.mesh.axis_index(cut.axis, self.rank)

    def stack_of(self, name: str) -> tuple[str, ...] | None:
        """The experts that are stacked, and cut, together with this one."""
        return next((names for names in self._stacks if len(names) > 1 and name in names and name in self.cuts), None)

    # -- cutting -----------------------------------------------------------------------------------------------------
    def _slice(self, item: Input, placed: list[tuple[str, Shard]]) -> None:
        name, ((axis, first), *more) = item.fqns[0], placed
        cut = Cut(axis, self.shapes[name], first.dim, stripes=first.outer, more=tuple(more))
        self._cut_data(name, cut)
        if not cut.is_even(self.mesh):  # programs read it padded
            names = (self._first[name],)
            self._sizes[names] = item.local_shape(self.mesh)
            self._restack(names)

    def _cut_data(self, name: str, cut: Cut) -> None:
        tensor = find(self.model, name)
        grad, tensor.grad = tensor.grad, None
        self._note(name, cut)
        if any(self.mesh.size(axis) > 1 for axis in cut.axes.split("+")):
            tensor.__dict__[_SHARE] = True
        if cut.parts:
            # contiguous, or a copy of it onto itself would look like one onto another part of the same memory
            part = cut.part(tensor.data, self.mesh, self.rank)
            tensor.data = part.clone(memory_format=torch.contiguous_format)
            grad = (
                None
                if grad is None
                else cut.part(grad, self.mesh, self.rank).clone(memory_format=torch.contiguous_format)
            )
        tensor.grad = grad

    def _stack(self, item: Input, placed: list[tuple[str, Shard]]) -> None:
        """Each expert lies on one rank of the axis that cuts the stack's own dim, and is cut over the others."""
        if item.fqns in self._stacks:
            return
        owners = [axis for axis, cut in placed if cut.dim == 0]
        inner = tuple((axis, cut.moved(cut.dim - 1)) for axis, cut in placed if cut.dim != 0)
        share = len(item.fqns) // (self.mesh.size(owners[0]) if owners else 1)
        for index, name in enumerate(item.fqns):
            if owners:
                self._cut_data(name, Cut(owners[0], self.shapes[name], None, index // share, more=inner))
            elif inner:
                (axis, first), *more = inner
                self._cut_data(name, Cut(axis, self.shapes[name], first.dim, stripes=first.outer, more=tuple(more)))
        self._sizes[item.fqns] = item.local_shape(self.mesh)[1:]
        self._restack(item.fqns)
        for name in set(item.fqns) - set(self.local_names(item.fqns)):
            _empty(find(self.model, name), self.global_shape(name))

    def _note(self, name: str, cut: Cut) -> None:
        """Tied weights are cut once and known as cut under all their names."""
        self.cuts.update({alias: cut for alias, first in self._first.items() if first == self._first[name]})

    def local_names(self, names: tuple[str, ...]) -> list[str]:
        first = self.cuts.get(names[0])
        if first is None or first.owner is None:
            return list(names)
        mine = self.mesh.axis_index(first.axis, self.rank)
        return [name for name in names if self.cuts[name].owner == mine]

    def _restack(self, names: tuple[str, ...]) -> Tensor:
        """Put this rank's experts into one tensor and point their Parameters into it; a shard that is padded is its own stack."""
        local = [find(self.model, name) for name in self.local_names(names)]
        stack = torch.stack([padded(item.data, self._sizes[names]) for item in local])
        for item, part in zip(local, stack.unbind(0), strict=True):
            item.data = part[: len(item)] if part.shape != item.shape else part
        self._stacks[names] = stack
        return stack

    def restack(self) -> None:
        """Make up the stacks again whose parameters have been moved or converted."""
        with torch.no_grad():
            for names, stack in list(self._stacks.items()):
                if self.holds(names[0]) and not self._is_intact(names, stack):
                    self._restack(names)

    def _is_intact(self, names: tuple[str, ...], stack: Tensor) -> bool:
        """Whether the Parameters still point into the stack; ``model.to()`` and assignments to ``.data`` break that."""
        step = stack.stride(0) * stack.element_size()
        held = [(index, find(self.model, name)) for index, name in enumerate(self.local_names(names))]
        return all(
            item.data_ptr() == stack.data_ptr() + index * step
            if item.numel()
            else (item.dtype, item.device) == (stack.dtype, stack.device)
            for index, item in held
        )


def part_of(value: Tensor, placed: Shard, ranks: int, index: int) -> Tensor:
    """One rank's part of a whole value: of equal size, or of ``ceil(size / ranks)`` rows until there are no more."""
    if placed.outer == 1:
        size = value.shape[placed.dim]
        step = -(-size // ranks)
        start = min(index * step, size)
        return value.narrow(placed.dim, start, min(step, size - start))
    blocks = torch.unflatten(value, placed.dim, (placed.outer, ranks, -1))
    return blocks.select(placed.dim + 1, index).flatten(placed.dim, placed.dim + 1)


def padded(value: Tensor, shape: Sequence[int]) -> Tensor:
    """``value`` with zeros behind it in every dim, up to ``shape``."""
    if tuple(value.shape) == tuple(shape):
        return value
    missing = [size - own for own, size in zip(value.shape, shape, strict=True)]
    return torch.nn.functional.pad(value, [count for size in reversed(missing) for count in (0, size)])


def put_together(parts: Sequence[Tensor], placed: Shard) -> Tensor:
    """The whole of the parts of all ranks; inverse of `part_of`."""
    if placed.outer == 1:
        return torch.cat(list(parts), placed.dim)
    blocks = [torch.unflatten(part, placed.dim, (placed.outer, -1)) for part in parts]
    return torch.stack(blocks, placed.dim + 1).flatten(placed.dim, placed.dim + 2)


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def find(model: nn.Module, name: str) -> Tensor:
    """A parameter or buffer by its dotted name, as it is now."""
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    found: Tensor | None = module._parameters.get(last)
    if found is None:
        found = module._buffers.get(last)
    if found is None:
        raise CaptureError(f"the model has lost its weight '{name}' since it was captured; parallelize it again.")
    return found


_SHARE = "_moecompile_share"


def is_share(tensor: Tensor) -> bool:
    """Whether a plan has left this rank a part of the tensor."""
    return _SHARE in tensor.__dict__


def nothing_of(shape: Sequence[int], like: Tensor) -> Tensor:
    """What a rank has of a weight that others hold: no rows, but as many dims, which optimizers of matrices ask for."""
    return torch.empty((0, *shape[1:]), dtype=like.dtype, device=like.device)


def _empty(tensor: Tensor, shape: Sequence[int]) -> None:
    """Take a weight's data, and its gradient's, where other ranks hold them."""
    grad, tensor.grad = tensor.grad, None
    tensor.data = nothing_of(shape, tensor.data)
    tensor.__dict__[_SHARE] = True
    tensor.grad = None if grad is None else nothing_of(shape, grad)


def parameter(model: nn.Module, name: str) -> nn.Parameter:
    found = find(model, name)
    assert isinstance(found, nn.Parameter)
    return found
