"""Floating point operations of a program, counted on its graph, and what this machine reaches on a plain matmul.

Counted: matrix products (grouped ones by the rows they really have) and attention, forward and backward, and convolutions in the
forward; each multiply-add as two. Attention is counted in full although a causal mask hides half of it, as is usual for model FLOPs
utilisation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from . import meta, ops
from .program import Program

aten = torch.ops.aten


def count(program: Program, rows: int = 0) -> int:
    """FLOPs of one run on one rank; a size that is known at run time only counts as ``rows``, the mean over the ranks."""
    return sum(of(node, rows) for node in program.graph.nodes)


def of(node: Node, rows: int = 0) -> int:
    """FLOPs of one call, 0 for what is not counted."""
    return _RULES[node.target](_Sizes(node, rows)) if node.target in _RULES else 0


def measured_peak(threads: int, dtype: torch.dtype = torch.float32, size: int = 1024, rounds: int = 10) -> float:
    """FLOP/s of the best of a few ``size``-square matmuls on ``threads`` threads of this machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        left, right = torch.rand(size, size, dtype=dtype), torch.rand(size, size, dtype=dtype)
        best = math.inf
        for _ in range(rounds):
            start = time.perf_counter()
            torch.mm(left, right)
            best = min(best, time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return 2 * size**3 / best


@dataclass(frozen=True)
class _Sizes:
    """The shapes around one call, with run-time sizes filled in."""

    node: Node
    rows: int

    def of(self, node: Any) -> list[int]:
        return [self.rows if isinstance(size, torch.SymInt) else int(size) for size in meta.tensor(node).shape]

    def arg(self, at: int) -> list[int]:
        return self.of(self.node.args[at])


Rule = Callable[[_Sizes], int]


def _product(at: int) -> Rule:
    """Each element of the result is a dot product over the last dim of argument ``at``."""
    return lambda sizes: 2 * math.prod(sizes.of(sizes.node)) * sizes.arg(at)[-1]


def _convolution(sizes: _Sizes) -> int:
    """Each element of the result is a dot product with a kernel of weight [out, in of a group, ...]."""
    return 2 * math.prod(sizes.of(sizes.node)) * math.prod(sizes.arg(1)[1:])


def _grouped_linear(sizes: _Sizes) -> int:
    """rows [R, in] times one of weight [E, out, in]."""
    rows, (_, out, inner) = sizes.arg(0)[0], sizes.arg(2)
    return 2 * rows * out * inner


def _grouped_wgrad(sizes: _Sizes) -> int:
    """grad [R, out] and rows [R, in] to [E, out, in]."""
    (rows, out), inner = sizes.arg(0), sizes.arg(1)[1]
    return 2 * rows * out * inner


def _grouped_mlp(products: int, at: int) -> Rule:
    """``products`` with each weight; rows [R, H] are argument ``at``, before the counts and the weights [E, out, in]."""

    def rule(sizes: _Sizes) -> int:
        weights = sum(math.prod(sizes.arg(at + place)[1:]) for place in (2, 3))
        return products * 2 * sizes.arg(at)[0] * weights

    return rule


def _attention(products: int, at: int) -> Rule:
    """``products`` matmuls between queries [B, h, S, D] (argument ``at``) and keys [B, h, L, D]."""

    def rule(sizes: _Sizes) -> int:
        batch, heads, queries, dim = sizes.arg(at)
        return products * 2 * batch * heads * queries * sizes.arg(at + 1)[2] * dim

    return rule


_RULES: dict[Any, Rule] = {
    aten.linear.default: _product(0),
    aten.mm.default: _product(0),
    ops.cpu.mm: _product(0),
    aten.bmm.default: _product(0),
    aten.matmul.default: _product(0),
    aten.addmm.default: _product(1),
    aten.conv1d.default: _convolution,
    aten.conv2d.default: _convolution,
    aten.convolution.default: _convolution,
    ops.grouped_linear: _grouped_linear,
    ops.grouped_linear_wgrad: _grouped_wgrad,
    ops.cpu.grouped_linear: _grouped_linear,
    ops.cpu.grouped_linear_wgrad: _grouped_wgrad,
    ops.cpu.grouped_mlp: _grouped_mlp(1, 0),
    ops.cpu.grouped_mlp_backward: _grouped_mlp(2, 1),
    ops.cpu.causal_attention: _attention(2, 0),
    ops.cpu.causal_attention_backward: _attention(4, 1),
    aten.scaled_dot_product_attention.default: _attention(2, 0),
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention(2, 0),
    # scores again, and the gradients of scores, values, queries and keys
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention(5, 1),
}
