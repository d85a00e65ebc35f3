"""The verifier: each check finds the fault that is planted for it, and says what to do; sound programs pass."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import Node

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.errors import VerifyError
from moecompile.pass_base import Fact
from moecompile.placement.types import REPLICATE
from moecompile.plan import Plan
from moecompile.program import InputKind, Level, Output, OutputKind, Program
from moecompile.verify import verify_program, verify_values
from tests.support import golden

aten = torch.ops.aten
MODEL = "recognize-moe,record-metrics,shard-dense,shard-experts,insert-dispatch"
GATHER = f"{MODEL}{{backend=allgather}}"
STEP = f"{MODEL},differentiate,sync-loss,sync-grads"
PLAN = Plan(dp=4, ep=2)


class Balanced(golden.Block):
    """A block with a balance loss: a product of two sums over all tokens, so the forward has all-reduces of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).softmax(-1).mean(0)
        return super().forward(x) + (scores * scores).sum()


def prepared(pipeline: str, plan: Plan = PLAN) -> Program:
    program = golden.run(golden.captured(plan, Balanced()), pipeline)
    verify_program(program)
    verify_values(program)
    return program


def one(program: Program, target: Any, *, backward: bool = False, at: int = 0) -> Node:
    wanted = meta.Direction.BACKWARD if backward else meta.Direction.FORWARD
    return [node for node in graphs.find(program.graph, target) if meta.direction(node) is wanted][at]


def skip(node: Node) -> None:
    """Readers get the operand: the call is gone."""
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    node.graph.erase_node(node)


def set_arg(node: Node, index: int, value: Any) -> None:
    args = list(node.args)
    args[index] = value
    node.args = tuple(args)


def insert_after(node: Node, target: Any, *args: Any) -> Node:
    """A call on the node's value, which all its readers get instead."""
    with node.graph.inserting_after(node):
        made = graphs.call(node.graph, target, node, *args, like=node)
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    return made


# ---- the mutants: pipeline, what is done to the program, what the verifier says --------------------------------------------


def no_value(program: Program) -> None:
    del one(program, ops.permute).meta["val"]


def wrong_kind(program: Program) -> None:
    with program.graph.inserting_after(one(program, ops.permute)):
        program.graph.call_method("abs", (one(program, ops.permute),))


def input_not_described(program: Program) -> None:
    program.inputs.pop()


def output_not_described(program: Program) -> None:
    program.outputs.append(Output(OutputKind.USER))


def size_before_its_read(program: Program) -> None:
    read = one(program, aten._local_scalar_dense.default)
    moved = one(program, ops.dispatch)
    with program.graph.inserting_before(read):
        early = program.graph.call_function(aten.neg.default, (one(program, ops.permute),))
    early.meta = {"val": moved.meta["val"]}


def shared_meta(program: Program) -> None:
    one(program, ops.permute).meta["custom"] = one(program, ops.dispatch).meta["custom"] = {"key": 1}


def unknown_axis(program: Program) -> None:
    set_arg(one(program, ops.dispatch), 4, "row")


def unused_collective(program: Program) -> None:
    with program.graph.inserting_before(program.graph.output_node()):
        graphs.call(program.graph, ops.all_reduce, program.output_nodes()[0], "sum", "dp")


def wrong_group_size(program: Program) -> None:
    set_arg(one(program, ops.exchange_counts), 1, 4)


def size_that_differs(program: Program) -> None:
    insert_after(one(program, ops.dispatch), ops.all_reduce, "sum", "dp")


def second_read(program: Program) -> None:
    read = one(program, ops.sizes_to_host)
    with program.graph.inserting_before(read):
        graphs.call(program.graph, ops.sizes_to_host, *read.args, like=read)


def no_way_back(program: Program) -> None:
    skip(one(program, ops.combine))


def sizes_not_swapped(program: Program) -> None:
    back = one(program, ops.combine)
    send, recv = back.args[1:3]
    set_arg(back, 1, recv)
    set_arg(back, 2, send)


def back_over_another_axis(program: Program) -> None:
    set_arg(one(program, ops.combine), 4, "edp")


def partial_to_nonlinear(program: Program) -> None:
    """The balance loss multiplies shares instead of sums."""
    skip(one(program, ops.all_reduce))


