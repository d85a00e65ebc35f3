"""Models with a line that looks at the whole batch: it is gathered, reported, and everything is exact all the same."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moecompile as mc
from moecompile.plan import Plan
from moecompile.program import Program
from tests.support.models import VOCAB, Config, build, tokens
from tests.support.parity import LockStep, compare, plain, slice_for
from tests.support.pool import Job, Ranks, gathered, parallel, train
from tests.support.thinned import thinned

pytestmark = pytest.mark.timeout(150)
ADDED, ALONE = Config("loop", shared=True, aux=0.1, neighbour="added"), Config("loop", aux=0.1, neighbour="alone")
BATCHES = [tokens(8, 5, seed, ignored=0.2) for seed in range(3)]


def traced(config: Config, plan: Plan) -> Program:
    return mc.trace(build(config), plan, slice_for(BATCHES[0], plan, 0))


# ---- numbers -----------------------------------------------------------------------------------------------------------


TRAINED = {
    f"{key}-{name}": (config, plan)
    for key, plan in (("dp2", Plan(dp=2)), ("dp4-ep2", Plan(dp=4, ep=2)), ("dp4-ep4", Plan(dp=4, ep=4)))
    for name, config in (("added", ADDED), ("alone", ALONE))
}


@pytest.mark.parametrize(("config", "plan"), thinned(TRAINED, keep=("dp2-alone", "dp4-ep2-added", "dp4-ep4-alone")))
def test_training(config: Config, plan: Plan) -> None:
    """Also where whole values reach the experts and every rank sends all rows."""
    lock_step = LockStep(build(config), plan, BATCHES[0])
    op = {"added": "aten.roll.default", "alone": "aten.slice.Tensor"}[config.neighbour]
    assert [item.op for item in lock_step.program.gathers] == [op]
    compare(lock_step.run(BATCHES), plain(build(config), BATCHES))


def test_training_on_gloo(ranks: Ranks) -> None:
    job = Job(ADDED, Plan(dp=2, ep=2))
    reference = plain(build(ADDED), BATCHES)
    compare(gathered(ranks.run(2, train, job, BATCHES), reference, job.plan), reference)


class Chosen(nn.Module):
    """A loss of the rows that have a label, taken by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build(Config("loop", layers=1))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits, flat = self.inner(ids, labels)["logits"].reshape(-1, VOCAB), labels.reshape(-1)
        return {"loss": F.cross_entropy(logits[flat != -100], flat[flat != -100])}


@pytest.mark.parametrize("plan", [Plan(dp=1), Plan(dp=2, ep=2), Plan(dp=1, tp=2, ep=2)], ids=str)
def test_rows_chosen_by_a_mask(plan: Plan) -> None:
    """Each batch has another number of them."""
    lock_step = LockStep(Chosen(), plan, BATCHES[0])
    compare(lock_step.run(BATCHES), plain(Chosen(), BATCHES))
    assert {item.op for item in lock_step.program.gathers} == (
        {"aten.index.Tensor"} if plan.num_data_ranks > 1 else set()
    )


def _chosen(rank: int, plan: Plan) -> tuple[Tensor, dict[str, Tensor]]:
    with parallel(Chosen(), plan) as model:
        loss = model(**slice_for(BATCHES[0], plan, rank))["loss"]
        loss.backward()
        return loss.detach(), mc.full_grads(model)


def test_rows_chosen_by_a_mask_over_microbatches(ranks: Ranks) -> None:
    model = Chosen()
    total = model(**BATCHES[0])["loss"]
    total.backward()
    for loss, grads in ranks.run(2, _chosen, Plan(dp=2, ep=2, microbatches=2)):
        torch.testing.assert_close(loss, total.detach(), rtol=1e-12, atol=0)
        for name, param in model.named_parameters():
            torch.testing.assert_close(grads[name], param.grad, rtol=1e-9, atol=1e-13)


def _microbatches(rank: int, plan: Plan) -> tuple[Tensor, dict[str, Tensor]]:
    with parallel(build(ADDED), plan) as model:
        loss = model(**slice_for(BATCHES[0], plan, rank))["loss"]
        loss.backward()
        return loss.detach(), mc.full_grads(model)


