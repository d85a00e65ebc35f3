"""Pipeline stages on gloo ranks against one process that runs the same microbatches: loss, gradients, norm, weights of three steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moecompile as mc
from moecompile.plan import Plan
from tests.support.models import Config, build, tokens
from tests.support.parity import OPTIMIZERS, difference, slice_for
from tests.support.pool import Ranks, parallel
from tests.support.staged import microbatches
from tests.support.thinned import thinned

pytestmark = pytest.mark.timeout(260)
CONFIG = Config("ops", hidden=16, heads=4, inner=8, layers=2, shared=True, tied=True, rotary=True, aux=0.1)
BATCHES = [tokens(8, 8, seed, ignored=0.2) for seed in range(3)]
Batches = Sequence[dict[str, Tensor]]


@dataclass
class Trained:
    """Three steps: losses, norms, whole gradients before clipping, whole weights at the end."""

    losses: list[Tensor]
    norms: list[Tensor]
    grads: list[dict[str, Tensor]]
    weights: Mapping[str, Any]


def reference(config: Config, plan: Plan, limit: float, batches: Batches = BATCHES) -> Trained:
    """Token means over the step's valid tokens; balance terms of microbatches, averaged by their rows."""
    model, found = build(config), Trained([], [], [], {})
    stepper = OPTIMIZERS["adamw"](model.parameters())
    for batch in batches:
        parts = microbatches(batch, plan)
        valid = sum(int((part["labels"] != -100).sum()) for part in parts)
        total = torch.zeros((), dtype=torch.float64)
        for part in parts:
            out = model(**part)
            loss = F.cross_entropy(out["logits"].flatten(0, 1), part["labels"].flatten(), reduction="sum") / valid
            share = len(part["labels"]) / len(batch["labels"])
            loss = loss + (config.aux * out["balance"] * share if config.aux else 0)
            loss.backward()
            total += loss.detach()
        found.losses.append(total)
        found.grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        found.norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit))
        stepper.step()
        stepper.zero_grad()
    found.weights = model.state_dict()
    return found


def train(
    rank: int, config: Config, plan: Plan, limit: float, stock: bool = False, batches: Batches = BATCHES
) -> Trained:
    found = Trained([], [], [], {})
    with parallel(build(config), plan) as model:
        stepper = OPTIMIZERS["adamw"](model.parameters())
        for batch in batches:
            out = model(**slice_for(batch, plan, rank))
            out["loss"].backward()
            found.losses.append(out["loss"].detach())
            found.grads.append({name: grad for name, grad in mc.full_grads(model).items() if grad is not None})
            clip = nn.utils.clip_grad_norm_(model.parameters(), limit) if stock else mc.clip_grad_norm_(model, limit)
            found.norms.append(clip.detach().as_subclass(Tensor))
            stepper.step()
            stepper.zero_grad()
        found.weights = mc.full_state_dict(model)
    return found


def check(
    ranks: Ranks, config: Config, plan: Plan, limit: float = 0.05, stock: bool = False, batches: Batches = BATCHES
) -> None:
    wanted = reference(config, plan, limit, batches)
    for found in ranks.run(plan.world_size, train, config, plan, limit, stock, batches, timeout=230.0):
        compare(found, wanted)


def compare(found: Trained, wanted: Trained) -> None:
    assert len(found.losses) == len(wanted.losses)
    for at in range(len(wanted.losses)):
        assert difference("loss", found.losses[at], wanted.losses[at]) < 1e-11
        assert found.grads[at].keys() == wanted.grads[at].keys()
        for name, grad in wanted.grads[at].items():
            assert difference(name, found.grads[at][name], grad) < 1e-10
        assert difference("norm", found.norms[at], wanted.norms[at]) < 1e-11
    assert found.weights.keys() == wanted.weights.keys()
    for name, weight in wanted.weights.items():
        assert difference(name, found.weights[name], weight) < 1e-10


PLANS = {
    "pp2": Plan(dp=1, pp=2, microbatches=2),
    "pp2-gpipe": Plan(dp=1, pp=2, microbatches=4, schedule="gpipe"),
    "pp2-dp2-ep2": Plan(dp=2, pp=2, ep=2, microbatches=4),
    "pp2-tp2": Plan(dp=1, pp=2, tp=2, microbatches=2),
    "pp2-sp2-ep2": Plan(dp=1, pp=2, tp=2, ep=2, microbatches=2, sequence_parallel=True),
    "pp2-dp2-etp2": Plan(dp=2, pp=2, etp=2, microbatches=4),
    "pp2-cp2": Plan(dp=1, pp=2, cp=2, ep=2, microbatches=2),
}


@pytest.mark.parametrize("plan", thinned(PLANS, keep=("pp2-gpipe", "pp2-dp2-ep2")))
def test_three_steps(ranks: Ranks, plan: Plan) -> None:
    check(ranks, CONFIG, plan)


def test_stock_clip(ranks: Ranks) -> None:
    """case 36: a tied weight, which two stages hold, counts once."""
    check(ranks, CONFIG, PLANS["pp2-dp2-ep2"], stock=True)


INTERLEAVED = {
    "four-layers": (4, "Et|t|t|tL"),
    "empty-and-bare": (2, "E||tt|L"),
}


@pytest.mark.parametrize(("layers", "layout"), INTERLEAVED.values(), ids=INTERLEAVED.keys())
def test_several_stages_a_rank(ranks: Ranks, layers: int, layout: str) -> None:
    plan = Plan(dp=1, pp=2, microbatches=4, schedule="interleaved-1f1b", layout=layout)
    check(ranks, replace(CONFIG, layers=layers), plan)


@pytest.mark.parametrize("style", thinned({"loop": "loop", "stacked": "stacked"}))
def test_four_stages(ranks: Ranks, style: Any) -> None:
    check(ranks, replace(CONFIG, style=style, layers=4), Plan(dp=1, pp=4, microbatches=4))
