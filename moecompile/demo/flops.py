"""Floating point operations of a program, counted on its graph, and what this machine reaches on a plain matmul.

Counted: matrix products (grouped ones by the rows they really have) and attention, forward and backward, each multiply-add as
two. Attention is counted in full although a causal mask hides half of it, as is usual for model FLOPs utilisation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from moecompile import meta, ops
from moecompile.program import Program

aten = torch.ops.aten


def count(program: Program) -> int:
    """FLOPs of one run. Sizes must be static, as they are for a plan with ep=1, and experts not yet lowered."""
    return sum(_RULES[node.target](node) for node in program.graph.nodes if node.target in _RULES)


def measured_peak(threads: int, dtype: torch.dtype = torch.float32, size: int = 1024, rounds: int = 5) -> float:
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


def _shape(node: Any) -> list[int]:
    return [int(size) for size in meta.tensor(node).shape]


def _product(at: int) -> Callable[[Node], int]:
    """Each element of the result is a dot product over the last dim of argument ``at``."""
    return lambda node: 2 * meta.tensor(node).numel() * _shape(node.args[at])[-1]


def _grouped_linear(node: Node) -> int:
    """rows [R, in] times one of weight [E, out, in]."""
    rows, (_, out, inner) = _shape(node.args[0])[0], _shape(node.args[2])
    return 2 * rows * out * inner


def _grouped_wgrad(node: Node) -> int:
    """grad [R, out] and rows [R, in] to [E, out, in]."""
    (rows, out), inner = _shape(node.args[0]), _shape(node.args[1])[1]
    return 2 * rows * out * inner


def _attention(products: int, at: int) -> Callable[[Node], int]:
    """``products`` matmuls between queries [B, h, S, D] (argument ``at``) and keys [B, h, L, D]."""

    def rule(node: Node) -> int:
        batch, heads, queries, dim = _shape(node.args[at])
        return products * 2 * batch * heads * queries * _shape(node.args[at + 1])[2] * dim

    return rule


_RULES: dict[Any, Callable[[Node], int]] = {
    aten.linear.default: _product(0),
    aten.mm.default: _product(0),
    aten.bmm.default: _product(0),
    aten.matmul.default: _product(0),
    aten.addmm.default: _product(1),
    ops.grouped_linear: _grouped_linear,
    ops.grouped_linear_wgrad: _grouped_wgrad,
    aten.scaled_dot_product_attention.default: _attention(2, 0),
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention(2, 0),
    # scores again, and the gradients of scores, values, queries and keys
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention(5, 1),
}
