"""Train on local ranks and in one process, step by step, and stop where they differ."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console

from moecompile import api, flops
from moecompile import pipeline as pipelines
from moecompile.errors import PlanError, VerifyError
from moecompile.passes import PASSES, STEP
from moecompile.plan import Plan
from moecompile.program import Program
from moecompile.runtime.launcher import RankPool

from . import corpus, models, show, worker
from .layer_text import layer_text
from .worker import Job, StepReport, Trainer

# Largest difference of the two losses that the order of sums explains. In float64 it stays near 1e-13. In float32 a near tie
# between two experts is decided differently sooner or later, and from there on both runs are right and drift apart.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 5e-2}
_STEP_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Settings:
    """One demo run. ``tolerance`` None: the one of ``dtype``."""

    model: str = "qwen3"
    plan: Plan = field(default_factory=lambda: Plan(dp=4, ep=4))
    steps: int = 50
    batch: int = 8
    seq_len: int = 128
    lr: float = 2e-3
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    reference: bool = True
    tolerance: float | None = None
    out: Path = Path("out/demo")

    @property
    def allowed(self) -> float:
        return TOLERANCE[self.dtype] if self.tolerance is None else self.tolerance

    def job(self) -> Job:
        """What the processes need of this. PlanError for a batch that the data ranks do not divide, or too few GPUs."""
        ranks = self.plan.num_data_ranks
        if self.batch % ranks:
            raise PlanError(
                f"demo: a batch of {self.batch} rows cannot be cut over dp={ranks}; use --batch {ranks * max(1, self.batch // ranks)}."
            )
        if self.device != "cpu" and torch.cuda.device_count() < self.plan.world_size:
            raise PlanError(
                f"demo: {self.plan} needs {self.plan.world_size} GPUs, one a rank, and this machine has "
                f"{torch.cuda.device_count()}; use --device cpu or a smaller --plan."
            )
        return Job(self.model, self.plan, self.batch, self.seq_len, self.lr, self.dtype, self.device)


@dataclass
class Curves:
    """The losses so far, and the largest difference."""

    losses: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)

    @property
    def max_difference(self) -> float:
        pairs = zip(self.losses, self.reference, strict=False)
        return max((abs(ours - theirs) for ours, theirs in pairs), default=0.0)


def run_demo(settings: Settings, console: Console | None = None) -> Curves:
    """Run it. Raises VerifyError at the first step whose losses differ by more than the tolerance, RankError if a rank fails."""
    console = console or Console()
    settings.plan.check_supported()
    job = settings.job()
    reference = Trainer(job)
    console.print(_heading(settings, reference), highlight=False)
    peak = flops.measured_peak(os.cpu_count() or 1, job.dtype)
    with RankPool(job.plan.world_size, timeout=_STEP_TIMEOUT_S, backend=_backend(job)) as pool:
        with console.status(f"capturing the model on {job.plan.world_size} ranks"):
            started = pool.run(worker.start, job)
        speed = _Speed(job, sum(report.flops for report in started), peak)
        held = max(report.parameters for report in started)
        console.print(
            f"captured and rewritten in {max(report.seconds for report in started):.1f} s: {started[0].nodes} nodes, "
            f"{held:,} parameters on the fullest rank\n{speed.line()}\n",
            highlight=False,
        )
        curves = _train(settings, pool, reference if settings.reference else None, speed, console)
        last = pool.run(worker.finish)[0]
    if last:
        console.print(show.load_table(last))
    show.rewritten_layer(console, layer_text(_model_level(job)))
    path = settings.out / "loss.png"
    show.save_plot(path, curves.losses, curves.reference, f"{models.MODELS[job.model].what}, {job.plan}")
    console.print(_summary(settings, curves, path))
    return curves


def _train(settings: Settings, pool: RankPool, reference: Trainer | None, speed: _Speed, console: Console) -> Curves:
    curves = Curves()
    with show.progress_bar(console) as progress:
        task = progress.add_task("training", total=settings.steps, figures="")
        for number in range(settings.steps):
            reports: list[StepReport] = pool.run(worker.step, number)
            seconds = max(report.seconds for report in reports)
            curves.losses.append(reports[0].loss)
            if reference is not None:
                curves.reference.append(reference.step(number).loss)
            line = show.step_line(
                number,
                curves.losses[-1],
                curves.reference[-1] if reference is not None else None,
                speed.tokens_per_rank(seconds),
                speed.utilisation(seconds),
            )
            console.print(line, highlight=False)
            show.advance(progress, task, f"largest difference {curves.max_difference:.1e}" if reference else "")
            _check(settings, number, reports, curves)
    return curves


def _check(settings: Settings, number: int, reports: list[StepReport], curves: Curves) -> None:
    losses = {report.loss for report in reports}
    if len(losses) > 1:
        raise VerifyError(
            f"demo: at step {number} the ranks report different losses {sorted(losses)}; they must be equal."
        )
    ours = curves.losses[-1]
    theirs = curves.reference[-1] if curves.reference else ours
    if not abs(ours - theirs) <= settings.allowed:  # also for NaN
        raise VerifyError(
            f"demo: at step {number} the loss is {ours!r} on {settings.plan.world_size} ranks and {theirs!r} in one process; the "
            f"difference must stay within {settings.allowed:g}, which the order of sums explains."
        )


def _model_level(job: Job) -> Program:
    """The program of one rank up to the pass that derives the backward."""
    names = [item.name for item in pipelines.parse(STEP, PASSES)]
    plan = replace(job.plan, passes=",".join(names[: names.index("differentiate")]))
    window = corpus.windows(corpus.load(), 0, job.batch // plan.num_data_ranks, job.seq_len)
    return api.trace(worker.build(job), plan, models.MODELS[job.model].call(window))


@dataclass(frozen=True)
class _Speed:
    """Turns the seconds of a step into figures: FLOPs of all ranks from the graphs they run, peak from a matmul."""

    job: Job
    flops: int
    peak: float

    def line(self) -> str:
        return (
            f"a step is {self.flops / 1e9:.2f} GFLOP (counted on the graphs); MFU is against {self.peak / 1e9:.0f} GFLOP/s, a "
            f"1024-square matmul on all cores of this machine just now"
        )

    def tokens_per_rank(self, seconds: float) -> float:
        return self.job.tokens_per_rank / seconds

    def utilisation(self, seconds: float) -> float:
        return self.flops / seconds / self.peak


def _backend(job: Job) -> str:
    return "gloo" if job.device == "cpu" else "cpu:gloo,cuda:nccl"


def _heading(settings: Settings, reference: Trainer) -> str:
    parameters = sum(parameter.numel() for parameter in reference.model.parameters())
    return (
        f"{models.MODELS[settings.model].what}: {parameters:,} parameters, {settings.dtype}\n"
        f"{settings.plan.world_size} ranks of {settings.plan} on {os.cpu_count()} cores; global batch {settings.batch} x "
        f"{settings.seq_len} bytes of the standard library's source"
    )


def _summary(settings: Settings, curves: Curves, path: Path) -> str:
    first, last = curves.losses[0], curves.losses[-1]
    text = f"\nloss {first:.4f} -> {last:.4f} in {len(curves.losses)} steps; curve in {path}"
    if curves.reference:
        text += (
            f"\n[green]equal to one process at every step[/green]: largest difference {curves.max_difference:.2e}, "
            f"allowed {settings.allowed:g}"
        )
    return text
