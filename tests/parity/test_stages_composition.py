"""Pipeline stages with every other cut and kind of model: three steps equal one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

import moecompile as mc
from moecompile.errors import PassError
from tests.support.composition import CASES, MODELS, PLANS, SMALL, check
from tests.support.pool import Ranks

pytestmark = pytest.mark.timeout(460)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(*case, marks=() if case in SMALL else pytest.mark.slow, id=" ".join(case).replace(" ", "-"))
        for case in dict.fromkeys(CASES)
    ],
)
def test_three_steps(ranks: Ranks, name: str, plan: str) -> None:
    report = check(ranks, name, plan)
    assert report, str(report)
    assert {row.kind for row in report.rows} >= {"loss", "gradient", "norm", "weight"}


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["pp2 tp2 sp ep2", "pp2 cp2"])
@pytest.mark.parametrize("name", ["jamba", "nemotron_h"])
def test_what_of_a_mixer_is_gathered_is_named(name: str, plan: str) -> None:
    """The table's rows of Mamba hybrids hold although a convolution runs along the cut sequence; ``strict`` refuses that."""
    model, batch = MODELS[name].build(), MODELS[name].batch(0)
    gathered = mc.trace(model, PLANS[plan], batch).gathers
    assert gathered and all(f"modeling_{name}.py:" in item.source for item in gathered)
    with pytest.raises(PassError, match=rf"conv1d.*modeling_{name}\.py:\d+"):
        mc.trace(model, replace(PLANS[plan], strict=True), batch)
