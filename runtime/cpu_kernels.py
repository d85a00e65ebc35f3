"""CPU kernels of the `moe_cpu::` ops: the meaning of the plain-torch reference with fewer passes over memory.

What makes them faster: products written straight into their place (`out=`), weighted sums that gather
without materialising the gathered rows, in-place arithmetic on one scratch buffer, and blocks of rows that
stay in the cache.  Importing this file registers the kernels.  Where a case is rare (padding rows, mixed or
low precision) they call the reference op.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moecompile import ops
from moecompile.ops.cpu import LIBRARY
from moecompile.ops.experts import (
    check_grouped_linear,
    check_grouped_linear_wgrad,
    check_same_rows,
    rows_by_expert,
)
from moecompile.ops.fused import check_rms_norm, check_rotary, check_silu_mul, check_swiglu, statistics_dtype
from moecompile.ops.routing import check_rows, check_unpermute, check_unpermute_backward, may_have_padding
from moecompile.runtime import products
from moecompile.runtime.attention import causal_attention, causal_attention_backward
from moecompile.runtime.grouped_mlp import grouped_mlp, grouped_mlp_backward

aten = torch.ops.aten

# Elements per block of the swiglu gradient: its operands together stay in the level-2 and level-3 caches.
BLOCK_ELEMENTS = 1 << 17

FULL_PRECISION = (torch.float32, torch.float64)

# ---- experts -----------------------------------------------------------------------------------------------


def grouped_linear(rows: Tensor, tokens_per_expert: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`moe::grouped_linear` as one product per [source, expert] segment, without filling the output first.

    An expert's segments come one after another: its weight stays in the cache (3 % of the experts' time).
    """
    check_grouped_linear(rows, tokens_per_expert, weight, bias)
    # The segments cover all rows (checked), so nothing of this memory stays unwritten.
    out = rows.new_empty(rows.shape[0], weight.shape[1])
    weights = weight.transpose(1, 2).unbind(0)
    biases = None if bias is None else bias.unbind(0)
    for expert, spans in rows_by_expert("grouped_linear", tokens_per_expert, rows):
        for span in spans:
            if biases is None:
                torch.mm(rows[span], weights[expert], out=out[span])
            else:
                torch.addmm(biases[expert], rows[span], weights[expert], out=out[span])
    return out


