"""Buffers written in forward hold what one process over the global batch leaves in them, on every rank alike."""

from __future__ import annotations

import pytest

from moecompile.plan import Plan
from tests.support import buffer_models as models
from tests.support.parity import LockStep, compare, plain

DP = Plan(dp=2, ep=2)
WIDER = {"dp4": Plan(dp=4, ep=2), "zero": Plan(dp=2, ep=2, passes="+shard-params")}
SEQUENCE = {
    "tp2": Plan(dp=1, tp=2, sequence_parallel=True, ep=2),
    "cp2": Plan(dp=1, cp=2, ep=2),
    "dp2-cp2": Plan(dp=2, cp=2, ep=4),
}
FAST = (models.Steps, models.Load, models.MeanReassigned, models.MeanByOut, models.Norm, models.Spectral)


def kinds(*fast: type[models.Layer]) -> list[object]:
    """The others run among the slow tests."""
    return [kind if kind in fast else pytest.param(kind, marks=pytest.mark.slow) for kind in models.KINDS]


def check(kind: type[models.Layer], plan: Plan, *, layers: int = 1, words: bool = False) -> LockStep:
    batches = [models.batch(seed, words=words) for seed in range(3)]
    reference = plain(models.made(kind, layers, words), batches)
    assert reference.buffers or kind is models.NormWithoutTrack
    run = LockStep(models.made(kind, layers, words), plan, batches[0])
    assert len(run.program.layers) == layers
    compare(run.run(batches), reference)
    return run


@pytest.mark.parametrize("kind", kinds(*FAST), ids=lambda kind: kind.__name__)
def test_three_steps_equal_one_process(kind: type[models.Layer]) -> None:
    assert check(kind, DP, layers=2).program.gathers == []


@pytest.mark.slow
@pytest.mark.parametrize("plan", list(WIDER.values()), ids=list(WIDER))
@pytest.mark.parametrize("kind", models.KINDS, ids=lambda kind: kind.__name__)
def test_on_wider_plans(kind: type[models.Layer], plan: Plan) -> None:
    assert check(kind, plan).program.gathers == []


@pytest.mark.parametrize("kind", kinds(models.Norm), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("plan", list(SEQUENCE.values()), ids=list(SEQUENCE))
def test_where_the_sequence_is_cut(kind: type[models.Layer], plan: Plan) -> None:
    run = check(kind, plan, words=True)
    assert any(dict(item.placements).get("tp" if plan.tp > 1 else "cp") for item in run.program.outputs)
