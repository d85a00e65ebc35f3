"""How long capture, recognition and the passes take, by number of layers and of experts: CPU seconds of one process, no ranks needed.

    python -m benchmarks.compile [--model interface|loop] [--layers 2,4,8,16,32] [--experts 8,64,256] [--wide] [--passes] [--json FILE]

The program is that of one of two ranks with ep=2; verification after each pass is included, as in a real call. The last column
is what one more layer (or expert) costs, from the first to the last size. ``interface`` is the model of the step benchmark, whose
stacked experts transformers looks up; ``loop`` is `examples/qwen3_moe_plain.py`, whose loops over experts are recognised. Layers
are counted with 8 experts, experts with 2 layers. ``--passes`` shows each pass. ``--wide`` traces 16 layers of 64 experts for one of
1024 ranks, on every axis at once but pp, proof included.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import moecompile as mc
from benchmarks.workload import WithLoss, batch, build
from examples import qwen3_moe_plain as plain
from moecompile import pipeline as pipelines
from moecompile.compilation import Request, as_program, capture, default_pipeline
from moecompile.passes import PASSES

Built = tuple[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]]
RECOGNITION = "recognize-moe"


def interface(layers: int, experts: int) -> Built:
    return WithLoss(build(layers=layers, num_experts=experts)), (batch(0, 0, 2), {})


def loop(layers: int, experts: int) -> Built:
    ids = torch.randint(0, 256, (2, 64))
    return plain.build(plain.Config(num_layers=layers, num_experts=experts)), ((), {"input_ids": ids, "labels": ids})


MODELS: dict[str, Callable[[int, int], Built]] = {"interface": interface, "loop": loop}


NARROW = mc.Plan(dp=2, ep=2)
WIDE = mc.Plan(dp=64, cp=4, tp=4, ep=64, etp=2, sequence_parallel=True)


def measure(kind: str, layers: int, experts: int, plan: mc.Plan = NARROW) -> dict[str, float]:
    """CPU seconds of capture and of every pass, and the number of nodes at the end."""
    model, (args, kwargs) = MODELS[kind](layers, experts)
    request = Request(args, kwargs, plan)
    start = time.process_time()
    program = as_program(capture(model, request), request)
    spent = {"capture": time.process_time() - start}
    last = time.process_time()

    def on_pass(_: object, item: object) -> None:
        nonlocal last
        now = time.process_time()
        spent[item.name] = now - last  # type: ignore[attr-defined]
        last = now

    passes = pipelines.parse(default_pipeline(plan, step=True), PASSES)
    pipelines.run(program, passes, PASSES, record_text=False, on_pass=on_pass)
    spent["behind the last pass"] = time.process_time() - last
    spent["all behind capture"] = time.process_time() - start - spent["capture"]
    spent["nodes"] = len(program.graph.nodes)
    return spent


def summary(spent: dict[str, float]) -> dict[str, float]:
    """Capture, recognition and everything else of ours."""
    kept = {"capture": spent["capture"], RECOGNITION: spent[RECOGNITION]}
    return {**kept, "other passes": spent["all behind capture"] - spent[RECOGNITION], "nodes": spent["nodes"]}


def show(sizes: list[int], what: str, found: list[dict[str, float]]) -> None:
    """A table with a column for each size, and one for the growth from the first size to the last."""
    print(f"| stage | {' | '.join(f'{size} {what}' for size in sizes)} | one more |")
    print("|---" * (len(sizes) + 2) + "|")
    for stage in found[0]:
        cells = [f"{one[stage]:.0f}" if stage == "nodes" else f"{one[stage]:.2f}" for one in found]
        growth = (found[-1][stage] - found[0][stage]) / max(sizes[-1] - sizes[0], 1)
        print(f"| {stage} | {' | '.join(cells)} | {growth:.3f} |")
    print(f"\nload {os.getloadavg()[0]:.1f}\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="2,4,8,16,32", help="empty: leave the depths out")
    parser.add_argument("--experts", default="8,64,256", help="empty: leave the numbers of experts out")
    parser.add_argument("--model", choices=list(MODELS), default="interface")
    parser.add_argument("--passes", action="store_true", help="show each pass")
    parser.add_argument("--wide", action="store_true", help="one of 1024 ranks, 16 layers")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    measure(args.model, 1, 8)  # the first capture of a process also imports and registers
    depths, counts = ([int(item) for item in text.split(",") if item] for text in (args.layers, args.experts))
    found: dict[str, list[dict[str, float]]] = {}
    for what, sizes in (("layers", depths), ("experts", counts)):
        if sizes:
            found[what] = [measure(args.model, *((size, 8) if what == "layers" else (2, size))) for size in sizes]
            show(sizes, what, found[what] if args.passes else [summary(one) for one in found[what]])
    if args.wide:
        plans = [WIDE, replace(WIDE, passes="+shard-sequence{attention=ring}")]
        found["wide"] = [measure(args.model, 16, 64, plan) for plan in plans]
        for plan, one in zip(plans, found["wide"], strict=True):
            kept = one if args.passes else summary(one)
            print(plan, *(f"{stage}: {kept[stage]:.2f}" for stage in kept), sep="\n  ")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