def grouped_linear_wgrad(grad: Tensor, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """`moe::grouped_linear_wgrad`, each source added into its expert's gradient in place."""
    check_grouped_linear_wgrad(grad, rows, tokens_per_expert)
    check_same_rows("grouped_linear_wgrad", grad, rows)
    if grad.dtype not in FULL_PRECISION:  # adding up the sources one by one would round between them
        reference: Tensor = ops.grouped_linear_wgrad(grad, rows, tokens_per_expert)
        return reference
    out = grad.new_empty(tokens_per_expert.shape[-1], grad.shape[1], rows.shape[1])
    idle = set(range(out.shape[0]))
    for expert, (first, *others) in rows_by_expert("grouped_linear_wgrad", tokens_per_expert, rows):
        torch.mm(grad[first].t(), rows[first], out=out[expert])
        for span in others:
            out[expert].addmm_(grad[span].t(), rows[span])
        idle.remove(expert)
    for expert in idle:
        out[expert].zero_()
    return out


mm = products.mm

# ---- unpermute ---------------------------------------------------------------------------------------------


def unpermute(rows: Tensor, row_map: Tensor, num_tokens: int, top_k: int, probs: Tensor | None = None) -> Tensor:
    """`moe::unpermute` as one bag of rows per token: rows are read once and no weighted copy is made."""
    check_unpermute("unpermute", rows, row_map, num_tokens, top_k, probs)
    num_choices = num_tokens * top_k
    check_rows("unpermute", rows, row_map, num_choices)
    mixed = rows.dtype not in FULL_PRECISION or (probs is not None and probs.dtype != rows.dtype)
    if mixed or rows.numel() == 0 or may_have_padding(row_map):
        reference: Tensor = ops.unpermute(rows, row_map, num_tokens, top_k, probs)
        return reference
    inverse = torch.full((num_choices,), -1, dtype=torch.int64)
    inverse[row_map] = torch.arange(rows.shape[0])
    offsets = torch.arange(0, num_choices, top_k)
    weights = None if probs is None else probs.reshape(-1)
    if rows.shape[0] < num_choices:  # some choices have no row: their token's bag is smaller
        present = inverse >= 0
        sizes = present.view(num_tokens, top_k).sum(1)
        inverse, offsets = inverse[present], sizes.cumsum(0) - sizes
        weights = None if weights is None else weights[present]
    return torch.nn.functional.embedding_bag(inverse, rows, offsets, mode="sum", per_sample_weights=weights)


def unpermute_backward(grad: Tensor, rows: Tensor, row_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """`moe::unpermute_backward` with one gathered copy, scaled in place after its dot products were taken."""
    check_unpermute_backward(grad, rows, row_map, probs)
    check_rows("unpermute_backward", rows, row_map, probs.numel())
    mixed = rows.dtype not in FULL_PRECISION or not (grad.dtype == rows.dtype == probs.dtype)
    if mixed or rows.numel() == 0 or may_have_padding(row_map):
        reference: tuple[Tensor, Tensor] = ops.unpermute_backward(grad, rows, row_map, probs)
        return reference
    grad_rows = grad.index_select(0, row_map // probs.shape[1])
    dots = torch.linalg.vecdot(grad_rows, rows)
    grad_probs = dots.new_zeros(probs.numel())
    grad_probs[row_map] = dots
    grad_rows.mul_(probs.reshape(-1).index_select(0, row_map).unsqueeze(1))
    return grad_rows, grad_probs.view(probs.shape)


# ---- swiglu ------------------------------------------------------------------------------------------------
# Order of arithmetic is that of ATen's silu, mul and silu_backward. Blocks are copied to dense scratch, where silu is
# vectorized; it is not on the halves of a wider tensor.


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    check_silu_mul(gate, up)
    activated: Tensor = aten.silu.out(gate, out=torch.empty_like(gate))
    return activated.mul_(up)


def swiglu(h: Tensor) -> Tensor:
    """silu(gate) * up for h = [gate|up] along the last dimension."""
    check_swiglu(h)
    width = h.shape[-1]
    out = h.new_empty(*h.shape[:-1], width // 2)
    if not h.numel():
        return out
    gate, up = h.reshape(-1, width).chunk(2, 1)
    step = max(1, BLOCK_ELEMENTS // max(width // 2, 1))
    for o, g, u in zip(*(torch.split(t, step) for t in (out.view(-1, width // 2), gate, up)), strict=True):
        o.copy_(g)
        aten.silu_.default(o)
        o.mul_(u)
    return out


def _write_silu_mul_grads(grad: Tensor, gate: Tensor, up: Tensor, grad_gate: Tensor, grad_up: Tensor) -> None:
    """Fill the last two arguments block by block; all are [R, F]."""
    num_rows, width = gate.shape
    step = max(1, min(num_rows, BLOCK_ELEMENTS // max(width, 1)))
    scratch = gate.new_empty(2, step, width)
    blocks = (torch.split(t, step) for t in (grad, gate, up, grad_gate, grad_up))
    for d, g, u, out_g, out_u in zip(*blocks, strict=True):
        dense, s = scratch[0, : g.shape[0]].copy_(g), scratch[1, : g.shape[0]]
        aten.silu.out(dense, out=s)
        torch.mul(d, s, out=out_u)
        torch.mul(d, u, out=s)
        aten.silu_backward.grad_input(s, dense, grad_input=s)
        out_g.copy_(s)


def silu_mul_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    check_silu_mul(gate, up)
    grad_gate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    grad_up = torch.empty_like(up, memory_format=torch.contiguous_format)
    if gate.numel():
        flat = [t.reshape(-1, gate.shape[-1]) for t in (grad, gate, up, grad_gate, grad_up)]
        _write_silu_mul_grads(*flat)
    return grad_gate, grad_up


def swiglu_backward(grad: Tensor, h: Tensor) -> Tensor:
    check_swiglu(h)
    grad_h = torch.empty_like(h, memory_format=torch.contiguous_format)
    width = h.shape[-1]
    if h.numel():
        gate, up = h.reshape(-1, width).chunk(2, 1)
        grad_gate, grad_up = grad_h.view(-1, width).chunk(2, 1)
        _write_silu_mul_grads(grad.reshape(-1, width // 2), gate, up, grad_gate, grad_up)
    return grad_h


# ---- rms_norm ----------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y = (x * rstd, rounded to x's dtype) * weight; rstd = 1 / sqrt(mean(x^2) + eps), float32 or wider."""
    check_rms_norm(x, weight)
    wide = x.to(statistics_dtype(x))
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # the fastest reduction of squares there is here
    rstd = length.square_().div_(max(x.shape[-1], 1)).add_(eps).rsqrt_()
    y = torch.empty_like(x)
    normed = torch.mul(wide, rstd, out=y) if wide is x else y.copy_(wide * rstd)
    return normed.mul_(weight), rstd.contiguous()


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """grad_x = rstd * (d - n * mean(d * n)) and grad_weight = sum(grad * n).

    Here n = x * rstd and d = grad * weight.
    """
    check_rms_norm(x, weight)
    width = x.shape[-1]
    g, wide_x = (t.reshape(-1, width).to(rstd.dtype) for t in (grad, x))
    r, w = rstd.reshape(-1, 1), weight.to(rstd.dtype)
    buffer = torch.mul(g, wide_x).mul_(r)  # grad * n
    grad_weight = buffer.sum(0)
    slope = torch.linalg.vecdot(buffer, w).unsqueeze(1).mul_(r).mul_(r).div_(-max(width, 1))
    grad_x = torch.mul(g, w, out=buffer).mul_(r).addcmul_(wide_x, slope).view(x.shape).to(x.dtype)
    like_x = grad_x if x.is_contiguous() else torch.empty_like(x).copy_(grad_x)
    return like_x, grad_weight.to(weight.dtype)


# ---- rotary ------------------------------------------------------------------------------------------------


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x * cos + (-x2, x1) * sin, in three passes over x in the order in which it lies in memory."""
    check_rotary(x, cos, sin)
    half = x.shape[-1] // 2
    order = [*sorted(range(x.dim() - 1), key=lambda dim: -x.stride()[dim]), x.dim() - 1]
    # The angles are spread out but for the outermost dimensions that share them: long inner loops without broadcasting.
    shared = 0
    while shared < x.dim() - 1 and cos.shape[order[shared]] == 1:
        shared += 1
    lies, angles = x.permute(order), [t.permute(order) for t in (cos, sin)]
    spread = [*angles[0].shape[:shared], *lies.shape[shared:]]
    cos, sin = (t.expand(spread).contiguous() for t in angles)
    sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)
    turned = torch.mul(lies, cos).addcmul_(torch.roll(lies, half, -1), sin)
    out = turned.permute([order.index(dim) for dim in range(x.dim())])
    return out if out.stride() == torch.empty_like(x).stride() else torch.empty_like(x).copy_(out)


# ---- registration ------------------------------------------------------------------------------------------


def refusing_gradients(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, which raises where autograd would go on recording: it writes in place and has no gradient."""

    def run(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
            raise RuntimeError(
                f"moe_cpu::{kernel.__name__}: an argument requires a gradient, but the op has none; call it under "
                "torch.no_grad(), or use the moe:: or ATen op it replaces."
            )
        return kernel(*args)

    return run


for _kernel in (
    grouped_linear,
    grouped_linear_wgrad,
    grouped_mlp,
    grouped_mlp_backward,
    causal_attention,
    causal_attention_backward,
    mm,
    unpermute,
    unpermute_backward,
    swiglu,
    swiglu_backward,
    silu_mul,
    silu_mul_backward,
    rms_norm,
    rms_norm_backward,
    rotary,
):
    LIBRARY.impl(_kernel.__name__, refusing_gradients(_kernel), "CPU")  # type: ignore[no-untyped-call]
