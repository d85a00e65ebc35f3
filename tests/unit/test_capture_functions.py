"""Custom autograd functions: the graph has the user's value and the user's gradient, whatever that is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import Function

from moecompile import ops
from moecompile.capture import capture_model
from moecompile.compat import SingleLevelFunction
from moecompile.compilation import Request, compile_call
from moecompile.errors import CaptureError
from moecompile.plan import Plan
from tests.support import custom_functions as functions
from tests.support import moe_styles as styles
from tests.support.captured_call import assert_matches_eager, gradients, run_captured, targets
from tests.support.parity import LockStep, compare, plain


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def rows(seed: int, count: int = 6) -> Tensor:
    return torch.randn(count, functions.WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss_of(out: Tensor) -> Tensor:
    return (out * torch.arange(1, out.numel() + 1, dtype=out.dtype).reshape(out.shape)).sin().sum()


@pytest.mark.parametrize("kind", functions.EXACT, ids=lambda kind: kind.__name__)
def test_value_and_gradient_are_the_users(kind: type[functions.Layer]) -> None:
    model = made(kind)
    captured = capture_model(model, (rows(0),), {})
    assert not [name for name in targets(captured) if name.startswith("moe_capture")]
    assert_matches_eager(captured, model, rows(1), loss_of=loss_of, tolerance=1e-12)


def test_the_gradient_is_not_the_one_of_the_forward() -> None:
    """What the comparison above would not notice if both sides forgot the backward."""
    model = made(functions.SquaredRelu)
    x = rows(1)
    eager = gradients(model, loss_of(model(x)))["before.weight"]
    plainly = gradients(model, loss_of(model.after(model.before(x).relu().square())))["before.weight"]
    assert eager is not None and plainly is not None and (eager - plainly).norm() > 0.1 * eager.norm()


def test_a_method_taken_before_is_torchs_again_afterwards() -> None:
    capture_model(made(functions.TakenBefore), (rows(0),), {})
    x = rows(0).requires_grad_()
    (grad,) = torch.autograd.grad(functions.squared_relu(x).sum(), x)
    assert torch.equal(grad, 3 * x.relu()) and "apply" not in vars(SingleLevelFunction)


@pytest.mark.parametrize("function", [functions._Normed.apply, functions._Clipped.apply])
def test_a_method_taken_before_is_refused_all_the_same(function: Any) -> None:
    with pytest.raises(CaptureError, match=r"to the incoming gradient.*not linear"):
        capture_model(Taken(function), (torch.ones(3, 8),), {})


def test_without_gradients_only_the_value_is_captured() -> None:
    model = made(functions.SeveralOutputs)
    with torch.no_grad():
        captured = capture_model(model, (rows(0),), {})
        assert "moe.graft.default" not in targets(captured)
        assert torch.allclose(run_captured(captured, model, rows(1))[0], model(rows(1)), rtol=1e-12)


class Applied(nn.Module):
    def __init__(self, function: type[Function], *rest: Any) -> None:
        super().__init__()
        self.linear, self.function, self.rest = nn.Linear(8, 8), function, rest

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(self.linear(x), *self.rest)


class Taken(nn.Module):
    """Holds the method that was taken from a function's class."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


@pytest.mark.parametrize(
    ("function", "rest", "message"), functions.REFUSED, ids=lambda item: getattr(item, "__name__", "")
)
def test_refused_with_line(function: type[Function], rest: tuple[Any, ...], message: str) -> None:
    with pytest.raises(CaptureError, match=message) as caught:
        capture_model(Applied(function, *rest), (torch.ones(3, 8),), {})
    assert ".py:" in str(caught.value) and "\n" not in str(caught.value)


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        def body(x: Tensor) -> Tensor:
            return self.second(functions._SquaredRelu.apply(x))

        return torch.utils.checkpoint.checkpoint(body, self.first(x), use_reentrant=True)


def test_reentrant_checkpoint() -> None:
    model = made(Reentrant)
    assert_matches_eager(capture_model(model, (rows(0),), {}), model, rows(1), loss_of=loss_of, tolerance=1e-12)


class InExperts(styles.Layer):
    """The activation of every expert has a gradient of its own, and so has the router's estimator."""

    def make(self) -> None:
        class Act(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return functions._SquaredRelu.apply(x)

        self.experts = nn.ModuleList([styles.MLP(act=Act()) for _ in range(styles.EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x)
        gates = scores.softmax(-1)
        weight, ids = gates.topk(1, -1)
        weight = functions._Sampled.apply(scores, weight, ids, gates, torch.ones_like(weight))
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, expert(x[t]) * weight[t, k, None])
        return y


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.layer = nn.LayerNorm(styles.WIDTH), InExperts()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (x + self.layer(self.before(x)) - labels).square().mean()}


def test_expert_parallel_training_is_exact() -> None:
    batches = [{"x": rows(seed, 32), "labels": rows(seed + 100, 32)} for seed in (0, 1)]
    run = LockStep(made(Trained), Plan(dp=2, ep=2), batches[0])
    assert len(run.program.layers) == 1
    assert not [node for node in run.program.graph.nodes if node.target is ops.graft], "the step needs values only"
    compare(run.run(batches), plain(made(Trained), batches))


def test_nothing_of_the_transpose_is_left_in_the_step() -> None:
    """Backward of `3 * relu(x) * grad` needs one product; the transposed forward is dropped."""
    model = made(functions.SquaredRelu)
    request = Request((rows(0),), {}, Plan(dp=1), lambda out, x: loss_of(out))
    program = compile_call(model, request, pipeline="recognize-moe,shard-dense,differentiate")
    assert [node for node in program.graph.nodes if "relu" in str(node.target)] != []
    assert not [node for node in program.graph.nodes if node.target is ops.graft]
