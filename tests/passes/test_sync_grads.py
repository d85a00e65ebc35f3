"""sync-grads: each gradient is summed once, over the ranks that hold its parameter whole."""

from __future__ import annotations

import pytest

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.errors import PassError
from moecompile.passes.sync_grads import SyncGrads
from moecompile.plan import Plan
from moecompile.program import OutputKind, Program
from moecompile.verify.collectives import over, reductions
from tests.support import golden

BEFORE = "recognize-moe,shard-dense,shard-experts,insert-dispatch,differentiate"


def rewrite(item: str = "sync-grads", plan: Plan = golden.PLAN, model: object = None) -> golden.Rewrite:
    return golden.rewrite(BEFORE, item, plan, model)  # type: ignore[arg-type]


def axes(program: Program) -> dict[str, list[str]]:
    """The axes over which each gradient is summed."""
    return {
        item.name: over(reductions(found))
        for found, item in zip(program.output_nodes(), program.outputs, strict=True)
        if item.kind is OutputKind.GRAD
    }


def test_golden_dense(golden: golden.Golden) -> None:
    """Weight and bias share one flat bucket."""
    golden("dense", rewrite(plan=Plan(dp=2), model=dense()))


def dense() -> golden.Line:
    return golden.Line()


@pytest.mark.parametrize(("dp", "ep", "experts"), [(2, 1, ["dp"]), (2, 2, []), (4, 2, ["edp"]), (4, 4, []), (1, 1, [])])
def test_axes_follow_from_where_the_parameter_is_whole(dp: int, ep: int, experts: list[str]) -> None:
    found = axes(rewrite(plan=Plan(dp=dp, ep=ep)).program)
    assert found == {"w1": experts, "w2": experts, "gate_weight": ["dp"] if dp > 1 else []}


def test_effect() -> None:
    def effect() -> None:
        assert axes(rewrite(plan=Plan(dp=4, ep=2)).program) == {"w1": ["edp"], "w2": ["edp"], "gate_weight": ["dp"]}

    golden.assert_needs(SyncGrads, effect)


def test_one_bucket_a_group() -> None:
    program = rewrite(plan=Plan(dp=4, ep=2), model=golden.Stack()).program
    sums = [
        node for node in graphs.find(program.graph, ops.all_reduce) if meta.direction(node) is meta.Direction.BACKWARD
    ]
    assert [node.args[2] for node in sums] == ["edp", "dp"]


def test_bucket_size_splits() -> None:
    """Buckets of a MiB hold these tiny gradients together; the option is part of the pass's text."""
    found = rewrite("sync-grads{bucket-mb=1}", Plan(dp=4, ep=2), golden.Stack())
    assert found.program.history[-1].pass_text == "sync-grads{bucket-mb=1}"
    assert axes(found.program) == axes(rewrite(plan=Plan(dp=4, ep=2), model=golden.Stack()).program)


def test_nothing_to_do_on_one_rank() -> None:
    found = rewrite(plan=Plan(dp=1))
    assert found.rewrites == 0 and found.before == found.after


def test_a_second_run_is_refused() -> None:
    with pytest.raises(PassError, match="'sync-grads' would run twice, since GRADS_SYNCED holds"):
        golden.run(rewrite().program, "sync-grads")
