"""Pipeline stages with every other cut and kind of model: three steps equal one process."""

from __future__ import annotations

import pytest

from tests.support.composition import CASES, SMALL, check
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
