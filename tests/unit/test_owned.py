"""Tensors of a global shape of which a rank holds stripes: their blocks make up the whole, and nothing computes on them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from moecompile.owned import Part, PartTensor, StripedTensor
from moecompile.placement.types import Shard
from moecompile.weights import part_of

RANKS = 2


def striped(whole: Tensor, placed: Shard, index: int, ranks: int = RANKS) -> PartTensor:
    local = part_of(whole, placed, ranks, index).clone()
    return StripedTensor.of(local, whole.shape, [Part(placed, index, ranks, "a group")])


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("placed", [Shard(0, 2), Shard(0, 3), Shard(1, 2)], ids=str)
def test_the_blocks_of_all_ranks_make_up_the_whole(placed: Shard, ranks: int) -> None:
    whole = torch.arange(36 * 24, dtype=torch.float64).reshape(36, 24)
    found = torch.full_like(whole, float("nan"))
    for rank in range(ranks):
        part = striped(whole, placed, rank, ranks)
        assert part.shape == whole.shape and len(part.__create_chunk_list__()) == placed.outer
        for item, chunk in zip(part.__create_write_items__("w", None), part.__create_chunk_list__(), strict=True):
            assert item.index.offset == chunk.offsets and item.tensor_data is not None
            where = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
            assert found[where].isnan().all(), "two ranks write the same place"
            found[where] = part.__get_tensor_shard__(item.index)
    assert torch.equal(found, whole)


def test_blocks_are_views_that_a_reader_fills() -> None:
    part = striped(torch.zeros(12, 4), Shard(0, 3), 1)
    for number, chunk in enumerate(part.__create_chunk_list__()):
        part.__get_tensor_shard__(MetadataIndex("w", chunk.offsets)).fill_(number + 1)
    local = part.to_local()
    assert local is not None and local[:, 0].tolist() == [1, 1, 2, 2, 3, 3]
    with pytest.raises(ValueError, match="only its owner reads and writes it"):
        part.__get_tensor_shard__(MetadataIndex("w", torch.Size([0, 0])))


def test_copies_and_conversions() -> None:
    whole = torch.arange(24.0).reshape(12, 2)
    part = striped(whole, Shard(0, 3), 0)
    twin = copy.deepcopy(part)
    for made in (part.clone(), part.to(torch.float64), part.detach(), twin):
        assert isinstance(made, StripedTensor) and made.shape == whole.shape
    local, other = part.to_local(), twin.to_local()
    assert local is not None and other is not None
    other.zero_()
    assert torch.equal(local, part_of(whole, Shard(0, 3), RANKS, 0)), "a deep copy has data of its own"
    part.copy_(2 * whole)
    assert torch.equal(local, part_of(2 * whole, Shard(0, 3), RANKS, 0)), "of a whole value the part is taken"
    part.copy_(striped(whole, Shard(0, 3), 0))
    assert torch.equal(local, part_of(whole, Shard(0, 3), RANKS, 0))
    with pytest.raises(RuntimeError, match="lies otherwise than"):
        part.copy_(striped(whole, Shard(0, 2), 0))


def test_nothing_computes_and_nobody_pickles() -> None:
    part = striped(torch.ones(12, 2), Shard(0, 3), 0)
    with pytest.raises(RuntimeError, match=r"call its full_tensor\(\), or use moecompile\.full_state_dict"):
        part + 1
    with pytest.raises(TypeError, match=r"save it with torch\.distributed\.checkpoint\.save"):
        pickle.dumps(part)
