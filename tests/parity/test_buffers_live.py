"""Buffers that a forward writes, through `parallelize`: every kind of call moves them once, as it does in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moecompile as mc
from moecompile.plan import Plan
from tests.support import buffer_models as models
from tests.support.parity import Batch, difference, slice_for
from tests.support.pool import Ranks, parallel

pytestmark = pytest.mark.timeout(240)
States = list[dict[str, Tensor]]


class Several(nn.Module):
    """A counter, a load, a norm and a running mean that nobody saves; without its loss where ``bare``."""

    def __init__(self, bare: bool = False) -> None:
        super().__init__()
        self.bare, self.inner = bare, models.Model(models.Norm, layers=1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("load", torch.zeros(models.WIDTH))
        self.register_buffer("mean", torch.zeros(models.WIDTH), persistent=False)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        self.mean = self.mean.lerp(x.detach().mean((0, 1)), 0.25)
        out = self.inner((x - self.mean) * (1 + 0.1 * self.steps), labels)
        self.steps += 1
        with torch.no_grad():
            self.load += out["out"].argmax(-1).flatten().bincount(minlength=models.WIDTH)
        return out["out"] if self.bare else out


def made(bare: bool = False) -> Several:
    torch.manual_seed(0)
    return Several(bare).double()


def buffers(model: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_buffers()}


def loss_of(out: Any, batch: Batch, rows: int) -> Tensor:
    """The mean over the whole batch, or this rank's share of it."""
    return out["loss"] if isinstance(out, dict) else (out - batch["labels"]).square().sum() / rows


def session(model: Any, give: Callable[[int], Batch]) -> States:
    """Training, accumulation, evaluation in both modes and training again; the buffers behind every call, the weights at the end."""
    quiet = getattr(model, "no_sync", contextlib.nullcontext)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows, found = models.batch()["labels"].numel(), []

    def call(seed: int) -> Tensor:
        batch = give(seed)
        loss = loss_of(model(**batch), batch, rows)
        found.append(buffers(model))
        return loss

    for seed in range(2):
        with quiet():
            call(seed).backward()
        call(seed + 10).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            call(seed + 20)
            model.eval()
            call(seed + 30)
            model.train()
    return [*found, {name: value for name, value in full(model).items() if name not in found[0]}]


def full(model: Any) -> dict[str, Tensor]:
    if isinstance(model, Several):
        return {name: value.detach() for name, value in model.state_dict().items()}
    return mc.full_state_dict(model)


def check(found: States, wanted: States) -> None:
    assert len(found) == len(wanted)
    for here, there in zip(found, wanted, strict=True):
        assert here.keys() == there.keys()
        for name, value in there.items():
            assert difference(name, here[name], value, zero=not value.any()) < 1e-11, name


def on_rank(rank: int, plan: Plan, bare: bool) -> tuple[States, bool]:
    """The session, and whether every buffer still lies where it lay."""
    model = made(bare)
    places = [value.data_ptr() for value in model.buffers()]
    with parallel(model, plan) as sharded:
        found = session(sharded, lambda seed: slice_for(models.batch(seed), plan, rank))
        saved = sharded.state_dict()
        assert "mean" not in saved and saved["steps"] == found[-2]["steps"]
    return found, places == [value.data_ptr() for value in model.buffers()]


def test_a_session_in_one_process_moves_what_it_should() -> None:
    found = session(made(), models.batch)
    train, evaluated = found[2], found[3]
    changed = {name for name in train if not torch.equal(train[name], evaluated[name])}
    assert changed == {"mean", "load", "steps"}
    assert found[-2]["steps"] == 8 and found[-2]["inner.layers.0.norm.num_batches_tracked"] == 6


@pytest.mark.slow
@pytest.mark.parametrize("bare", [False, True], ids=["loss inside", "loss outside"])
def test_a_session_on_one_rank(bare: bool) -> None:
    found, same = on_rank(0, Plan(dp=1), bare)
    assert same
    check(found, session(made(bare), models.batch))


@pytest.mark.parametrize(
    "bare", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["loss inside", "loss outside"]
)
def test_a_session_on_two_ranks(ranks: Ranks, bare: bool) -> None:
    plan, wanted = Plan(dp=2, ep=2), session(made(bare), models.batch)
    (first, same), (second, also) = ranks.run(2, on_rank, plan, bare)
    assert same and also
    check(first, wanted)
    for here, there in zip(first, second, strict=True):
        assert all(torch.equal(value, there[name]) for name, value in here.items())
