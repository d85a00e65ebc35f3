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
        lambda g: g.mean(1), lambda g: (g * 2).sum((0, 1)), lambda g: torch.amax(g, dim=-1), lambda g: g.view(3, 2).sum(0),
        lambda g: g.std(False), lambda g: torch.max(g, 1),
    ],
)  # fmt: skip
def test_numbers_over_a_part_are_refused(take: Callable[[Tensor], Any]) -> None:
    with pytest.raises(RuntimeError, match=r"one rank.s part of a parameter.*full_grads"):
        take(_grad())


def test_dims_that_are_not_cut_may_be_reduced() -> None:
    grad = CutGrad.of(torch.ones(2, 3), None, dims=(0,))
    assert (grad * 2).mean(1, keepdim=True).shape == (2, 1)
    assert torch.max(grad, torch.zeros(2, 3)).shape == (2, 3)
    for dim in (0, -2, (0, 1)):
        with pytest.raises(RuntimeError, match=r"one rank.s part of a parameter.*full_grads"):
            grad.mean(dim)


CUT_IN_ROWS = [
    lambda g: g @ g.mT, lambda g: torch.einsum("ab,ab->", g, g), lambda g: g.softmax(0), lambda g: g.t().mean(1), lambda g: g.T.sum(0),
    lambda g: g[0], lambda g: g[..., 0:2, :], lambda g: g.__setitem__(0, 0.0), lambda g: g[torch.tensor([0])], lambda g: g.select(0, 0),
    lambda g: torch.linalg.svd(g), lambda g: nn.functional.normalize(g, dim=0), lambda g: g.cumsum(0), lambda g: g.topk(1),
    lambda g: g.index_fill_(0, torch.tensor([0]), 0.0), lambda g: g[torch.tensor([True, False])],
]  # fmt: skip


@pytest.mark.parametrize("take", CUT_IN_ROWS, ids=range(len(CUT_IN_ROWS)))
def test_what_joins_or_picks_rows_of_a_part_is_refused(take: Callable[[Tensor], Any]) -> None:
    with pytest.raises(RuntimeError, match=r"one rank.s part of a parameter.*full_grads"):
        take(CutGrad.of(torch.ones(2, 2), None, dims=(0,)))
    take(CutGrad.of(torch.ones(2, 2), None, dims=()))  # held whole, by this rank alone


def test_what_stays_within_the_dims_that_are_whole_is_not() -> None:
    grad = CutGrad.of(torch.arange(8.0).view(2, 2, 2), None, dims=(0,))
    assert (grad @ grad).shape == (2, 2, 2)
    assert grad[:, 0].shape == (2, 2) and grad[..., 1].shape == (2, 2) and grad.softmax(-1).shape == (2, 2, 2)
    grad[grad > 6] = 6.0
    assert float(grad.as_subclass(Tensor).max()) == 6.0
    assert isinstance(grad.transpose(1, 2), CutGrad) and isinstance(grad * 2, CutGrad)


CENTRED = {"ep": Plan(dp=2, ep=2), "tp": Plan(dp=1, tp=2, ep=2), "zero-3": Plan(dp=2, passes="+shard-params")}


def centre(model: Any, batch: dict[str, Tensor]) -> list[str]:
    """Takes each matrix' gradient less its rows' means; returns the names of those where that was refused."""
    model(**batch)["loss"].backward()
    refused = []
    for name, param in model.named_parameters():
        if param.ndim > 1:
            try:
                param.grad = param.grad - param.grad.mean(1, keepdim=True)
            except RuntimeError as error:
                assert "one rank's part of a parameter" in str(error)
                refused.append(name)
    return refused


def centre_on_rank(rank: int, plan: Plan) -> tuple[list[str], dict[str, Tensor | None]]:
    with parallel(build(CONFIG), plan) as model:
        return centre(model, slice_for(tokens(4, 5, 0), plan, rank)), mc.full_grads(model)


@pytest.mark.parametrize("plan", CENTRED.values(), ids=CENTRED.keys())
def test_means_of_rows_are_those_of_the_whole_or_refused(plan: Plan, ranks: Ranks) -> None:
    model = build(CONFIG)
    centre(model, tokens(4, 5, 0))
    for refused, grads in ranks.run(2, centre_on_rank, plan):
        assert len(refused) < sum(param.ndim > 1 for param in model.parameters())
        assert bool(refused) == (plan.tp > 1), "only tp cuts the dim that is reduced"
        for name, param in model.named_parameters():
            if name not in refused:
                found = grads[name]
                assert found is not None and param.grad is not None
                assert difference(name, found, param.grad) < 1e-11


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
