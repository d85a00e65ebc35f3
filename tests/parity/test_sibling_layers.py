"""Identical MoE layers are read once, and a layer that differs in anything is none of them: each trains as it does in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecompile.plan import Plan
from moecompile.recognition import reader
from moecompile.recognition.match import Matcher
from tests.support.parity import Batch, LockStep, compare, plain
from tests.support.thinned import thinned

WIDTH, EXPERTS = 8, 4
ORDER = [2, 0, 3, 1]


class Layer(nn.Module):
    """An MoE layer of the usual kind; every option changes what it computes, or what may be said of it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.top_k, self.scale = options.get("top_k", 2), options.get("scale", 1.5)
        self.act = options.get("act", "gelu")
        self.order: list[int] | None = options.get("order")
        self.weights_in = options.get("weights_in", False)
        self.given = options.get("given", 0)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        wide = options.get("wide", 2 * WIDTH)
        self.up = nn.ModuleList(nn.Linear(WIDTH, wide) for _ in range(EXPERTS))
        self.down = nn.ModuleList(nn.Linear(wide, WIDTH, bias=options.get("bias", True)) for _ in range(EXPERTS))
        self.shift = nn.Parameter(torch.randn(WIDTH)) if options.get("shift") else None

    def expert(self, index: int, rows: Tensor) -> Tensor:
        found: Tensor = self.down[index](getattr(F, self.act)(self.up[index](rows)))
        return found if self.shift is None else found + self.shift

    def forward(self, x: Tensor) -> Tensor:
        probs, ids = self.gate(x).softmax(-1).topk(self.top_k)
        if self.order is not None:
            probs = probs * torch.tensor(self.order, dtype=x.dtype)[ids]
        probs, out = self.scale * probs, torch.zeros_like(x)
        for index in range(EXPERTS):
            token, slot = torch.where(ids == index)
            weight = probs[token, slot, None]
            rows = self.expert(index, x[token] * weight) if self.weights_in else self.expert(index, x[token]) * weight
            out.index_add_(0, token, rows)
        return x + out


class Stack(nn.Module):
    def __init__(self, *options: dict[str, Any]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(**one) for one in options)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return {"loss": (x - labels).square().mean()}


def stack(*options: dict[str, Any]) -> Stack:
    torch.manual_seed(0)
    return Stack(*options).double()


def batch(seed: int) -> Batch:
    draw = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {"x": draw[0], "labels": draw[1]}


@pytest.fixture
def proofs() -> Iterator[mock.Mock]:
    with mock.patch.object(reader, "Matcher", wraps=Matcher) as counted:
        yield counted


def agrees(options: list[dict[str, Any]]) -> LockStep:
    batches = [batch(0)]
    reference = plain(stack(*options), batches)
    run = LockStep(stack(*options), Plan(dp=2, ep=2), batches[0])
    idle = [name for name, grad in reference.steps[0].grads.items() if not grad.any()]
    compare(run.run(batches), reference, zero=idle)
    return run


def test_identical_layers_are_proved_once(proofs: mock.Mock) -> None:
    run = agrees([{}] * 4)
    assert proofs.call_count == 1
    assert [record["module"] for record in run.program.layers] == [f"layers.{at}" for at in range(4)]
    for at, record in enumerate(run.program.layers):
        assert record["params"] and all(name.startswith(f"layers.{at}.") for name in record["params"])


OTHERS: dict[str, dict[str, Any]] = {
    "scale": {"scale": 1.25},
    "activation": {"act": "silu"},
    "top-k": {"top_k": 1},
    "width": {"wide": WIDTH},
    "bias": {"bias": False},
    "weights on the input": {"weights_in": True},
    "constants": {"order": ORDER},
    "a parameter that all share": {"shift": True},
}


@pytest.mark.parametrize(
    "other", thinned({name: name for name in OTHERS}, keep=("scale", "top-k", "weights on the input", "constants"))
)
def test_a_layer_that_differs_is_no_sibling(other: str, proofs: mock.Mock) -> None:
    run = agrees([{}, OTHERS[other], {}])
    assert proofs.call_count >= 2
    assert [record["top_k"] for record in run.program.layers] == [2, OTHERS[other].get("top_k", 2), 2]


def test_constants_that_differ_in_their_numbers_alone(proofs: mock.Mock) -> None:
    agrees([{"order": ORDER}, {"order": ORDER}, {"order": ORDER[::-1]}])
    assert proofs.call_count == 2


def test_layers_of_which_one_is_frozen(proofs: mock.Mock) -> None:
    model = stack({}, {}, {})
    model.layers[1].requires_grad_(False)
    LockStep(model, Plan(dp=2, ep=2), batch(0))
    assert proofs.call_count == 2
