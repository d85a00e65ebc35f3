"""Tensors of a global shape of which a rank holds a part that DTensor cannot describe.

An expert that is a module of its own lives on one expert-parallel rank (and that rank's replicas): a mesh of the owners alone would
answer ``full_tensor()`` with nothing on all other ranks. A weight that holds several projections side by side is cut in each of
them: its part is no block of the whole, and ``torch.distributed.checkpoint`` takes a DTensor's part for one. Both types have the
global shape everywhere, speak the protocol of ``torch.distributed.checkpoint``, and put the whole together on request.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from .compat import all_gather_single, no_torch_function, resolve_process_group, wrapper_tensor
from .placement.types import Shard
from .weights import padded, part_of, put_together

aten = torch.ops.aten


class PartTensor(Tensor):
    """Global shape, ``to_local()`` (None where absent), ``full_tensor()``; anything that computes is refused.

    ``_place`` says where the data lies, on which ranks of which process groups.
    """

    _local: Tensor | None
    _place: tuple[Any, ...]

    @classmethod
    def made(cls, local: Tensor | None, shape: Sequence[int], like: Tensor, place: tuple[Any, ...]) -> PartTensor:
        """``local`` as the part of a tensor of that shape, with type and device of ``like``."""
        found: PartTensor = wrapper_tensor(cls, shape, like)
        found._local, found._place = local, place
        return found

    def to_local(self) -> Tensor | None:
        """The data on a rank that holds it, sharing memory with the parameter; None elsewhere."""
        return self._local

    @abc.abstractmethod
    def full_tensor(self) -> Tensor:
        """A plain copy of the whole, on every rank of the group; collective."""

    @abc.abstractmethod
    def _chunks(self) -> list[tuple[tuple[int, ...], Tensor]]:
        """The blocks of the whole that this rank holds, each with where it begins."""

    def placed_as(self, *place: Any) -> bool:
        """Whether the data lies where that place would have it."""
        return self._place == place

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        held = "absent here" if self._local is None else f"here: {self._local}"
        return f"{type(self).__name__}(shape={tuple(self.shape)}, cuts={[str(part.placed) for part in self._place[0]]}, {held})"

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        source = args[0]
        if func in _COPIES and isinstance(source, PartTensor):
            local = None if source._local is None else func(source._local, *args[1:], **kwargs)
            like = func(torch.empty(0, dtype=source.dtype, device=source.device), *args[1:], **kwargs)
            return source.made(local, source.shape, like, source._place)
        if func is aten.new_empty.default and tuple(args[1]) == tuple(source.shape):
            # staging for an asynchronous checkpoint fills the attributes in afterwards
            like = torch.empty(0, dtype=source.dtype, device=kwargs.get("device", source.device))
            return source.made(None, source.shape, like, source._place)
        if func is aten.copy_.default and isinstance(source, PartTensor):
            value = args[1]
            if isinstance(value, PartTensor) and not value.placed_as(*source._place):
                raise RuntimeError(f"{value!r} lies otherwise than {source!r}; copy its full_tensor().")
            value = value._local if isinstance(value, PartTensor) else source._part_of(value)
            if source._local is not None and value is not None:
                source._local.copy_(value)
            return source
        raise RuntimeError(
            f"{func} was called on a tensor of which a rank holds a part ({source!r}); call its full_tensor(), or use "
            "moecompile.full_state_dict(model)."
        )

    @abc.abstractmethod
    def _part_of(self, whole: Tensor) -> Tensor | None:
        """This rank's part of a whole plain tensor."""

    def __deepcopy__(self, memo: dict[int, Any]) -> PartTensor:
        local = None if self._local is None else self._local.detach().clone()
        made = self.made(local, self.shape, torch.empty(0, dtype=self.dtype, device=self.device), self._place)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a rank's state_dict() holds its own experts and parts only, and one pickled file of it would miss the others; save it with "
            "torch.distributed.checkpoint.save, or torch.save(moecompile.full_state_dict(model))."
        )

    # -- the protocol of torch.distributed.checkpoint ----------------------------------------------------------------
    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        items = []
        for offsets, part in self._chunks():
            data = TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=part.shape),
                properties=TensorProperties.create_from_tensor(part),
                size=self.shape,
            )
            index = MetadataIndex(fqn, torch.Size(offsets))
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=part.shape) for offsets, part in self._chunks()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for offsets, part in self._chunks():
            if index.offset is None or tuple(index.offset) == offsets:
                return part
        raise ValueError(
            f"{index.fqn} from {index.offset} on is not held by this rank; only its owner reads and writes it."
        )


@dataclass(frozen=True)
class Part:
    """One cut of a dim, or of what cuts before it left: this rank is the one with that ``index`` of ``ranks`` in ``group``."""

    placed: Shard
    index: int
    ranks: int
    group: str


def _cut(value: Tensor, parts: Sequence[Part]) -> Tensor:
    for part in parts:
        value = part_of(value, part.placed, part.ranks, part.index)
    return value


