"""What a user changes on the model, returns beside the loss, or passes beside the batch: followed exactly, or refused in a sentence."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moecompile as mc
from moecompile.errors import CaptureError
from moecompile.plan import Plan
from tests.support.models import Config, build, tokens
from tests.support.parity import slice_for
from tests.support.pool import Ranks, parallel

pytestmark = pytest.mark.timeout(240)
ALONE = Plan(dp=1)
BATCH = tokens(2, 8, 0)


class Schedule:
    """An object whose own code reads what it holds."""

    def __init__(self) -> None:
        self.now = 1.5

    def factor(self) -> float:
        return 2 * self.now


class Scaled(nn.Module):
    """A loss times everything that a user may turn between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build(Config("loop", layers=1))
        self.coef, self.options, self.factor = 1.0, {"weight": 1.0}, torch.ones((), dtype=torch.float64)
        self.tables, self.shape, self.schedule = {"a": [torch.ones(2, dtype=torch.float64)]}, torch.square, Schedule()
        self.steps_seen = 0  # nothing of the model's code reads it

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        loss: Tensor = self.inner(**batch)["loss"]
        factor = self.coef * self.options["weight"] * self.factor * self.tables["a"][0].sum() * self.schedule.factor()
        return {"loss": self.shape(loss) * factor}


def coefficient(model: Any) -> None:
    model.coef = 3.0


def option(model: Any) -> None:
    model.options["weight"] = 0.5


def tensor(model: Any) -> None:
    model.factor = torch.tensor(5.0, dtype=torch.float64)


def tensor_in_containers(model: Any) -> None:
    model.tables["a"][0] = torch.tensor([2.0, 3.0], dtype=torch.float64)


def function(model: Any) -> None:
    model.shape = torch.exp


def inside_an_object(model: Any) -> None:
    model.schedule.now += 1


def hook(model: Any) -> None:
    model.inner.register_forward_hook(lambda module, given, out: {**out, "loss": out["loss"] * 7})


