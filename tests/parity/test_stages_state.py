"""State of a model in pipeline stages: saved under one plan, loaded under another; accumulation; weights drawn from the meta device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import moecompile as mc
from moecompile.plan import Plan
from tests.support.models import Config, build, tokens
from tests.support.parity import OPTIMIZERS, difference, slice_for
from tests.support.pool import Ranks, parallel
from tests.support.thinned import thinned

pytestmark = pytest.mark.timeout(260)
CONFIG = Config("loop", layers=2, tied=True, shared=True)
BATCHES = [tokens(4, 8, seed, ignored=0.2) for seed in range(2)]
PP, WIDE = Plan(dp=1, pp=2, microbatches=2), Plan(dp=2, pp=2, ep=2, microbatches=2)
TP, DP = Plan(dp=1, pp=2, tp=2, microbatches=2), Plan(dp=2, ep=2, microbatches=2)


def step(model: Any, stepper: torch.optim.Optimizer, batch: dict[str, Tensor]) -> None:
    model(**batch)["loss"].backward()
    stepper.step()
    stepper.zero_grad()


def save(rank: int, plan: Plan, path: str) -> dict[str, Any]:
    with parallel(build(CONFIG), plan) as model:
        stepper = OPTIMIZERS["adamw"](model.parameters())
        step(model, stepper, slice_for(BATCHES[0], plan, rank))
        dcp.save({"model": model.state_dict(), "opt": mc.optimizer_state_dict(model, stepper)}, checkpoint_id=path)
        found = mc.full_state_dict(model)
        step(model, stepper, slice_for(BATCHES[1], plan, rank))
        return {"saved": found, "after": mc.full_state_dict(model)}


def load(rank: int, plan: Plan, path: str) -> dict[str, Any]:
    with parallel(
        build(Config(**{**vars(CONFIG), "seed": 7})), plan, example=slice_for(BATCHES[0], plan, rank)
    ) as model:
        stepper = OPTIMIZERS["adamw"](model.parameters())
        state = {"model": model.state_dict(), "opt": mc.optimizer_state_dict(model, stepper)}
        dcp.load(state, checkpoint_id=path)
        model.load_state_dict(state["model"])
        mc.load_optimizer_state_dict(model, stepper, state["opt"])
        found = mc.full_state_dict(model)
        step(model, stepper, slice_for(BATCHES[1], plan, rank))
        return {"saved": found, "after": mc.full_state_dict(model)}


@pytest.mark.parametrize(
    ("first", "then"),
    thinned({"pp-dp": (PP, DP), "wide-pp": (WIDE, PP), "dp-pp": (DP, PP), "wide-tp": (WIDE, TP)}, keep=("pp-dp",)),
)
def test_saved_under_one_plan_and_loaded_under_another(ranks: Ranks, tmp_path: Path, first: Plan, then: Plan) -> None:
    """Weights and moments; the step after it is the one that the first plan would have made."""
    before = ranks.run(first.world_size, save, first, str(tmp_path), timeout=230.0)
    for found in ranks.run(then.world_size, load, then, str(tmp_path), timeout=230.0):
        for when, bound in (("saved", 0.0), ("after", 1e-10)):
            assert found[when].keys() == before[0][when].keys()
            for name, value in before[0][when].items():
                assert difference(name, found[when][name], value) <= bound, (when, name)


def load_plain(rank: int, plan: Plan) -> bool:
    plain = build(Config(**{**vars(CONFIG), "seed": 3})).state_dict()
    with parallel(build(CONFIG), plan, example=slice_for(BATCHES[0], plan, rank)) as model:
        model.load_state_dict(plain)
        found = mc.full_state_dict(model)
    return found.keys() == plain.keys() and all(torch.equal(found[name], value) for name, value in plain.items())


@pytest.mark.parametrize("plan", [PP, TP], ids=["pp", "pp-tp"])
def test_a_plain_state_goes_in_and_comes_out(ranks: Ranks, plan: Plan) -> None:
    assert all(ranks.run(plan.world_size, load_plain, plan, timeout=230.0))


def accumulate(rank: int, plan: Plan, quiet: bool) -> dict[str, Tensor]:
    with parallel(build(CONFIG), plan) as model:
        if quiet:
            with model.no_sync():
                model(**slice_for(BATCHES[0], plan, rank))["loss"].backward()
        else:
            model(**slice_for(BATCHES[0], plan, rank))["loss"].backward()
        model(**slice_for(BATCHES[1], plan, rank))["loss"].backward()
        return {name: grad for name, grad in mc.full_grads(model).items() if grad is not None}


@pytest.mark.parametrize("quiet", thinned({"plain loop": False, "no_sync": True}, keep=("no_sync",)))
def test_accumulation(ranks: Ranks, quiet: bool) -> None:
    model = build(CONFIG)
    for batch in BATCHES:
        model(**batch)["loss"].backward()
    wanted = {name: param.grad for name, param in model.named_parameters()}
    for found in ranks.run(4, accumulate, WIDE, quiet, timeout=230.0):
        assert found.keys() == wanted.keys()
        for name, grad in wanted.items():
            assert grad is not None and difference(name, found[name], grad) < 1e-10
