"""Where a step's time goes: CPU time of every node of the program, summed by op and direction.

    python -m benchmarks.profile_step [--ranks 2] [--steps 8] [--rows 40]

Each node's figure is the least over the steps of the main thread's CPU time, so the sum is a little below a real step, and the
time in gloo's own threads is left out.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from typing import Any

import torch
from torch import fx

import moecompile as mc
from benchmarks.workload import WithLoss, adamw, batch, build
from moecompile import meta
from moecompile.runtime.launcher import launch


class _Timed(fx.Interpreter):
    """Runs a bound graph node by node and keeps the least time of each."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.least: dict[fx.Node, int] = {}

    def run_node(self, node: fx.Node) -> Any:
        start = time.thread_time_ns()
        found = super().run_node(node)
        spent = time.thread_time_ns() - start
        self.least[node] = min(self.least.get(node, spent), spent)
        return found


def profile(rank: int, steps: int) -> list[tuple[str, str, int, float]]:
    """(op, direction, calls, ms) rows of rank 0, with the optimizer and the wrapper as rows of their own."""
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    model = mc.parallelize(WithLoss(build()), mc.Plan(dp=ranks, ep=ranks))
    optimizer = adamw(model.parameters())
    times: dict[str, list[float]] = defaultdict(list)
    for index in range(steps):
        begin = time.thread_time()
        loss = model(*batch(index, rank, ranks))
        middle = time.thread_time()
        loss.backward()
        after = time.thread_time()
        optimizer.step()
        optimizer.zero_grad()
        for name, spent in (
            ("call", middle - begin),
            ("hand out", after - middle),
            ("AdamW", time.thread_time() - after),
        ):
            times[name].append(spent * 1e3)
    bound = model._state.latest.executor._bound
    timed = _Timed(bound)
    bound.forward = timed.run  # the interpreter in place of the generated code
    for index in range(steps):
        model(*batch(index, rank, ranks))
    rows: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for node, spent in timed.least.items():
        name = str(node.target) if node.op == "call_function" else node.op
        row = rows[name, meta.direction(node).value]
        row[0] += 1
        row[1] += spent / 1e6
    found = [(name, way, int(count), spent) for (name, way), (count, spent) in rows.items()]
    return found + [(f"[{name}]", "whole", 1, min(spent)) for name, spent in times.items()]


def profile_on(rank: int, steps: int) -> Any:
    torch.set_num_threads(1)
    return profile(rank, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows", type=int, default=40)
    args = parser.parse_args()
    rows = launch(profile_on, args.ranks, args.steps)[0] if args.ranks > 1 else profile_on(0, args.steps)
    inside = sum(row[3] for row in rows if not row[0].startswith("["))
    print(f"graph {inside:.1f} ms, {sum(row[2] for row in rows)} nodes")
    for name, way, count, spent in sorted(rows, key=lambda row: -row[3])[: args.rows]:
        print(f"{spent:8.2f} ms {count:5} x {name} ({way})")


if __name__ == "__main__":
    main()
