"""``moecompile report``: what one rank sends in a step of a plan and where it reads on the host, without ranks or devices."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from moecompile import api
from moecompile.communication import Traffic, communication, host_reads

from .loading import load_example, load_model, load_plan, one_example

NAME = "report"
HELP = "list the collectives of a step under a plan, with the bytes a rank sends, and its reads on the host"
EXAMPLE = (
    "moecompile report --model examples.qwen3_moe_plain:build --plan dp=2,tp=2,ep=4,sequence_parallel=true \\\n"
    "      --example 'input_ids=int64[2,64]<256,labels=int64[2,64]<256'"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="package.module:name", help="a module, or what returns one")
    parser.add_argument("--example", required=True, metavar="SPEC", help="what one rank passes, as for inspect")
    parser.add_argument("--plan", required=True, metavar="PLAN", help="TOML file, or fields such as dp=2,tp=2,ep=4")
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace, console: Console) -> int:
    model, plan = load_model(arguments.model), load_plan(arguments.plan, {})
    world_size = None if plan.dp is not None else plan.least_world_size
    program = api.trace(model, plan, one_example(load_example(arguments.example)), world_size=world_size)
    rows, reads = communication(program), host_reads(program)
    if arguments.json:
        found = {"collectives": [asdict(row) for row in rows], "host_reads": [asdict(read) for read in reads]}
        print(json.dumps({"plan": str(program.plan), **found}, indent=2))
        return 0
    console.print(f"{program.plan}: {sum(row.bytes for row in rows):,} bytes sent by a rank in a step", highlight=False)
    console.print(_table(rows))
    console.print(f"{len(reads)} reads on the host in a step", highlight=False)
    for read in reads:
        console.print(f"  {read}", highlight=False, soft_wrap=True)
    return 0


def _table(rows: list[Traffic]) -> Table:
    table = Table()
    for name in ("axis", "direction", "collective"):
        table.add_column(name)
    for name in ("ranks", "calls", "bytes sent"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row.axis, row.direction, row.op, str(row.ranks), str(row.calls), f"{row.bytes:,}")
    return table
