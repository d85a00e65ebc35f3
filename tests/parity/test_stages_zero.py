"""Pipeline stages whose parameters, gradients and optimizer state are shards over the data axes, against one process.

The runs and comparisons are those of stages without shards; new is that every weight of a stage is cut over its own data ranks.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moecompile as mc
from moecompile.plan import Plan
from tests.parity import test_stages as stages
from tests.parity import test_stages_state as states
from tests.support.models import Config, build
from tests.support.parity import OPTIMIZERS, difference, slice_for
from tests.support.pool import Ranks, parallel
from tests.support.thinned import thinned

pytestmark = pytest.mark.timeout(300)


def zero(level: int = 3, option: str = "", **fields: Any) -> Plan:
    return Plan(**{"pp": 2, "microbatches": 2, **fields}, passes=f"+shard-params{{level={level}{option}}}")


INTERLEAVED = {"schedule": "interleaved-1f1b", "layout": "E|t|t|L", "microbatches": 4}
PLANS = {
    **{f"{level}-dp": zero(level, dp=2, microbatches=4) for level in (1, 2, 3)},
    **{f"{level}-ep": zero(level, dp=2, ep=2) for level in (1, 2, 3)},
    **{f"{level}-cp": zero(level, dp=1, cp=2, ep=2) for level in (1, 2, 3)},
    **{f"{level}-interleaved": zero(level, dp=2, **INTERLEAVED) for level in (1, 2, 3)},
    "3-edp": zero(3, dp=4, ep=2),
    "1-edp-etp": zero(1, dp=4, etp=2),
    "2-tp": zero(2, dp=2, tp=2, ep=2),
    "3-sp": zero(3, dp=2, tp=2, ep=4, sequence_parallel=True),
    "3-buckets": zero(3, ",bucket-mb=1,prefetch=1", dp=2),
}


@pytest.mark.parametrize("plan", thinned(PLANS, keep=("1-interleaved", "3-dp")))
def test_three_steps(ranks: Ranks, plan: Plan) -> None:
    stages.check(ranks, stages.CONFIG, plan)


def test_stock_clip(ranks: Ranks) -> None:
    """Shards of a tied weight, which two stages hold, count once."""
    stages.check(ranks, stages.CONFIG, PLANS["2-ep"], stock=True)


UNEVEN = Config("loop", layers=2, hidden=9, heads=3, inner=7, bias=True, tied=True)


@pytest.mark.parametrize("level", thinned({"1": 1, "2": 2, "3": 3}, keep=("1",)))
def test_unequal_shards(ranks: Ranks, level: int) -> None:
    """9 rows on 2 ranks are 5 + 4, of a stage each."""
    stages.check(ranks, UNEVEN, zero(level, dp=2))


# ---- what a rank holds -------------------------------------------------------------------------------------------------


def sizes(rank: int, plan: Plan) -> tuple[int, int, int, list[int]]:
    """Elements of this rank's parameters, of its gradients, of Adam's first moments; gathers after each of some calls."""
    with parallel(build(states.CONFIG), plan) as model:
        stepper = OPTIMIZERS["adamw"](model.parameters())
        batch = slice_for(states.BATCHES[0], plan, rank)
        states.step(model, stepper, batch)
        call, count, found = model._state.latest, 0, []
        if call.kept is not None:
            run = call.kept._executor

            def counted(inputs: Any) -> Any:
                nonlocal count
                count += 1
                return run(inputs)

            call.kept._executor = counted
        for _ in range(2):
            model(**batch)["loss"].backward()
            found.append(count)
        grads = sum(param.grad.numel() for param in model.parameters() if param.grad is not None)
        moments = sum(value["exp_avg"].numel() for value in stepper.state.values())
        return sum(param.numel() for param in model.parameters()), grads, moments, found


@pytest.mark.parametrize("level", thinned({"1": 1, "2": 2, "3": 3}, keep=("3",)))
def test_a_rank_holds_half_of_its_stage(ranks: Ranks, level: int) -> None:
    """Parameters, gradients and moments; the tied weight is on both stages. Level 1 and 2 gather once after a step."""
    found = ranks.run(4, sizes, zero(level, dp=2), timeout=200.0)
    plain = build(states.CONFIG)
    every = sum(param.numel() for param in plain.parameters()) + plain.embed.weight.numel()
    assert sum(params for params, *_ in found) == every
    for params, grads, moments, gathered in found:
        assert params == grads == moments < every / 3
        assert gathered == ([1, 1] if level < 3 else [0, 0])


# ---- state -------------------------------------------------------------------------------------------------------------


def alone() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The plain model and its optimizer after one step."""
    model = build(states.CONFIG)
    stepper = OPTIMIZERS["adamw"](model.parameters())
    states.step(model, stepper, states.BATCHES[0])
    return model, stepper


