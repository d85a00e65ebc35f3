"""Chains of elementwise ops as one op each: swiglu, silu_mul, rms_norm, rotary.

The fusing passes put them in place of a model's own ATen chains once these are local to a rank; a backend then has one op to
replace instead of a pattern, and autograd keeps the inputs only, not every step between.  The kernels here are the plain
formulas.  F width of half of h, H normalised width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moecompile.ops.registry import Op, define, require, require_same_dtype

aten = torch.ops.aten


def through(formula: Op, inputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Gradients of a plain formula, written by autograd: what the gradient of a gradient op needs, which no step runs."""
    with torch.enable_grad():
        leaves = [item.detach().requires_grad_(item.is_floating_point()) for item in inputs]
        found = formula(*leaves)
        outputs = found if isinstance(found, tuple) else (found,)
        pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
        return torch.autograd.grad(
            [out for out, _ in pairs], leaves, [grad for _, grad in pairs], create_graph=True, allow_unused=True
        )


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _silu_grad(grad: Tensor, gate: Tensor) -> Tensor:
    """silu'(gate) * grad, with ATen's own op, or written out where it has to be differentiable again."""
    if not torch.is_grad_enabled():
        found: Tensor = aten.silu_backward.default(grad, gate)
        return found
    s = torch.sigmoid(gate)
    return grad * s * (1 + gate * (1 - s))


# ---- swiglu: the two halves of one tensor ------------------------------------------------------------------


def check_swiglu(h: Tensor) -> None:
    require(
        h.dim() >= 1 and h.shape[-1] % 2 == 0,
        f"moe::swiglu: h has shape {list(h.shape)}, but an even last dimension [gate|up] is needed; use silu_mul for "
        "separate tensors.",
    )


