"""Case 48: a rank that dies ends the run everywhere within seconds, and the others say where they waited for it."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from moecompile import ops
from moecompile.plan import Plan
from moecompile.runtime.launcher import RankError
from tests.support.models import Config, build, tokens
from tests.support.parity import slice_for
from tests.support.pool import Ranks, parallel

pytestmark = pytest.mark.timeout(120)
SECONDS = 15.0  # four of them are the launcher's grace, in which ranks may say what they saw


class DieBefore(TorchDispatchMode):
    """Kills this process right before the ``count``-th call of an op, and leaves the moment in a file."""

    def __init__(self, op: Any, count: int, note: Path) -> None:
        super().__init__()
        self.op, self.left, self.note = op, count, note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= func is self.op
        if func is self.op and not self.left:
            self.note.write_text(str(time.monotonic()))  # one clock for all processes of a machine
            os.kill(os.getpid(), signal.SIGKILL)
        return func(*args, **(kwargs or {}))


def die_in_second_step(rank: int, plan: Plan, victim: int, name: str, count: int, note: Path) -> float:
    """Two steps; ``victim`` dies in the second, before the ``count``-th call of the op."""
    batch = slice_for(tokens(2 * plan.world_size, 5, 0), plan, rank)
    with parallel(build(Config("loop", layers=3)), plan) as model:
        model(**batch)["loss"].backward()
        if rank == victim:
            with DieBefore(getattr(ops, name), count, note):
                model(**batch)["loss"].backward()
        return float(model(**batch)["loss"])


@pytest.mark.parametrize(
    ("world", "ep", "victim", "name", "count", "expected"),
    [
        (2, 2, 1, "dispatch", 2, r"dispatch\w* of layers\.1\S* \(forward\) failed on axis ep, ranks \(0, 1\)"),
        (2, 2, 0, "combine", 5, r"combine\w* of layers\.\d\S* \(backward\) failed on axis ep, ranks \(0, 1\)"),
        pytest.param(
            4,
            2,
            3,
            "dispatch",
            2,
            r"dispatch\w* of layers\.1\S* \(forward\) failed on axis ep, ranks \(2, 3\)",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["second-layer-forward", "rank-0-backward", "four-ranks"],
)
def test_case_48_a_dead_peer_is_named(
    ranks: Ranks, world: int, ep: int, victim: int, name: str, count: int, expected: str, tmp_path: Path
) -> None:
    """Layer, phase, group and the missing rank, within seconds."""
    plan = Plan(dp=world, ep=ep, timeout=60)
    note = tmp_path / "died"
    with pytest.raises(
        RankError, match=f"rank {victim} of {world} failed: the process was killed by SIGKILL"
    ) as caught:
        ranks.run(world, die_in_second_step, plan, victim, name, count, note)
    took = time.monotonic() - float(note.read_text())
    said = str(caught.value)
    assert caught.value.rank == victim
    assert "What the ranks waiting for it saw" in said
    assert re.search(expected + rf": rank {victim} is missing", said), said
    assert took < SECONDS, took
