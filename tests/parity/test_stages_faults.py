"""Faults of pipelines: a stage that dies or stalls is named with the place, and ranks that disagree never start."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from moecompile import ops, parallel_model
from moecompile.errors import CaptureError
from moecompile.plan import Plan
from moecompile.program import Program
from moecompile.runtime.launcher import RankError
from tests.support.models import Config, build, tokens
from tests.support.parity import slice_for
from tests.support.pool import Ranks, parallel

pytestmark = pytest.mark.timeout(260)
CONFIG = Config("ops", layers=2)
BATCH = tokens(8, 8, 0)


def vanish(rank: int, plan: Plan, how: str) -> None:
    """Stage 1 dies, or does not go on, as it comes to the forward of microbatch 2."""
    with parallel(build(CONFIG), plan) as model:
        compiled = model.prepare((), slice_for(BATCH, plan, rank))
        (stage,) = compiled.pipeline.stages
        run = stage.forward_one_chunk

        def until(chunk: int, *args: Any, **kwargs: Any) -> Any:
            if chunk == 2 and stage.is_last:
                if how == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(600)
            return run(chunk, *args, **kwargs)

        stage.forward_one_chunk = until
        model(**slice_for(BATCH, plan, rank))


WAITED = "rank 0: a message of the pipeline never came: stage 0 was receiving the backward of microbatch 2 from rank 1; rank 1 is missing"


def test_a_stage_that_dies_in_a_step_is_named_with_microbatch_and_action(ranks: Ranks) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 of 2 failed: the process was killed by SIGKILL") as caught:
        ranks.run(2, vanish, Plan(dp=1, pp=2, microbatches=4, timeout=200.0), "die", timeout=230.0)
    assert WAITED in str(caught.value) and time.monotonic() - start < 190


@pytest.mark.slow
def test_a_stage_that_stalls_is_named_after_the_timeout(ranks: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(2, vanish, Plan(dp=1, pp=2, microbatches=4, timeout=20.0), "stall", timeout=230.0)
    said = str(caught.value)
    assert f"{WAITED} (it died, or did not arrive within timeout=20 s)" in said
    assert "rank 1 was here:" in said and "in until" in said


def disagree(rank: int, plan: Plan) -> list[str]:
    """What each rank says when rank 3 has another schedule, then when it lacks a collective of its stage."""
    found = []

    def without_a_reduction(*args: Any, **kwargs: Any) -> Program:
        program = compile_call(*args, **kwargs)
        node = [node for node in program.graph.nodes if node.target is ops.all_reduce][-1]
        node.replace_all_uses_with(node.args[0])
        program.graph.erase_node(node)
        program.graph_module.recompile()
        return program

    compile_call = parallel_model.compile_call
    for own, compiled in ((replace(plan, schedule="gpipe"), compile_call), (plan, without_a_reduction)):
        with (
            mock.patch.object(parallel_model, "compile_call", compiled if rank == 3 else compile_call),
            parallel(build(CONFIG), own if rank == 3 else plan) as model,
        ):
            try:
                model(**slice_for(BATCH, plan, rank))
                found.append("ran")
            except CaptureError as error:
                found.append(str(error))
    return found


def test_ranks_that_would_send_in_another_order_never_start(ranks: Ranks) -> None:
    """Over pp: another schedule. Over ep: a collective that one rank of stage 1 does not make. All ranks say the same."""
    found = ranks.run(4, disagree, Plan(dp=2, pp=2, ep=2, microbatches=4), timeout=230.0)
    assert found == [found[0]] * 4
    schedules, collectives = found[0]
    assert "rank 3 has pipeline gpipe of 4 microbatches" in schedules
    assert "but rank 0 has pipeline 1f1b of 4 microbatches" in schedules
    assert "rank 3 has" in collectives and "all_reduce sum of" in collectives and "on stage 1" in collectives
