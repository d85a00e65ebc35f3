"""Buffers written in forward hold what one process over the global batch leaves in them, on every rank alike."""

from __future__ import annotations

import pytest

from moecompile.plan import Plan
from tests.support import buffer_models as models
from tests.support.parity import LockStep, compare, plain

PLANS = {"dp2": Plan(dp=2, ep=2), "dp4": Plan(dp=4, ep=2)}


@pytest.mark.parametrize("plan", list(PLANS.values()), ids=list(PLANS))
@pytest.mark.parametrize("kind", models.KINDS, ids=lambda kind: kind.__name__)
def test_three_steps_equal_one_process(kind: type[models.Layer], plan: Plan) -> None:
    batches = [models.batch(seed) for seed in range(3)]
    reference = plain(models.made(kind), batches)
    assert reference.buffers or kind is models.NormWithoutTrack
    run = LockStep(models.made(kind), plan, batches[0])
    assert len(run.program.layers) == 2 and run.program.gathers == []
    compare(run.run(batches), reference)
