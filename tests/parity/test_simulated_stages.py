"""Pipeline stages of all ranks in this process: equal to one process, and whatever goes wrong between stages is named."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import moecompile as mc
from moecompile import simulate_stages
from moecompile.errors import VerifyError
from moecompile.plan import Plan
from moecompile.program import Program
from moecompile.stages import Stage, cut_stages
from moecompile.timeline import Action
from tests.parity.test_stages import reference
from tests.support.models import Config, build, tokens
from tests.support.parity import difference, slice_for
from tests.support.thinned import thinned

pytestmark = pytest.mark.timeout(200)
CONFIG = Config("ops", hidden=16, heads=4, inner=8, layers=2, shared=True, tied=True, rotary=True, aux=0.1)
BATCH = tokens(8, 8, 0, ignored=0.2)
INTERLEAVED = {"schedule": "interleaved-1f1b", "layout": "E|t|t|L", "microbatches": 4}


def simulated(plan: Plan, program: Program | None = None) -> Any:
    batches = [slice_for(BATCH, plan, rank) for rank in range(plan.world_size)]
    return mc.simulate_ranks(build(CONFIG), plan, batches, program=program)


PLANS = {
    "pp2": Plan(dp=1, pp=2, microbatches=4),
    "gpipe": Plan(dp=1, pp=2, microbatches=2, schedule="gpipe"),
    "interleaved-ep": Plan(dp=2, pp=2, ep=2, **INTERLEAVED),
    "dp-etp": Plan(dp=2, pp=2, etp=2, microbatches=2),
    "sp-ep": Plan(dp=1, pp=2, tp=2, ep=2, microbatches=2, sequence_parallel=True),
    "cp-ep": Plan(dp=1, pp=2, cp=2, ep=2, microbatches=2),
    "zigzag": Plan(dp=1, pp=2, cp=2, microbatches=2, passes="+shard-sequence{attention=ring,order=zigzag}"),
    "dp2-tp2-ep4": Plan(dp=2, pp=2, tp=2, ep=4, microbatches=2),
    **{f"zero-{at}": Plan(dp=2, pp=2, ep=2, microbatches=2, passes=f"+shard-params{{level={at}}}") for at in (1, 2, 3)},
    "zero-3-interleaved": Plan(dp=4, pp=2, ep=2, **{**INTERLEAVED, "microbatches": 2}, passes="+shard-params"),
}


@pytest.mark.parametrize("plan", thinned(PLANS, keep=("gpipe", "interleaved-ep", "sp-ep", "zero-3")))
def test_loss_and_gradients(plan: Plan) -> None:
    wanted, found = reference(CONFIG, plan, 1.0, [BATCH]), simulated(plan)
    assert difference("loss", found.loss, wanted.losses[0]) < 1e-12
    assert found.grads.keys() == wanted.grads[0].keys()
    for name, grad in wanted.grads[0].items():
        assert difference(name, found.grads[name], grad) < 1e-11


def test_results_come_from_the_last_stage_and_metrics_from_all() -> None:
    plan = PLANS["interleaved-ep"]
    found, plain = simulated(plan), build(CONFIG)(**BATCH)
    leaves = [set(outputs) for outputs in found.outputs]
    assert leaves[0] == leaves[1] < leaves[2] == leaves[3]  # the logits are on the last stage only
    (logits,) = {leaf for leaf in leaves[2] if found.outputs[2][leaf].shape[:2] == (4, 8)}
    whole = torch.cat([found.outputs[rank][logits] for rank in (2, 3)])
    assert difference("logits", whole, plain["logits"].detach()) < 1e-12
    counts = [value for name, value in found.metrics.items() if "tokens_per_expert" in name]
    assert [int(value.sum()) for value in counts] == [64 * CONFIG.top_k] * CONFIG.layers


# ---- mutants -----------------------------------------------------------------------------------------------------------

MUTATED = PLANS["interleaved-ep"]


@functools.cache
def program() -> Program:
    """Not to be changed."""
    return mc.trace(build(CONFIG), MUTATED, slice_for(BATCH, MUTATED, 0))


def messages() -> list[tuple[int, str, int]]:
    """Every value that a stage sends or receives: the stage, the list, its place in there."""
    lists = ("received", "sent", "received_grads", "sent_grads")
    return [
        (stage.index, name, at)
        for stage in cut_stages(program())
        for name in lists
        for at in range(len(getattr(stage, name)))
    ]


def run_changed(patch: pytest.MonkeyPatch, change: Callable[[list[Stage]], Sequence[Stage]]) -> None:
    patch.setattr(simulate_stages, "cut_stages", lambda found: change(cut_stages(found)))
    simulated(MUTATED, program())


def test_every_message_that_one_side_forgets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that is not sent is waited for; one that is not received is left over, or missing where it is read."""
    found = messages()
    assert len(found) >= 12
    for index, name, at in found:

        def forget(stages: list[Stage], index: int = index, name: str = name, at: int = at) -> list[Stage]:
            kept = getattr(stages[index], name)
            stages[index] = replace(stages[index], **{name: (*kept[:at], *kept[at + 1 :])})
            return stages

        with pytest.raises(VerifyError, match=r"waits for|did not take it|should hand on|neither made nor received"):
            run_changed(monkeypatch, forget)


def test_who_waits_for_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(stages: list[Stage]) -> list[Stage]:
        stages[1] = replace(stages[1], sent=())
        return stages

    with pytest.raises(VerifyError, match=r"rank 0 waits for '\w+', for the forward of microbatch 0 on stage 2"):
        run_changed(monkeypatch, silent)


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ([("F", 0), ("B", 0)], r"deadlock.* rank 0 waits for '\w+', for the backward of microbatch 0 on stage 0"),
        ([("B", 0)], r"rank 0 runs the backward of microbatch 0 on stage 0, whose forward it has not run"),
    ],
    ids=["before the last stage", "before its forward"],
)
def test_a_backward_that_comes_too_early(monkeypatch: pytest.MonkeyPatch, first: list[Any], said: str) -> None:
    """The gradient for it would come from a stage whose forward the same rank has yet to run."""
    usual = simulate_stages.order

    def turned(schedule: str, rank: int, *rest: Any) -> list[Any]:
        early = [Action(kind, stage, 0) for kind, stage in first if rank == 0]
        return [*early, *(action for action in usual(schedule, rank, *rest) if action not in early)]

    monkeypatch.setattr(simulate_stages, "order", turned)
    with pytest.raises(VerifyError, match=said):
        simulated(MUTATED, program())


def test_a_value_of_another_shape_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def wider(stages: list[Stage]) -> list[Stage]:
        first = replace(stages[0].sent[0], shape=(1, *stages[0].sent[0].shape))
        stages[0] = replace(stages[0], sent=(first, *stages[0].sent[1:]))
        return stages

    with pytest.raises(VerifyError, match="stage 0 should hand on"):
        run_changed(monkeypatch, wider)


def test_microbatches_that_do_not_divide_the_batch_are_refused() -> None:
    plan = Plan(dp=1, pp=2, microbatches=3)
    with pytest.raises(mc.PlanError, match="pass a multiple of 3 rows"):
        simulated(plan)
