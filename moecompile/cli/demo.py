"""``moecompile demo``."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.console import Console

from moecompile.demo import Settings, run_demo
from moecompile.demo.models import MODELS
from moecompile.errors import PlanError

from .loading import load_plan

NAME = "demo"
HELP = "train a small MoE model on local ranks, held against one process at every step"
EXAMPLE = "moecompile demo --model module-list --plan dp=2,ep=2 --steps 20"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = Settings()
    parser.add_argument("--model", choices=MODELS, default=default.model, help="which model of examples/ (%(default)s)")
    parser.add_argument("--plan", default="dp=4,ep=4", metavar="PLAN", help="TOML file, or fields (%(default)s)")
    parser.add_argument("--steps", type=int, default=default.steps, help="%(default)s")
    parser.add_argument("--batch", type=int, default=default.batch, help="rows of the global batch (%(default)s)")
    parser.add_argument("--seq-len", type=int, default=default.seq_len, help="bytes a row (%(default)s)")
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64", help="%(default)s")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: one GPU a rank (%(default)s)")
    parser.add_argument("--no-reference", action="store_true", help="leave the one process out")
    parser.add_argument("--tolerance", type=float, help="largest difference of the losses (by dtype)")
    parser.add_argument("--out", type=Path, default=default.out, help="folder of the plot (%(default)s)")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """0; a difference beyond the tolerance raises."""
    if arguments.steps < 1:
        raise PlanError(f"demo: --steps is {arguments.steps}; it must be at least 1.")
    plan = load_plan(arguments.plan, {})
    if plan.dp is None:
        plan = load_plan(arguments.plan, {"dp": plan.ep})
    settings = Settings(
        model=arguments.model,
        plan=plan,
        steps=arguments.steps,
        batch=arguments.batch,
        seq_len=arguments.seq_len,
        dtype=getattr(torch, arguments.dtype),
        device=arguments.device,
        reference=not arguments.no_reference,
        tolerance=arguments.tolerance,
        out=arguments.out,
    )
    run_demo(settings, console)
    return 0
