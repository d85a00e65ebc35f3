"""A capture is held against the plain model on fresh data: what export loses in silence is found, and what is right passes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moecompile as mc
from moecompile.capture import Captured, capture_model, compare_capture
from moecompile.errors import CaptureError
from tests.support import hf_models
from tests.support.moe_styles import WIDTH, Layer


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = self.layer(x) * self.scale
        return {"loss": out.square().mean(), "out": out}


def rows(count: int = 6) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def made() -> Model:
    torch.manual_seed(0)
    return Model().double()


def captured(model: nn.Module, *args: Any, ranks: int = 1, **kwargs: Any) -> Captured:
    whole = tuple(torch.cat([item] * ranks) for item in args)
    return capture_model(model, whole, {name: torch.cat([item] * ranks) for name, item in kwargs.items()})


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_right_capture_passes(ranks: int) -> None:
    model = made()
    before = {name: item.clone() for name, item in model.state_dict().items()}
    state = torch.get_rng_state()
    assert compare_capture(model, captured(model, rows(), ranks=ranks), (rows(),), {}, ranks) == ""
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(item, before[name]) for name, item in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())


def test_a_hugging_face_model_passes() -> None:
    model, batch = hf_models.build("mixtral"), hf_models.batch()
    assert compare_capture(model, captured(model, **batch, ranks=2), (), batch, 2) == ""


def damage(found: Captured, what: str) -> None:
    """Do to a graph what export does to some models."""
    graph = found.graph_module.graph
    linear = next(node for node in graph.nodes if node.target is torch.ops.aten.linear.default)
    with graph.inserting_after(linear):
        target = torch.ops.aten.detach.default if what == "gradient" else torch.ops.aten.neg.default
        made_node = graph.call_function(target, (linear,))
    linear.replace_all_uses_with(made_node, delete_user_cb=lambda user: user is not made_node)
    found.graph_module.recompile()


def test_a_lost_gradient_is_found() -> None:
    model = made()
    found = captured(model, rows())
    damage(found, "gradient")
    with pytest.raises(
        CaptureError, match=r"\.py:\d+: the captured graph of Model gives another gradient of layer.gate.weight"
    ):
        compare_capture(model, found, (rows(),), {}, 1)


def test_another_value_is_found() -> None:
    model = made()
    found = captured(model, rows())
    damage(found, "value")
    with pytest.raises(CaptureError, match=r"gives another (output|loss)"):
        compare_capture(model, found, (rows(),), {}, 1)


def test_a_hidden_change_of_a_buffer_is_found() -> None:
    """Through numpy no tracer sees it."""

    class Counts(Model):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            if type(x) is Tensor:
                self.scale.numpy()[...] = 2.0
            return super().forward(x)

    torch.manual_seed(0)
    model = Counts().double()
    with pytest.raises(CaptureError, match="lacks what the plain model's forward does to buffer 'scale'"):
        compare_capture(model, captured(model, rows()), (rows(),), {}, 1)


def test_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    found = captured(model, rows())

    def left_out(**changes: Any) -> str:
        return compare_capture(changes.get("model", model), changes.get("found", found), (rows(),), {}, 1)

    assert left_out(model=Model().bfloat16()).startswith("rounding in low precision")
    assert left_out(model=Model().to("meta")) == "it is on the meta device"
    random = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)).double()
    assert left_out(model=random, found=captured(random, rows())) == "it draws random numbers"
    monkeypatch.setattr("moecompile.capture.compare._MOST_FLOPS", 10.0)
    assert left_out() == "it is large"
    monkeypatch.setenv("MOECOMPILE_COMPARE", "always")
    assert left_out() == ""
    monkeypatch.setenv("MOECOMPILE_COMPARE", "0")
    assert left_out() == "MOECOMPILE_COMPARE=0"


def test_parallelize_compares_its_first_capture(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []
    monkeypatch.setattr("moecompile.compilation.compare_capture", lambda *args: calls.append(1) or "it is a test")
    with caplog.at_level(logging.INFO, "moecompile"):
        model = mc.parallelize(made(), mc.Plan(dp=1))
        model(rows())["loss"].backward()
        model(rows())
        model(rows(4))
    assert calls == [1], "weights are cut after the first capture"
    assert "not compared with the plain model: it is a test" in caplog.text


def test_a_wrong_capture_stops_parallelize(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = capture_model

    def wrong(*args: Any, **kwargs: Any) -> Captured:
        found = plain(*args, **kwargs)
        damage(found, "gradient")
        return found

    monkeypatch.setattr("moecompile.compilation.capture_model", wrong)
    model = mc.parallelize(made(), mc.Plan(dp=1))
    with pytest.raises(CaptureError, match="gives another gradient"):
        model(rows())
