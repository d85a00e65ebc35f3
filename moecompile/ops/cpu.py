"""The `moe_cpu::` ops: what the CPU lowering puts in place of `moe::` and ATen ops of an already
differentiated graph.

Schemas and shape rules only; `moecompile.runtime.cpu_kernels` holds the kernels.  Ops named like a `moe::` op
mean the same. None has a gradient: they enter a graph after its backward has been written out.
"""

from typing import Any

import torch
from torch import Tensor

from moecompile.compat import OpOverload
from moecompile.ops import fused
from moecompile.ops.experts import check_grouped_linear, check_grouped_linear_wgrad
from moecompile.ops.registry import Op, require
from moecompile.ops.routing import check_unpermute, check_unpermute_backward

NAMESPACE = "moe_cpu"
# Queries of a block of causal_attention: fewer make small products, more compute more scores that the mask throws away.
BLOCK_QUERIES = 64
LIBRARY = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]


def _define(schema: str, fake: Op) -> OpOverload[..., Any]:
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    overload: OpOverload[..., Any] = getattr(getattr(torch.ops, NAMESPACE), name).default
    return overload


# ---- the meaning of moe:: ----------------------------------------------------------------------------------


def _grouped_linear_fake(rows: Tensor, tokens_per_expert: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    check_grouped_linear(rows, tokens_per_expert, weight, bias)
    return rows.new_empty(rows.shape[0], weight.shape[1])


def _grouped_linear_wgrad_fake(grad: Tensor, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
    check_grouped_linear_wgrad(grad, rows, tokens_per_expert)
    return grad.new_empty(tokens_per_expert.shape[-1], grad.shape[1], rows.shape[1])


def _unpermute_fake(rows: Tensor, row_map: Tensor, num_tokens: int, top_k: int, probs: Tensor | None = None) -> Tensor:
    check_unpermute("unpermute", rows, row_map, num_tokens, top_k, probs)
    return rows.new_empty(num_tokens, rows.shape[1])


def _unpermute_backward_fake(grad: Tensor, rows: Tensor, row_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    check_unpermute_backward(grad, rows, row_map, probs)
    return rows.new_empty(rows.shape), probs.new_empty(probs.shape)


grouped_linear = _define(
    "grouped_linear(Tensor rows, Tensor tokens_per_expert, Tensor weight, Tensor? bias=None) -> Tensor",
    _grouped_linear_fake,
)
grouped_linear_wgrad = _define(
    "grouped_linear_wgrad(Tensor grad, Tensor rows, Tensor tokens_per_expert) -> Tensor",
    _grouped_linear_wgrad_fake,
)
unpermute = _define(
    "unpermute(Tensor rows, Tensor row_map, SymInt num_tokens, int top_k, Tensor? probs=None) -> Tensor",
    _unpermute_fake,
)
unpermute_backward = _define(
    "unpermute_backward(Tensor grad, Tensor rows, Tensor row_map, Tensor probs) -> (Tensor grad_rows, "
    "Tensor grad_probs)",
    _unpermute_backward_fake,
)


def check_grouped_mlp(rows: Tensor, tokens_per_expert: Tensor, w_in: Tensor, w_out: Tensor) -> None:
    """What grouped_mlp demands of its arguments, except that the counts add up to the rows."""
    check_grouped_linear(rows, tokens_per_expert, w_in, None)
    require(
        w_out.dim() == 3 and w_out.shape[0] == w_in.shape[0] and w_in.shape[1] == 2 * w_out.shape[2],
        f"moe_cpu::grouped_mlp: w_out has shape {list(w_out.shape)}, but [E, H, F] for w_in [E, 2F, H] = "
        f"{list(w_in.shape)} is needed; stack gate over up in w_in.",
    )
    require(
        rows.dtype == w_out.dtype and rows.dtype in (torch.float32, torch.float64),
        f"moe_cpu::grouped_mlp: rows are {rows.dtype} and w_out is {w_out.dtype}, but both must be float32 or float64; use "
        "grouped_linear and swiglu for others.",
    )


def _grouped_mlp_fake(rows: Tensor, tokens_per_expert: Tensor, w_in: Tensor, w_out: Tensor) -> tuple[Tensor, Tensor]:
    check_grouped_mlp(rows, tokens_per_expert, w_in, w_out)
    return rows.new_empty(rows.shape[0], w_out.shape[1]), rows.new_empty(2, rows.shape[0], w_out.shape[2])


def _grouped_mlp_backward_fake(
    grad: Tensor, rows: Tensor, tokens_per_expert: Tensor, w_in: Tensor, w_out: Tensor, h: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    check_grouped_mlp(rows, tokens_per_expert, w_in, w_out)
    contiguous = torch.contiguous_format
    return (
        torch.empty_like(rows, memory_format=contiguous),
        torch.empty_like(w_in, memory_format=contiguous),
        torch.empty_like(w_out, memory_format=contiguous),
    )


# grouped_linear(swiglu(h), w_out) of h = grouped_linear(rows, w_in); the backward takes h as [2, R, F], gate and up
grouped_mlp = _define(
    "grouped_mlp(Tensor rows, Tensor tokens_per_expert, Tensor w_in, Tensor w_out) -> (Tensor y, Tensor h)",
    _grouped_mlp_fake,
)
grouped_mlp_backward = _define(
    "grouped_mlp_backward(Tensor grad, Tensor rows, Tensor tokens_per_expert, Tensor w_in, Tensor w_out, Tensor h) -> "
    "(Tensor grad_rows, Tensor grad_w_in, Tensor grad_w_out)",
    _grouped_mlp_backward_fake,
)

# ---- attention ---------------------------------------------------------------------------------------------


def check_causal_attention(query: Tensor, key: Tensor, value: Tensor) -> None:
    """What causal_attention demands of its operands."""
    require(
        query.dim() == 4 and query.shape == key.shape == value.shape,
        f"moe_cpu::causal_attention: query, key and value have shapes {list(query.shape)}, {list(key.shape)} and "
        f"{list(value.shape)}, but one shape [B, h, S, D] is needed; use scaled_dot_product_attention for others.",
    )
    require(
        query.dtype == key.dtype == value.dtype and query.dtype in (torch.float32, torch.float64),
        f"moe_cpu::causal_attention: query is {query.dtype}, key {key.dtype} and value {value.dtype}, but all must be "
        "float32 or all float64; use scaled_dot_product_attention for others.",
    )


def attention_elements(heads: int, length: int) -> int:
    """Probabilities of one sequence: each block of queries has those of the keys up to its own last one."""
    whole, rest = length // BLOCK_QUERIES, length % BLOCK_QUERIES  # no divmod: a length may be a symbol
    return heads * (BLOCK_QUERIES**2 * whole * (whole + 1) // 2 + rest * length)


def _causal_attention_fake(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    check_causal_attention(query, key, value)
    batch, heads, length, width = query.shape
    out = query.new_empty(batch, length, heads, width).transpose(1, 2)
    return out, query.new_empty(batch, attention_elements(heads, length))


def _causal_attention_backward_fake(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, probs: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    check_causal_attention(query, key, value)
    batch, heads, length, width = query.shape
    gradients = [query.new_empty(batch, length, heads, width).transpose(1, 2) for _ in range(3)]
    return gradients[0], gradients[1], gradients[2]


# causal scaled_dot_product_attention, with its probabilities, which the backward takes
causal_attention = _define(
    "causal_attention(Tensor query, Tensor key, Tensor value, float scale) -> (Tensor out, Tensor probs)",
    _causal_attention_fake,
)
causal_attention_backward = _define(
    "causal_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor probs, float scale) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    _causal_attention_backward_fake,
)

# ---- plain products ----------------------------------------------------------------------------------------


def _mm_fake(a: Tensor, b: Tensor) -> Tensor:
    require(
        a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0],
        f"moe_cpu::mm: operands of shapes {list(a.shape)} and {list(b.shape)}, but [M, K] and [K, N] are needed.",
    )
    return a.new_empty(a.shape[0], b.shape[1])


mm = _define("mm(Tensor a, Tensor b) -> Tensor", _mm_fake)

# ---- chains of elementwise ops: the meaning of moe:: of the same name --------------------------------------

swiglu = _define("swiglu(Tensor h) -> Tensor", fused.swiglu_fake)
swiglu_backward = _define("swiglu_backward(Tensor grad, Tensor h) -> Tensor", fused.swiglu_backward_fake)
silu_mul = _define("silu_mul(Tensor gate, Tensor up) -> Tensor", fused.silu_mul_fake)
silu_mul_backward = _define(
    "silu_mul_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor grad_gate, Tensor grad_up)",
    fused.silu_mul_backward_fake,
)
rms_norm = _define("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor y, Tensor rstd)", fused.rms_norm_fake)
rms_norm_backward = _define(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor rstd) -> (Tensor grad_x, Tensor grad_weight)",
    fused.rms_norm_backward_fake,
)
rotary = _define("rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor", fused.rotary_fake)
