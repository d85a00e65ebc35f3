"""`parallelize` on gloo ranks against the plain model: the ground truth. The ranks live for the whole session.

Every step is compared: loss, outputs, each gradient, the norm on every rank, and that copies are bitwise equal.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import moecompile as mc
from moecompile.plan import Plan
from tests.support.models import Config, build, choose, push_to, tokens
from tests.support.parity import Batch, ParityError, compare, plain, slice_for
from tests.support.pool import Job, Part, Ranks, gathered, parallel, train
from tests.support.thinned import thinned

pytestmark = pytest.mark.timeout(150)
BATCHES = [tokens(8, 5, seed, ignored=0.2) for seed in range(3)]


def check(ranks: Ranks, job: Job, batches: list[Batch], *, zero: tuple[str, ...] = (), **options: Any) -> list[Part]:
    """Train on gloo ranks and compare with the plain model."""
    parts = ranks.run(job.plan.world_size, train, job, batches, **options)
    reference = plain(build(job.config), batches, optimizer=job.optimizer, clip=job.clip)
    compare(gathered(parts, reference, job.plan), reference, zero=zero)
    return parts


@pytest.mark.parametrize(
    "config",
    [
        Config("loop", shared=True, aux=0.1),
        Config("stacked", tied=True, aux=0.1),
        Config("loop", bias=True, aux=0.1),
    ],
    ids=["loop-shared", "stacked-tied", "loop-bias"],
)
@pytest.mark.parametrize("plan", [Plan(dp=2), Plan(dp=2, ep=2)], ids=["dp2", "dp2-ep2"])
def test_two_ranks(ranks: Ranks, config: Config, plan: Plan) -> None:
    check(ranks, Job(config, plan), BATCHES)


@pytest.mark.parametrize(
    "plan",
    thinned({"ep2": Plan(dp=4, ep=2), "ep4": Plan(dp=4, ep=4), "allgather": Plan(dp=4, ep=2, dispatch="allgather")}),
)
def test_four_ranks(ranks: Ranks, plan: Plan) -> None:
    check(ranks, Job(Config("loop", shared=True, aux=0.1), plan), BATCHES)


def test_ranks_hold_their_share_and_nothing_else(ranks: Ranks) -> None:
    """Elements per rank equal the closed form: everything outside the experts, and E / ep of these."""
    config, plan = Config("loop", experts=8, shared=True), Plan(dp=4, ep=2)
    parts = ranks.run(4, train, Job(config, plan), BATCHES[:1])
    sizes = {name: param.numel() for name, param in build(config).named_parameters()}
    one_expert = 3 * config.hidden * config.inner
    experts = config.layers * config.experts * one_expert
    assert sum(size for name, size in sizes.items() if ".experts." in name) == experts
    for part in parts:
        assert sum(weight.numel() for weight in part.weights.values()) == sum(sizes.values()) - experts + experts // 2
        assert {name for name, weight in part.weights.items() if weight.numel()} > {
            name for name in sizes if ".experts." not in name
        }


def test_the_users_code_never_runs_again(ranks: Ranks) -> None:
    """Every forward of the plain model raises after the first step; training goes on with the same numbers."""
    check(ranks, Job(Config("loop", shared=True, aux=0.1), Plan(dp=2, ep=2), forbid=True), BATCHES)


@pytest.mark.parametrize("early", [True, False], ids=["before-the-first-call", "after-it"])
def test_the_optimizer_may_be_made_at_any_time(ranks: Ranks, early: bool) -> None:
    check(ranks, Job(Config("loop"), Plan(dp=2, ep=2), early=early), BATCHES)


# ---- case 04: clipping and optimizers over two meshes ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("style", "stock", "optimizer"),
    [
        ("loop", False, "adamw"),
        ("loop", True, "adamw-fused"),
        ("loop", True, "adamw-foreach"),
        ("stacked", False, "adamw-fused"),
        ("stacked", True, "adamw-foreach"),
    ],
    ids=[
        "loop-helper-default",
        "loop-stock-fused",
        "loop-stock-foreach",
        "stacked-helper-fused",
        "stacked-stock-foreach",
    ],
)
def test_case_04_clipping_and_optimizers(ranks: Ranks, style: str, stock: bool, optimizer: str) -> None:
    """Attention on one mesh, experts on another: both ways to clip give the single-process norm on every rank."""
    config = Config(style, aux=0.1)  # type: ignore[arg-type]
    parts = check(ranks, Job(config, Plan(dp=2, ep=2), optimizer, clip=0.05, stock=stock), BATCHES)
    assert all(step.norm > 0.05 for part in parts for step in part.steps)  # so that clipping did something


def test_case_04_with_copies_of_experts(ranks: Ranks) -> None:
    """edp = 2: an expert that two ranks hold counts once."""
    job = Job(Config("loop", aux=0.1), Plan(dp=4, ep=2), "sgd", clip=0.05)
    check(ranks, job, BATCHES)
    check(ranks, Job(job.config, job.plan, "sgd", clip=0.05, stock=True), BATCHES)


# ---- case 14: ranks that use different experts -------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [Plan(dp=2), Plan(dp=2, ep=2)], ids=["expert-dp", "ep2"])
def test_case_14_ranks_that_use_different_experts(ranks: Ranks, plan: Plan) -> None:
    """Rank 0 uses expert 0 alone, rank 1 expert 3 alone; five steps end within a minute and equal the plain model's."""
    config = Config("loop", top_k=1, normalize=False, aux=0.1)
    choices = torch.zeros(4, 5, 1, dtype=torch.int64)
    choices[2:] = 3
    batches = [tokens(4, 5, seed) | {"push": push_to(choices, 4)} for seed in range(5)]
    start = time.monotonic()
    check(ranks, Job(config, plan), batches, zero=("*.experts.1.*", "*.experts.2.*"), timeout=60.0)
    assert time.monotonic() - start < 60


