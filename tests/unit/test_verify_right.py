"""Right programs that the proof of places has to read: each was refused once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moecompile as mc
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