def partial_called_whole(program: Program) -> None:
    loss = one(program, aten.add.Tensor)
    meta.set_placements(loss, {})


def maximum_of_shares(program: Program) -> None:
    set_arg(one(program, ops.all_reduce), 1, "max")


def partial_to_user(program: Program) -> None:
    at = [item.kind for item in program.outputs].index(OutputKind.METRIC)
    program.outputs[at] = Output(OutputKind.USER, leaf=0)


def backward_not_transposed(program: Program) -> None:
    node = one(program, ops.dispatch, backward=True)
    send, recv = node.args[1:3]
    set_arg(node, 1, recv)
    set_arg(node, 2, send)


def backward_over_another_axis(program: Program) -> None:
    set_arg(one(program, ops.dispatch, backward=True), 4, "edp")


def backward_lost(program: Program) -> None:
    skip(one(program, ops.dispatch, backward=True))


def backward_sum_lost(program: Program) -> None:
    """The adjoint of the balance loss's all-reduce."""
    skip(one(program, ops.all_reduce, backward=True))


def backward_sum_twice(program: Program) -> None:
    node = one(program, ops.all_reduce, backward=True)
    meta.set_direction(insert_after(node, ops.all_reduce, "sum", "dp"), meta.Direction.BACKWARD)


def gradient_sum(program: Program, name: str) -> Node:
    """The all-reduce behind one gradient."""
    outputs = zip(program.output_nodes(), program.outputs, strict=True)
    found = next(node for node, item in outputs if item.kind is OutputKind.GRAD and item.name == name)
    return next(
        node for node in reversed(list(program.graph.nodes))
        if node.target is ops.all_reduce and node in {found, *graphs.ancestors(found)}
    )  # fmt: skip


def gradient_not_reduced(program: Program) -> None:
    skip(gradient_sum(program, "gate_weight"))


def gradient_reduced_twice(program: Program) -> None:
    node = gradient_sum(program, "gate_weight")
    meta.set_direction(insert_after(node, ops.all_reduce, "sum", "dp"), meta.Direction.BACKWARD)


def gradient_over_another_axis(program: Program) -> None:
    set_arg(gradient_sum(program, "gate_weight"), 2, "edp")


def expert_gradient_like_a_dense_one(program: Program) -> None:
    set_arg(gradient_sum(program, "w1"), 2, "dp")


def expert_bucket_lost(program: Program) -> None:
    skip(gradient_sum(program, "w2"))


def whole_weight(program: Program) -> None:
    node = one(program, ops.grouped_linear)
    weight: Any = node.args[2]
    with graphs.mode_of(program.graph):
        weight.meta["val"] = torch.empty(golden.EXPERTS, golden.WIDTH, golden.WIDTH, dtype=torch.float64)


def own_rows(program: Program) -> None:
    linear = one(program, ops.grouped_linear)
    with program.graph.inserting_before(linear):
        rows = graphs.unpack(program.graph, one(program, ops.permute))[0]
    set_arg(linear, 0, rows)


def whole_batch(program: Program) -> None:
    node = next(node for node, item in program.items() if item.kind is InputKind.BATCH)
    with graphs.mode_of(program.graph):
        node.meta["val"] = torch.empty(golden.TOKENS * 4, golden.WIDTH, dtype=torch.float64)


def loss_not_a_share(program: Program) -> None:
    program.outputs[0] = replace(program.outputs[0], placements=(("dp", REPLICATE),))


def loop_left(program: Program) -> None:
    """One expert's product on the rows a mask picked."""
    x = next(node for node, item in program.items() if item.kind is InputKind.BATCH)
    weight = next(node for node in program.placeholders() if node.name == "gate_weight")
    with program.graph.inserting_before(one(program, ops.permute)):
        mask = graphs.call(program.graph, aten.gt.Scalar, x, 0, like=x)
        size = graphs.call(
            program.graph, aten._local_scalar_dense.default, graphs.call(program.graph, aten.sum.default, mask)
        )
        picked = graphs.call(program.graph, aten.new_zeros.default, x, [size, golden.WIDTH], like=x)
        graphs.call(program.graph, aten.linear.default, picked, weight, like=x)