# ---- case 16 on ranks --------------------------------------------------------------------------------------------------


def test_idle_experts_and_a_rank_without_rows(ranks: Ranks) -> None:
    """Experts of rank 1 get nothing at all, with foreach AdamW, which still decays them."""
    batches = [tokens(4, 5, seed) | {"push": push_to(choose(4, 5, 2, [0, 1]), 4)} for seed in range(3)]
    job = Job(Config("loop", aux=0.1), Plan(dp=2, ep=2), "adamw-foreach")
    check(ranks, job, batches, zero=("*.experts.2.*", "*.experts.3.*"))


# ---- faults that must not pass -----------------------------------------------------------------------------------------


def train_apart(rank: int, job: Job, batches: list[Batch]) -> Part:
    """One rank nudges a replicated weight after the first step, as a missing reduction would."""
    part = Part()
    with parallel(build(job.config), job.plan) as model:
        stepper = torch.optim.SGD(model.parameters(), lr=0.1)
        model(**slice_for(batches[0], job.plan, rank))["loss"].backward()
        stepper.step()
        if rank == 1:
            with torch.no_grad():
                model.plain.head.weight[0, 0] += 1e-12
        part.weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return part


def test_copies_that_drift_apart_are_found(ranks: Ranks) -> None:
    job = Job(Config("loop"), Plan(dp=2, ep=2), "sgd")
    parts = ranks.run(2, train_apart, job, BATCHES[:1])
    reference = plain(build(job.config), BATCHES[:1], optimizer="sgd")
    reference.steps.clear()
    with pytest.raises(ParityError, match=r"weight head.weight: copies on different ranks are not bitwise equal"):
        gathered(parts, reference, job.plan)


def different_models(rank: int, plan: Plan) -> None:
    config = Config("loop", layers=1 + rank)
    with parallel(build(config), plan) as model:
        model(**slice_for(BATCHES[0], plan, rank))


def test_a_rank_with_another_model_ends_the_call_everywhere(ranks: Ranks) -> None:
    with pytest.raises(mc.CaptureError, match="the ranks were not given the same call"):
        raise_cause(lambda: ranks.run(2, different_models, Plan(dp=2, ep=2)))


def raise_cause(call: Any) -> None:
    """The rank's own exception in place of the launcher's."""
    try:
        call()
    except RuntimeError as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None
