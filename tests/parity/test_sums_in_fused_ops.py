"""A sum over ranks that has not been taken yet goes through a product, and not into the op that a chain is joined to."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecompile import graph as graphs
from moecompile import ops
from moecompile.compilation import Request, compile_call
from moecompile.plan import Plan
from tests.support.models import VOCAB, tokens
from tests.support.parity import LockStep, compare, plain, slice_for

WIDTH = 8
MODEL = "recognize-moe,normalize-loss,shard-dense,fuse-swiglu,fuse-rms-norm,fuse-rotary"
PLANS = {"cp2": Plan(dp=1, cp=2), "dp2": Plan(dp=2), "dp2-cp2": Plan(dp=2, cp=2)}


class Pooled(nn.Module):
    """Means over the sequence, and for a weight over the batch, that a gated activation, a rotation or a norm reads."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.up, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        if kind == "gated":
            self.gate = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("angles", torch.rand(1, 1, WIDTH))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.tokens(ids)
        pooled = x.mean(1)
        if self.kind == "gated":
            made = F.silu(self.gate(pooled)) * self.up(pooled)
        elif self.kind == "turned":
            heads = self.up(pooled).unsqueeze(1)
            first, second = heads[..., : WIDTH // 2], heads[..., WIDTH // 2 :]
            made = (heads * self.angles.cos() + torch.cat((-second, first), -1) * self.angles.sin()).squeeze(1)
        else:
            weight = self.up(pooled).mean(0)
            made = pooled * (pooled.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
        return {"loss": (x + self.out(made).unsqueeze(1) - self.tokens(labels)).square().mean()}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("kind", ["gated", "turned", "normed"])
def test_three_steps(kind: str, plan: Plan) -> None:
    batches = [tokens(4, 6, seed) for seed in range(3)]
    run = LockStep(Pooled(kind).double(), plan, batches[0])
    compare(run.run(batches), plain(Pooled(kind).double(), batches))


@pytest.mark.parametrize(
    ("kind", "target"), [("gated", ops.silu_mul), ("turned", ops.rotary), ("normed", ops.rms_norm)]
)
def test_what_is_whole_is_joined(kind: str, target: object) -> None:
    """On one rank nothing is left to be summed."""
    plan = Plan(dp=1)
    program = compile_call(
        Pooled(kind).double(), Request((), slice_for(tokens(4, 6, 0), plan, 0), plan), pipeline=MODEL
    )
    assert graphs.find(program.graph, target)
