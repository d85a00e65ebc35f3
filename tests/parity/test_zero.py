"""Sharded parameters, gradients and optimizer state against the plain model: in lock step over all axes, and on gloo ranks.

Widths of 7 and 9 leave unequal shards and padding; fp64, so that a wrong sum shows.
"""

from __future__ import annotations

import pytest

from moecompile.plan import Plan
from tests.support.models import Config, build, tokens
from tests.support.parity import LockStep, compare, plain
from tests.support.pool import Job, Ranks, gathered, train

pytestmark = pytest.mark.timeout(240)
LOOP = Config("loop", layers=1, shared=True, tied=True, rotary=True, aux=0.1, bias=True, inner=7)
STACKED = Config("stacked", layers=2, hidden=8, inner=8, heads=4, shared=True, aux=0.1)
ZERO = "+shard-params"
BATCHES = [tokens(8, 4, seed, ignored=0.2) for seed in range(3)]
AXES = {
    "dp": Plan(dp=4, passes=ZERO),
    "ep": Plan(dp=4, ep=2, passes=ZERO),
    "tp": Plan(dp=2, tp=2, ep=2, passes=ZERO),
    "cp": Plan(dp=2, cp=2, ep=2, passes=ZERO),
    "sp": Plan(dp=1, cp=2, tp=2, ep=2, sequence_parallel=True, passes=ZERO),
    "etp": Plan(dp=4, ep=2, etp=2, passes=ZERO),
    "edp-etp": Plan(dp=4, etp=2, passes=ZERO),
}


@pytest.mark.parametrize("plan", AXES.values(), ids=AXES.keys())
def test_three_steps_in_lock_step(plan: Plan) -> None:
    lock_step = LockStep(build(STACKED), plan, BATCHES[0])
    compare(lock_step.run(BATCHES), plain(build(STACKED), BATCHES))


@pytest.mark.parametrize("ranks_of", [2, 3, 4])
def test_unequal_shards_in_lock_step(ranks_of: int) -> None:
    """9 rows and columns are 5 + 4, 3 + 3 + 3, and 3 + 3 + 3 + 0."""
    config = Config("loop", layers=1, hidden=9, heads=3, inner=9, bias=True)
    batches = [tokens(12, 3, seed) for seed in range(2)]
    plan = Plan(dp=ranks_of, passes=ZERO + "{bucket-mb=1,prefetch=1}")
    lock_step = LockStep(build(config), plan, batches[0])
    compare(lock_step.run(batches), plain(build(config), batches))


@pytest.mark.parametrize("config", [LOOP, STACKED], ids=["loop", "stacked"])
@pytest.mark.parametrize("plan", [Plan(dp=2, passes=ZERO), AXES["ep"]], ids=["dp2", "dp4-ep2"])
@pytest.mark.parametrize(
    ("optimizer", "stock"),
    [("sgd", True), ("adamw-foreach", False), ("adamw-fused", True)],
    ids=["sgd", "foreach", "fused"],
)
def test_three_steps_on_gloo(ranks: Ranks, config: Config, plan: Plan, optimizer: str, stock: bool) -> None:
    """Both ways to clip give the single process's norm on every rank."""
    job = Job(config, plan, optimizer, clip=0.05, stock=stock)
    parts = ranks.run(plan.world_size, train, job, BATCHES)
    reference = plain(build(config), BATCHES, optimizer=optimizer, clip=0.05)
    compare(gathered(parts, reference, plan), reference)
    assert all(step.norm > 0.05 for part in parts for step in part.steps)
