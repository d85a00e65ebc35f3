"""Parts in zigzag: which elements a rank has, the adjoint that puts them back, and random numbers by their places."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from moecompile import ops
from moecompile.placement.types import Shard, parse
from tests.support.ops_oracle import rand


def test_a_rank_has_one_piece_from_the_front_and_one_from_the_end() -> None:
    found = [ops.zigzag_slice(torch.arange(12), torch.tensor(rank), 0, 1, 3).tolist() for rank in range(3)]
    assert found == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]


def test_of_every_block() -> None:
    """As where tokens of two sequences lie one behind the other."""
    found = [ops.zigzag_slice(torch.arange(16)[None], torch.tensor(rank), 1, 2, 2).tolist() for rank in range(2)]
    assert found == [[[0, 1, 6, 7, 8, 9, 14, 15]], [[2, 3, 4, 5, 10, 11, 12, 13]]]


@pytest.mark.parametrize(("dim", "outer", "ranks"), [(0, 1, 2), (1, 1, 3), (1, 2, 3), (2, 1, 1)])
def test_all_parts_make_up_the_whole(dim: int, outer: int, ranks: int) -> None:
    whole = rand(4, 12, 2)
    parts = [ops.zigzag_slice(whole, torch.tensor(rank), dim, outer, ranks) for rank in range(ranks)]
    back = [ops.zigzag_place(part, torch.tensor(rank), dim, outer, ranks) for rank, part in enumerate(parts)]
    torch.testing.assert_close(torch.stack(back).sum(0), whole, rtol=0, atol=0)


def test_opcheck() -> None:
    whole, index = rand(3, 8, grad=True), torch.tensor(1)
    opcheck(ops.zigzag_slice, (whole, index, 1, 1, 2))
    opcheck(ops.zigzag_place, (whole, index, 1, 2, 2))
    assert torch.autograd.gradgradcheck(lambda x: ops.zigzag_slice(x, index, 1, 1, 2).square(), whole)


def test_a_length_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="dim 0 has size 6, but a multiple of 4 is needed; pad it"):
        ops.zigzag_slice(torch.arange(6), torch.tensor(0), 0, 1, 2)


@pytest.mark.parametrize("outer", [1, 2])
def test_random_numbers_are_those_of_the_places(outer: int) -> None:
    """Also where a part is cut once more, plainly."""
    seed, ranks = torch.tensor(3), 2
    whole = ops.uniform(torch.empty(3, 16), seed, [], [], [], [])
    for rank in range(ranks):
        index, part = torch.tensor(rank), ops.zigzag_slice(whole, torch.tensor(rank), 1, outer, ranks)
        found = ops.uniform(torch.empty(3, 8), seed, [index], [1], [outer], [ranks], [True])
        torch.testing.assert_close(found, part, rtol=0, atol=0)
        for inner in range(2):
            twice = ([index, torch.tensor(inner)], [1, 1], [outer, outer], [ranks, 2], [True, False])
            found = ops.uniform(torch.empty(3, 4), seed, *twice)
            due = ops.local_slice(part, torch.tensor(inner), 1, outer, 2)
            torch.testing.assert_close(found, due, rtol=0, atol=0)


def test_places_of_rows() -> None:
    """Two sequences of eight tokens with two choices each; rank 1 of 2 has the middle of both."""
    places = ops.global_rows(torch.arange(16), [torch.tensor(1)], [16], [2], [2], [True])
    tokens = [2, 3, 4, 5, 10, 11, 12, 13]
    assert places.tolist() == [2 * token + choice for token in tokens for choice in range(2)]
    opcheck(ops.global_rows, (torch.arange(16), [torch.tensor(1)], [16], [2], [2], [True]))
    opcheck(ops.uniform, (rand(4, 4), torch.tensor(1), [torch.tensor(1)], [1], [1], [2], [True]))


@pytest.mark.parametrize("placed", [Shard(1), Shard(0, 3), Shard(2, zigzag=True), Shard(0, 4, zigzag=True)], ids=str)
def test_the_text_of_a_placement(placed: Shard) -> None:
    assert parse(str(placed)) == placed


def test_a_placement_names_its_order() -> None:
    assert str(Shard(1, zigzag=True)) == "S(1,zigzag)" and str(Shard(0, 2, zigzag=True)) == "S(0,outer=2,zigzag)"
