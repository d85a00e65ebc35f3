"""``moecompile verify``: a plan on local ranks against the plain model in one process."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

import torch
from rich.console import Console
from rich.table import Table

from moecompile.verification import KINDS, Report, verify

from .loading import load_example, load_model, load_plan

NAME = "verify"
HELP = "run a plan on local ranks and compare loss, gradients, norm, weights and buffers with one process"
EXAMPLE = (
    "moecompile verify --model examples.qwen3_moe_plain:build --dp 2 --ep 2 \\\n"
    "      --example 'input_ids=int64[2,64]<256,labels=int64[2,64]<256'"
)
UNEQUAL = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="package.module:name", help="a module, or what returns one")
    parser.add_argument(
        "--example",
        required=True,
        metavar="SPEC",
        help="what one rank passes: name=dtype[sizes]<bound by commas, or package.module:function "
        "(of one argument: the number of the slice)",
    )
    parser.add_argument("--plan", metavar="PLAN", help="TOML file, or fields such as dp=4,ep=2")
    parser.add_argument("--dp", type=int, help="data parallel degree")
    parser.add_argument("--ep", type=int, help="expert parallel degree")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps (%(default)s)")
    parser.add_argument(
        "--dtype",
        choices=("model", "float64", "float32"),
        default="float64",
        help="convert the model first (%(default)s)",
    )
    parser.add_argument("--tolerance", type=float, help="largest relative error (by dtype)")
    parser.add_argument("--all", action="store_true", help="every tensor, not the worst of each kind")
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """0 if everything is equal within the tolerance, else 1."""
    report = verify(
        load_model(arguments.model),
        load_plan(arguments.plan, {"dp": arguments.dp, "ep": arguments.ep}),
        load_example(arguments.example),
        steps=arguments.steps,
        dtype=None if arguments.dtype == "model" else getattr(torch, arguments.dtype),
        tolerance=arguments.tolerance,
    )
    if arguments.json:
        rows = [asdict(row) for row in report.rows]
        print(
            json.dumps(
                {"plan": str(report.plan), "ok": report.ok, "tolerance": report.tolerance, "rows": rows}, indent=2
            )
        )
    else:
        console.print(_table(report, arguments.all))
        console.print("equal to one process" if report.ok else "[red]not equal to one process[/red]")
    return 0 if report.ok else UNEQUAL


def _table(report: Report, every: bool) -> Table:
    table = Table(
        title=f"{report.plan} on {report.plan.world_size} ranks, tolerance {report.tolerance:g}", title_justify="left"
    )
    for name in ("what", "compared", "relative error", "worst" if not every else "name", "rank"):
        table.add_column(name, overflow="fold")
    for kind in KINDS:
        rows = [row for row in report.rows if row.kind == kind]
        worst = report.worst(kind)
        for row in rows if every else [worst] if worst is not None else []:
            color = "green" if row.error <= report.tolerance else "red"
            table.add_row(
                kind, str(1 if every else len(rows)), f"[{color}]{row.error:.1e}[/{color}]", row.name, str(row.rank)
            )
    return table
