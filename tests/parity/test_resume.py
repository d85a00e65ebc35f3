"""Stop after three steps, restart under another dp x ep, go on: losses and weights of the uninterrupted run.

What belongs to the run and not to the model is the user's to save, as in a plain loop: scheduler, random state, place in the data.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import moecompile as mc
from moecompile.plan import Plan
from tests.support.models import Config, build, tokens
from tests.support.parity import slice_for
from tests.support.pool import Ranks, parallel
from tests.support.thinned import thinned

pytestmark = pytest.mark.timeout(300)
# dropout: the random state has to come along, too
LOOP = Config("loop", layers=1, shared=True, tied=True, aux=0.1, dropout=0.1)
STACKED = Config("stacked", layers=1, bias=True, aux=0.1, dropout=0.1)
HALF = 3
ONE, SAVED = Plan(dp=1), Plan(dp=2, ep=2)


class Data:
    """A source that knows its place."""

    def __init__(self) -> None:
        self.at = 0

    def next(self) -> dict[str, Tensor]:
        self.at += 1
        return tokens(8, 5, self.at, ignored=0.2)


class Job:
    """A user's training run: model, optimizer, scheduler and data, and how they are saved and loaded."""

    def __init__(self, config: Config, plan: Plan, rank: int, made: Any) -> None:
        self.plan, self.rank, self.made, self.data = plan, rank, made, Data()
        groups = [
            {"params": [param for name, param in made.named_parameters() if "norm" in name], "weight_decay": 0.0},
            {"params": [param for name, param in made.named_parameters() if "norm" not in name]},
        ]
        self.opt = torch.optim.AdamW(groups, lr=0.02, eps=1e-5, weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.opt, max_lr=0.02, total_steps=2 * HALF + 1)

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            loss = self.made(**slice_for(self.data.next(), self.plan, self.rank))["loss"]
            loss.backward()
            mc.clip_grad_norm_(self.made, 0.5)
            self.opt.step()
            self.schedule.step()
            self.opt.zero_grad()
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        return {
            "model": self.made.state_dict(),
            "optimizer": mc.optimizer_state_dict(self.made, self.opt),
            "scheduler": self.schedule.state_dict(),
            "random": torch.get_rng_state(),
            "position": self.data.at,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.made.load_state_dict(state["model"])
        mc.load_optimizer_state_dict(self.made, self.opt, state["optimizer"])
        self.schedule.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random"])
        self.data.at = state["position"]


def first_half(rank: int, config: Config, plan: Plan, folder: str) -> list[float]:
    torch.manual_seed(11)
    with parallel(build(config), plan) as made:
        job = Job(config, plan, rank, made)
        losses = job.steps(HALF)
        dcp.save(job.state(), checkpoint_id=folder)
        return losses


def second_half(
    rank: int, config: Config, plan: Plan, folder: str, called: bool
) -> tuple[list[float], dict[str, Tensor]]:
    """``called``: the model has been called, and cut, before the state is loaded."""
    torch.manual_seed(12)
    with parallel(build(Config(**{**vars(config), "seed": 99})), plan) as made:
        job = Job(config, plan, rank, made)
        if called:
            made(**slice_for(tokens(8, 5, 50), plan, rank))
        state = job.state()
        dcp.load(state, checkpoint_id=folder)
        job.load(state)
        return job.steps(HALF), mc.full_state_dict(made)


def uninterrupted(config: Config) -> tuple[list[float], dict[str, Tensor]]:
    """One rank; random numbers in the program do not depend on the layout."""
    torch.manual_seed(11)
    with parallel(build(config), ONE) as made:
        job = Job(config, ONE, 0, made)
        return job.steps(2 * HALF), mc.full_state_dict(made)


@pytest.mark.parametrize("config", thinned({"loop": LOOP, "stacked": STACKED}))
def test_resume_under_another_plan(ranks: Ranks, config: Config, tmp_path: Path) -> None:
    losses, weights = uninterrupted(config)
    for first in ranks.run(2, first_half, config, SAVED, str(tmp_path)):
        assert first == pytest.approx(losses[:HALF], rel=1e-12, abs=0)
    for plan, called in ((Plan(dp=4, ep=4), False), (Plan(dp=2), True), (Plan(dp=4, ep=2), True), (ONE, False)):
        args = (config, plan, str(tmp_path), called)
        found = ranks.run(plan.world_size, second_half, *args) if plan.world_size > 1 else [second_half(0, *args)]
        for second, last in found:
            assert second == pytest.approx(losses[HALF:], rel=1e-12, abs=0), plan
            for name, value in weights.items():
                torch.testing.assert_close(last[name], value, rtol=1e-9, atol=1e-12)


def skewed(rank: int, config: Config, folder: str, leave_out: str) -> list[float]:
    with parallel(build(Config(**{**vars(config), "seed": 99})), SAVED) as made:
        torch.manual_seed(12)
        job = Job(config, SAVED, rank, made)
        fresh, state = copy.deepcopy(job.state()), job.state()  # dcp loads into the model itself
        dcp.load(state, checkpoint_id=folder)
        job.load({**state, leave_out: fresh[leave_out]})
        return job.steps(HALF)


def test_each_part_of_the_state_matters(ranks: Ranks, tmp_path: Path) -> None:
    """The comparison above would see a part that did not come along."""
    losses, _ = uninterrupted(LOOP)
    ranks.run(2, first_half, LOOP, SAVED, str(tmp_path))
    for part in ("model", "optimizer", "scheduler", "random", "position"):
        found = ranks.run(2, skewed, LOOP, str(tmp_path), part)[0]
        assert found != pytest.approx(losses[HALF:], rel=1e-9), part
