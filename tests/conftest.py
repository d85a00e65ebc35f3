"""Fixtures and options of more than one directory."""

from collections.abc import Iterator

import pytest

from tests.support.golden import Golden
from tests.support.pool import Ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write golden texts instead of comparing with them")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Gloo ranks that stay alive between tests; they start when a test first runs something on them."""
    made = Ranks()
    yield made
    made.close()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compares a rewrite with its golden text."""
    return Golden(request.config.getoption("--update-golden"))


@pytest.fixture(scope="module")
def proving() -> Iterator[None]:
    """The verifier proves where every value lives, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOECOMPILE_PROVE", "1")
        yield
