"""What each rank of the demo does: the training loop of any user, one step a call, with a clock around it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from moecompile import api, flops
from moecompile.plan import Plan

from . import corpus, models

_WARM_UP_STEPS = 20


@dataclass(frozen=True)
class Job:
    """What all processes of one run have to know."""

    model: str
    plan: Plan
    batch: int
    seq_len: int
    lr: float
    dtype: torch.dtype
    device: str

    @property
    def tokens_per_rank(self) -> int:
        return self.batch // self.plan.num_data_ranks * self.seq_len


@dataclass(frozen=True)
class StepReport:
    """One step as one process saw it."""

    loss: float
    norm: float
    seconds: float


@dataclass(frozen=True)
class StartReport:
    """What a rank holds once its model is compiled."""

    seconds: float
    parameters: int
    nodes: int
    flops: int


def build(job: Job, rank: int | None = None) -> nn.Module:
    """The plain model on this process's device."""
    place = "cpu" if job.device == "cpu" else f"cuda:{rank or 0}"
    return models.MODELS[job.model].build().to(place, job.dtype)


class Trainer:
    """The plain loop of one process over its rows of every global batch; rank None is the one-process reference."""

    def __init__(self, job: Job, rank: int | None = None) -> None:
        self.job, self.rank = job, rank
        self.text = corpus.load()
        self.model: Any = build(job, rank)
        self.device = next(self.model.parameters()).device
        self.compile_seconds = 0.0
        if rank is not None:
            start = time.perf_counter()
            self.model = api.parallelize(self.model, job.plan, example=self._call(0))
            self.compile_seconds = time.perf_counter() - start
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=job.lr)
        self.schedule = LambdaLR(self.optimizer, lambda done: min(1.0, (done + 1) / _WARM_UP_STEPS))

    def _call(self, number: int) -> dict[str, Any]:
        """This process's part of the batch of one step."""
        window = corpus.windows(self.text, number, self.job.batch, self.job.seq_len)
        if self.rank is not None:
            window = window.chunk(self.job.plan.num_data_ranks)[self.job.plan.data_rank(self.rank)]
        call = models.MODELS[self.job.model].call(window)
        return {name: tensor.to(self.device) for name, tensor in call.items()}

    def step(self, number: int) -> StepReport:
        start = time.perf_counter()
        loss = models.loss_of(self.model(**self._call(number)))
        loss.backward()  # type: ignore[no-untyped-call]
        norm = self._clip()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        seen = loss.item()
        return StepReport(seen, float(norm), time.perf_counter() - start)

    def _clip(self) -> torch.Tensor:
        if self.rank is None:
            return torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return api.clip_grad_norm_(self.model, 1.0)


# The rank's trainer, between two calls of the launcher's pool.
_trainer: Trainer | None = None


def start(rank: int, job: Job) -> StartReport:
    """Build, capture and cut the model on this rank."""
    global _trainer
    _trainer = Trainer(job, rank)
    program = _trainer.model.program
    held = sum(parameter.numel() for parameter in _trainer.model.parameters())
    rows = job.tokens_per_rank * max((layer["top_k"] for layer in program.layers), default=0)
    return StartReport(_trainer.compile_seconds, held, len(program.graph.nodes), flops.count(program, rows))


def step(rank: int, number: int) -> StepReport:
    """Train one step."""
    assert _trainer is not None, "start() comes first"
    return _trainer.step(number)


def finish(rank: int) -> dict[str, list[int]]:
    """Tokens per expert of the last step by MoE layer, over all ranks."""
    assert _trainer is not None, "start() comes first"
    return {name: found.tokens_per_expert.tolist() for name, found in api.metrics(_trainer.model).items()}
