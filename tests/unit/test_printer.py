"""The text of a program: canonical, complete, and Python."""

from __future__ import annotations

import difflib
import re

import pytest
import torch

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.plan import Plan
from moecompile.printer import argument_text, graph_text, node_line, type_text
from moecompile.runtime.simulator import simulate
from tests.support import golden

STEP = "recognize-moe,record-metrics,shard-dense,shard-experts,insert-dispatch,differentiate,sync-loss,sync-grads"


def test_the_same_program_gives_the_same_text() -> None:
    """Also after symbols and names have been used up by another capture."""
    first = golden.run(golden.captured(), STEP)
    again = golden.run(golden.captured(), STEP)
    assert str(first) == str(again)


def test_run_time_sizes_are_numbered_from_zero() -> None:
    text = str(golden.run(golden.captured(), STEP))
    assert set(re.findall(r"\bu\d+\b", text)) == {"u0"}


def test_values_are_named_by_op() -> None:
    program = golden.run(golden.captured(), STEP)
    names = [node.name for node in program.graph.nodes if node.op == "call_function"]
    assert {"dispatch", "combine", "rows", "row_map", "tokens_per_expert", "send", "recv", "all_reduce"} <= set(names)
    assert not [name for name in names if name.startswith("getitem") or "default" in name]


def test_one_inserted_node_changes_one_line_and_its_reader() -> None:
    program = golden.run(golden.captured(), "recognize-moe")
    before = graph_text(program)
    (relu,) = graphs.find(program.graph, torch.ops.aten.relu.default)
    with program.graph.inserting_before(relu):
        added = graphs.call(program.graph, torch.ops.aten.neg.default, relu.args[0], like=relu)
    relu.replace_input_with(relu.args[0], added)  # type: ignore[arg-type]
    diff = list(difflib.unified_diff(before.splitlines(), graph_text(program).splitlines(), lineterm="", n=0))[2:]
    assert sorted(line[0] for line in diff if line[0] in "+-") == ["+", "+", "-"]


def test_collectives_say_what_they_move() -> None:
    """T=3 rows of 2 doubles are 48 B; what comes back has a size known at run time only."""
    lines = str(golden.run(golden.captured(), STEP)).splitlines()
    assert any("= torch.ops.moe.dispatch" in line and "moves 48 B" in line for line in lines)
    assert any("= torch.ops.moe.combine" in line and "moves 16*u0 B" in line for line in lines)
    assert any("= torch.ops.moe.exchange_counts" in line and "moves 32 B" in line for line in lines)
    assert not any("moves" in line for line in lines if "torch.ops.moe." not in line)


def test_placements_and_modules_are_shown_where_known() -> None:
    text = str(golden.run(golden.captured(), "recognize-moe,shard-dense,shard-experts"))
    assert "w1,  # param f64[2, 2, 2]  S(0)@ep" in text
    assert re.search(r"linear = .*# f64\[3, 4\]  S\(0\)@dp  gate$", text, re.MULTILINE)
    assert re.search(r"sum_1 = .*P@dp$", text, re.MULTILINE)


def test_sources_on_demand() -> None:
    program = golden.run(golden.captured(), "recognize-moe")
    assert "golden.py:" not in program.text()
    assert re.search(r"permute = .*  at \S+/golden\.py:\d+$", program.text(sources=True), re.MULTILINE)


def test_the_header_says_what_was_done() -> None:
    head = str(golden.run(golden.captured(), "recognize-moe,shard-dense")).splitlines()[:3]
    assert head == [
        "# level: model; pipeline: recognize-moe,shard-dense",
        "# facts: LOSS_SHARES, MOE_OPS, TOKENS_SHARDED",
        "# plan: dp=2 ep=2; 2 ranks",
    ]


def test_copies_of_a_layer_name_their_own_layer() -> None:
    """Layers of one structure are traced once; each copy's lines say which layer they are."""
    program = golden.run(golden.captured(Plan(dp=1), golden.Stack()), "recognize-moe,shard-dense,differentiate")
    for direction in meta.Direction:
        seen = [
            meta.module_path(node)
            for node in program.graph.nodes
            if "grouped_linear" in node.name and meta.direction(node) is direction
        ]
        order = [f"blocks.{index}" for index in range(3)]
        assert list(dict.fromkeys(seen)) == (order if direction is meta.Direction.FORWARD else order[::-1])


def test_the_printed_function_runs_as_it_stands() -> None:
    """One rank, so nothing has to be bound: the text computes what the graph computes."""
    program = golden.run(golden.captured(Plan(dp=1)), "recognize-moe,shard-dense,differentiate,lower-ops")
    space: dict[str, object] = {}
    exec(str(program), space)
    torch.manual_seed(1)
    inputs = [torch.randn(node.meta["val"].shape, dtype=torch.float64) for node in program.placeholders()]
    found = space["forward"](*inputs)  # type: ignore[operator]
    (wanted,) = simulate(program.graph_module, [inputs], program.mesh)
    assert len(found) == len(wanted) == 4
    assert all(torch.equal(here, there) for here, there in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    "argument",
    [
        None, 3, -1.5, float("inf"), float("-inf"), "text", True, [1, [2.0, None]], (4,), (), {"a": [1]}, slice(0, None, 2),
        torch.float32, torch.bool, torch.strided, torch.contiguous_format, torch.channels_last, torch.device("cpu"),
    ],
)  # fmt: skip
def test_arguments_are_python(argument: object) -> None:
    assert eval(argument_text(argument), {"torch": torch}) == argument


def test_nan_is_python() -> None:
    found = eval(argument_text(float("nan")))
    assert found != found


def test_types() -> None:
    assert type_text(torch.empty(2, 3, dtype=torch.bfloat16)) == "bf16[2, 3]"
    assert type_text((torch.empty(()), torch.empty(0, dtype=torch.int64))) == "(f32[], i64[0])"


def test_a_call_prints_keywords() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_function(ops.all_reduce, (x, "sum"), {"axis": "dp"})
    assert node_line(made) == f"{made.name} = torch.ops.moe.all_reduce.default(x, 'sum', axis='dp')"
