"""A tensor that is whole on the ranks of one mesh coordinate and absent on the others.

An expert that is a module of its own lives on one expert-parallel rank (and that rank's replicas). DTensor cannot say that: a
mesh of the owners alone would answer ``full_tensor()`` with nothing on all other ranks. This type has the global shape
everywhere, speaks the protocol of ``torch.distributed.checkpoint``, which saves it once, and broadcasts itself on request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from .compat import no_torch_function, resolve_process_group, wrapper_tensor

aten = torch.ops.aten


class OwnedTensor(Tensor):
    """Global shape, ``to_local()`` (None where absent), ``full_tensor()``; anything that computes is refused.

    ``group`` names the process group with one rank of each coordinate in order; ``owner`` is the coordinate with the data.
    """

    _local: Tensor | None
    _owner: int
    _group: str

    @staticmethod
    def __new__(cls, local: Tensor | None, shape: Sequence[int], like: Tensor, owner: int, group: str) -> OwnedTensor:
        made: OwnedTensor = wrapper_tensor(cls, shape, like)
        made._local, made._owner, made._group = local, owner, group
        return made

    def to_local(self) -> Tensor | None:
        """The data on a rank that holds it, sharing memory with the parameter; None elsewhere."""
        return self._local

    def full_tensor(self) -> Tensor:
        """A plain copy of the whole, on every rank of the group; collective."""
        local = torch.empty(self.shape, dtype=self.dtype, device=self.device) if self._local is None else self._local
        whole = local.detach().clone(memory_format=torch.contiguous_format)
        group = resolve_process_group(self._group)
        dist.broadcast(whole, dist.get_global_rank(group, self._owner), group)
        return whole

    def placed_as(self, owner: int, group: str) -> bool:
        """Whether the data lies where that owner of that group would hold it."""
        return self._owner == owner and self._group == group

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        place = "absent here" if self._local is None else f"here: {self._local}"
        return f"OwnedTensor(shape={tuple(self.shape)}, owner={self._owner}, {place})"

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        source = args[0]
        if func in _COPIES and isinstance(source, OwnedTensor):
            local = None if source._local is None else func(source._local, *args[1:], **kwargs)
            like = func(torch.empty(0, dtype=source.dtype, device=source.device), *args[1:], **kwargs)
            return OwnedTensor(local, source.shape, like, source._owner, source._group)
        if func is aten.new_empty.default and tuple(args[1]) == tuple(source.shape):
            # staging for an asynchronous checkpoint fills the attributes in afterwards
            like = torch.empty(0, dtype=source.dtype, device=kwargs.get("device", source.device))
            return OwnedTensor(None, source.shape, like, source._owner, source._group)
        if func is aten.copy_.default and isinstance(source, OwnedTensor):
            value = args[1]._local if isinstance(args[1], OwnedTensor) else args[1]
            if source._local is None:
                return source
            if value is not None:
                source._local.copy_(value)
                return source
        raise RuntimeError(
            f"{func} was called on a tensor that only the ranks of expert coordinate {getattr(source, '_owner', '?')} hold; "
            "call its full_tensor(), or use moecompile.full_state_dict(model)."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnedTensor:
        local = None if self._local is None else self._local.detach().clone()
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        made = OwnedTensor(local, self.shape, like, self._owner, self._group)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a rank's state_dict() holds its own experts only, and one pickled file of it would miss the others; save it with "
            "torch.distributed.checkpoint.save, or torch.save(moecompile.full_state_dict(model))."
        )

    # -- the protocol of torch.distributed.checkpoint ----------------------------------------------------------------
    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size([0] * self.dim()), sizes=self.shape)

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        if self._local is None:
            return []
        data = TensorWriteData(
            chunk=self._chunk(), properties=TensorProperties.create_from_tensor(self._local), size=self.shape
        )
        return [WriteItem(index=MetadataIndex(fqn, self._chunk().offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [] if self._local is None else [self._chunk()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        if self._local is None:
            raise ValueError(f"{index.fqn} is not held by this rank; only its owner reads and writes it.")
        return self._local


_COPIES = {
    aten.detach.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.empty_like.default,
    aten.zeros_like.default,
}