def moments(rank: int, plan: Plan) -> dict[str, dict[str, Tensor]]:
    """Whole optimizer state after one step."""
    with parallel(build(states.CONFIG), plan) as model:
        stepper = OPTIMIZERS["adamw"](model.parameters())
        states.step(model, stepper, slice_for(states.BATCHES[0], plan, rank))
        found = mc.optimizer_state_dict(model, stepper)["state"]
        return {
            name: {
                key: value.full_tensor() if hasattr(value, "full_tensor") else copy.copy(value)
                for key, value in item.items()
            }
            for name, item in found.items()
        }


@pytest.mark.parametrize("level", thinned({"1": 1, "2": 2, "3": 3}, keep=("3",)))
def test_optimizer_state_is_that_of_the_plain_model(ranks: Ranks, level: int) -> None:
    model, stepper = alone()
    wanted = {name: stepper.state[param] for name, param in model.named_parameters()}
    for found in ranks.run(4, moments, zero(level, dp=2, ep=2), timeout=200.0):
        assert found.keys() == wanted.keys()
        for name, item in wanted.items():
            assert found[name].keys() == item.keys()
            for key, value in item.items():
                assert difference(f"{key} of {name}", found[name][key], value) < 1e-10


DP = Plan(dp=2, ep=2, microbatches=2)
PAIRS = {
    "1-pp": (zero(1, dp=2), states.PP),
    "3-dp": (zero(3, dp=2, ep=2), DP),
    "dp-1": (DP, zero(1, dp=2, ep=2)),
    "3-1": (zero(3, dp=2), zero(1, dp=2, ep=2)),
    "2-3": (zero(2, dp=2, ep=2), Plan(dp=4, ep=2, microbatches=1, passes="+shard-params")),
}


@pytest.mark.parametrize(("first", "then"), thinned(PAIRS, keep=("3-1",)))
def test_saved_under_one_plan_and_loaded_under_another(ranks: Ranks, tmp_path: Path, first: Plan, then: Plan) -> None:
    states.test_saved_under_one_plan_and_loaded_under_another(ranks, tmp_path, first, then)


@pytest.mark.parametrize("level", thinned({"1": 1, "2": 2, "3": 3}, keep=("3",)))
def test_a_plain_state_goes_in_and_comes_out(ranks: Ranks, level: int) -> None:
    states.test_a_plain_state_goes_in_and_comes_out(ranks, zero(level, dp=2))


@pytest.mark.parametrize("level", thinned({"1": 1, "2": 2, "3": 3}, keep=("1",)))
def test_accumulation_under_no_sync(ranks: Ranks, level: int) -> None:
    """Shards are reduced in each backward; what stays whole, by the first one outside."""
    model = build(states.CONFIG)
    for batch in states.BATCHES:
        model(**batch)["loss"].backward()
    wanted = {name: param.grad for name, param in model.named_parameters()}
    for found in ranks.run(4, states.accumulate, zero(level, dp=2), True, timeout=230.0):
        assert found.keys() == wanted.keys()
        for name, grad in wanted.items():
            assert grad is not None and difference(name, found[name], grad) < 1e-10


def evaluate(rank: int, plan: Plan) -> list[float]:
    """Losses of a step, of an evaluation behind it, and of a step behind that."""
    with parallel(build(states.CONFIG), plan) as model:
        stepper, found = OPTIMIZERS["adamw"](model.parameters()), []
        batch = slice_for(states.BATCHES[0], plan, rank)
        for trains in (True, False, True):
            with torch.set_grad_enabled(trains):
                loss = model(**batch)["loss"]
            found.append(float(loss))
            if trains:
                loss.backward()
                stepper.step()
                stepper.zero_grad()
        return found


@pytest.mark.parametrize("level", thinned({"1": 1, "2": 2, "3": 3}, keep=("2",)))
def test_evaluation_between_steps(ranks: Ranks, level: int) -> None:
    """Programs with and without backward share what is kept."""
    model, _ = alone()
    wanted = [float(build(states.CONFIG)(**states.BATCHES[0])["loss"].detach())]
    wanted += [float(model(**states.BATCHES[0])["loss"].detach())] * 2
    for found in ranks.run(4, evaluate, zero(level, dp=2), timeout=200.0):
        assert found == pytest.approx(wanted, rel=1e-11, abs=0)
