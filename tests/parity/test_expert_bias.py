"""Aux-loss-free balancing: the bias that `update_expert_bias` moves is the one a single process would have.

The oracle counts with the plain model's own router over the whole batch of every call since the last move.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moecompile as mc
from moecompile.errors import CaptureError
from moecompile.plan import Plan
from tests.support.models import Config, build, tokens
from tests.support.parity import slice_for
from tests.support.pool import Ranks
from tests.support.thinned import thinned

EXPERTS, WIDTH, RATE = 4, 8, 0.01
pytestmark = pytest.mark.timeout(150)


class BiasedMoe(nn.Module):
    """Sigmoid scores, a bias that only chooses, weights from the scores alone (DeepSeek-V3)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 6), nn.SiLU(), nn.Linear(6, WIDTH)) for _ in range(EXPERTS)
        )
        self.register_buffer("choice_bias", torch.tensor([0.3, -0.1, 0.0, 0.05], dtype=torch.float32))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.sigmoid(self.gate(x))
        _, ids = torch.topk(scores + self.choice_bias, 2, dim=-1)
        return ids, scores.gather(1, ids)

    def forward(self, x: Tensor) -> Tensor:
        ids, probs = self.route(x)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, slot = torch.where(ids == index)
            out = out.index_add(0, rows, expert(x[rows]) * probs[rows, slot, None])
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(BiasedMoe() for _ in range(2))
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids).reshape(-1, WIDTH)
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": F.cross_entropy(self.head(x), labels.reshape(-1), ignore_index=-100)}


def made() -> Model:
    torch.manual_seed(0)
    model = Model().double()
    for layer in model.layers:
        layer.choice_bias = layer.choice_bias.float()  # type: ignore[operator, union-attr]
    return model


def batches(count: int) -> list[dict[str, Tensor]]:
    return [tokens(4, 8, seed, ignored=0.2) for seed in range(count)]


def oracle(steps: int, calls: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Biases after training with ``calls`` accumulated calls a step, and all weights."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    counts = [torch.zeros(EXPERTS) for _ in model.layers]
    for at, layer in enumerate(model.layers):

        def count(module: Any, args: Any, at: int = at) -> None:
            with torch.no_grad():
                counts[at] += torch.bincount(module.route(args[0])[0].reshape(-1), minlength=EXPERTS)

        layer.register_forward_pre_hook(count)
    found = iter(batches(steps * calls))
    for _ in range(steps):
        for _ in range(calls):
            model(**next(found))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        for layer, got in zip(model.layers, counts, strict=True):
            layer.choice_bias += RATE * torch.sign(got.mean() - got)  # type: ignore[operator, union-attr]
            got.zero_()
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    return [layer.choice_bias.clone() for layer in model.layers], weights  # type: ignore[operator, union-attr]


def trained(rank: int, plan: Plan, steps: int, calls: int, to_bf16: bool = False) -> dict[str, Tensor]:
    model = mc.parallelize(made(), plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = iter(batches(steps * calls))
    for _ in range(steps):
        for _ in range(calls):
            model(**slice_for(next(found), plan, rank))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(**slice_for(batches(1)[0], plan, rank))  # an evaluation counts nothing
        mc.update_expert_bias(model, RATE)
    if to_bf16:
        model.to(torch.bfloat16)
        mixed = dict(model.plain.named_buffers())
        assert all(value.dtype is torch.float32 for value in mixed.values())
        return {name: value.clone() for name, value in mixed.items()}
    return mc.full_state_dict(model)


@pytest.mark.parametrize(
    ("plan", "calls"),
    thinned(
        {
            "one": (Plan(dp=1), 1),
            "dp2-ep2": (Plan(dp=2, ep=2), 1),
            "dp2-ep2-accumulated": (Plan(dp=2, ep=2), 2),
            "dp2-accumulated": (Plan(dp=2), 2),
            "tp2-ep2": (Plan(dp=1, tp=2, ep=2), 1),
        }
    ),
)
def test_biases_and_weights_are_those_of_one_process(ranks: Ranks, plan: Plan, calls: int) -> None:
    biases, weights = oracle(3, calls)
    assert any(not torch.equal(bias, made().layers[0].choice_bias) for bias in biases)  # type: ignore[arg-type, union-attr]
    for found in ranks.run(plan.world_size, trained, plan, 3, calls):
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, check_dtype=True)


def test_the_bias_stays_float32_in_a_narrow_model(ranks: Ranks) -> None:
    plan = Plan(dp=2, ep=2)
    biases, _ = oracle(1, 1)
    for found in ranks.run(2, trained, plan, 1, 1, True):
        for at, bias in enumerate(biases):
            assert torch.equal(found[f"layers.{at}.choice_bias"], bias)


def test_a_checkpoint_holds_the_moved_bias() -> None:
    model = mc.parallelize(made(), Plan(dp=1))
    model(**batches(1)[0])["loss"].backward()
    mc.update_expert_bias(model, RATE)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = made()
    other.load_state_dict(torch.load(file))
    assert torch.equal(other.layers[0].choice_bias, model.plain.layers[0].choice_bias)  # type: ignore[arg-type, union-attr]
    assert not torch.equal(other.layers[0].choice_bias, made().layers[0].choice_bias)  # type: ignore[arg-type, union-attr]


def test_a_router_without_bias_and_a_second_update_are_refused() -> None:
    model = mc.parallelize(made(), Plan(dp=1))
    with pytest.raises(CaptureError, match="register one"):
        mc.update_expert_bias(model)  # not captured yet
    model(**batches(1)[0])["loss"].backward()
    mc.update_expert_bias(model)
    with pytest.raises(CaptureError, match="once after each optimizer step"):
        mc.update_expert_bias(model)
    plain = mc.parallelize(copy.deepcopy(build(Config("ops"))), Plan(dp=1))
    plain(**batches(1)[0])["loss"].backward()
    with pytest.raises(CaptureError, match="or balance with an auxiliary loss"):
        mc.update_expert_bias(plain)
