"""`mc.verify` compares what it says, and its comparison is hard to please."""

import copy
import math

import pytest
import torch
from torch import nn

import moecompile as mc
from moecompile.errors import CaptureError
from moecompile.mesh import Mesh
from moecompile.plan import Plan
from moecompile.verification import Report, Row, Trace, compare, loss_of
from moecompile.weights import Cut
from tests.unit.test_cli import tiny

PLAN = Plan(dp=2, ep=2)
CUTS = {"experts": Cut("ep", (4, 3)), "experts.0": Cut("ep", (3,), None, 0)}


def alone() -> Trace:
    torch.manual_seed(0)
    tensors = {
        "experts": torch.rand(4, 3).double(),
        "experts.0": torch.rand(3).double(),
        "head": torch.rand(5).double(),
    }
    copies = [{name: tensor.clone() for name, tensor in tensors.items()} for _ in range(2)]
    return Trace([2.0, 1.5], [0.7, 0.6], copies[0], copies[1], {"table": torch.arange(3.0)})


def rank(index: int) -> Trace:
    """What a right rank holds: half of the stacked experts, its own single expert, all of the rest."""
    whole = alone()

    def cut(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        own = tensors["experts.0"] if index == 0 else torch.empty(0).double()
        return {"experts": tensors["experts"].chunk(2)[index], "experts.0": own, "head": tensors["head"]}

    return Trace(whole.losses, whole.norms, cut(whole.gradients), cut(whole.weights), whole.buffers, CUTS)


def errors(ranks: list[Trace]) -> dict[tuple[str, str], float]:
    rows = compare(alone(), ranks, Mesh(PLAN), torch.float64, 1e-9)
    return {(row.kind, row.name): row.error for row in rows}


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_difference_under_microbatches_is_explained(microbatches):
    """A balance loss over a microbatch is not the one over the batch."""
    plan = Plan(dp=2, ep=2, microbatches=microbatches)
    text = str(Report(plan, 1e-9, (Row("loss", "step 0", 1e-3, 0),)))
    assert "NOT EQUAL" in text and ("verify the plan with microbatches=1" in text) is (microbatches == 2)
    assert "verify the plan" not in str(Report(plan, 1e-9, (Row("loss", "step 0", 0.0, 0),)))


def test_right_ranks_have_no_error():
    found = errors([rank(0), rank(1)])
    assert set(found.values()) == {0.0}
    assert len(found) == 2 + 2 + 3 + 3 + 1


def change(what: str, ranks: list[Trace]) -> tuple[str, str]:
    """Break one thing; returns the row that has to show it."""
    first, second = ranks
    if what == "one gradient of one rank is 1.001 times as large":
        second.gradients["head"] = second.gradients["head"] * 1.001
        return "gradient", "head"
    if what == "two experts are swapped":
        first.weights["experts"], second.weights["experts"] = second.weights["experts"], first.weights["experts"]
        return "weight", "experts"
    if what == "a gradient is missing":
        del first.gradients["experts"]
        return "gradient", "experts"
    if what == "a gradient is there that the plain model has not":
        first.gradients["more"] = second.gradients["more"] = torch.ones(1)
        return "gradient", "more"
    if what == "a NaN":
        second.weights["head"] = second.weights["head"] * math.nan
        return "weight", "head"
    if what == "the loss of one rank":
        second.losses = [2.0, 1.5 + 1e-6]
        return "loss", "step 1"
    if what == "the norm of one rank":
        first.norms = [0.7 * 1.001, 0.6]
        return "norm", "step 0"
    if what == "a rank that holds another's expert":
        second.weights["experts.0"] = first.weights["experts.0"]
        return "weight", "experts.0"
    assert what == "a buffer"
    second.buffers = {"table": torch.arange(3.0) + 1}
    return "buffer", "table"


@pytest.mark.parametrize(
    "what",
    [
        "one gradient of one rank is 1.001 times as large",
        "two experts are swapped",
        "a gradient is missing",
        "a gradient is there that the plain model has not",
        "a NaN",
        "the loss of one rank",
        "the norm of one rank",
        "a rank that holds another's expert",
        "a buffer",
    ],
)
def test_what_is_wrong_is_seen(what):
    ranks = [rank(0), rank(1)]
    row = change(what, ranks)
    found = errors(ranks)
    assert found.pop(row) > 1e-9
    assert set(found.values()) == {0.0}, "nothing else is blamed"


def test_an_idle_expert_must_be_exactly_zero():
    ranks, whole = [rank(0), rank(1)], alone()
    for trace in (*ranks, whole):
        trace.gradients["head"] = torch.zeros(5).double()
    whole.norms = [0.0, 0.0]
    for trace in ranks:
        trace.norms = [0.0, 0.0]
    ranks[1].gradients["head"] = torch.full((5,), 1e-30).double()
    rows = compare(whole, ranks, Mesh(PLAN), torch.float64, 1e-9)
    assert next(row.error for row in rows if (row.kind, row.name) == ("gradient", "head")) == math.inf


def test_a_model_that_is_left_as_it_was():
    """Slices that differ in how many labels count: a function says what each data rank passes in each step."""
    model = tiny()
    before = copy.deepcopy(model.state_dict())

    def example(number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        labels = torch.randint(0, 32, (2, 8), generator=generator)
        labels[:, : number % 5] = -100
        return {"input_ids": torch.randint(0, 32, (2, 8), generator=generator), "labels": labels}

    report = mc.verify(model, PLAN, example, dtype=torch.float64, steps=2)
    assert report.ok, str(report)
    assert bool(report)
    kinds = {row.kind for row in report.rows}
    assert kinds == {"loss", "gradient", "norm", "weight"}
    trained = len(list(model.parameters()))
    assert sum(row.kind == "gradient" for row in report.rows) == trained
    assert sum(row.kind == "weight" for row in report.rows) == trained
    assert "equal to one process" in str(report)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_model_without_a_loss_is_refused():
    with pytest.raises(CaptureError, match="returns no loss"):
        mc.verify(nn.Linear(3, 3), Plan(dp=1), (torch.ones(2, 3),))


def test_where_a_loss_may_be():
    loss = torch.ones((), requires_grad=True)
    assert loss_of(loss) is loss
    assert loss_of({"loss": loss, "logits": torch.ones(2)}) is loss
    assert loss_of((loss, torch.ones(2))) is loss
