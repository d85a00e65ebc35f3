"""Sharded parameters, gradients and optimizer state against the plain model: in lock step over all axes, and on gloo ranks.

Widths of 7 and 9 leave unequal shards and padding; fp64, so that a wrong sum shows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moecompile.plan import Plan
from tests.support.models import Config, build, tokens
from tests.support.parity import LockStep, compare, plain, slice_for
from tests.support.pool import Job, Ranks, gathered, parallel, train
from tests.support.thinned import thinned

pytestmark = pytest.mark.timeout(240)
LOOP = Config("loop", layers=1, shared=True, tied=True, rotary=True, aux=0.1, bias=True, inner=7)
STACKED = Config("stacked", layers=2, hidden=8, inner=8, heads=4, shared=True, aux=0.1)
ZERO = "+shard-params"
LEVELS = ["{level=1}", "{level=2}", ""]
BATCHES = [tokens(8, 4, seed, ignored=0.2) for seed in range(3)]
AXES = {
    "dp": Plan(dp=4, passes=ZERO),
    "ep": Plan(dp=4, ep=2, passes=ZERO),
    "tp": Plan(dp=2, tp=2, ep=2, passes=ZERO),
    "cp": Plan(dp=2, cp=2, ep=2, passes=ZERO),
    "sp": Plan(dp=1, cp=2, tp=2, ep=2, sequence_parallel=True, passes=ZERO),
    "etp": Plan(dp=4, ep=2, etp=2, passes=ZERO),
    "edp-etp": Plan(dp=4, etp=2, passes=ZERO),
    "shards over cp, copies over dp": Plan(dp=2, cp=2, ep=2, passes=ZERO + "{over=cp}"),
    "level 2, tp": Plan(dp=2, tp=2, ep=2, passes=ZERO + "{level=2}"),
    "level 1, tp": Plan(dp=2, tp=2, ep=2, passes=ZERO + "{level=1}"),
}


@pytest.mark.parametrize("plan", thinned(AXES))
def test_three_steps_in_lock_step(plan: Plan) -> None:
    lock_step = LockStep(build(STACKED), plan, BATCHES[0])
    compare(lock_step.run(BATCHES), plain(build(STACKED), BATCHES))


@pytest.mark.parametrize("ranks_of", thinned({"2": 2, "3": 3, "4": 4}))
def test_unequal_shards_in_lock_step(ranks_of: int) -> None:
    """9 rows and columns are 5 + 4, 3 + 3 + 3, and 3 + 3 + 3 + 0."""
    config = Config("loop", layers=1, hidden=9, heads=3, inner=9, bias=True)
    batches = [tokens(12, 3, seed) for seed in range(2)]
    plan = Plan(dp=ranks_of, passes=ZERO + "{bucket-mb=1,prefetch=1}")
    lock_step = LockStep(build(config), plan, batches[0])
    compare(lock_step.run(batches), plain(build(config), batches))


GLOO = {
    f"{at + 1}-{name}": (config, level)
    for at, level in enumerate(LEVELS)
    for name, config in (("loop", LOOP), ("stacked", STACKED))
}


@pytest.mark.parametrize(("config", "level"), thinned(GLOO, keep=("1-loop", "2-stacked", "3-loop")))
def test_levels_on_gloo(ranks: Ranks, config: Config, level: str) -> None:
    trained(ranks, Job(config, Plan(dp=2, passes=ZERO + level), "adamw", clip=0.05))


@pytest.mark.parametrize(
    ("config", "optimizer", "stock"),
    thinned(
        {
            "loop-sgd-stock": (LOOP, "sgd", True),
            "loop-foreach": (LOOP, "adamw-foreach", False),
            "stacked-fused-stock": (STACKED, "adamw-fused", True),
            "stacked": (STACKED, "adamw", False),
        },
        keep=("stacked-fused-stock",),
    ),
)
def test_experts_over_edp_on_gloo(ranks: Ranks, config: Config, optimizer: str, stock: bool) -> None:
    """Both ways to clip give the single process's norm on every rank."""
    trained(ranks, Job(config, AXES["ep"], optimizer, clip=0.05, stock=stock))


@pytest.mark.parametrize("stock", [False, True], ids=["helper", "stock"])
def test_a_rank_without_rows_on_gloo(ranks: Ranks, stock: bool) -> None:
    """9 rows on 4 ranks are 3 + 3 + 3 + 0: the last rank steps and clips with empty shards."""
    config = Config("loop", layers=1, hidden=9, heads=3, inner=9, bias=True, aux=0.1)
    trained(
        ranks, Job(config, Plan(dp=4, passes=ZERO), "adamw-fused" if stock else "adamw-foreach", clip=0.05, stock=stock)
    )


@pytest.mark.parametrize("name", thinned({"tp": "tp", "edp-etp": "edp-etp"}))
def test_beside_other_axes_on_gloo(ranks: Ranks, name: str) -> None:
    trained(ranks, Job(STACKED, AXES[name], "adamw-fused", clip=0.05, stock=True))


def trained(ranks: Ranks, job: Job) -> None:
    """Three steps on gloo ranks and in the plain model."""
    parts = ranks.run(job.plan.world_size, train, job, BATCHES)
    reference = plain(build(job.config), BATCHES, optimizer=job.optimizer, clip=job.clip)
    compare(gathered(parts, reference, job.plan), reference)
    assert all(step.norm > 0.05 for part in parts for step in part.steps)
    assert any(axis == "dp" for cut in parts[0].cuts.values() for axis, _ in cut)


# ---- what is kept at levels 1 and 2 ------------------------------------------------------------------------------------


def kept(rank: int, plan: Plan) -> tuple[list[int], float, float]:
    """How often parameters had been gathered after each of some calls, and the last loss, here and of a plain model."""
    with parallel(build(LOOP), plan) as model:
        alone = build(LOOP)
        optimizer, other = (torch.optim.SGD(item.parameters(), lr=0.1) for item in (model, alone))
        batch, found, count = BATCHES[0], [], 0

        def call() -> float:
            loss = model(**slice_for(batch, plan, rank))["loss"]
            loss.backward()
            found.append(count)
            return float(loss)

        call()
        head = model._state.latest.kept
        run = head._executor

        def counted(inputs: Any) -> Any:
            nonlocal count
            count += 1
            return run(inputs)

        head._executor = counted
        found.clear()
        call()  # a second microbatch: nothing has changed
        optimizer.step()
        for _ in range(2):
            alone(**batch)["loss"].backward()
        other.step()
        call()
        call()
        with torch.no_grad():
            if rank == 0:  # behind the back of version counters, where one rank alone can see it
                model.plain.norm.weight.data.mul_(3.0)
            alone.norm.weight[: len(alone.norm.weight) // 2].mul_(3.0)
        last = call()
        call()
        return found, last, float(alone(**batch)["loss"])


@pytest.mark.parametrize("level", ["{level=1}", "{level=2}"], ids=["1", "2"])
def test_parameters_are_gathered_when_a_shard_has_changed(ranks: Ranks, level: str) -> None:
    for found, loss, wanted in ranks.run(2, kept, Plan(dp=2, passes=ZERO + level)):
        assert found == [0, 1, 1, 2, 2]
        assert loss == pytest.approx(wanted, rel=1e-12)
