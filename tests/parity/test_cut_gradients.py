"""Gradients of which each rank holds a part, in the hands of a user: what is computed from them is the model's or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moecompile as mc
from moecompile.grads import CutGrad, in_optimizer
from moecompile.plan import Plan
from tests.support.models import Config, build, tokens
from tests.support.parity import difference, slice_for
from tests.support.pool import Ranks, parallel

pytestmark = pytest.mark.timeout(150)
PLAN = Plan(dp=2, ep=2)
CONFIG = Config("loop", layers=1)


def _grad() -> CutGrad:
    return CutGrad.of(torch.ones(2, 3), None)


@pytest.mark.parametrize(
    "change",
    [
        lambda g: g / 3, lambda g: 2 * g, lambda g: torch.ones(2, 3) - g, lambda g: g.clone(), lambda g: g.detach().data, copy.deepcopy,
        lambda g: g.float().view(-1), lambda g: torch.nan_to_num(g.abs() ** 2), torch.isfinite, lambda g: g.mul_(2),
    ],
)  # fmt: skip
def test_what_is_computed_by_element_stays_a_part(change: Callable[[Tensor], Tensor]) -> None:
    assert isinstance(change(_grad()), CutGrad)


@pytest.mark.parametrize(
    "take",
    [
        lambda g: (g**2).sum(), lambda g: g.abs().max(), lambda g: torch.isnan(g).any(), lambda g: (g / 2).mean(), torch.std,
        lambda g: torch.dot(g.view(-1), g.view(-1)), lambda g: nn.utils.parameters_to_vector([torch.ones(2), g]),
    ],
)  # fmt: skip
def test_numbers_over_a_part_are_refused(take: Callable[[Tensor], Any]) -> None:
    with pytest.raises(RuntimeError, match=r"one rank.s part of a parameter.*full_grads"):
        take(_grad())


def test_optimizers_see_plain_tensors() -> None:
    in_optimizer(True)
    try:
        assert type(_grad().clone()) is Tensor and _grad().sum() == 6
    finally:
        in_optimizer(False)


def train(model: Any, rank: int | None) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps under a scaler, the second with an overflow in one expert, the third with gradients that the user assigns."""
    params = list(model.parameters())
    stepper, scaler = torch.optim.SGD(params, lr=0.1, momentum=0.9), torch.amp.GradScaler("cpu", init_scale=8.0)
    said = []
    for at in range(3):
        batch = tokens(4, 5, at) if rank is None else slice_for(tokens(4, 5, at), PLAN, rank)
        stepper.zero_grad()
        scaler.scale(model(**batch)["loss"]).backward()
        if at == 1:
            last = next(param for name, param in model.named_parameters() if "experts.3.up" in name)
            last.grad.fill_(torch.inf)
        scaler.unscale_(stepper)
        if at == 2:
            for param in params:
                param.grad = param.grad / 3
            said.append(nn.utils.clip_grad_norm_(params, 0.01).item())
        scaler.step(stepper)
        scaler.update()
        said.append(scaler.get_scale())
    return said, dict(model.state_dict()) if rank is None else mc.full_state_dict(model)


def train_on_rank(rank: int) -> tuple[list[float], dict[str, Tensor]]:
    with parallel(build(CONFIG), PLAN) as model:
        return train(model, rank)


def test_a_scaler_skips_a_step_on_all_ranks_or_none(ranks: Ranks) -> None:
    said, weights = train(build(CONFIG), None)
    assert said[1] == said[0] / 2, "the overflow halves the scale"
    for found, held in ranks.run(2, train_on_rank):
        assert found == pytest.approx(said, rel=1e-11)
        for name, value in weights.items():
            assert difference(name, held[name], value) < 1e-11