def _joined(local: Tensor, shape: Sequence[int], parts: Sequence[Part]) -> Tensor:
    """The whole, of that shape, on every rank of the groups; collective."""
    sizes = list(shape)
    before = []
    for part in parts:
        before.append(sizes[part.placed.dim])
        sizes[part.placed.dim] = -(-before[-1] // part.ranks)
    local = padded(local, sizes)
    for part, size in zip(reversed(parts), reversed(before), strict=True):
        local = gathered(local, part.placed, size, part.ranks, resolve_process_group(part.group))
    return local.contiguous()


def gathered(local: Tensor, placed: Shard, size: int, ranks: int, group: dist.ProcessGroup) -> Tensor:
    """What the parts of all ranks make up, whose dim then has ``size``; each part is padded to the largest. Collective."""
    local = local.contiguous()
    found = local.new_empty((ranks, *local.shape))
    all_gather_single(found.flatten(0, 1), local, group=group)
    return put_together(found.unbind(0), placed).narrow(placed.dim, 0, size)


def _blocks(local: Tensor, shape: Sequence[int], parts: Sequence[Part]) -> list[tuple[tuple[int, ...], Tensor]]:
    """The blocks of the whole that make up ``local``, each with where it begins: cut dim by dim into runs of neighbours."""
    runs: list[list[tuple[int, int]]] = []
    for dim, size in enumerate(shape):
        index = _cut(
            torch.arange(size), [replace(part, placed=part.placed.moved(0)) for part in parts if part.placed.dim == dim]
        )
        ends = (index.diff() != 1).nonzero().flatten().add(1).tolist()
        runs.append(
            [(int(index[start]), stop - start) for start, stop in pairwise([0, *ends, len(index)]) if stop > start]
        )
    found = []
    for place in product(*runs):
        block = local
        for dim, (run, here) in enumerate(zip(runs, place, strict=True)):
            block = block.narrow(dim, sum(length for _, length in run[: run.index(here)]), here[1])
        found.append((tuple(start for start, _ in place), block))
    return found


class OwnedTensor(PartTensor):
    """On the ranks of coordinate ``owner``, whole or each with its part, and absent on the others."""

    @classmethod
    def of(
        cls,
        local: Tensor | None,
        shape: Sequence[int],
        like: Tensor,
        owner: int,
        group: str,
        parts: Sequence[Part] = (),
    ) -> PartTensor:
        return cls.made(local, shape, like, (tuple(parts), owner, group))

    def full_tensor(self) -> Tensor:
        """A plain copy of the whole, on every rank of the group; collective."""
        parts, owner, name = self._place
        if self._local is None:
            whole = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        else:
            whole = _joined(self._local.detach(), self.shape, parts).clone(memory_format=torch.contiguous_format)
        group = resolve_process_group(name)
        dist.broadcast(whole, dist.get_global_rank(group, owner), group)
        return whole

    def _chunks(self) -> list[tuple[tuple[int, ...], Tensor]]:
        return [] if self._local is None else _blocks(self._local, self.shape, self._place[0])

    def _part_of(self, whole: Tensor) -> Tensor | None:
        return None if self._local is None else _cut(whole, self._place[0])


class StripedTensor(PartTensor):
    """Cut in several dims, or in one that holds projections side by side, of each of which a rank has its part."""

    @classmethod
    def of(cls, local: Tensor, shape: Sequence[int], parts: Sequence[Part]) -> PartTensor:
        """``local`` as what the cuts, one after the other, leave to this rank."""
        return cls.made(local, shape, local, (tuple(parts),))

    def full_tensor(self) -> Tensor:
        """A plain copy of the whole, on every rank of the groups; collective."""
        assert self._local is not None
        return _joined(self._local.detach(), self.shape, self._place[0]).clone()

    def _chunks(self) -> list[tuple[tuple[int, ...], Tensor]]:
        return [] if self._local is None else _blocks(self._local, self.shape, self._place[0])

    def _part_of(self, whole: Tensor) -> Tensor | None:
        return _cut(whole, self._place[0])


class StagedTensor(PartTensor):
    """What the pipeline stages that read a weight have of it; absent on the others.

    ``inner`` says how they have it: ``()`` whole, else whether this rank has any of it, and its place as an OwnedTensor
    (parts, owner, group) or a StripedTensor (parts).
    """

    @classmethod
    def of(
        cls, local: Tensor | None, shape: Sequence[int], like: Tensor, place: tuple[int, bool, tuple[Any, ...], str]
    ) -> PartTensor:
        """``place``: the first pipeline rank that holds it, whether this one does, how it is held there, the group of the stages."""
        inner = place[2]
        return cls.made(None if inner and not inner[0] else local, shape, like, place)

    def _as_inner(self) -> PartTensor:
        """The same part for the ranks of one stage."""
        _, _, inner, group = self._place
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        place = inner[1] if inner else ((), 0, group)
        kind = StripedTensor if len(place) == 1 else OwnedTensor
        return kind.made(self._local, self.shape, like, place)

    def full_tensor(self) -> Tensor:
        """A plain copy of the whole, on every rank of all stages; collective."""
        owner, here, inner, group = self._place
        found = self._as_inner().full_tensor() if inner and here else self._local
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        return OwnedTensor.of(found, self.shape, like, owner, group).full_tensor()

    def _chunks(self) -> list[tuple[tuple[int, ...], Tensor]]:
        return [] if self._local is None else self._as_inner()._chunks()

    def _part_of(self, whole: Tensor) -> Tensor | None:
        return None if self._local is None else self._as_inner()._part_of(whole)


_COPIES = {
    aten.detach.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.empty_like.default,
    aten.zeros_like.default,
}
