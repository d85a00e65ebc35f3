"""Gradients that are accumulated under ``no_sync``: whatever comes between and beside, they are those of the plain loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moecompile as mc
from moecompile.plan import Plan
from tests.support.models import VOCAB, Config, build, tokens
from tests.support.parity import difference, slice_for
from tests.support.pool import Ranks, parallel

pytestmark = pytest.mark.timeout(150)
PLAN = Plan(dp=2, ep=2)
BATCHES = [tokens(4, 5, seed) for seed in range(3)]
Loss = Callable[[int], Tensor]  # of the batch of that number


class Logits(nn.Module):
    """The model without its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build(Config("loop", layers=1))

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.inner(ids, ids)["logits"]
        return logits


def decay(model: nn.Module) -> Tensor:
    """A term outside of the model that every rank computes alike."""
    return torch.stack([param.square().sum() for param in model.parameters()]).sum() / 100


def alone_first(model: Any, loss: Loss, quiet: Any) -> None:
    decay(model).backward()
    with quiet():
        loss(0).backward()


def other_terms(model: Any, loss: Loss, quiet: Any) -> None:
    with quiet():
        (loss(0) + decay(model)).backward()


def synced_before(model: Any, loss: Loss, quiet: Any) -> None:
    loss(0).backward()
    with quiet():
        loss(1).backward()


def one_backward_of_both(model: Any, loss: Loss, quiet: Any) -> None:
    with quiet():
        first = loss(0)
    (first + loss(1)).backward()


def evaluated_between(model: Any, loss: Loss, quiet: Any) -> None:
    with quiet():
        loss(0).backward()
    last = loss(1)
    with torch.no_grad():
        loss(2)
    last.backward()


def frozen_since(model: Any, loss: Loss, quiet: Any) -> None:
    with quiet():
        loss(0).backward()
    router = next(param for name, param in model.named_parameters() if "router" in name)
    router.requires_grad_(False)
    loss(1).backward()
    router.requires_grad_(True)


WAYS = (alone_first, other_terms, synced_before, one_backward_of_both, evaluated_between, frozen_since)


def left_unreduced(model: Any, loss: Loss) -> list[str]:
    """What is said where gradients of this rank alone would be taken for the model's."""
    said, stepper = [], torch.optim.SGD(model.parameters())
    with model.no_sync():
        loss(0).backward()
    for take in (stepper.step, lambda: mc.clip_grad_norm_(model, 1.0), lambda: mc.full_grads(model)):
        try:
            take()
        except RuntimeError as error:
            said.append(str(error))
    stepper.zero_grad()
    stepper.step()  # there is nothing to step with, and nothing to refuse
    return said


def gradients(rank: int | None, own_loss: bool) -> tuple[dict[str, dict[str, Tensor | None]], list[str]]:
    """After each of the ways and one more call, and what is refused; of the plain model where there is no rank."""
    plain = Logits() if own_loss else build(Config("loop", layers=1))
    with contextlib.nullcontext(plain) if rank is None else parallel(plain, PLAN) as model:

        def loss(number: int) -> Tensor:
            batch = BATCHES[number] if rank is None else slice_for(BATCHES[number], PLAN, rank)
            if not own_loss:
                return model(**batch)["loss"]  # type: ignore[no-any-return]
            found, wanted = model(batch["ids"]).reshape(-1, VOCAB), batch["labels"].reshape(-1)
            return F.cross_entropy(found, wanted, reduction="sum") / 20

        found = {}
        for way in WAYS:
            way(model, loss, contextlib.nullcontext if rank is None else model.no_sync)
            loss(2).backward()
            held = {name: param.grad for name, param in model.named_parameters()}
            found[way.__name__] = held if rank is None else mc.full_grads(model)
            model.zero_grad()
        return found, [] if rank is None else left_unreduced(model, loss)


@pytest.mark.parametrize("own_loss", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["loss", "own loss"])
def test_gradients_are_those_of_the_plain_loop(ranks: Ranks, own_loss: bool) -> None:
    wanted, _ = gradients(None, own_loss)
    for found, said in ranks.run(2, gradients, own_loss):
        for way, grads in wanted.items():
            for name, grad in grads.items():
                value = found[way][name]
                assert grad is not None and value is not None, (way, name)
                assert difference(f"{way}: {name}", value, grad) < 1e-11
        assert [text.split(" came ")[0] for text in said] == ["SGD.step()", "clip_grad_norm_", "full_grads"]
        assert all("outside of no_sync()" in text for text in said)
