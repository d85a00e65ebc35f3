"""How long capture and each pass take, by number of layers: CPU seconds of one process, no ranks needed.

    python -m benchmarks.compile_time [--layers 2,4,8,16] [--json FILE]

The program is that of one of two ranks with ep=2; verification after each pass is included, as in a real call.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import moecompile as mc
from benchmarks.workload import LAYERS, WithLoss, batch, build
from moecompile import pipeline as pipelines
from moecompile.compilation import Request, as_program, capture, default_pipeline
from moecompile.passes import PASSES


def measure(layers: int) -> dict[str, float]:
    """CPU seconds of capture and of every pass, and the number of nodes at the end."""
    plan = mc.Plan(dp=2, ep=2)
    model = WithLoss(build(layers=layers))
    request = Request(batch(0, 0, 2), {}, plan)
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
    spent["code generation"] = time.process_time() - last
    spent["total"] = time.process_time() - start
    spent["nodes"] = len(program.graph.nodes)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="2,4,8,16")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    measure(LAYERS)  # the first capture of a process also imports and registers
    depths = [int(text) for text in args.layers.split(",")]
    found = {depth: measure(depth) for depth in depths}
    print("| stage | " + " | ".join(f"{depth} layers" for depth in depths) + " |")
    print("|---" * (len(depths) + 1) + "|")
    for stage in found[depths[0]]:
        cells = [f"{found[depth][stage]:.0f}" if stage == "nodes" else f"{found[depth][stage]:.2f}" for depth in depths]
        print(f"| {stage} | " + " | ".join(cells) + " |")
    print(f"\nload {os.getloadavg()[0]:.1f}")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
