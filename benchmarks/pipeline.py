"""Pipeline schedules: their bubble, and what the runtime costs per action beside ``torch.distributed.pipelining`` over plain modules.

    python -m benchmarks.pipeline             pp 2 and 4, 8 microbatches, every schedule
    python -m benchmarks.pipeline --quick     pp 2, fewer steps

Both contestants live in the same rank processes, cut the same model at the same places, run the same schedule classes over gloo
and take turns. The bubble is measured with stages that sleep: a forward takes one unit, a backward two, so that ranks which share a core
do not wait for each other, and a step without bubble would take ``microbatches * 3`` units. The overhead is measured without
sleep, on a model so small that computing is cheap: CPU time of the whole process inside the schedule, less that of the same
computations called one after another, divided by the actions (a forward or backward of one microbatch on one stage). What a call does
beside the schedule (agreement of the ranks, tokens counted over the step, the loss on every rank) stands by itself, per step: plain
modules do not have it. CPU time is disturbed little by other programs. The run fails if the losses of the two differ.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import moecompile as mc
from moecompile.runtime.stage_runner import Pipeline
from moecompile.timeline import bubble, timeline

WIDTH, TOKENS, ROWS, VOCABULARY = 16, 8, 2, 32
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved-1f1b": 2}
CONTESTANTS = ("moecompile", "plain modules")


class Block(nn.Module):
    """One layer: a residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Toy(nn.Module):
    """Embedding, layers, head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return loss_of(self.head(x), labels)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@dataclass
class Contestant:
    """``step`` runs one step and returns the loss where it is known; ``compute`` the same computations without schedule and messages.

    ``inside`` collects the CPU seconds that steps spent in the schedule.
    """

    step: Callable[[], Tensor | None]
    compute: Callable[[], None]
    stages: list[Any]
    inside: list[float]


def ours(rank: int, pp: int, schedule: str, microbatches: int, ids: Tensor, labels: Tensor) -> Contestant:
    """The plan over the whole model."""
    torch.manual_seed(0)
    chunks = CHUNKS[schedule]
    layout = "even" if chunks == 1 else "|".join(["Et", *["t"] * (pp * chunks - 2), "tL"])
    model = mc.parallelize(
        Toy(pp * chunks), mc.Plan(dp=1, pp=pp, microbatches=microbatches, schedule=schedule, layout=layout)
    )
    call = model.prepare((ids, labels), {})
    pipeline: Pipeline = call.pipeline
    halves: list[tuple[Any, list[Any]]] = []

    def step() -> Tensor:
        loss = model(ids, labels)
        loss.backward()
        for param in model.parameters():
            param.grad = None
        return loss.detach()

    record(pipeline, halves)
    step()
    for stage in pipeline.stages:
        del stage.forward.run, stage.backward.run
    inside = timed(pipeline, "run")

    def compute() -> None:
        with torch.no_grad():
            for _ in range(microbatches):
                for half, given in halves:
                    half.executor._bound.forward(*given)

    return Contestant(step, compute, list(pipeline.stages), inside)


def record(pipeline: Pipeline, halves: list[tuple[Any, list[Any]]]) -> None:
    """Note the generated code of each half of a stage, and inputs for it."""
    for half in [half for stage in pipeline.stages for half in (stage.forward, stage.backward)]:

        def run(fed: dict[str, Any], values: dict[str, Any], half: Any = half) -> Any:
            if len(halves) < 2 * len(pipeline.stages) and half not in [item for item, *_ in halves]:
                known = {**fed, **values}
                halves.append((half, [known[name] for name, _ in half.reads]))
            return type(half).run(half, fed, values)

        half.run = run


def plain(rank: int, pp: int, schedule: str, microbatches: int, ids: Tensor, labels: Tensor) -> Contestant:
    """The library's own stages over pieces of the model, as its tutorials write them."""
    torch.manual_seed(0)
    number = pp * CHUNKS[schedule]
    model = Toy(number)
    pieces: list[nn.Module] = list(model.layers)
    pieces[0], pieces[-1] = nn.Sequential(model.embed, pieces[0]), nn.Sequential(pieces[-1], model.head)
    mine = range(rank, number, pp)
    stages = [PipelineStage(pieces[at], at, number, torch.device("cpu")) for at in mine]
    made: Any
    if schedule == "interleaved-1f1b":
        made = ScheduleInterleaved1F1B(stages, microbatches, loss_fn=loss_of)
    else:
        made = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule](stages[0], microbatches, loss_fn=loss_of)
    params = [param for at in mine for param in pieces[at].parameters()]

    def step() -> Tensor | None:
        losses: list[Tensor] = []
        given = (ids,) if rank == 0 else ()
        if rank == pp - 1:
            made.step(*given, target=labels, losses=losses, return_outputs=False)
        else:
            made.step(*given, return_outputs=False)
        for param in params:
            param.grad = None
        return torch.stack(losses).mean() if losses else None

    x, target = torch.randn(ROWS, TOKENS, WIDTH, requires_grad=True), labels[:ROWS]

    def compute() -> None:
        for _ in range(microbatches):
            for at in mine:
                out = pieces[at](ids[:ROWS] if at == 0 else x)
                if at == number - 1:
                    loss_of(out, target).backward()
                else:
                    torch.autograd.backward(out, torch.ones_like(out))
        for param in (*params, x):
            param.grad = None

    return Contestant(step, compute, stages, timed(made, "step"))