def test_microbatches(ranks: Ranks) -> None:
    """The oracle is one process over microbatches that each hold a part of every rank's rows."""
    model, total = build(ADDED), torch.zeros((), dtype=torch.float64)
    valid = (BATCHES[0]["labels"] != -100).sum()
    for rows in ([0, 1, 4, 5], [2, 3, 6, 7]):
        part = {name: value[rows] for name, value in BATCHES[0].items()}
        out = model(**part)
        balance = ADDED.aux * out["balance"]
        total = total + (out["loss"] - balance) * (part["labels"] != -100).sum() / valid + balance / 2
    total.backward()
    for loss, grads in ranks.run(2, _microbatches, Plan(dp=2, ep=2, microbatches=2)):
        torch.testing.assert_close(loss, total.detach(), rtol=1e-12, atol=0)
        for name, param in model.named_parameters():
            torch.testing.assert_close(grads[name], param.grad, rtol=1e-9, atol=1e-13)


class Logits(nn.Module):
    """The model without its loss; the number of results is that of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build(ALONE)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.inner(ids, ids)["logits"]
        return logits


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), reduction="sum") / 40


def _without_loss(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    plan = Plan(dp=2, ep=2)
    mine = slice_for(BATCHES[0], plan, rank)
    with parallel(Logits(), plan) as model:
        out = model(mine["ids"])
        _loss(out, mine["ids"]).backward()
        return out.detach(), mc.full_grads(model)


def test_a_call_without_loss_returns_this_ranks_part(ranks: Ranks) -> None:
    model, ids = Logits(), BATCHES[0]["ids"]
    out = model(ids)
    _loss(out, ids).backward()
    found = ranks.run(2, _without_loss)
    torch.testing.assert_close(torch.cat([part for part, _ in found]), out.detach(), rtol=1e-12, atol=1e-13)
    for _, grads in found:
        for name, param in model.named_parameters():
            torch.testing.assert_close(grads[name], param.grad, rtol=1e-9, atol=1e-13)


# ---- what is said about it ---------------------------------------------------------------------------------------------


def test_the_record_names_line_axis_and_bytes() -> None:
    (found,) = traced(ADDED, Plan(dp=4)).gathers
    rows, length, hidden, size = 2, 5, ADDED.hidden, 8
    assert (found.op, found.axis, found.module) == ("aten.roll.default", "dp", "")
    assert found.source.rpartition("/")[2].startswith("models.py:")
    assert found.bytes == rows * length * hidden * size and found.grad_bytes == 4 * found.bytes
    assert traced(Config("loop"), Plan(dp=4)).gathers == [] and traced(ADDED, Plan(dp=1)).gathers == []


def test_nothing_goes_back_in_a_call_without_gradients() -> None:
    with torch.no_grad():
        (found,) = traced(ADDED, Plan(dp=4)).gathers
    assert found.bytes > 0 and found.grad_bytes == 0


def test_the_text_keeps_it(tmp_path: Any) -> None:
    program = traced(ADDED, Plan(dp=2))
    assert f"# gathered: {program.gathers[0]}\n" in str(program)
    program.save(tmp_path / "program.py")
    loaded = mc.load(tmp_path / "program.py")
    assert loaded.gathers == program.gathers and str(loaded) == str(program)


def test_a_warning_once_per_program(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "moecompile"):
        program = traced(ADDED, Plan(dp=2))
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith(
        f"lines of the model that are not computed in parts: 1; every rank gathers {program.gathers[0].step_bytes:,} B"
    )
    assert "strict=True" in text and "models.py:" in text and "aten.roll.default" in text


def _warnings(rank: int) -> int:
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("moecompile")
    logger.addHandler(handler)
    with parallel(build(ADDED), Plan(dp=2)) as model:
        for batch in BATCHES[:2]:
            model(**slice_for(batch, Plan(dp=2), rank))
    logger.removeHandler(handler)
    return sum("not computed in parts" in text for text in records)


def test_one_rank_says_it(ranks: Ranks) -> None:
    assert ranks.run(2, _warnings) == [1, 0]


def test_strict_refuses_it() -> None:
    with pytest.raises(
        mc.PassError, match=r"models.py:\d+\) calls aten.roll.default .* rewrite|run it along another dim; or leave"
    ):
        traced(ADDED, Plan(dp=2, strict=True))
    assert traced(Config("loop"), Plan(dp=2, strict=True)).gathers == []
