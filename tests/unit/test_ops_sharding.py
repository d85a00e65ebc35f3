"""own_index: which numbers of a range are a rank's own."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from moecompile import ops


def test_each_number_belongs_to_one_rank() -> None:
    index = torch.tensor([[0, 5, 2], [-100, 3, 1]])
    owners = torch.zeros_like(index)
    for rank in range(3):
        safe, own = ops.own_index(index, torch.tensor(2 * rank), 2, 6, -100)
        assert torch.equal(safe[own] + 2 * rank, index[own])
        assert not safe[~own].any() and (safe < 2).all()
        owners += own
    assert torch.equal(owners, (index != -100).long())


def test_a_number_that_is_left_out_may_lie_in_the_range() -> None:
    safe, own = ops.own_index(torch.tensor([0, 1]), torch.tensor(0), 2, 2, 1)
    assert own.tolist() == [True, False] and safe.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("number", "said"), [(6, "index 6 is out of range for 6"), (-1, "index -1 is out of range for 6")]
)
def test_out_of_range(number: int, said: str) -> None:
    with pytest.raises(IndexError, match=said):
        ops.own_index(torch.tensor([0, number]), torch.tensor(0), 2, 6, -100)


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="cast it"):
        ops.own_index(torch.tensor([0.0]), torch.tensor(0), 2, 6, -100)


def test_opcheck() -> None:
    opcheck(ops.own_index, (torch.tensor([0, 3, 5]), torch.tensor(2), 2, 6, -100))
