"""Right programs that the proof of places has to read: each was refused once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moecompile as mc
from moecompile.pass_base import Fact
from moecompile.plan import Plan
from moecompile.verify import check_spread


class Cosine(nn.Module):
    """Router on normalised weights: the gradient of the norm chooses between a sum over the ranks and a scalar 0."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(4, 8))
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        probs, ids = (F.normalize(x, dim=-1) @ F.normalize(self.gate, dim=-1).t()).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(ids == index)
            out.index_add_(0, token, expert(x[token]) * probs[token, slot, None])
        return out.square().mean()


def test_a_scalar_zero_goes_with_a_sum() -> None:
    program = mc.trace(Cosine().double(), Plan(dp=2, ep=2), (torch.randn(6, 8, dtype=torch.float64),))
    coverage = check_spread(program)
    assert coverage.checked and coverage.proved > 0 and not coverage.unproved


class Decay(nn.Module):
    """One number for each head over batch and sequence, as gates of linear attention have."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:  # [batch, sequence, 4, width]
        rate = self.heads.exp().view(1, 1, 4, 1)
        return (rate * x).sigmoid().square().mean()


@pytest.mark.parametrize("rows", [1, 2])
def test_a_gradient_loses_the_dim_of_one_row_a_rank(rows: int) -> None:
    """Where a rank has one row, autograd leaves out the sum over rows of what was broadcast."""
    program = mc.trace(Decay().double(), Plan(dp=4), (torch.randn(rows, 3, 4, 2, dtype=torch.float64),))
    coverage = check_spread(program)
    assert coverage.checked and not coverage.unproved
    assert program.facts >= {Fact.DIFFERENTIATED, Fact.GRADS_SYNCED}
