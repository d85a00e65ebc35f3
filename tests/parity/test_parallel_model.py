"""What `parallelize` promises besides numbers: identity, cache, autograd's manners, and refusals that all ranks raise alike."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moecompile as mc
from moecompile.plan import Plan
from tests.support.models import VOCAB, Config, build, tokens
from tests.support.parity import slice_for
from tests.support.pool import Ranks, parallel

pytestmark = pytest.mark.timeout(150)
PLAN = Plan(dp=2, ep=2)
CONFIG = Config("loop", layers=1)


def _mine(rank: int, seed: int = 0, batch: int = 4, length: int = 5) -> dict[str, Tensor]:
    return slice_for(tokens(batch, length, seed), PLAN, rank)


def _message(action: Callable[[], Any]) -> str:
    """The error as text: a rank that raises would end the pool."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ---- identity, names, attributes -------------------------------------------------------------------------------------


def _identity(rank: int) -> dict[str, bool]:
    plain = build(CONFIG)
    before, names = list(plain.parameters()), [name for name, _ in plain.named_parameters()]
    with parallel(plain, PLAN) as model:
        early = [id(item) for item in model.parameters()]
        model(**_mine(rank))
        return {
            "objects": early == [id(item) for item in before] == [id(item) for item in model.parameters()],
            "names": [name for name, _ in model.named_parameters()] == names,
            "modules": [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()],
            "attribute": model.config is plain.config,
            "mode": not model.eval().training and not plain.training and not plain.layers[0].training,
        }


def test_parameters_names_and_attributes_are_the_users_own(ranks: Ranks) -> None:
    assert all(all(found.values()) for found in ranks.run(2, _identity)), ranks.run(2, _identity)


# ---- autograd --------------------------------------------------------------------------------------------------------