def wrong_level(program: Program) -> None:
    program.level = Level.MODEL


def gradient_of_no_parameter(program: Program) -> None:
    at = [item.kind for item in program.outputs].index(OutputKind.GRAD)
    program.outputs[at] = replace(program.outputs[at], name="x")


def half_lowered(program: Program) -> None:
    node = one(program, ops.cpu.grouped_linear)
    node.target = ops.grouped_linear


MUTANTS: list[tuple[str, Callable[[Program], None], str]] = [
    (MODEL, no_value, r"carries no value; build nodes with graph\.call\(\)"),
    (MODEL, wrong_kind, r"is a call_method node; only calls of functions on placeholders are allowed"),
    (MODEL, input_not_described, r"4 placeholders but 3 inputs are described; append to program\.inputs"),
    (MODEL, output_not_described, r"returns 2 values but 3 outputs are described; append to program\.outputs"),
    (MODEL, size_before_its_read, r"has the size u\d+, but u\d+ is not read before it; insert it after the read"),
    (MODEL, shared_meta, r"share one meta\['custom'\]; copy it with meta\.copy_meta\(\)"),
    (MODEL, unknown_axis, r"runs over the axis 'row', which is none of pp, dp, .*; name an axis of the mesh"),
    (MODEL, unused_collective, r"is a collective whose result nobody uses; erase it or use its result"),
    (MODEL, wrong_group_size, r"is written for a group of 4, but 'ep' has 2 ranks; pass mesh\.size\('ep'\)"),
    (MODEL, size_that_differs, r"moves a tensor whose size may differ between ranks; exchange the sizes first"),
    (MODEL, second_read, r"reads on the host what sizes_to_host_1 has read; use its result"),
    (MODEL, no_way_back, r"sends rows away that no combine with swapped sizes brings back; insert the combine"),
    (MODEL, sizes_not_swapped, r"sends rows away that no combine with swapped sizes brings back; insert the combine"),
    (MODEL, back_over_another_axis, r"sends rows away that no combine with swapped sizes brings back"),
    (MODEL, partial_to_nonlinear, r"partial on dp: a product of two sums is not the sum of products; all_reduce it over dp first"),
    (MODEL, partial_called_whole, r"is recorded as whole on dp, but its operand is partial there; all_reduce the operand over dp"),
    (MODEL, maximum_of_shares, r"takes the max of a value that is partial on dp; reduce it with 'sum'"),
    (MODEL, partial_to_user, r"is returned to the user while partial on dp; all_reduce it over dp first"),
    (MODEL, whole_weight, r"has the weights of 4 experts, a rank holds \[2\]; cut its weight over ep"),
    (GATHER, own_rows, r"computes on this rank's own rows of permute; let it read the rows of the dispatch"),
    (MODEL, whole_batch, r"holds 12 of 12 rows on each of 4 data ranks; cut it over dp"),
    (MODEL, loss_not_a_share, r"is the loss, but not a share of it on dp; convert it to P before differentiating"),
    (MODEL, loop_left, r"is a product on rows picked by their values; write the layer in permute, grouped_linear, unpermute"),
    (STEP, backward_not_transposed, r"is in the backward and transposes no collective of the forward; that of a dispatch"),
    (STEP, backward_over_another_axis, r"is in the backward and transposes no collective of the forward"),
    (STEP, backward_lost, r"has no transpose in the backward, so its gradient stays on the wrong ranks; differentiate again"),
    (STEP, backward_sum_lost, r"has no transpose in the backward"),
    (STEP, backward_sum_twice, r"is in the backward and transposes no collective of the forward"),
    (STEP, gradient_not_reduced, r"is the gradient of gate_weight: not reduced, one sum over dp is due; let sync-grads reduce it once"),
    (STEP, gradient_reduced_twice, r"is the gradient of gate_weight: sum over dp of sum over dp, one sum over dp is due"),
    (STEP, gradient_over_another_axis, r"is the gradient of gate_weight: sum over edp, one sum over dp is due"),
    (STEP, expert_gradient_like_a_dense_one, r"is the gradient of w1: sum over dp, one sum over edp is due"),
    (STEP, expert_bucket_lost, r"is the gradient of w\d: not reduced, one sum over edp is due"),
    (STEP, wrong_level, r"its level is MODEL; set it to STEP"),
    (STEP, gradient_of_no_parameter, r"is the gradient of 'x', which is no parameter; name an input of kind PARAM"),
    (f"{STEP},lower-ops", half_lowered, r"is still moe::grouped_linear while others are lowered; map every call in lower-ops"),
]  # fmt: skip