def timed(owner: Any, name: str) -> list[float]:
    """The CPU seconds of every call of a method from now on."""
    found: list[float] = []
    run = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        result = run(*args, **kwargs)
        found.append(time.process_time() - start)
        return result

    setattr(owner, name, counted)
    return found


def after(seconds: float, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    time.sleep(seconds)
    return run(*args, **kwargs)


def slow_down(stages: list[Any], forward: float) -> None:
    """From now on every action sleeps: a forward for ``forward`` seconds, a backward twice as long."""
    for stage in stages:
        for name, seconds in (("forward_one_chunk", forward), ("backward_one_chunk", 2 * forward)):
            setattr(stage, name, partial(after, seconds, getattr(stage, name)))


def measure(rank: int, pp: int, schedule: str, microbatches: int, rounds: int, steps: int, unit: float) -> dict:
    """What one rank saw, by step: CPU seconds a step, inside the schedule, for computing alone; wall seconds with sleeping stages."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    ids, labels = (torch.randint(VOCABULARY, (ROWS * microbatches, TOKENS)) for _ in range(2))
    made = {
        name: build(rank, pp, schedule, microbatches, ids, labels)
        for name, build in zip(CONTESTANTS, (ours, plain), strict=True)
    }
    found: dict[str, dict[str, Any]] = {name: {"step": [], "schedule": [], "compute": [], "wall": []} for name in made}
    for name, contestant in made.items():
        for _ in range(3):
            loss = contestant.step()
            contestant.compute()
        found[name]["loss"] = None if loss is None else loss.item()
    for number in range(rounds):
        for name in made if number % 2 == 0 else reversed(made):
            made[name].inside.clear()
            found[name]["step"] += cpu_seconds(made[name].step, steps)
            found[name]["schedule"] += made[name].inside
            found[name]["compute"] += cpu_seconds(made[name].compute, steps)
    for name, contestant in made.items():
        slow_down(contestant.stages, unit / CHUNKS[schedule])
        for _ in range(rounds):
            torch.distributed.barrier()
            start = time.perf_counter()
            contestant.step()
            torch.distributed.barrier()
            found[name]["wall"].append(time.perf_counter() - start)
    return found


def cpu_seconds(run: Callable[[], Any], times: int) -> list[float]:
    """CPU time of this process for each run."""
    found = []
    for _ in range(times):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return found


def report(pp: int, schedule: str, microbatches: int, unit: float, ranks: list[dict]) -> list[str]:
    """Two lines of the table."""
    chunks = CHUNKS[schedule]
    actions, ideal = 2 * microbatches * chunks, 3 * microbatches * unit
    predicted = bubble(timeline(schedule, pp, microbatches, chunks))
    losses = [item["loss"] for found in ranks for item in found.values() if item["loss"] is not None]
    if max(losses) - min(losses) > 1e-5:
        raise SystemExit(f"pp={pp} {schedule}: the losses differ: {losses}")
    lines = []
    for name in CONTESTANTS:
        wall = statistics.median(max(walls) for walls in zip(*(found[name]["wall"] for found in ranks), strict=True))
        step, inside, alone = (
            statistics.mean(min(found[name][what]) for found in ranks) * 1e6 for what in ("step", "schedule", "compute")
        )
        lines.append(
            f"| {pp} | {schedule} | {name} | {wall / ideal:.3f} | {1 / (1 - predicted):.3f} | {inside / actions:.0f} | "
            f"{alone / actions:.0f} | {(inside - alone) / actions:.0f} | {step - inside:.0f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pp", default="2,4", help="pipeline degrees (default: 2,4)")
    parser.add_argument("--schedules", default=",".join(CHUNKS), help="schedules (default: all)")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20, help="steps a round whose CPU time is measured")
    parser.add_argument("--unit", type=float, default=0.02, help="seconds that the forward of a sleeping rank takes")
    parser.add_argument("--quick", action="store_true", help="pp 2, two rounds of five steps")
    given = parser.parse_args()
    if given.quick:
        given.pp, given.rounds, given.steps = "2", 2, 5
    print(f"{given.microbatches} microbatches, load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    print(
        "| pp | schedule | stages | step / ideal | by the timeline | CPU us an action | computing | overhead | us a step beside |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for pp in map(int, given.pp.split(",")):
        for schedule in given.schedules.split(","):
            settings = (pp, schedule, given.microbatches, given.rounds, given.steps, given.unit)
            ranks = mc.launch(measure, pp, *settings, timeout=600.0)
            print("\n".join(report(pp, schedule, given.microbatches, given.unit, ranks)), flush=True)


if __name__ == "__main__":
    main()
