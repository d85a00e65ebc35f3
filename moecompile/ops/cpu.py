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