@pytest.mark.parametrize(("pipeline", "mutate", "told"), MUTANTS, ids=[mutate.__name__ for _, mutate, _ in MUTANTS])
def test_each_planted_fault_is_found(pipeline: str, mutate: Callable[[Program], None], told: str) -> None:
    program = prepared(pipeline)
    mutate(program)
    with pytest.raises(VerifyError, match=told) as error:
        verify_program(program)
    sentence = str(error.value).split("\n")[0]
    assert sentence.endswith("."), sentence


def test_the_lines_around_the_fault_are_shown() -> None:
    program = prepared(MODEL)
    unknown_axis(program)
    with pytest.raises(VerifyError) as error:
        verify_program(program)
    lines = str(error.value).splitlines()[1:]
    assert len(lines) == 10
    assert [line for line in lines if line.startswith("  > ")] == [lines[5]]
    assert re.match(r"  > dispatch = torch\.ops\.moe\.dispatch", lines[5])


def test_every_fact_has_a_check() -> None:
    from moecompile.verify.facts import CHECKS

    assert set(CHECKS) == set(Fact)


# ---- values --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pipeline", [MODEL, STEP])
@pytest.mark.parametrize("what", ["shape", "dtype", "argument"])
def test_a_stale_value_is_found(pipeline: str, what: str) -> None:
    program = prepared(pipeline)
    node = one(program, ops.grouped_linear)
    found = meta.tensor(node)
    with graphs.mode_of(program.graph):
        if what == "shape":
            node.meta["val"] = found.new_empty(7, golden.WIDTH)
        elif what == "dtype":
            node.meta["val"] = found.to(torch.float32)
        else:
            set_arg(one(program, ops.combine), 3, 5)
    with pytest.raises(
        VerifyError, match=r"is recorded as .*, but its op gives .*; call graph\.refresh\(\) after changing"
    ):
        verify_values(program)


def test_a_call_that_became_impossible_is_found() -> None:
    program = prepared(MODEL)
    set_arg(one(program, ops.grouped_linear), 2, program.placeholders()[-1])
    with pytest.raises(VerifyError, match="cannot be computed from its operands"):
        verify_values(program)


# ---- no false alarm --------------------------------------------------------------------------------------------------------


class Detached(golden.Block):
    """A balance loss whose one factor is a constant for autograd; its sum over ranks has no backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).softmax(-1).mean(0)
        return super().forward(x) + (scores.detach() * scores.square()).sum()


@pytest.mark.parametrize(
    "model", [golden.Block, golden.Stack, Balanced, Detached, golden.Weighted, golden.Line, golden.Scale]
)
@pytest.mark.parametrize("options", ["", "{backend=allgather}", "{probs=fc2}"])
def test_sound_programs_pass(model: type[torch.nn.Module], options: str) -> None:
    """The pipeline verifies after each pass; that it does is the next test."""
    dense = model in (golden.Line, golden.Scale)
    pipeline = f"{STEP},canonicalize,lower-ops".replace("insert-dispatch", f"insert-dispatch{options}")
    program = golden.run(golden.captured(Plan(dp=4, ep=1 if dense else 2), model()), pipeline)
    assert all(entry.verify_seconds > 0 for entry in program.history)


def test_the_pipeline_verifies_after_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    from moecompile.passes.insert_dispatch import InsertDispatch

    original = InsertDispatch.run

    def faulty(self: Any, graph: Any, ctx: Any) -> int:
        done = original(self, graph, ctx)
        no_way_back(ctx.program)
        return done

    monkeypatch.setattr(InsertDispatch, "run", faulty)
    with pytest.raises(
        VerifyError,
        match=r"after pass 'insert-dispatch' \(run before it: recognize-moe, record-metrics, shard-dense, shard-experts\)",
    ):
        golden.run(golden.captured(PLAN, Balanced()), STEP)
