"""CPU kernels of `moe_cpu::causal_attention`: block of queries by block of queries, each with the keys it may see.

A block's scores stay in the cache between their products and the softmax. The probabilities are kept: the backward then has four
products, where flash attention has a fifth, and an exponential, to find them again (Dao et al. 2022, Algorithm 4).
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from moecompile.ops.cpu import BLOCK_QUERIES, attention_elements, check_causal_attention

aten = torch.ops.aten

# Elements of the scores that a block of several heads makes at once: they stay in the level-2 cache.
BLOCK_ELEMENTS = 1 << 18


def _blocks(length: int) -> list[tuple[int, int]]:
    return [(at, min(at + BLOCK_QUERIES, length)) for at in range(0, length, BLOCK_QUERIES)]


def _groups(query: Tensor) -> Iterator[slice]:
    """As many heads at a time as keep a block's scores in the cache."""
    _, heads, length, _ = query.shape
    most = max(1, min(heads, BLOCK_ELEMENTS // max(1, min(BLOCK_QUERIES, length) * length)))
    for first in range(0, heads, most):
        yield slice(first, min(first + most, heads))


def _parts(probs: Tensor, query: Tensor, group: slice) -> list[Tensor]:
    """The probabilities of a group of heads, [B, heads, queries, keys] for each block of queries: views."""
    length, found = query.shape[2], []
    start = attention_elements(group.start, length)
    for at, end in _blocks(length):
        shape = query.shape[0], group.stop - group.start, end - at, end
        size = math.prod(shape[1:])
        found.append(probs[:, start : start + size].view(shape))
        start += size
    return found


def _scratch(query: Tensor) -> Tensor:
    """Room for the scores of one sequence, a group of heads and a block of queries."""
    heads = max((group.stop - group.start for group in _groups(query)), default=0)
    return query.new_empty(heads * min(BLOCK_QUERIES, query.shape[2]) * query.shape[2])


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(scale * query key^T, what comes later left out) value, and the probabilities block after block."""
    check_causal_attention(query, key, value)
    batch, heads, length, width = query.shape
    out = query.new_empty(batch, length, heads, width).transpose(1, 2)
    probs = query.new_empty(batch, attention_elements(heads, length))
    scratch = _scratch(query)
    for group in _groups(query):
        for (at, end), part in zip(_blocks(length), _parts(probs, query, group), strict=True):
            later = query.new_full((end - at, end), -math.inf).triu_(at + 1)
            scores = scratch[: math.prod(part.shape[1:])].view(part.shape[1:])
            blocks = query[:, group, at:end], key[:, group, :end].mT, value[:, group, :end], out[:, group, at:end], part
            for q, k, v, y, p in zip(*(block.unbind(0) for block in blocks), strict=True):
                torch.baddbmm(later, q, k, alpha=scale, out=scores)
                aten._softmax.out(scores, -1, False, out=p)
                torch.bmm(p, v, out=y)
    return out, probs


def causal_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, probs: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value.

    With P the probabilities: dV = P^T dO, dS = P * (dO V^T - sum(dO * O)), dQ = scale dS K and dK = scale dS^T Q.
    """
    check_causal_attention(query, key, value)
    batch, heads, length, width = query.shape
    grads = [query.new_empty(batch, length, heads, width).transpose(1, 2) for _ in range(3)]
    grad_query, grad_key, grad_value = grads
    shift = torch.linalg.vecdot(grad, out).neg_().unsqueeze(-1)
    scratch = _scratch(query)
    for group in _groups(query):
        # From the last block, which sees all keys: it writes what the others add to.
        for (at, end), part in reversed(list(zip(_blocks(length), _parts(probs, query, group), strict=True))):
            add = 0 if end == length else 1
            slope = scratch[: math.prod(part.shape[1:])].view(part.shape[1:])
            rows, keys = (slice(None), group, slice(at, end)), (slice(None), group, slice(end))
            blocks = (
                *(grad[rows], query[rows], shift[rows].expand(part.shape), grad_query[rows]),
                *(key[keys], value[keys].mT, grad_key[keys], grad_value[keys], part, part.mT),
            )
            for d, q, minus, grad_q, k, v, grad_k, grad_v, p, p_t in zip(
                *(block.unbind(0) for block in blocks), strict=True
            ):
                torch.baddbmm(grad_v, p_t, d, beta=add, out=grad_v)
                torch.baddbmm(minus, d, v, out=slope)
                slope.mul_(p)
                torch.baddbmm(grad_q, slope, k, beta=0, alpha=scale, out=grad_q)
                torch.baddbmm(grad_k, slope.mT, q, beta=add, alpha=scale, out=grad_k)
    return grad_query, grad_key, grad_value
