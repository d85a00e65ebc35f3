"""A layer that nobody recognises, with its router and experts named by hand: same checks, same parity."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moecompile as mc
from tests.support.moe_styles import EXPERTS, MLP, TOP_K, WIDTH, Layer
from tests.support.parity import Batch, LockStep, compare, plain

PLAN = mc.Plan(dp=2, ep=2)


class TokenByToken(Layer):
    """Reads every token's experts as numbers, which no tracer can follow."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x.reshape(-1, WIDTH))
        tokens = x.reshape(-1, WIDTH)
        rows = []
        for t, chosen in enumerate(ids.tolist()):
            rows.append(sum(self.experts[e](tokens[t]) * w[t, k] for k, e in enumerate(chosen)))
        return torch.stack(rows).reshape(x.shape)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probs, ids = self.gate(x).softmax(-1).topk(TOP_K, -1)
        return ids, probs


class Exotic(nn.Module):
    """Stacked weights, a mask as second argument, a shared expert, and a tuple with a balance loss as result."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.shared = Router(), MLP()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.4)

    def one(self, index: int, rows: Tensor) -> Tensor:
        return (rows @ self.up[index]).tanh()

    def result(self, mixed: Tensor, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        share = self.router.gate(x).softmax(-1).mean((0, 1))
        return mixed.reshape(x.shape) * scale + self.shared(x), share.square().sum()

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        ids, probs = self.router(x.reshape(-1, WIDTH))
        rows = []
        for token, chosen, weights in zip(x.reshape(-1, WIDTH), ids.tolist(), probs, strict=True):
            rows.append(sum(self.one(e, token) * weights[k] for k, e in enumerate(chosen)))
        return self.result(torch.stack(rows), x, scale)


class Trained(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.before, self.layer = nn.LayerNorm(WIDTH), layer

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out: Any = self.layer(self.before(x))
        out, aux = out if isinstance(out, tuple) else (out, 0)
        return {"loss": (x + out - labels).square().mean() + 0.1 * aux}


def batch(seed: int) -> Batch:
    draw = torch.randn(2, 4, 4, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {"x": draw[0], "labels": draw[1]}


def token_by_token() -> nn.Module:
    layer = TokenByToken()
    return mc.mark_moe(layer, router=lambda self, x: self.route(x)[::-1], experts="experts")


def exotic() -> nn.Module:
    return mc.mark_moe(
        Exotic(),
        router="router",
        experts=lambda self, index, rows: self.one(index, rows),
        num_experts=EXPERTS,
        finish=lambda self, mixed, x, scale=1.0: self.result(mixed, x, scale),
    )


def made(build: Any) -> nn.Module:
    torch.manual_seed(0)
    return Trained(build()).double()


@pytest.mark.parametrize("build", [token_by_token, exotic])
def test_expert_parallel_training_is_exact(build: Any) -> None:
    batches = [batch(0), batch(1)]
    reference = plain(made(build), batches)
    run = LockStep(made(build), PLAN, batches[0])
    (layer,) = run.program.layers
    assert layer["num_experts"] == EXPERTS and layer["top_k"] == TOP_K
    compare(run.run(batches), reference)


def test_without_the_mark_it_is_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(mc.CaptureError, match="reads a number out of a tensor"):
        mc.trace(Trained(TokenByToken()).double(), PLAN, batch(0))


def test_the_modules_own_forward_is_left_alone() -> None:
    model = made(exotic)
    before = model.layer(batch(0)["x"])
    mc.trace(model, PLAN, {name: value[:2] for name, value in batch(0).items()})
    assert "forward" not in vars(model.layer)
    assert all(torch.equal(one, other) for one, other in zip(model.layer(batch(0)["x"]), before, strict=True))
    copied = copy.deepcopy(model)
    mc.trace(copied, PLAN, {name: value[:2] for name, value in batch(0).items()})


WRONG: dict[str, Any] = {
    "another activation": {
        "experts": lambda self, index, rows: (rows @ self.up[index]).sigmoid(),
        "num_experts": EXPERTS,
    },
    "weights squared": {"router": lambda self, x: (self.router(x)[0], self.router(x)[1] ** 2)},
    "no shared expert": {"finish": lambda self, mixed, x: (mixed.reshape(x.shape), self.result(mixed, x, 1.0)[1])},
    "gradient lost": {"router": lambda self, x: (self.router(x)[0], self.router(x)[1].detach())},
}


@pytest.mark.parametrize("name", list(WRONG))
def test_a_mark_that_means_something_else_is_refused(name: str) -> None:
    torch.manual_seed(0)
    right: dict[str, Any] = {
        "router": "router",
        "experts": lambda self, index, rows: self.one(index, rows),
        "num_experts": EXPERTS,
        "finish": lambda self, mixed, x: self.result(mixed, x, 1.0),
    }
    layer = mc.mark_moe(Exotic(), **{**right, **WRONG[name]})
    with pytest.raises(
        mc.CaptureError, match=r"test_mark_moe.py:\d+: mark_moe of Exotic: .* is not that of the module's own"
    ):
        mc.trace(Trained(layer).double(), PLAN, batch(0))


def test_a_forward_that_cannot_be_tried() -> None:
    class Broken(TokenByToken):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("needs another device")

    def build(check: bool) -> nn.Module:
        layer = Broken()
        marked = mc.mark_moe(layer, router=lambda self, x: self.route(x)[::-1], experts="experts", check=check)
        return Trained(marked).double()

    with pytest.raises(mc.CaptureError, match=r"could not be compared .*needs another device.*check=False"):
        mc.trace(build(True), PLAN, batch(0))
    assert len(mc.trace(build(False), PLAN, batch(0)).layers) == 1


def test_arguments_are_checked() -> None:
    with pytest.raises(mc.CaptureError, match="a ModuleList of experts is needed"):
        mc.mark_moe(Exotic(), router="router", experts="shared")
    with pytest.raises(mc.CaptureError, match="pass num_experts"):
        mc.mark_moe(Exotic(), router="router", experts=lambda self, index, rows: rows)
    with pytest.raises(AttributeError):
        mc.mark_moe(TokenByToken(), router="nowhere", experts="experts")
    with pytest.raises(mc.CaptureError, match=r"do not fit; tokens are \[T, H\]"):
        bad = mc.mark_moe(TokenByToken(), router=lambda self, x: (x[:, :2].long(), x[:, :1]), experts="experts")
        mc.trace(Trained(bad).double(), PLAN, batch(0))
