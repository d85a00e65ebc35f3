"""Paired step times: moecompile beside its peers on one machine, in one run.

    python -m benchmarks.step_time                                  all variants, 3 rounds
    python -m benchmarks.step_time --variants ddp,ours-ep2 --rounds 1 --warmup 3 --steps 8

Every variant is a launch of its own in every round, and the rounds alternate, so that a busy minute hits all of them. Each
rank has one thread. The figures are medians over the timed steps, then over the rounds: wall time of rank 0, and CPU time
of the busiest rank (all threads of the process), which other programs on the machine disturb much less.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.variants import VARIANTS
from benchmarks.workload import batch
from moecompile.runtime.executor import tune_allocator

ROOT = Path(__file__).resolve().parents[1]


def run_rank(variant: str, warmup: int, steps: int) -> None:
    """One rank of one launch: rank 0 prints its figures as the last line."""
    torch.set_num_threads(1)
    tune_allocator()  # the same allocator settings for everybody
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    step = VARIANTS[variant][0]()
    wall, cpu, losses, first = [], [], [], 0.0
    for index in range(warmup + steps):
        ids, labels = batch(index, rank, ranks)
        if ranks > 1:
            dist.barrier()
        start, start_cpu = time.perf_counter(), time.process_time()
        loss = step(ids, labels)
        wall.append((time.perf_counter() - start) * 1e3)
        cpu.append((time.process_time() - start_cpu) * 1e3)
        losses.append(_mean_loss(variant, loss, ranks))
        first = first or wall[0]
    own = {
        "wall": statistics.median(wall[warmup:]),
        "wall_min": min(wall[warmup:]),
        "cpu": statistics.median(cpu[warmup:]),
        "cpu_min": min(cpu[warmup:]),
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "first_ms": first,
    }
    everyone = [own]
    if ranks > 1:
        everyone = [None] * ranks
        dist.all_gather_object(everyone, own)
    if rank == 0:
        print("RESULT " + json.dumps({"losses": losses[:5], "ranks": everyone}), flush=True)
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def _mean_loss(variant: str, loss: torch.Tensor, ranks: int) -> float:
    """The loss of the whole batch. Ours is that already; the peers report their own part of it."""
    loss = loss.detach().clone()
    if ranks > 1 and not variant.startswith("ours"):
        dist.all_reduce(loss)
        loss /= ranks
    return loss.item()


def launch(variant: str, warmup: int, steps: int, timeout: float = 600.0) -> dict:
    """Run one variant in processes of its own; returns what rank 0 printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = VARIANTS[variant][1]
    command = [
        sys.executable,
        "-m",
        "benchmarks.step_time",
        "--rank-of",
        variant,
        "--warmup",
        str(warmup),
        "--steps",
        str(steps),
    ]
    base = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(ranks):
        place = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        env = base | ({key: str(value) for key, value in place.items()} if ranks > 1 else {})
        processes.append(
            subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        said = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
    for process, (_, errors) in zip(processes, said, strict=True):
        if process.returncode:
            raise RuntimeError(f"{variant}: a rank ended with {process.returncode}\n{errors[-3000:]}")
    line = next(line for line in said[0][0].splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def measure(names: list[str], rounds: int, warmup: int, steps: int) -> dict:
    """All rounds; per variant the medians over rounds and each round's own figures."""
    runs: dict[str, list[dict]] = {name: [] for name in names}
    for number in range(rounds):
        # every second round backwards: nobody is always first after an idle or a busy moment
        for name in names if number % 2 == 0 else reversed(names):
            load = os.getloadavg()[0]
            found = launch(name, warmup, steps)
            found["load"] = load
            runs[name].append(found)
            ranks = found["ranks"]
            cpu = " ".join(f"{item['cpu']:.1f}" for item in ranks)
            wall = ranks[0]["wall"]
            print(f"round {number + 1} {name:14} wall {wall:7.1f} cpu {cpu} load {load:.1f}", flush=True)
    table = {name: _summary(found) for name, found in runs.items()}
    return {"workload": _workload(rounds, warmup, steps), "variants": table, "runs": runs}


def _summary(runs: list[dict]) -> dict:
    return {
        "wall_ms": statistics.median(run["ranks"][0]["wall"] for run in runs),
        "cpu_ms": statistics.median(max(rank["cpu"] for rank in run["ranks"]) for run in runs),
        "cpu_min_ms": min(max(rank["cpu_min"] for rank in run["ranks"]) for run in runs),
        "rss_mb": statistics.median(max(rank["rss_mb"] for rank in run["ranks"]) for run in runs),
        "load": [round(run["load"], 1) for run in runs],
        "losses": runs[0]["losses"],
    }


def _workload(rounds: int, warmup: int, steps: int) -> dict:
    return {"torch": torch.__version__, "rounds": rounds, "warmup": warmup, "steps": steps, "cores": os.cpu_count()}


def check_losses(table: dict) -> float:
    """The largest relative difference between variants over the first five losses; they train the same model."""
    traces = [found["losses"] for found in table.values()]
    worst = 0.0
    for values in zip(*traces, strict=True):
        worst = max(worst, (max(values) - min(values)) / max(values))
    if not worst < 1e-3:
        raise RuntimeError(f"the variants do not train the same model: their losses differ by {worst:.1e}\n{traces}")
    return worst


def ratios(table: dict) -> list[tuple[str, str, float, float]]:
    """Ours against each peer with as many processes: (ours, peer, CPU ratio, wall ratio)."""
    found = []
    for mine in ("ours-1", "ours-ep2", "ours-ep2-allgather"):
        for peer in table:
            same_size = mine in table and VARIANTS[peer][1] == VARIANTS[mine][1]
            if same_size and not peer.startswith("ours"):
                own, other = table[mine], table[peer]
                found.append((mine, peer, own["cpu_ms"] / other["cpu_ms"], own["wall_ms"] / other["wall_ms"]))
    return found


def report(result: dict) -> str:
    """The tables, in Markdown."""
    table = result["variants"]
    lines = [
        "| variant | processes | CPU ms/rank | wall ms | peak MB/rank | load before |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in table.items():
        figures = " | ".join(f"{row[key]:.0f}" for key in ("cpu_ms", "cpu_min_ms", "wall_ms", "rss_mb"))
        loads = " ".join(f"{load:.1f}" for load in row["load"])
        lines.append(f"| {name} | {VARIANTS[name][1]} | {figures} | {loads} |")
    lines += ["", "| ours | peer | CPU ratio | wall ratio |", "|---|---|---|---|"]
    lines += [f"| {mine} | {peer} | {cpu:.2f} | {wall:.2f} |" for mine, peer, cpu, wall in ratios(table)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated, from: " + ", ".join(VARIANTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        run_rank(args.rank_of, args.warmup, args.steps)
        return
    # a terminated run ends its ranks, too
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    result = measure(args.variants.split(","), args.rounds, args.warmup, args.steps)
    worst = check_losses(result["variants"])
    print(report(result))
    print(f"\nfirst five losses agree to {worst:.1e} (relative)")
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
