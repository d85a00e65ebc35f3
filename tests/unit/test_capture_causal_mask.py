"""A mask becomes is_causal exactly when it is the lower triangle for every input."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from moecompile.capture import capture_model
from tests.support.captured_call import assert_matches_eager, targets

S, D = 6, 4


class Attention(nn.Module):
    def __init__(self, mask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        return scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x), scale=0.5).square().sum()


def positions(offset: int = 0) -> Tensor:
    return torch.arange(S).unsqueeze(1) + offset


def tril(x: Tensor) -> Tensor:
    return torch.ones(S, S, dtype=torch.bool).tril()


def minus_infinity(x: Tensor) -> Tensor:
    return torch.full((S, S), float("-inf")).triu(1)


def index_arithmetic(x: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0]).view(-1, 1, 1, 1)
    table = torch.arange(S).unsqueeze(0).expand(x.shape[0], -1)
    query, key = table[rows, positions().view(1, 1, S, 1)], table[rows, positions().view(1, 1, 1, S)]
    return (key <= query) & (key > query - 100) & (rows == rows)


def strictly_less(x: Tensor) -> Tensor:
    return positions().t() < positions(1)


def greater_equal(x: Tensor) -> Tensor:
    return (positions() >= positions().t()).expand(x.shape[0], 1, S, S)


def window(x: Tensor) -> Tensor:
    return (positions().t() <= positions()) & (positions().t() > positions() - 3)


def shifted(x: Tensor) -> Tensor:
    return positions().t() <= positions(1)


def full(x: Tensor) -> Tensor:
    return torch.ones(S, S, dtype=torch.bool)


def finite_bias(x: Tensor) -> Tensor:
    return torch.full((S, S), float("-inf")).triu(1) + 0.25


def of_the_input(x: Tensor) -> Tensor:
    return torch.ones(S, S, dtype=torch.bool).tril() & (x.abs().sum((1, 2)) > -1).view(-1, 1, 1, 1)


def some_rows(x: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0]).view(-1, 1, 1, 1)
    return (positions().t() <= positions()) | (rows == 1)


CAUSAL = [tril, minus_infinity, index_arithmetic, strictly_less, greater_equal]
OTHER = [window, shifted, full, finite_bias, of_the_input, some_rows]


def is_causal(mask: Callable[[Tensor], Tensor]) -> bool:
    torch.manual_seed(0)
    model = Attention(mask)
    captured = capture_model(model, (torch.empty(2, S, D),), {})
    x = torch.randn(2, S, D, generator=torch.Generator().manual_seed(1))
    assert_matches_eager(captured, model, x, loss_of=lambda out: out)
    (attention,) = [node for node in captured.graph_module.graph.nodes if "scaled_dot_product" in str(node.target)]
    assert attention.kwargs == {"scale": 0.5}
    causal = attention.args[3:] == (None, 0.0, True)
    # A mask that is no longer needed is not computed either.
    assert not causal or not [op for op in targets(captured) if "arange" in op or "ones" in op or "full" in op]
    return causal


@pytest.mark.parametrize("mask", CAUSAL, ids=lambda mask: mask.__name__)
def test_causal(mask: Callable[[Tensor], Tensor]) -> None:
    assert is_causal(mask)


@pytest.mark.parametrize("mask", OTHER, ids=lambda mask: mask.__name__)
def test_not_causal(mask: Callable[[Tensor], Tensor]) -> None:
    assert not is_causal(mask)


def test_a_mask_too_large_to_compute_is_decided_from_its_positions() -> None:
    size = 1 << 17

    class Long(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            at = torch.arange(size)
            return scaled_dot_product_attention(x, x, x, attn_mask=at.unsqueeze(0) <= at.unsqueeze(1))

    captured = capture_model(Long(), (torch.empty_strided((1, 1, size, D), (0, 0, 0, 0)),), {})
    assert targets(captured) == ["aten.scaled_dot_product_attention.default"]


def test_a_buffer_is_not_a_constant() -> None:
    class Buffered(Attention):
        def __init__(self) -> None:
            super().__init__(lambda x: self.triangle)
            self.register_buffer("triangle", torch.ones(S, S, dtype=torch.bool).tril())

    captured = capture_model(Buffered(), (torch.empty(2, S, D),), {})
    (attention,) = [node for node in captured.graph_module.graph.nodes if "scaled_dot_product" in str(node.target)]
    assert attention.args[3].name == "triangle"
