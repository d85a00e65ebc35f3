"""Gradients of a call's arguments, where the loss is taken outside of the model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecompile.plan import Plan
from tests.support.models import Config, build
from tests.support.parity import difference
from tests.support.pool import Ranks, parallel
from tests.support.thinned import thinned

pytestmark = pytest.mark.timeout(240)


class Behind(nn.Module):
    """A MoE layer that takes what another module computes, beside tokens."""

    def __init__(self) -> None:
        super().__init__()
        inner = build(Config("ops", hidden=16, heads=4, inner=8, layers=1, shared=True))
        self.embed, self.layer = inner.get_submodule("embed"), inner.get_submodule("layers.0")

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        found: Tensor = self.layer(self.embed(ids) + x, None)[0]
        return found


def front() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 16).double()


IDS = torch.arange(32).reshape(4, 8) % 7
X = torch.randn(4, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TARGET = torch.randn(4, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def step(model: nn.Module, ids: Tensor, x: Tensor, target: Tensor) -> Tensor:
    """The gradient of the outer module's weight."""
    outer = front()
    found = model(ids, outer(x))
    found = found.full_tensor() if isinstance(found, DTensor) else found
    (F.mse_loss(found, target, reduction="sum") / TARGET.numel()).backward()
    assert outer.weight.grad is not None
    return outer.weight.grad


def on_rank(rank: int, plan: Plan) -> Tensor:
    at, of = plan.data_rank(rank), plan.num_data_ranks
    with parallel(Behind(), plan) as model:
        return step(model, *(item.chunk(of)[at] for item in (IDS, X, TARGET)))


PLANS = {
    "dp2": Plan(dp=2, ep=2),
    "tp2": Plan(dp=1, tp=2, ep=2),
    "tp2-sp": Plan(dp=1, tp=2, ep=2, sequence_parallel=True),
    "cp2": Plan(dp=1, cp=2, ep=2),
    "etp2": Plan(dp=2, etp=2),
    "dp2-tp2": Plan(dp=2, tp=2, ep=4),
}


@pytest.mark.parametrize("plan", thinned(PLANS, keep=("dp2", "tp2", "tp2-sp", "cp2")))
def test_the_gradient_of_an_argument_is_that_of_this_data_ranks_part(ranks: Ranks, plan: Plan) -> None:
    wanted = step(Behind(), IDS, X, TARGET)
    found = ranks.run(plan.world_size, on_rank, plan)
    parts = [found[plan.world_size // plan.num_data_ranks * at] for at in range(plan.num_data_ranks)]
    for rank, part in enumerate(found):
        assert torch.equal(part, parts[plan.data_rank(rank)]), "ranks that pass the same batch get the same gradient"
    assert difference("outer weight", torch.stack(parts).sum(0), wanted) < 1e-11
