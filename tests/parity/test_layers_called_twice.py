"""An MoE layer that runs more than once in a forward: its experts' gradient is the sum over the calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import moecompile as mc
from moecompile.plan import Plan
from tests.support.models import Config, MoeLayer
from tests.support.parity import difference, plain, slice_for

PLANS = {
    "dp1": Plan(dp=1),
    "dp2-ep2": Plan(dp=2, ep=2),
    "dp2-etp2": Plan(dp=2, etp=2),
    "zero-3": Plan(dp=2, ep=2, passes="+shard-params"),
}


class Twice(nn.Module):
    def __init__(self, style: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.moe = MoeLayer(Config(style, bias=style == "loop"))  # type: ignore[arg-type]

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        first, balance = self.moe(x, None)
        second, again = self.moe(x + first, None)
        return {"loss": (x + second - labels).square().mean() + balance + again}


class Residual(nn.Module):
    def __init__(self, moe: MoeLayer) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(x, None)[0]  # type: ignore[no-any-return]


class Layers(nn.Module):
    """One MoE layer in every layer of a list, which stages cut."""

    def __init__(self, style: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        moe = MoeLayer(Config(style))  # type: ignore[arg-type]
        self.layers = nn.ModuleList(Residual(moe) for _ in range(4))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": (x - labels).square().mean()}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("style", ["loop", "stacked"])
def test_simulated_gradients(style: str, plan: Plan) -> None:
    agree(Twice(style).double(), plan)


@pytest.mark.parametrize("style", ["loop", "stacked"])
def test_simulated_stages(style: str) -> None:
    agree(Layers(style).double(), Plan(dp=2, pp=2, ep=2, microbatches=2))


def agree(model: nn.Module, plan: Plan) -> None:
    batch = dict(zip(("x", "labels"), torch.randn(2, 4, 6, 8, dtype=torch.float64), strict=True))
    wanted = plain(model, [batch]).steps[0]
    parts = [slice_for(batch, plan, rank) for rank in range(plan.world_size)]
    found = mc.simulate_ranks(model, plan, parts)
    assert difference("loss", found.loss, wanted.loss) < 1e-12
    assert found.grads.keys() == wanted.grads.keys()
    for name, grad in wanted.grads.items():
        assert difference(name, found.grads[name], grad) < 1e-11
