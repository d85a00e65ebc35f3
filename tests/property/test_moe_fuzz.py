"""Layers put together at random from parts train expert-parallel exactly as in one process, or are refused with a line."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from moecompile.compilation import Request, compile_call
from moecompile.errors import MoeCompileError
from tests.property.fuzz import PLAN, compare, outcome
from tests.support import moe_parts as parts
from tests.support import moe_recipes as recipes
from tests.support.parity import LockStep, slice_for

ANY = st.builds(
    recipes.Recipe,
    st.sampled_from(recipes.ROUTERS),
    st.sampled_from(recipes.EXPERT_KINDS),
    st.sampled_from(recipes.COMBINES),
    st.booleans(),
    st.booleans(),
    st.sampled_from(recipes.OPTIONS),
)


def check(recipe: recipes.Recipe, seed: int) -> None:
    assert outcome(recipe, seed) == "exact"


@settings(max_examples=16, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(recipe=ANY, seed=st.integers(0, 99))
def test_any_composition_is_exact(recipe: recipes.Recipe, seed: int) -> None:
    check(recipe, seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(recipe=ANY, seed=st.integers(0, 99))
def test_many_compositions_are_exact(recipe: recipes.Recipe, seed: int) -> None:
    check(recipe, seed)


# ---- negative controls ---------------------------------------------------------------------------------------------------


class _Spoilt(recipes.Model):
    """A recipe with a fault put in behind its experts or its router."""

    fault: str

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        w, ids = self.router(x)
        experts: parts.Experts = _Faulty(self.experts, self.fault)
        if self.fault == "another's weight":
            w = w.roll(1, 0)
        if self.fault == "another's choice":
            ids = ids.roll(1, 0)
        out = self.recipe.combine(x, w, ids, experts)
        return {"loss": (x + out - labels).square().mean()}


class _Faulty(parts.Experts):
    def __init__(self, inner: parts.Experts, fault: str) -> None:
        super().__init__()
        object.__setattr__(self, "inner", inner)  # not a submodule: its parameters are the model's
        self.fault = fault

    def forward(self, e: int, rows: Tensor) -> Tensor:
        if self.fault == "sees neighbours":
            return self.inner(e, rows + rows.roll(1, 0))
        out = self.inner(e, rows)
        if self.fault == "centred":
            return out - out.mean(0, keepdim=True)
        if self.fault == "one expert differs" and e == 1:
            return out.tanh()
        return out


FAULTS = ["sees neighbours", "centred", "one expert differs"]
GATHERED: list[parts.Combine] = [parts.where_loop, parts.sorted_split, parts.over_choices]


@pytest.mark.parametrize("combine", GATHERED, ids=lambda combine: combine.__name__)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_spoilt_layer_is_refused(fault: str, combine: parts.Combine) -> None:
    recipe = recipes.Recipe(parts.SoftmaxTopK, parts.GatedModules, combine)
    torch.manual_seed(0)
    model: nn.Module = _Spoilt(recipe).double()
    model.fault = fault  # type: ignore[assignment]
    with pytest.raises(MoeCompileError, match=r"\.py:\d+"):
        compile_call(model, Request((), slice_for(recipes.batch(recipe, 0), PLAN, 0), PLAN))


@pytest.mark.parametrize("fault", ["another's weight", "another's choice"])
def test_a_layer_that_mixes_up_tokens_is_refused_or_exact(fault: str) -> None:
    """Rolling the decision over the batch is no routing of the token's own; where it is still run, it is run exactly."""
    recipe = recipes.Recipe(parts.SoftmaxTopK, parts.GatedModules, parts.where_loop)
    torch.manual_seed(0)
    model = _Spoilt(recipe).double()
    model.fault = fault
    batch = recipes.batch(recipe, 0)
    try:
        run = LockStep(model, PLAN, batch)
    except MoeCompileError as error:
        assert re.search(r"\.py:\d+", str(error))
        return
    found = run.step(batch)
    loss = model(**batch)["loss"]
    loss.backward()
    compare("loss", found.loss, loss.detach())
    assert set(found.grads) <= {name for name, _ in model.named_parameters()}
    for name, param in model.named_parameters():
        if param.grad is None and name not in found.grads:
            continue  # the spoilt forward does not use it
        compare(name, found.grads[name], torch.zeros_like(param) if param.grad is None else param.grad)


def test_the_check_notices_a_wrong_gradient() -> None:
    recipe = recipes.Recipe(parts.SoftmaxTopK, parts.GatedModules, parts.where_loop)
    batch = recipes.batch(recipe, 0)
    run = LockStep(recipes.build(recipe, 0), PLAN, batch)
    model = recipes.build(recipe, 1)
    loss = model(**batch)["loss"]
    loss.backward()
    with pytest.raises(AssertionError, match=r"router\.gate\.weight"):
        compare("router.gate.weight", run.step(batch).grads["router.gate.weight"], model.router.gate.weight.grad)  # type: ignore[arg-type]
