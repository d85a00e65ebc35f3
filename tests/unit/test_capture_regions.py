"""One flat functional graph: autocast as casts, no_grad as detach, in-place updates of local tensors as calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecompile.capture import Captured, capture_model
from moecompile.errors import CaptureError
from moecompile.program import OutputKind
from tests.support.captured_call import assert_matches_eager, gradients, run_captured, targets

ROWS, WIDTH = 5, 8


class Net(nn.Module):
    """Two linears that share a weight, a norm and a buffer; the forward is given."""

    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH))
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def net(body: Callable[[Any, Tensor], Any]) -> Net:
    torch.manual_seed(0)
    return Net(body)


def capture(model: nn.Module) -> Captured:
    return capture_model(model, (torch.empty(ROWS, WIDTH),), {})


def sample(seed: int = 1) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def matches(body: Callable[[Any, Tensor], Any]) -> Captured:
    """Capture and compare bitwise."""
    model = net(body)
    captured = capture(model)
    assert_matches_eager(captured, model, sample(), loss_of=lambda out: out, tolerance=0.0)
    return captured


# Autocast -------------------------------------------------------------------------------------------------------------


def mixed(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = self.second(self.first(x))
        y = torch.cat([y, x])
    with torch.autocast("cpu", enabled=False):
        z = self.first(x.float() * self.scale)
    return self.norm(y.float()).square().sum() + z.square().sum()


def test_autocast_region_becomes_casts() -> None:
    ops = targets(matches(mixed))
    # x and the bias of the first linear, the shared weight once, the second bias, and y on its way into cat
    assert ops.count("aten._to_copy.default") == 5
    assert not [op for op in ops if "autocast" in op]


def test_ambient_autocast_becomes_casts_and_its_inner_region_is_respected() -> None:
    model = net(mixed)
    with torch.autocast("cpu", torch.bfloat16):
        captured = capture(model)
        wanted = model(sample())
    (found,) = run_captured(captured, model, sample())
    assert torch.equal(found, wanted)
    eager, graph = gradients(model, wanted), gradients(model, found)
    for name, reference in eager.items():
        assert torch.equal(graph[name], reference), name


def test_without_autocast_there_is_no_cast() -> None:
    captured = matches(lambda self, x: self.norm(self.second(self.first(x))).square().sum())
    assert "aten._to_copy.default" not in targets(captured)


# Gradient regions -----------------------------------------------------------------------------------------------------


def test_no_grad_region_becomes_detach() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.no_grad():
            z = (y * 2).sum()
            with torch.enable_grad():
                w = self.second(x * z).sum()
        return (self.norm(y) * z).square().sum() + w

    assert "aten.detach.default" in targets(matches(body))


def test_no_grad_over_integers_leaves_nothing() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            order = self.first(x).sum(-1).argsort()
        return (self.second(x)[order] * self.scale * torch.arange(1, ROWS + 1).unsqueeze(1)).sum()

    assert "aten.detach.default" not in targets(matches(body))


def test_detach_of_the_user_is_kept() -> None:
    captured = matches(lambda self, x: (self.first(x) * self.second(x).detach()).sum())
    assert targets(captured).count("aten.detach.default") == 1


def test_captured_without_gradients_has_no_detach() -> None:
    model = net(lambda self, x: self.norm(self.first(x).detach()).sum())
    with torch.no_grad():
        captured = capture(model)
    assert torch.equal(run_captured(captured, model, sample())[0], model(sample()))


# In-place updates -----------------------------------------------------------------------------------------------------


def through_views(self: Any, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    flat, turned = y.view(-1), y.t()
    flat[3:9] = 1.0
    y[0] += self.first(x)[0]
    turned[1, 1].fill_(7.0)
    flat[10:14].mul_(self.scale[:4])
    return (y * flat.view(ROWS, WIDTH) * self.second(x) + turned.t()).sum()


def through_chunks(self: Any, x: Tensor) -> Tensor:
    # Parts of one tensor may be written only where it carries no gradient.
    base = torch.ones(ROWS, WIDTH)
    left, right = base.chunk(2, dim=-1)
    left += right
    left *= self.scale[:4]
    top, *_ = base.unbind(0)
    top.add_(2.0)
    base.split([1, 4], dim=0)[1].sub_(0.25)
    return (self.first(x) * base).square().sum() + (right * self.second(x)[:, 4:]).sum()


def through_masks(self: Any, x: Tensor) -> Tensor:
    y = self.first(x) * 1.0
    y[x > 0] = 0.5
    y[:, 2] = x[:, 3]
    y.index_add_(0, torch.tensor([0, 0, 2]), self.second(x)[:3], alpha=2.0)
    y.masked_fill_(x.abs() < 0.1, 3.0).clamp_(max=2.5)
    y.transpose(0, 1).unsqueeze(0)[0, 1:3] *= 3
    return (y.square() + y.clone().zero_() + self.first(x).relu_()).sum()


def through_types(self: Any, x: Tensor) -> Tensor:
    y = self.first(x).to(torch.bfloat16)
    y += self.second(x)
    y.copy_(y.float() * self.scale)
    z = torch.ones(ROWS, 1).expand(ROWS, WIDTH).clone()
    z[:, ::2] -= self.scale[::2]
    return (y.float() * z).sum()


@pytest.mark.parametrize("body", [through_views, through_chunks, through_masks, through_types])
def test_in_place_updates_become_functional(body: Callable[[Any, Tensor], Tensor]) -> None:
    ops = [op.removeprefix("aten.").split(".")[0] for op in targets(matches(body)) if op.startswith("aten.")]
    assert not [op for op in ops if op.endswith("_")]


def test_write_through_an_expanded_view_is_refused() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        y = self.first(x)[:1].clone()
        y.unfold(1, 2, 2).mul_(2)
        return y.sum()

    with pytest.raises(CaptureError, match="write with index assignment"):
        capture(net(body))


def test_in_place_change_under_no_grad_of_a_value_with_gradient_is_refused() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.no_grad():
            y.mul_(2)
        return y.sum()

    with pytest.raises(CaptureError, match="changed in place under no_grad"):
        capture(net(body))


# Outputs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "loss_leaf"),
    [
        (lambda self, x: self.first(x).sum(), 0),
        (lambda self, x: (self.first(x).sum(), self.second(x)), 0),
        (lambda self, x: {"logits": self.first(x), "loss": self.second(x).sum(), "note": "kept"}, 1),
        (lambda self, x: [self.first(x), None, 3], None),
        (lambda self, x: {"logits": self.first(x), "loss": None}, None),
    ],
)
def test_loss_is_found_and_structure_rebuilt(body: Callable[[Any, Tensor], Any], loss_leaf: int | None) -> None:
    model = net(body)
    captured = capture(model)
    losses = [item.leaf for item in captured.outputs if item.kind is OutputKind.LOSS]
    assert losses == ([] if loss_leaf is None else [loss_leaf])
    found, wanted = captured.rebuild(run_captured(captured, model, sample())), model(sample())
    assert type(found) is type(wanted)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0) if isinstance(wanted, Tensor) else None
    keys = list(wanted) if isinstance(wanted, dict) else range(len(wanted)) if not isinstance(wanted, Tensor) else []
    for key in keys:
        one, other = found[key], wanted[key]
        assert torch.equal(one, other) if isinstance(other, Tensor) else one == other


def test_loss_fn_is_traced_after_the_model() -> None:
    model = net(lambda self, x: self.first(x))
    captured = capture_model(
        model, (), {"x": torch.empty(ROWS, WIDTH)}, loss_fn=lambda output, x: (output - x).square().mean()
    )
    assert [(item.kind, item.leaf) for item in captured.outputs] == [(OutputKind.LOSS, -1), (OutputKind.USER, 0)]
    loss, _ = run_captured(captured, model, x=sample())
    assert torch.equal(loss, (model(sample()) - sample()).square().mean())


def test_loss_fn_that_returns_no_scalar_is_refused() -> None:
    with pytest.raises(CaptureError, match="reduce it with sum"):
        capture_model(net(lambda self, x: x), (torch.empty(ROWS, WIDTH),), {}, loss_fn=lambda output, x: output)


def test_positional_and_nested_arguments_are_named() -> None:
    class Nested(nn.Module):
        def forward(self, first: Tensor, extra: dict[str, Any], *, flag: bool) -> Tensor:
            return (first + extra["pair"][1] if flag else first).sum()

    pair = (torch.empty(2), torch.empty(2))
    captured = capture_model(Nested(), (torch.empty(2), {"pair": pair}), {"flag": True})
    assert [(item.name, item.leaf) for item in captured.inputs] == [
        ("first", 0),
        ("extra_pair_0", 1),
        ("extra_pair_1", 2),
    ]


def test_plain_tensor_attribute_becomes_a_constant() -> None:
    model = net(lambda self, x: (self.first(x) * self.table).sum())
    model.table = torch.rand(WIDTH)
    captured = capture(model)
    assert [value.equal(model.table) for value in captured.constants.values()] == [True]
    assert_matches_eager(captured, model, sample(), loss_of=lambda out: out, tolerance=0.0)


def test_tied_weight_is_one_input_and_shapes_can_be_given() -> None:
    model = net(lambda self, x: self.second(self.first(x)).sum())
    captured = capture(model)
    assert captured.shared == {"first.weight": ("second.weight",)}
    names = [name for item in captured.inputs for name in item.fqns]
    assert "first.weight" in names and "second.weight" not in names
    cut = net(lambda self, x: self.second(self.first(x)).sum())
    cut.first.weight.data = cut.first.weight.data[:2]
    again = capture_model(cut, (torch.empty(ROWS, WIDTH),), {}, shapes={"first.weight": (WIDTH, WIDTH)})
    assert targets(again) == targets(captured)
    assert cut.first.weight.shape == (2, WIDTH) and cut.second.weight is cut.first.weight
