"""Parameters of a test of which some run every time and the rest among the slow tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest


def thinned(items: Mapping[str, Any], every: int = 2, keep: tuple[str, ...] = ()) -> list[Any]:
    """One of ``every`` parameters, or those named in ``keep``; the others are marked slow. A value that is a tuple is several arguments."""
    assert set(keep) <= set(items), f"{keep} of {list(items)}"
    found = []
    for at, (name, value) in enumerate(items.items()):
        runs = name in keep if keep else at % every == 0
        values = value if isinstance(value, tuple) else (value,)
        found.append(pytest.param(*values, id=name, marks=() if runs else pytest.mark.slow))
    return found
