"""sync-loss: every rank reports the loss of the whole batch."""

from __future__ import annotations

import pytest

from moecompile import ops
from moecompile.errors import PassError
from moecompile.passes.sync_loss import SyncLoss
from moecompile.placement.types import REPLICATE
from moecompile.plan import Plan
from moecompile.program import OutputKind, Program
from tests.support import golden

BEFORE = "recognize-moe,shard-dense,differentiate"


def rewrite(plan: Plan = Plan(dp=2)) -> golden.Rewrite:  # noqa: B008
    return golden.rewrite(BEFORE, "sync-loss", plan, golden.Line())


def test_golden(golden: golden.Golden) -> None:
    golden("sum", rewrite())


def assert_whole(program: Program) -> None:
    """The loss is the sum of the shares, and is described as such."""
    at = next(i for i, item in enumerate(program.outputs) if item.kind is OutputKind.LOSS)
    loss = program.output_nodes()[at]
    assert loss.target is ops.all_reduce and loss.args[1:] == ("sum", "dp")
    assert dict(program.outputs[at].placements)["dp"] == REPLICATE


def test_effect() -> None:
    golden.assert_needs(SyncLoss, lambda: assert_whole(rewrite().program))


def test_gradients_are_those_of_the_share() -> None:
    """The pass comes after differentiation and leaves the gradients alone."""
    program = golden.run(golden.captured(Plan(dp=2), golden.Line()), BEFORE)
    grads = program.output_nodes()[1:]
    golden.run(program, "sync-loss")
    assert program.output_nodes()[1:] == grads


def test_nothing_to_do_on_one_rank() -> None:
    found = rewrite(Plan(dp=1))
    assert found.rewrites == 0 and found.before == found.after


def test_a_second_run_is_refused() -> None:
    with pytest.raises(PassError, match="'sync-loss' needs the fact LOSS_SHARES"):
        golden.run(rewrite().program, "sync-loss")
