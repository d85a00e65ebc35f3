"""What plain export refuses or gets silently wrong: captured exactly, on batches with idle experts too, or refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from moecompile.capture import capture_model
from moecompile.compilation import Request, compile_call
from moecompile.errors import CaptureError
from moecompile.plan import Plan
from tests.support import hard_models as hard
from tests.support.captured_call import assert_matches_eager
from tests.support.moe_styles import WIDTH


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def rows(seed: int, idle: bool = False) -> Tensor:
    """Fourteen tokens; with ``idle`` all but one are equal, so that most experts have none."""
    found = torch.randn(14, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.cat([found[:1].repeat(13, 1), found[13:]]) if idle else found


def loss_of(out: Tensor) -> Tensor:
    return (out * torch.arange(1, WIDTH + 1)).sin().sum()


@pytest.mark.parametrize("kind", hard.EXACT, ids=lambda kind: kind.__name__)
def test_captured_exactly(kind: type[nn.Module]) -> None:
    model = made(kind)
    captured = capture_model(model, (rows(0),), {})
    for x in (rows(1), rows(2, idle=True), rows(3, idle=True)):
        assert_matches_eager(captured, model, x, loss_of=loss_of, tolerance=1e-11)


@pytest.mark.parametrize("kind", hard.EXACT, ids=lambda kind: kind.__name__)
def test_recognised_as_an_moe_layer(kind: type[nn.Module]) -> None:
    request = Request((rows(0),), {}, Plan(dp=2, ep=2), lambda out, x: loss_of(out))
    (layer,) = compile_call(made(kind), request).layers
    assert layer["num_experts"] == 4 and layer["top_k"] == 2


@pytest.mark.parametrize("kind", list(hard.REFUSED), ids=lambda kind: kind.__name__)
def test_refused_by_name(kind: type[nn.Module]) -> None:
    with pytest.raises(CaptureError, match=hard.REFUSED[kind]) as caught:
        capture_model(made(kind), (rows(0),), {})
    assert ".py:" in str(caught.value)


def test_an_attribute_is_not_stale_after_the_call() -> None:
    """Using what the forward left raises; the module can be copied, run as it is, and captured again."""
    model = made(hard.KeepsLoss)
    capture_model(model, (rows(0),), {})
    for use in (
        lambda: model.aux + 1,
        lambda: torch.stack([model.aux]),
        lambda: float(model.aux),
        lambda: model.seen[0],
    ):
        with pytest.raises(
            CaptureError, match=r"hard_models.py:\d+: the forward assigns a tensor to attribute.*return it"
        ):
            use()
    copy.deepcopy(model)
    capture_model(model, (rows(0),), {})
    model(rows(0))
    assert model.aux.shape == ()


def test_asserts_elsewhere_are_still_made() -> None:
    class Asserting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert x.shape[0] == 3
            return x * 2

    with pytest.raises(CaptureError, match="AssertionError"):
        capture_model(Asserting(), (torch.ones(4),), {})
    capture_model(Asserting(), (torch.ones(3),), {})


def test_only_an_assert_is_taken_to_hold() -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if (x > 0).all() else -x

    with pytest.raises(CaptureError, match="depends on tensor values"):
        capture_model(Branching(), (torch.ones(3),), {})


def test_what_settles_after_one_call_is_no_state() -> None:
    """A cached length; the model is left as it was."""

    class Caching(nn.Module):
        length = 0

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] > self.length:
                self.length = x.shape[0]
            return x * 2

    model = Caching()
    capture_model(model, (torch.ones(3),), {})
    assert model.length == 0


def test_state_that_shows_in_the_second_call_is_refused() -> None:
    class Alternating(nn.Module):
        first = True

        def forward(self, x: Tensor) -> Tensor:
            first, self.first = self.first, False
            return x * 2 if first else x

    model = Alternating()
    with pytest.raises(
        CaptureError, match=r"test_capture_hard.py:\d+: the forward changes attribute 'first'.*True to False"
    ):
        capture_model(model, (torch.ones(3),), {})
    assert model.first
