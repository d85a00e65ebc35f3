"""Gradients that are accumulated under ``no_sync`` are those of one process, whatever is done between two backward calls."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moecompile as mc
from moecompile.plan import Plan
from tests.parity.test_gloo_axes import BATCHES, SMALL, Logits, token_loss
from tests.support.models import build
from tests.support.parity import difference, slice_for
from tests.support.pool import Ranks, parallel

pytestmark = pytest.mark.timeout(240)
PLANS = {"dp2-ep2": Plan(dp=2, ep=2), "dp2-etp2": Plan(dp=2, etp=2)}


def penalty(model: nn.Module) -> Tensor:
    """A term of the weights alone, which every rank has whole."""
    return 0.1 * sum(param.square().sum() for name, param in model.named_parameters() if "qkv" in name)  # type: ignore[return-value]


def accumulate(model: Any, batches: list[dict[str, Tensor]], way: str, inside: Any) -> None:
    """Two backward calls, the first of them in the context ``inside``."""
    if way == "a loss outside":
        with inside:
            token_loss(model(batches[0]["ids"])["logits"], batches[0]["ids"]).backward()
        token_loss(model(batches[1]["ids"])["logits"], batches[1]["ids"]).backward()
        return
    added = penalty if way == "a penalty" else lambda model: 0.0
    with inside:
        (model(**batches[0])["loss"] + added(model)).backward()
    loss = model(**batches[1])["loss"] + added(model)
    if way == "an evaluation":
        with torch.no_grad():
            model(**batches[2])
    loss.backward()


def made(way: str) -> nn.Module:
    return Logits() if way == "a loss outside" else build(SMALL)


def on_rank(rank: int, plan: Plan, way: str) -> dict[str, Tensor]:
    with parallel(made(way), plan) as model:
        accumulate(model, [slice_for(batch, plan, rank) for batch in BATCHES], way, model.no_sync())
        return {name: grad for name, grad in mc.full_grads(model).items() if grad is not None}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("way", ["a loss outside", "a penalty", "an evaluation"])
def test_gradients_are_those_of_one_process(ranks: Ranks, plan: Plan, way: str) -> None:
    model = made(way)
    accumulate(model, BATCHES, way, contextlib.nullcontext())
    wanted = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    for found in ranks.run(plan.world_size, on_rank, plan, way):
        assert found.keys() == wanted.keys()
        for name, grad in wanted.items():
            assert grad is not None and difference(name, found[name], grad) < 1e-11


def too_early(rank: int, plan: Plan) -> list[str]:
    said = []
    with parallel(build(SMALL), plan) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mine = slice_for(BATCHES[0], plan, rank)
        with model.no_sync():
            model(**mine)["loss"].backward()
        for call in (optimizer.step, lambda: mc.clip_grad_norm_(model, 1.0), lambda: mc.full_grads(model)):
            with pytest.raises(RuntimeError) as error:
                call()
            said.append(str(error.value))
        optimizer.zero_grad()
        optimizer.step()  # nothing is left to be wrong
        model(**mine)["loss"].backward()
        optimizer.step()
    return said


def test_what_needs_whole_gradients_is_refused_before_they_are_reduced(ranks: Ranks) -> None:
    for said in ranks.run(2, too_early, PLANS["dp2-ep2"]):
        assert len(said) == 3 and all("run the last forward and backward outside of it" in text for text in said)
