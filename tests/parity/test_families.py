"""Hugging Face families on simulated ranks: three steps on random batches, three on crowded ones, against the plain model."""

from __future__ import annotations

import pytest
import torch

from moecompile.plan import Plan
from tests.support import family_parity
from tests.support.families import FAMILIES
from tests.support.family_parity import FORMS, PLANS, check, differences
from tests.support.parity import ParityError, Run, Step

pytest.importorskip("transformers")

# one without an experts interface, one with a dense layer and shared experts, one whose rotary tables depend on the length
QUICK = [("dbrx", "loop"), ("deepseek_v2", "interface"), ("phimoe", "loop")]
NONE = ["doge"]  # product keys: tokens look rows up, and there is nothing to cut


def agrees(family: str, form: str, plan: Plan) -> None:
    found = check(family, form, plan)
    assert set(found.worst) == {*family_parity.KINDS, "outputs"}
    if family in NONE:
        assert found.layers == 0 and not found.cut
        return
    assert found.layers >= 1 and found.cut
    counts = torch.stack(found.loads)  # a layer and crowded batch, rank, expert
    assert counts.shape[1] == plan.dp and counts.sum() > 0
    assert (counts == 0).any(), "no expert was idle on a rank"


@pytest.mark.parametrize(("family", "form"), QUICK)
def test_family(family: str, form: str) -> None:
    agrees(family, form, PLANS[1] if form == "loop" else PLANS[0])


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"dp{plan.dp}ep{plan.ep}")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, form: str, plan: Plan) -> None:
    agrees(family, form, plan)


def test_the_comparison_notices() -> None:
    def run(grad: float, weight: float = 1.0) -> Run:
        grads = {"w": torch.tensor([grad, 1.0], dtype=torch.float64)}
        one = torch.ones((), dtype=torch.float64)
        step = Step(one, {"logits": torch.ones(3, dtype=torch.float64)}, grads, one)
        return Run([step], {"w": torch.full((2,), weight, dtype=torch.float64)})

    assert differences(run(1.0), run(1.0)) == dict.fromkeys([*family_parity.KINDS, "outputs"], 0.0)
    for wrong in (run(1.0 + 1e-8), run(1.0, 1.0 + 1e-8), run(float("nan"))):
        with pytest.raises(ParityError, match=r"w of step 0|weights w"):
            differences(wrong, run(1.0))
    missing = run(1.0)
    missing.steps[0].grads.clear()
    with pytest.raises(ParityError, match="no gradients of"):
        differences(missing, run(1.0))
