"""Sharded parameters in everything that is not a plain step: accumulation, calls without a loss, checkpoints, the meta device.

The models, runs and comparisons are those of the other axes; what is new is that every parameter is cut.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import moecompile as mc
from moecompile.plan import Plan
from tests.parity import test_gloo_axes as loops
from tests.parity import test_state_axes as states
from tests.support.models import Config, build, tokens
from tests.support.parity import difference, slice_for
from tests.support.pool import Ranks, parallel
from tests.support.thinned import thinned

pytestmark = pytest.mark.timeout(240)


def sharded(level: int = 3, **degrees: Any) -> Plan:
    return Plan(**degrees, passes=f"+shard-params{{level={level}}}")


ALL = sharded(dp=2, tp=2, ep=2)
LEVELS = [1, 2, 3]


ACCUMULATED = {f"{way}-{level}": (level, way) for level in LEVELS for way in ("plain loop", "no_sync")}


@pytest.mark.parametrize(("level", "way"), thinned(ACCUMULATED, keep=("no_sync-1", "plain loop-2", "no_sync-3")))
def test_accumulated_gradients(ranks: Ranks, level: int, way: str) -> None:
    loops.test_accumulated_gradients_are_those_of_the_plain_loop(ranks, sharded(level, dp=2), way)


def test_accumulated_gradients_beside_tp(ranks: Ranks) -> None:
    """Norms are whole over tp: their shards are reduced by the first backward outside."""
    loops.test_accumulated_gradients_are_those_of_the_plain_loop(ranks, ALL, "no_sync")


@pytest.mark.parametrize("plan", [sharded(1, dp=2), sharded(2, dp=2), ALL], ids=["level 1", "level 2", "level 3, tp"])
def test_microbatches(ranks: Ranks, plan: Plan) -> None:
    loops.compare_microbatches(ranks, plan)


@pytest.mark.parametrize(
    ("plan", "how"), [(ALL, "whole"), (sharded(2, dp=2), "parts"), (sharded(1, dp=2), "loss_fn")], ids=["3", "2", "1"]
)
def test_a_loss_outside_the_model(ranks: Ranks, plan: Plan, how: str) -> None:
    loops.compare_outside(ranks, plan, how, False)


@pytest.mark.parametrize("level", [2, 3])
def test_evaluation_between_steps(ranks: Ranks, level: int) -> None:
    """Programs with and without backward share what is kept."""
    loops.test_evaluation_between_steps(ranks, sharded(level, dp=2))


# ---- checkpoints -------------------------------------------------------------------------------------------------------

OTHERS = [
    (Plan(dp=1, tp=2, ep=2), True),
    (sharded(1, dp=2), False),
    (sharded(2, dp=4, ep=2), True),
    (sharded(3, dp=2, cp=2), True),
]


@pytest.mark.slow
def test_resume_under_another_level_and_plan(ranks: Ranks, tmp_path: Path) -> None:
    """Saved as shards beside tp; read by plain code, without shards, at other levels; losses are those of the uninterrupted run."""
    alone = states.Run(states.make(), Plan(dp=1), 0)
    alone.steps(0, 1)
    ranks.run(4, states.save, ALL, str(tmp_path))
    before = {name: value.clone() for name, value in alone.model.state_dict().items()}
    losses = alone.steps(2, 3)
    read = {name: torch.full_like(value, float("nan")) for name, value in before.items()}
    dcp.load({"model": read}, checkpoint_id=str(tmp_path), no_dist=True)
    for name, value in before.items():
        assert difference(name, read[name], value) < 1e-11
    for plan, called in OTHERS:
        resumed(ranks, plan, tmp_path, called, losses, alone)


@pytest.mark.slow
def test_resume_as_shards(ranks: Ranks, tmp_path: Path) -> None:
    """The other way round: what stripes and whole weights hold is read into shards."""
    alone = states.Run(states.make(), Plan(dp=1), 0)
    alone.steps(0, 1)
    ranks.run(2, states.save, states.SAVED, str(tmp_path))
    losses = alone.steps(2, 3)
    for called in (True, False):
        resumed(ranks, ALL, tmp_path, called, losses, alone)


def resumed(ranks: Ranks, plan: Plan, folder: Path, called: bool, losses: list[float], alone: states.Run) -> None:
    for found, weights in ranks.run(plan.world_size, states.resume, plan, str(folder), called):
        assert found == pytest.approx(losses, rel=1e-11, abs=0), plan
        for name, value in alone.model.state_dict().items():
            assert difference(name, weights[name], value) < 1e-10, (plan, name)


UNEVEN = Config("loop", layers=1, hidden=9, heads=3, inner=7, experts=4, bias=True)


def uneven_state(rank: int, plan: Plan) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Whole state out, another model's in, and once more as this rank's parts; elements that are held."""
    batch = slice_for(tokens(4, 3, 0), plan, rank)
    with parallel(build(UNEVEN), plan, example=batch) as model:
        first = mc.full_state_dict(model)
        model.load_state_dict(build(Config(**{**vars(UNEVEN), "seed": 5})).state_dict())
        state = model.state_dict()
        wholes = {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()
        }
        model.load_state_dict({name: torch.zeros_like(value) for name, value in wholes.items()}, strict=False)
        model.load_state_dict(wholes)
        model.load_state_dict(model.state_dict())
        return first, mc.full_state_dict(model), sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("plan", [sharded(dp=2), sharded(dp=4, ep=2)], ids=["dp2", "dp4-ep2"])
def test_unequal_shards_in_and_out(ranks: Ranks, plan: Plan) -> None:
    """9 columns and rows of 7: every element is held by one rank of a group."""
    first, second = (build(Config(**{**vars(UNEVEN), "seed": seed})).state_dict() for seed in (0, 5))
    found = ranks.run(plan.world_size, uneven_state, plan)
    for before, after, _ in found:
        for name, value in first.items():
            assert torch.equal(before[name], value) and torch.equal(after[name], second[name]), name
    assert sum(held for _, _, held in found) == sum(value.numel() for value in first.values())


# ---- the meta device, frozen parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 3])
def test_weights_from_meta_do_not_depend_on_shards(ranks: Ranks, level: int) -> None:
    torch.manual_seed(3)
    alone = states.make()
    for module in alone.modules():
        states.normal(module)
    wanted = alone.state_dict()
    whole = sum(param.numel() for param in alone.parameters())
    for found, _, held in ranks.run(2, states.drawn_on_meta, sharded(level, dp=2)):
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        assert held == whole // 2


def test_frozen_parameters_are_shards_and_have_no_gradient(ranks: Ranks) -> None:
    states.test_frozen_linears_are_cut_and_have_no_gradient(ranks, sharded(dp=1, cp=2, ep=2))
