"""Fixtures of more than one directory."""

from collections.abc import Iterator

import pytest

from tests.support.pool import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Gloo ranks that stay alive between tests; they start when a test first runs something on them."""
    made = Ranks()
    yield made
    made.close()
