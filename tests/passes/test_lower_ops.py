"""lower-ops: every moe:: compute op becomes the backend's own, with the same results; collectives stay."""

from __future__ import annotations

import pytest
import torch

from moecompile import graph as graphs
from moecompile import ops
from moecompile.errors import PassError
from moecompile.passes.lower_ops import LowerOps
from tests.support import golden
from tests.support.fusion import step_outputs


def test_golden(golden: golden.Golden) -> None:
    golden("experts", lowered())


def lowered(item: str = "lower-ops") -> golden.Rewrite:
    return golden.rewrite(
        "recognize-moe,shard-dense,shard-experts,insert-dispatch", item, golden.PLAN, golden.Weighted()
    )


def test_effect() -> None:
    def effect() -> None:
        graph = lowered().program.graph
        assert graphs.find(graph, ops.cpu.grouped_linear, ops.cpu.unpermute)
        assert not graphs.find(graph, ops.grouped_linear, ops.unpermute)
        assert graphs.find(graph, ops.dispatch, ops.combine)

    golden.assert_needs(LowerOps, effect)


def test_reference_changes_nothing() -> None:
    found = lowered("lower-ops{backend=reference}")
    assert found.rewrites == 0
    assert found.before == found.after


def test_values_on_a_gpu_keep_the_ops_that_run_there() -> None:
    """A CPU kernel has no place in a program for another device."""
    program = golden.run(golden.captured(), "recognize-moe,shard-dense,differentiate")
    wanted = len(graphs.find(program.graph, ops.grouped_linear))
    for node in program.graph.nodes:
        if isinstance(node.meta.get("val"), torch.Tensor):
            with node.meta["val"].fake_mode:
                node.meta["val"] = torch.empty_like(node.meta["val"], device="cuda")
    golden.run(program, "lower-ops", check=False)
    assert program.history[-1].rewrites == 0
    assert len(graphs.find(program.graph, ops.grouped_linear)) == wanted > 0


def test_unknown_backend() -> None:
    with pytest.raises(PassError, match="choose one of these"):
        lowered("lower-ops{backend=fpga}")


def test_same_loss_and_gradients() -> None:
    torch.manual_seed(0)
    model = golden.Block()
    plain, low = step_outputs(model, "differentiate"), step_outputs(model, "differentiate,lower-ops")
    assert len(plain) == len(low) > 1
    for a, b in zip(plain, low, strict=True):
        assert (a - b).norm() <= 1e-13 * a.norm()  # float64, sums in another order
    assert any(a.norm() > 0 for a in plain[1:])
