"""Ranks that would issue different collectives find out before the first of them runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moecompile import graph as graphs
from moecompile import meta, ops, parallel_model
from moecompile.compilation import Request, compile_call
from moecompile.compiled import CompiledCall
from moecompile.ops import AXIS_ARGUMENT
from moecompile.plan import Plan
from moecompile.program import Program
from moecompile.verify.order import agreement, collective_order
from tests.support.models import Config, build, tokens
from tests.support.mutants import copied
from tests.support.parity import slice_for
from tests.support.pool import Ranks, parallel

CONFIG = Config("ops", layers=1, aux=0.1)
PLAN = Plan(dp=2, ep=2)


@pytest.fixture(scope="module")
def program() -> Program:
    return compile_call(build(CONFIG), Request((), slice_for(tokens(4, 4, 0), PLAN, 0), PLAN))


def test_one_line_for_each_collective(program: Program) -> None:
    calls = graphs.find(program.graph, *AXIS_ARGUMENT)
    lines = collective_order(program)
    assert len(lines) == len(calls) > 8
    sent = next(line for line in lines if "moe.dispatch" in line)
    assert sent.endswith("over ep of 2 by send, recv") and "float64[16, 8]" in sent
    back = next(line for line in lines if "moe.combine" in line)
    assert "float64[n0, 8]" in back and back.endswith("by recv, send")


def test_captures_of_the_same_call_agree(program: Program) -> None:
    """Symbols are counted through, so their names do not tell how often a process has captured before."""
    again = compile_call(build(CONFIG), Request((), slice_for(tokens(4, 4, 0), PLAN, 0), PLAN))
    assert agreement(again) == agreement(program) == agreement(copied(program))


# ---- what may not differ -------------------------------------------------------------------------------------------------


def _swap_order(program: Program) -> None:
    """The loss is added up behind the gradients instead of before; names and arguments stay."""
    loss, bucket = graphs.find(program.graph, ops.all_reduce)[-2:]
    bucket.append(loss)


def _other_axis(program: Program) -> None:
    node = graphs.find(program.graph, ops.all_reduce)[0]
    node.args = (*node.args[:2], "ep")


def _other_kind(program: Program) -> None:
    node = graphs.find(program.graph, ops.all_reduce)[0]
    node.args = (node.args[0], "max", node.args[2])


def _other_type(program: Program) -> None:
    """No word of the text names the type of what a collective sends: only its operand has it."""
    node = graphs.find(program.graph, ops.all_reduce)[0].args[0]
    assert isinstance(node, torch.fx.Node)
    node.meta["val"] = meta.tensor(node).to(torch.float32)


def _other_size(program: Program) -> None:
    """A collective of rows that were counted by another layer's exchange, or of one row less."""
    node = graphs.find(program.graph, ops.combine)[0].args[0]
    assert isinstance(node, torch.fx.Node)
    node.meta["val"] = meta.tensor(node).new_empty(12, 8)


def _one_less(program: Program) -> None:
    node = graphs.find(program.graph, ops.all_reduce)[0]
    graphs.replace(node, node.args[0])  # type: ignore[arg-type]


CHANGES: list[Callable[[Program], None]] = [
    _swap_order, _other_axis, _other_kind, _other_type, _other_size, _one_less
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_every_difference_shows(change: Callable[[Program], None], program: Program) -> None:
    other = copied(program)
    change(other)
    other.graph.lint()
    other.graph_module.recompile()
    assert collective_order(other) != collective_order(program)
    assert agreement(other) != agreement(program)


def test_another_mesh_shows() -> None:
    """The same text over other groups: axes are names, and who stands behind them is the plan's."""
    lines = []
    for plan in (Plan(dp=4, ep=2), Plan(dp=4, ep=4)):
        lines.append(agreement(compile_call(build(CONFIG), Request((), slice_for(tokens(4, 4, 0), plan, 0), plan))))
    assert lines[0].splitlines()[0] != lines[1].splitlines()[0]


# ---- before the first run --------------------------------------------------------------------------------------------------


def _diverging(rank: int, change: Callable[[Program], None]) -> tuple[str, int]:
    """Rank 1 is given another program. Returns the error, and how many programs got as far as being bound to groups."""
    made, real = [], parallel_model.compile_call
    bound = CompiledCall.__init__

    def compiled(*args: Any, **kwargs: Any) -> Program:
        program = real(*args, **kwargs)
        if rank == 1:
            change(program)
            program.graph_module.recompile()
        return program

    def binding(self: Any, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        bound(self, *args, **kwargs)

    parallel_model.compile_call, CompiledCall.__init__ = compiled, binding  # type: ignore[method-assign]
    try:
        with parallel(build(CONFIG), PLAN) as model:
            try:
                model(**slice_for(tokens(4, 4, 0), PLAN, rank))
            except Exception as error:
                return f"{type(error).__name__}: {error}", len(made)
            return "", len(made)
    finally:
        parallel_model.compile_call, CompiledCall.__init__ = real, bound  # type: ignore[method-assign]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("change", [_swap_order, _other_axis, _other_type])
def test_a_planted_divergence_is_caught_before_anything_runs(change: Callable[[Program], None], ranks: Ranks) -> None:
    """All ranks raise alike and name the first collectives that differ; no rank waits for another."""
    for message, bound in ranks.run(2, _diverging, change):
        assert bound == 0
        assert message.startswith("CaptureError") and "rank 1 has collective" in message and "rank 0 has" in message