def _manners(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with parallel(build(CONFIG), PLAN) as model:
        out = model(**_mine(rank))
        out["loss"].backward()
        found["second backward"] = _message(lambda: out["loss"].backward())
        once = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        other = model(**_mine(rank))
        found["other output"] = _message(lambda: other["logits"].sum().backward())
        (model(**_mine(rank))["loss"] * 8).backward()
        found["scaled"] = all(
            torch.allclose(p.grad, 8 * g) for p, g in zip(model.parameters(), once, strict=True) if g is not None
        )
        model.zero_grad()
        head = model.head.weight
        (grad,) = torch.autograd.grad(model(**_mine(rank))["loss"], [head])
        found["autograd.grad"] = torch.equal(grad, once[[p is head for p in model.parameters()].index(True)])
        seen: list[Tensor] = []
        handle = head.register_hook(seen.append)
        model(**_mine(rank))["loss"].backward()
        handle.remove()
        found["hook"] = len(seen) == 1 and torch.equal(seen[0], grad)
        model.zero_grad()
        for name, param in model.named_parameters():
            param.requires_grad_("experts" not in name)
        model(**_mine(rank))["loss"].backward()
        found["frozen"] = all(p.grad is None for n, p in model.named_parameters() if "experts" in n)
        found["rest"] = torch.equal(head.grad, grad)
        with torch.no_grad():
            found["no grad"] = not model(**_mine(rank))["loss"].requires_grad
    return found


def test_the_loss_behaves_like_any_other_loss(ranks: Ranks) -> None:
    for found in ranks.run(2, _manners):
        assert "backward once" in found.pop("second backward")
        assert "only the loss has gradients" in found.pop("other output")
        assert all(found.values()), found


# ---- calls without a loss --------------------------------------------------------------------------------------------


class Logits(nn.Module):
    """The model without its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build(CONFIG)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.inner(ids, ids)["logits"]
        return logits


def _token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), reduction="sum") / 20


def _loss_fn(output: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(output.reshape(-1, VOCAB), ids.reshape(-1))


def _without_loss(rank: int, given: bool) -> dict[str, Tensor]:
    batch = tokens(4, 5, 0)
    mine = slice_for(batch, PLAN, rank)
    with parallel(Logits(), PLAN, loss_fn=_loss_fn if given else None) as model:
        out = model(mine["ids"])
        loss = out if given else _token_loss(out, mine["ids"])
        loss.backward()
        return mc.full_grads(model)


@pytest.mark.parametrize("given", [False, True], ids=["own loss", "loss_fn"])
def test_a_loss_outside_the_model_sums_over_data_ranks(ranks: Ranks, given: bool) -> None:
    plain = Logits()
    ids = tokens(4, 5, 0)["ids"]
    _loss_fn(plain(ids), ids).backward()
    wanted = {name: param.grad for name, param in plain.named_parameters()}
    for found in ranks.run(2, _without_loss, given):
        for name, grad in wanted.items():
            assert grad is not None
            torch.testing.assert_close(found[name], grad, rtol=1e-9, atol=1e-13)


# ---- cache -----------------------------------------------------------------------------------------------------------


def _shapes(rank: int) -> tuple[int, list[str]]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("moecompile")
    logger.addHandler(handler)
    with parallel(build(CONFIG), PLAN) as model:
        for length in (3, 4, 3, 5, 6, 4, 7):
            model(**_mine(rank, length=length))
        captures = len(model._state.cache)
    logger.removeHandler(handler)
    return captures, records


def test_new_shapes_are_captured_once_and_too_many_are_named(ranks: Ranks) -> None:
    for captures, records in ranks.run(2, _shapes):
        assert captures == 5
        (warning,) = [text for text in records if "sizes" in text and "argument 0" in text]
        assert "dim 1" in warning and "pad it to a few sizes" in warning


# ---- faults ----------------------------------------------------------------------------------------------------------


def _unequal(rank: int) -> str:
    with parallel(build(CONFIG), PLAN) as model:
        return _message(lambda: model(**_mine(rank, batch=4 if rank else 6)))


def _other_model(rank: int) -> str:
    with parallel(build(CONFIG if rank else Config("loop", layers=2)), PLAN) as model:
        return _message(lambda: model(**_mine(rank)))


def _one_rank_fails(rank: int) -> str:
    with parallel(build(CONFIG), PLAN) as model:
        batch = _mine(rank)
        if rank == 1:
            batch["labels"] = batch["labels"][:, :2]
        return _message(lambda: model(**batch))


def _no_rows(rank: int) -> str:
    with parallel(build(CONFIG), Plan(dp=2, ep=2, microbatches=3)) as model:
        return _message(lambda: model(**{name: value[:0] for name, value in _mine(rank).items()}))


@pytest.mark.parametrize(
    ("case", "advice"),
    [
        (_unequal, "int64"),
        (_other_model, "model"),
        (_one_rank_fails, "int64"),
        (_no_rows, "needs a positive multiple"),
    ],
    ids=["unequal shards", "another model", "a shape on one rank", "no rows"],
)
def test_faults_are_raised_on_every_rank(ranks: Ranks, case: Callable[[int], str], advice: str) -> None:
    messages = ranks.run(2, case)
    assert all(message.startswith(("CaptureError", "PlanError")) for message in messages), messages
    assert all(advice in message for message in messages), messages


def test_a_pipeline_of_one_microbatch_is_refused_in_one_sentence() -> None:
    for plan in (Plan(dp=1, pp=2), Plan(dp=2, pp=2, etp=2)):
        with pytest.raises(mc.PlanError, match=r"use microbatches=2 or more, or schedule='gpipe'\.$"):
            mc.trace(build(CONFIG), plan, _mine(0))


def test_generate_is_refused_by_name() -> None:
    class Generates(Logits):
        def generate(self) -> str:
            return "text"

    model = mc.parallelize(Generates(), Plan(dp=1))
    with pytest.raises(AttributeError, match="full_state_dict"):
        model.generate()


def test_nan_is_reported_after_the_step(caplog: pytest.LogCaptureFixture) -> None:
    model = mc.parallelize(build(CONFIG), Plan(dp=1))
    batch = tokens(2, 4, 0)
    batch["labels"][:] = -100
    with caplog.at_level(logging.WARNING, "moecompile"):
        loss = model(**batch)["loss"]
    assert loss.isnan(), "the plain model's loss is not a number here, and so is this one"
    assert "labels that are all ignored" in caplog.text