def _swiglu(h: Tensor) -> Tensor:
    """silu(gate) * up for h = [gate|up] along the last dimension: [..., 2F] -> [..., F]."""
    check_swiglu(h)
    gate, up = h.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def swiglu_fake(h: Tensor) -> Tensor:
    check_swiglu(h)
    return h.new_empty(*h.shape[:-1], h.shape[-1] // 2)


def _swiglu_grad(grad: Tensor, h: Tensor) -> Tensor:
    """grad [..., F], h [..., 2F] -> [..., 2F]."""
    check_swiglu(h)
    gate, up = h.chunk(2, -1)
    return torch.cat([_silu_grad(grad * up, gate), grad * torch.nn.functional.silu(gate)], -1)


def swiglu_backward_fake(grad: Tensor, h: Tensor) -> Tensor:
    check_swiglu(h)
    return h.new_empty(h.shape)


swiglu_backward = define(
    "swiglu_backward(Tensor grad, Tensor h) -> Tensor",
    _swiglu_grad,
    swiglu_backward_fake,
    setup=_save_inputs,
    backward=lambda ctx, grad: through(_swiglu_grad, ctx.saved_tensors, [grad]),
)
swiglu = define(
    "swiglu(Tensor h) -> Tensor",
    _swiglu,
    swiglu_fake,
    setup=_save_inputs,
    backward=lambda ctx, grad: swiglu_backward(grad, ctx.saved_tensors[0]),
)

# ---- silu_mul: the same with gate and up apart -------------------------------------------------------------


def check_silu_mul(gate: Tensor, up: Tensor) -> None:
    require(
        gate.shape[1:] == up.shape[1:] and gate.dim() == up.dim() >= 1,
        f"moe::silu_mul: gate has shape {list(gate.shape)} and up {list(up.shape)}, but they must agree; broadcast before.",
    )
    require_same_dtype("silu_mul", "gate", gate, "up", up)


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, laid out like gate."""
    check_silu_mul(gate, up)
    return torch.empty_like(gate).copy_(torch.nn.functional.silu(gate) * up)


def silu_mul_fake(gate: Tensor, up: Tensor) -> Tensor:
    check_silu_mul(gate, up)
    return torch.empty_like(gate)


def _silu_mul_grads(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    check_silu_mul(gate, up)
    return _silu_grad(grad * up, gate), grad * torch.nn.functional.silu(gate)


def silu_mul_backward_fake(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    check_silu_mul(gate, up)
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


silu_mul_backward = define(
    "silu_mul_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor grad_gate, Tensor grad_up)",
    _silu_mul_grads,
    silu_mul_backward_fake,
    setup=_save_inputs,
    backward=lambda ctx, *grads: through(_silu_mul_grads, ctx.saved_tensors, grads),
)
silu_mul = define(
    "silu_mul(Tensor gate, Tensor up) -> Tensor",
    _silu_mul,
    silu_mul_fake,
    setup=_save_inputs,
    backward=lambda ctx, grad: silu_mul_backward(grad, *ctx.saved_tensors),
)

# ---- rms_norm over the last dimension ----------------------------------------------------------------------


def check_rms_norm(x: Tensor, weight: Tensor) -> None:
    require(
        x.dim() >= 1 and tuple(weight.shape) == (x.shape[-1],),
        f"moe::rms_norm: x has shape {list(x.shape)} and weight {list(weight.shape)}, but [..., H] and [H] are needed; "
        "normalise over the last dimension only.",
    )
    require_same_dtype("rms_norm", "x", x, "weight", weight)


def statistics_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the mean of squares: float32 or wider."""
    return torch.promote_types(x.dtype, torch.float32)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y = (x * rstd, rounded to x's dtype) * weight, laid out like x; and rstd = 1 / sqrt(mean(x^2) + eps), [..., 1]."""
    check_rms_norm(x, weight)
    wide = x.to(statistics_dtype(x))
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return torch.empty_like(x).copy_((wide * rstd).to(x.dtype) * weight), rstd.contiguous()


def rms_norm_fake(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    check_rms_norm(x, weight)
    return torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=statistics_dtype(x))


def _rms_norm_grads(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """grad_x = rstd * (d - n * mean(d * n)), grad_weight = sum(grad * n), where n = x * rstd and d = grad * weight."""
    check_rms_norm(x, weight)
    wide = x.to(rstd.dtype)
    n = wide * rstd
    d = (grad * weight).to(rstd.dtype)
    grad_x = rstd * (d - n * (d * n).mean(-1, keepdim=True))
    grad_weight = (grad * n.to(grad.dtype)).reshape(-1, x.shape[-1]).sum(0, dtype=rstd.dtype)
    return torch.empty_like(x).copy_(grad_x), grad_weight.to(weight.dtype)


def rms_norm_backward_fake(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    check_rms_norm(x, weight)
    return torch.empty_like(x), weight.new_empty(weight.shape)


def _rms_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, output[1])


def _rms_norm_backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor, None]:
    return (*rms_norm_backward(grad, *ctx.saved_tensors), None)


def _rms_norm_second(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad, x, weight, rstd = ctx.saved_tensors

    def formula(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        # rstd depends on x. It was saved without eps, which is what is left of 1/rstd^2 after the mean of squares.
        wide = x.to(rstd.dtype)
        eps = (rstd.pow(-2) - x.detach().to(rstd.dtype).pow(2).mean(-1, keepdim=True)).detach()
        return _rms_norm_grads(grad, x, weight, torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps))

    return (*through(formula, (grad, x, weight), grads), None)


rms_norm_backward = define(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor rstd) -> (Tensor grad_x, Tensor grad_weight)",
    _rms_norm_grads,
    rms_norm_backward_fake,
    setup=_save_inputs,
    backward=_rms_norm_second,
)
rms_norm = define(
    "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor y, Tensor rstd)",
    _rms_norm,
    rms_norm_fake,
    setup=_rms_norm_setup,
    backward=_rms_norm_backward,
)

# ---- rotary position embedding -----------------------------------------------------------------------------


def check_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    require(
        x.dim() >= 2 and cos.dim() == sin.dim() == x.dim() and cos.shape == sin.shape and x.shape[-1] % 2 == 0,
        f"moe::rotary: x has shape {list(x.shape)}, cos {list(cos.shape)} and sin {list(sin.shape)}, but cos and sin must "
        "be alike, have x's dimensions and broadcast to x, whose last is even.",
    )
    require_same_dtype("rotary", "x", x, "cos", cos)


def _rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x * cos + (-x2, x1) * sin for x = (x1, x2) along the last dimension; the result is laid out like x."""
    check_rotary(x, cos, sin)
    first, second = x.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return torch.empty_like(x).copy_(x * cos + turned * sin)


def rotary_fake(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    check_rotary(x, cos, sin)
    return torch.empty_like(x)


def _rotary_setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _rotary_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    # The transpose of the rotation is a rotation again, by the opposite angle: the halves of sin change place and sign.
    cos, sin = ctx.saved_tensors
    first, second = sin.chunk(2, -1)
    return rotary(grad, cos, torch.cat((-second, -first), -1)), None, None


rotary = define(
    "rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    _rotary,
    rotary_fake,
    setup=_rotary_setup,
    backward=_rotary_backward,
)
