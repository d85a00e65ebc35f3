"""record-metrics: each MoE layer's tokens per expert become outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from moecompile import ops
from moecompile.passes.record_metrics import TOKENS_PER_EXPERT, RecordMetrics
from moecompile.placement.types import PARTIAL
from moecompile.plan import Plan
from moecompile.printer import graph_text
from moecompile.program import OutputKind, Program
from tests.support import golden


def test_golden(golden: golden.Golden) -> None:
    golden("block", golden_rewrite())


def golden_rewrite() -> golden.Rewrite:
    return golden.rewrite("recognize-moe", "record-metrics")


def assert_recorded(program: Program) -> None:
    """One output a layer: the second result of its permute."""
    found = [
        (node, item) for node, item in zip(program.output_nodes(), program.outputs, strict=True)
        if item.kind is OutputKind.METRIC
    ]  # fmt: skip
    assert [item.name for _, item in found] == ["blocks.0", "blocks.1", "blocks.2"]
    for node, item in found:
        assert item.what == TOKENS_PER_EXPERT
        assert node.args[0].target is ops.permute and node.args[1] == 1


def test_effect() -> None:
    def effect() -> None:
        assert_recorded(golden.rewrite("recognize-moe", "record-metrics", Plan(dp=2), golden.Stack()).program)

    golden.assert_needs(RecordMetrics, effect)


def test_counts_are_shares_once_the_tokens_are_cut() -> None:
    """Whether it runs before or after shard-dense, the output says that ranks hold parts of a sum."""
    for pipeline in ("recognize-moe,record-metrics,shard-dense", "recognize-moe,shard-dense,record-metrics"):
        program = golden.run(golden.captured(Plan(dp=2)), pipeline)
        assert dict(program.outputs[-1].placements)["dp"] == PARTIAL


class Dense(golden.Scale):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return torch.tanh(super().forward(x, labels))


def test_nothing_to_do_in_a_dense_model() -> None:
    found = golden.rewrite("recognize-moe", "record-metrics", Plan(dp=2), Dense())
    assert found.rewrites == 0 and found.before == found.after


def test_a_second_run_changes_nothing() -> None:
    program = golden_rewrite().program
    before = graph_text(program)
    golden.run(program, "record-metrics")
    assert program.history[-1].rewrites == 0 and graph_text(program) == before