@pytest.mark.parametrize(
    "change",
    [coefficient, option, tensor, tensor_in_containers, function, inside_an_object, hook],
    ids=lambda change: change.__name__,
)
def test_what_the_code_reads_leads_to_another_capture(change: Callable[[Any], None]) -> None:
    plain = Scaled().double()
    model = mc.parallelize(copy.deepcopy(plain), ALONE)
    for _ in range(2):
        assert torch.allclose(model(**BATCH)["loss"], plain(**BATCH)["loss"], rtol=1e-12)
        change(plain)
        change(model.plain)
    loss, wanted = model(**BATCH)["loss"], plain(**BATCH)["loss"]
    assert torch.allclose(loss, wanted, rtol=1e-12)
    loss.backward()
    wanted.backward()
    for (name, mine), theirs in zip(plain.named_parameters(), model.plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None and theirs.grad is not None:
            assert torch.allclose(mine.grad, theirs.grad, rtol=1e-10, atol=1e-14), name


class Numbered(nn.Module):
    """Weighs tokens by numbers whose type nothing says."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return (self.head(x) * (torch.arange(4) / 3)).sum()


def test_the_type_of_new_tensors_leads_to_another_capture(caplog: pytest.LogCaptureFixture) -> None:
    """1 / 3 in float32 and in float64 are two numbers."""
    caplog.set_level(logging.ERROR)
    plain, x, before, seen = Numbered(), torch.randn(2, 4, dtype=torch.float64), torch.get_default_dtype(), set()
    model = mc.parallelize(copy.deepcopy(plain), ALONE)
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            assert torch.allclose(model(x), plain(x), rtol=1e-14)
            seen.add(plain(x).item())
    finally:
        torch.set_default_dtype(before)
    assert len(seen) == len(model._state.cache) == 2


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_of_modules_are_refused(kind: str) -> None:
    model = mc.parallelize(Scaled(), ALONE)
    model(**BATCH)
    handle = getattr(model.plain.inner.head, kind)(lambda *given: None)
    with pytest.raises(
        CaptureError, match=r"inner\.head has a backward hook, which a captured step would not call; hook parameters"
    ):
        model(**BATCH)
    with torch.no_grad():
        model(**BATCH)
    handle.remove()
    model(**BATCH)["loss"].backward()


def test_what_the_code_does_not_read_costs_nothing() -> None:
    model = mc.parallelize(Scaled(), ALONE)
    for step in range(3):
        model.plain.steps_seen = step  # type: ignore[assignment]
        model(**BATCH)
    assert len(model._state.cache) == 1


def another_parameter(model: Any) -> None:
    model.inner.head.weight = nn.Parameter(model.inner.head.weight.detach().clone())


def another_module(model: Any) -> None:
    model.inner.head = copy.deepcopy(model.inner.head)


@pytest.mark.parametrize("change", [another_parameter, another_module], ids=lambda change: change.__name__)
def test_parts_that_were_replaced_are_refused(change: Callable[[Any], None]) -> None:
    model = mc.parallelize(Scaled(), ALONE)
    model(**BATCH)
    change(model.plain)
    with pytest.raises(CaptureError, match=r"'inner\.head.*' of the model was replaced .*param\.data\.copy_"):
        model(**BATCH)


def test_a_copy_is_refused_with_a_way_out() -> None:
    with pytest.raises(TypeError, match="copy the plain model before parallelize"):
        copy.deepcopy(mc.parallelize(Scaled(), ALONE))


@pytest.mark.parametrize(
    ("use", "advice"),
    [
        (pickle.dumps, "save full_state_dict"),
        (lambda model: hasattr(model, "_ddp_params_and_buffers_to_ignore"), "use it as it is"),
        (lambda model: mc.parallelize(model, ALONE), "pass a plain model"),
        (lambda model: mc.parallelize(nn.Sequential(model), ALONE), "pass a plain model"),
    ],
    ids=["pickle", "DDP", "parallelize", "inside"],
)
def test_what_a_parallel_model_cannot_be_is_said(use: Callable[[Any], Any], advice: str) -> None:
    with pytest.raises((TypeError, CaptureError), match=advice):
        use(mc.parallelize(Scaled(), ALONE))


class OfInputs(nn.Module):
    """Its loss, or what the loss is made of, of tokens that somebody else computes."""

    def __init__(self, own_loss: bool) -> None:
        super().__init__()
        self.linear, self.own_loss = nn.Linear(3, 3), own_loss

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out.square().mean() if self.own_loss else out


def test_gradients_of_arguments_are_right_or_refused() -> None:
    """A step would leave them out in silence, also where the same call was made without before."""
    x = torch.randn(4, 3)
    model = mc.parallelize(OfInputs(True), ALONE)
    model(x).backward()
    with pytest.raises(CaptureError, match=r"the argument x requires a gradient.*detach the argument"):
        model(x.requires_grad_())
    model = mc.parallelize(OfInputs(False), ALONE)
    model(x).square().mean().backward()
    found, x.grad = x.grad, None
    model.plain(x).square().mean().backward()
    torch.testing.assert_close(found, x.grad)


@pytest.mark.parametrize("own_loss", [False, True])
def test_second_derivatives_are_refused(own_loss: bool) -> None:
    found = mc.parallelize(OfInputs(own_loss), ALONE)(torch.randn(4, 3)).mean()
    with pytest.raises(RuntimeError, match=r"create_graph=True.*leave create_graph out"):
        found.backward(create_graph=True)


@pytest.mark.slow
def test_torch_compile_leaves_it_as_it_is() -> None:
    model = mc.parallelize(Scaled(), ALONE)
    assert torch.equal(torch.compile(model)(**BATCH)["loss"], model(**BATCH)["loss"])


def _parallel_again(rank: int) -> str:
    plan, plain = Plan(dp=2, ep=2), build(Config("loop", layers=1))
    with parallel(plain, plan) as model:
        model(**slice_for(BATCH, plan, rank))
    try:
        mc.parallelize(plain, plan)
    except CaptureError as error:
        return str(error)
    return ""


def test_a_share_of_a_model_is_not_taken_for_one(ranks: Ranks) -> None:
    said = ranks.run(2, _parallel_again)
    assert said[0] == said[1] and "this rank's share of" in said[0] and "pass a plain model" in said[0]


def test_experts_that_share_a_parameter_are_refused() -> None:
    """As two of a stack it would be trained once for each."""
    model: Any = build(Config("loop", layers=1))
    experts = next(module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1)
    experts[1].up.weight = experts[0].up.weight
    with pytest.raises(CaptureError, match=r"experts 0, 1 share the parameter .*experts\.0\.up\.weight"):
        mc.parallelize(model, ALONE)(**BATCH)


# ---- results and arguments without batch dim -----------------------------------------------------------------------------


class Returns(nn.Module):
    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.inner, self.whole = build(Config("loop", layers=1)), whole

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        out = self.inner(**batch)
        beside = (batch["labels"] != -100).sum() if self.whole else out["logits"].mean()
        return {"loss": out["loss"], "beside": beside}


def test_whole_numbers_over_microbatches_are_refused() -> None:
    model = mc.parallelize(Returns(True), Plan(dp=1, microbatches=2))
    with pytest.raises(CaptureError, match=r"has no batch dim: microbatches=2 cannot put whole numbers together"):
        model(**BATCH)


def test_means_over_microbatches_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    model, plain = mc.parallelize(Returns(False), Plan(dp=1, microbatches=2)), Returns(False)
    with caplog.at_level(logging.WARNING):
        found = model(**BATCH)["beside"]
    torch.testing.assert_close(found, plain(**BATCH)["beside"].detach(), rtol=1e-12, atol=0)
    assert "microbatches=2 return the mean of their values" in caplog.text


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = build(Config("loop", layers=1))

    def forward(self, weight: Tensor, **batch: Tensor) -> dict[str, Tensor]:
        return {"loss": self.inner(**batch)["loss"] * weight}


def weighted(rank: int, plan: Plan, weights: list[float]) -> str:
    with parallel(Weighted(), plan) as model:
        given = slice_for(tokens(4, 8, 0), plan, rank)
        try:
            model(weight=torch.tensor(weights[rank]), **given)
        except CaptureError as error:
            return str(error)
    return "fine"


def test_a_common_tensor_that_differs_is_refused_on_all_ranks(ranks: Ranks) -> None:
    plan = Plan(dp=2)
    assert ranks.run(2, weighted, plan, [0.5, 0.5]) == ["fine"] * 2
    for said in ranks.run(2, weighted, plan, [0.5, 0.7]):
        assert "ranks 0 and 1 pass different values in a tensor without batch dim" in said


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = build(Config("loop", layers=1))

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.inner(ids=ids, labels=ids)["logits"]
        return scores


def scored(rank: int, plan: Plan) -> str:
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    ear = Ear()
    logging.getLogger("moecompile").addHandler(ear)
    with parallel(Scores(), plan) as model:
        model(slice_for(tokens(4, 8, 0), plan, rank)["ids"])
    logging.getLogger("moecompile").removeHandler(ear)
    return "\n".join(heard)


def test_a_call_without_a_loss_says_how_gradients_are_summed(ranks: Ranks) -> None:
    first, other = ranks.run(2, scored, Plan(dp=2))
    assert "the call returns no loss" in first and "loss_fn" in first
    assert "the call returns no loss" not in other


# ---- the plain code of a cut model -----------------------------------------------------------------------------------------


def alone(rank: int, plan: Plan) -> list[str]:
    said = []
    with parallel(build(Config("loop", hidden=16, heads=4, layers=1)), plan) as model:
        mine = slice_for(tokens(4, 8, 0), plan, rank)
        model(**mine)
        plain = model.plain
        x = torch.zeros(2, 16, dtype=torch.float64)
        for call in (lambda: plain.layers[0].qkv(x), lambda: plain(**mine), lambda: model.layers[0](x[None], None)):
            with pytest.raises(CaptureError) as error:
                call()
            said.append(str(error.value))
        said.append(str(tuple(plain.layers[0].norm_1(x).shape)))  # whole on every rank
        model(**slice_for(tokens(4, 6, 0), plan, rank))["loss"].backward()  # another shape: captured anew
    return said


def test_the_plain_code_does_not_run_on_a_part(ranks: Ranks) -> None:
    for said in ranks.run(2, alone, Plan(dp=1, tp=2, ep=2)):
        *refused, whole = said
        assert all("and the plain code of Linear would compute with that alone" in text for text in refused), refused
        assert "layers.0.qkv: 'weight' is this rank's part [24, 16] of [48, 16]" in refused[0] and whole == "(2, 16)"
