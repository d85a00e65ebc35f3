"""The communication report counts what the program sends: closed forms per layer, and the command that prints it."""

from __future__ import annotations

import json

import pytest

from moecompile.cli.main import main
from moecompile.communication import communication
from moecompile.compilation import Request, compile_call
from moecompile.plan import Plan
from tests.support.models import Config, build, tokens

ROWS, LENGTH, HIDDEN, BYTES = 2, 8, 16, 8


def sent(plan: Plan, layers: int = 1) -> dict[tuple[str, str, str], tuple[int, int]]:
    config = Config("ops", layers=layers, hidden=HIDDEN, heads=4, inner=8)
    program = compile_call(build(config), Request((), tokens(ROWS, LENGTH, 0), plan))
    return {(row.axis, row.direction, row.op): (row.calls, row.bytes) for row in communication(program)}


def test_dispatch_sends_every_choice_once_a_direction() -> None:
    found = sent(Plan(dp=2, ep=2))
    rows = ROWS * LENGTH * 2 * HIDDEN * BYTES // 2  # top-2, half of them to the other rank
    for direction in ("forward", "backward"):
        assert found["ep", direction, "dispatch"] == found["ep", direction, "combine"] == (1, rows)


@pytest.mark.parametrize("ep", [1, 2])
def test_rows_go_to_all_ranks_that_hold_parts_of_their_expert(ep: int) -> None:
    found = sent(Plan(dp=2 * ep, ep=ep, etp=2))
    rows = ROWS * LENGTH * 2 * HIDDEN * BYTES  # top-2, all of them to the one other rank
    for direction in ("forward", "backward"):
        assert found["etp", direction, "all_gather_rows"] == found["etp", direction, "reduce_scatter_rows"] == (1, rows)


def test_a_layer_under_tp_costs_one_all_reduce_each_way() -> None:
    one, two = sent(Plan(dp=1, tp=2)), sent(Plan(dp=1, tp=2), layers=2)
    activations = ROWS * LENGTH * HIDDEN * BYTES
    calls, size = (
        b - a for a, b in zip(one["tp", "backward", "all_reduce"], two["tp", "backward", "all_reduce"], strict=True)
    )
    assert calls >= 1
    assert size >= activations  # 2 (n-1)/n of the activations for n = 2, and the gradients of what is whole on both


def test_one_rank_sends_nothing() -> None:
    assert sent(Plan(dp=1)) == {}


def test_the_command_prints_and_writes_json(capsys) -> None:
    argv = [
        "report",
        "--model",
        "tests.unit.test_cli:tiny",
        "--example",
        "input_ids=int64[2,8]<32,labels=int64[2,8]<32",
        "--plan",
        "dp=2,ep=2",
    ]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows, reads = found["collectives"], found["host_reads"]
    assert reads and all(read["op"] == "sizes_to_host" and ".py:" in read["source"] for read in reads)
    assert {row["op"] for row in rows} >= {"dispatch", "combine", "exchange_counts", "all_reduce"}
    assert main(argv) == 0
    told = capsys.readouterr().out
    assert "bytes sent by a rank" in told and "dispatch" in told
    assert f"{len(reads)} reads on the host" in told and reads[0]["source"] in told
