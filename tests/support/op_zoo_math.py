"""Kinds of operations on what a linear gives: elementwise, over the sequence, over the batch, indices, linear algebra, complex numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.op_zoo import LENGTH, WIDTH, Kind, after, linear

D, S = WIDTH, LENGTH


def _eye(size: int = D) -> Tensor:
    return torch.eye(size, dtype=torch.float64)


def weights(change: Any, **options: Any) -> Kind:
    """Tokens times what is made of a linear's weight."""
    return Kind(linear, lambda layer, x: x @ change(layer.weight) + layer.bias, **options)


def _complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (4, 2)).contiguous())


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x).flatten(-2)


def _rows(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0])


def _written(h: Tensor, x: Tensor) -> Tensor:
    h = h.clone()
    h[:, 1:] = h[:, 1:] + x[:, :-1]
    h[:, 0].zero_()
    h[..., 0] *= 2
    return h


def _masked(h: Tensor, x: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    mask = x[..., 0] > 0
    out[mask] = h[mask] * 2
    return out


def _rank_of_tokens(h: Tensor, x: Tensor) -> Tensor:
    return h * x.sum(-1).argsort(1).argsort(1)[..., None]


def _segments(h: Tensor, x: Tensor) -> Tensor:
    """Mean of each of two kinds of tokens, in the whole batch, back at its tokens."""
    kind = (x[..., 0] > 0).long().flatten()
    flat = h.flatten(0, 1)
    total = torch.zeros(2, D, dtype=h.dtype).index_add(0, kind, flat)
    count = torch.zeros(2, dtype=h.dtype).index_add(0, kind, torch.ones_like(flat[:, 0])).clamp(min=1)[:, None]
    return (total / count)[kind].reshape(h.shape)


def _segments_of_a_sequence(h: Tensor, x: Tensor) -> Tensor:
    at = (x[..., :1] > 0).long().expand_as(h)
    return (
        torch.zeros(h.shape[0], 2, D, dtype=h.dtype).scatter_reduce(1, at, h, "mean", include_self=False).gather(1, at)
    )


def _no_grad(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = layer(x)
    return h * x


def _hooked(h: Tensor, x: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda grad: grad * 2)
    return h


class Clipped(torch.autograd.Function):
    """A step whose gradient is that of a line."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1)


class Scaled(torch.autograd.Function):
    """Gradients by their own mean over the whole batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / (1 + grad.abs().mean())


def _energy(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.func.grad(lambda part: layer(part).square().sum())(x)


def _called(layer: nn.Module, x: Tensor) -> Tensor:
    halved = {name: param / 2 for name, param in layer.named_parameters()}
    return torch.func.functional_call(layer, halved, (x,))


_UNARY: dict[str, Any] = {
    "cumsum": lambda h: h.cumsum(1),
    "cumsum of the batch": lambda h: h.cumsum(0),
    "cumsum of width": lambda h: h.cumsum(-1),
    "cumsum of tokens": lambda h: h.flatten(0, 1).cumsum(0).reshape(h.shape) / 10,
    "cumprod": lambda h: h.cumprod(1),
    "logcumsumexp": lambda h: h.logcumsumexp(1),
    "logcumsumexp of the batch": lambda h: h.logcumsumexp(0),
    "cummax": lambda h: h.cummax(1).values,
    "cummin": lambda h: h.cummin(1).values,
    "prod": lambda h: h.prod(1, keepdim=True).expand_as(h),
    "diff": lambda h: F.pad(h.diff(dim=1), (0, 0, 1, 0)),
    "sort": lambda h: h.sort(1).values,
    "sort of width": lambda h: h.sort(-1, descending=True).values,
    "sort of the batch": lambda h: h.sort(0).values,
    "sort stable": lambda h: h.sort(dim=1, stable=True).values,
    "msort of tokens": lambda h: torch.msort(h.flatten(0, 1)).reshape(h.shape),
    "topk": lambda h: h.topk(2, dim=-1).values.sum(-1, keepdim=True).expand_as(h),
    "topk of the batch": lambda h: h + h.topk(2, dim=0).values.sum(0),
    "kthvalue": lambda h: h - h.kthvalue(2, dim=-1, keepdim=True).values,
    "median": lambda h: h - h.median(1, keepdim=True).values,
    "median of all": lambda h: h - h.median(),
    "nanmedian": lambda h: h - h.nanmedian(1, keepdim=True).values,
    "mode": lambda h: h - (h * 2).round().mode(1, keepdim=True).values,
    "quantile": lambda h: h - h.quantile(0.3, dim=1, keepdim=True),
    "quantile of the batch": lambda h: h - h.quantile(0.3, dim=0, keepdim=True),
    "quantile of all": lambda h: h - h.quantile(0.9),
    "flip": lambda h: h.flip(1),
    "flip of the batch": lambda h: h.flip(0),
    "roll": lambda h: h.roll(1, 1),
    "roll of the batch": lambda h: h.roll(1, 0),
    "roll of two dims": lambda h: h.roll((1, 2), (1, 2)),
    "rot90": lambda h: h.rot90(2, (1, 2)),
    "std of the batch": lambda h: h / h.std(dim=0, keepdim=True),
    "var of all": lambda h: (h - h.mean()) / h.var().sqrt(),
    "std_mean": lambda h: h - torch.std_mean(h, dim=-1, keepdim=True)[1],
    "mean of the batch": lambda h: h - h.mean((0, 1)),
    "sum of the batch": lambda h: h + h.sum(0),
    "norm of all": lambda h: h / h.norm(),
    "norm inf": lambda h: h / h.norm(p=float("inf"), dim=-1, keepdim=True),
    "norm 1": lambda h: h / torch.linalg.vector_norm(h, 1, dim=1, keepdim=True),
    "norm of matrices": lambda h: h / torch.linalg.matrix_norm(h)[:, None, None],
    "maximum of all": lambda h: h / h.abs().max(),
    "amax of the batch": lambda h: h - h.amax(0),
    "aminmax": lambda h: h - torch.aminmax(h, dim=-1, keepdim=True)[0],
    "softmax of the batch": lambda h: h.softmax(0),
    "logsumexp of all": lambda h: h - h.logsumexp((0, 1)),
    "normalize": lambda h: F.normalize(h, dim=1),
    "renorm": lambda h: torch.renorm(h, 2, 0, 1.0),
    "log1p exp": lambda h: h.exp().log1p(),
    "erf": lambda h: h.erf() + h.erfc() * 0.5 + h.expm1(),
    "erfinv": lambda h: torch.erfinv(h.tanh() * 0.5),
    "lgamma": lambda h: torch.lgamma(h.abs() + 1) + torch.digamma(h.abs() + 1),
    "polygamma": lambda h: torch.polygamma(1, h.abs() + 1),
    "special": lambda h: torch.special.i0e(h) + torch.special.ndtri(h.sigmoid()) + torch.special.entr(h.sigmoid()),
    "sinc": torch.sinc,
    "logit": lambda h: torch.logit(h.sigmoid(), 1e-6),
    "fractions": lambda h: h.frac() + torch.fmod(h, 0.7) + torch.remainder(h, 0.7),
    "nan_to_num": lambda h: h.nan_to_num(),
    "sgn": lambda h: h.sgn() * h,
    "sign": lambda h: h.sign() * h,
    "power": lambda h: (h.abs() + 0.1) ** 0.5 + 2**h,
    "outer": lambda h: (h[..., :, None] * h[..., None, :]).sum(-1),
    "diagonal": lambda h: (h[..., None] * h[..., None, :]).diagonal(dim1=-2, dim2=-1),
    "diag_embed": lambda h: torch.diag_embed(h).sum(-1),
    "vander": lambda h: torch.linalg.vander(h[..., 0], N=D),
    "movedim": lambda h: h.movedim(1, 2).softmax(-1).movedim(2, 1),
    "tile": lambda h: h[:, :3].tile(1, 2, 1),
    "repeat_interleave": lambda h: h[:, ::2].repeat_interleave(2, 1),
    "as_strided": lambda h: h.as_strided((h.shape[0], S, D), (S * D, D, 1)),
    "unflatten": lambda h: h.unflatten(-1, (2, 4)).flip(-2).flatten(-2),
    "split": lambda h: torch.cat(h.split([2, 4], 1)[::-1], 1),
    "tensor_split": lambda h: torch.cat(h.tensor_split(3, -1)[::-1], -1),
    "chunk and stack": lambda h: torch.stack(h.chunk(2, -1), -1).flatten(-2),
    "unbind": lambda h: torch.stack(list(h.unbind(1))[::-1], 1),
    "unbind of the batch": lambda h: torch.stack(list(h.unbind(0))[::-1], 0),
    "first sequence": lambda h: h - h[0],
    "last sequence": lambda h: h * h[-1:].sigmoid(),
    "other half of the batch": lambda h: torch.cat([h[2:], h[:2]]),
    "pairs of the batch": lambda h: h.unflatten(0, (-1, 2)).flip(1).flatten(0, 1),
    "pairs of the batch averaged": lambda h: (
        h.unflatten(0, (-1, 2)).mean(1, keepdim=True).expand(-1, 2, -1, -1).flatten(0, 1)
    ),
    "batch as columns": lambda h: h.reshape(h.shape[0], -1).t().softmax(-1).t().reshape(h.shape),
    "other shape of the batch": lambda h: h.reshape(2, -1, D).cumsum(1).reshape(h.shape) / 5,
    "gram": lambda h: h @ (h.flatten(0, 1).t() @ h.flatten(0, 1)) / 24,
    "max_pool2d": lambda h: F.max_pool2d(h[:, None], 3, 1, 1)[:, 0],
    "adaptive_avg_pool2d": lambda h: F.adaptive_avg_pool2d(h[:, None], (3, 4))[:, 0].repeat(1, 2, 2),
    "interpolate bilinear": lambda h: F.interpolate(h[:, None], scale_factor=2, mode="bilinear")[:, 0, ::2, ::2],
    "conv2d fixed": lambda h: F.conv2d(h[:, None], torch.ones(1, 1, 3, 3, dtype=h.dtype), padding=1)[:, 0],
    "rfft": lambda h: torch.fft.irfft(torch.fft.rfft(h, dim=1) * 0.5, n=S, dim=1),
    "rfft size": lambda h: h + torch.fft.rfft(h, dim=-1).abs().sum(-1, keepdim=True),
    "fft2": lambda h: torch.fft.fft2(h, norm="ortho").real,
    "fft of the batch": lambda h: torch.fft.fft(h, dim=0).real,
    "hilbert": lambda h: torch.fft.ifft(torch.fft.fft(h, dim=1) * (torch.arange(S) < 4)[:, None], dim=1).imag,
    "complex turn": lambda h: _real(
        _complex(h) * torch.polar(torch.ones(4, dtype=h.dtype), torch.arange(4, dtype=h.dtype))
    ),
    "complex turn by position": lambda h: _real(
        _complex(h) * torch.polar(torch.ones(S, 1, dtype=h.dtype), torch.arange(S, dtype=h.dtype)[:, None])
    ),
    "complex product": lambda h: _real(_complex(h) * _complex(h).conj().roll(1, -1)),
    "complex angle": lambda h: torch.complex(h, h.roll(1, -1)).angle(),
    "complex cumprod": lambda h: _real(_complex(h).cumprod(1)),
    "relu_ in place": lambda h: h.mul_(2).relu_(),
    "straight through": lambda h: h + (h.round() - h).detach(),
    "custom function": Clipped.apply,
    "custom function of the batch": Scaled.apply,
    "vmap": lambda h: torch.vmap(lambda row: row.softmax(0) * row.sum())(h),
    "vmap of two dims": lambda h: torch.vmap(torch.vmap(lambda row: row / row.norm()))(h),
    "vmap over the sequence": lambda h: torch.vmap(lambda part: part.cumsum(0), in_dims=1, out_dims=1)(h),
    "bool": lambda h: h * (h > 0),
    "int": lambda h: h * (h * 10).int(),
    "where": lambda h: torch.where(h > 0, h, 0.1 * h),
    "detached": lambda h: h - h.detach() + h * h.detach(),
    "half precision": lambda h: h.bfloat16().to(h.dtype),
    "hann_window": lambda h: h * torch.hann_window(S, dtype=h.dtype)[:, None],
    "tril of scores": lambda h: torch.tril(h @ h.transpose(1, 2)).softmax(-1) @ h,
    "python number of the batch": lambda h: h * (h.shape[0] / 10) + h.size(1),
    "linspace over the batch": lambda h: h * torch.linspace(0, 1, h.shape[0], dtype=h.dtype)[:, None, None],
    "numbers of sequences": lambda h: h * torch.arange(h.shape[0])[:, None, None],
}

_BINARY: dict[str, Any] = {
    "einsum of scores": lambda h, x: torch.einsum("bsd,btd,bte->bse", h, h, x),
    "einsum of any dims": lambda h, x: torch.einsum("...d,...d->...", h, x)[..., None] * x,
    "einsum diagonal": lambda h, x: torch.einsum("bii->bi", h @ x.transpose(1, 2))[..., None] * x,
    "einsum with a repeated batch": lambda h, x: torch.einsum("bsd,csd->sbc", h, x).sum(-1).t()[..., None] * x / 10,
    "einsum of heads": lambda h, x: (
        torch.einsum("bsnd,btnd->bnst", h.unflatten(-1, (2, 4)), x.unflatten(-1, (2, 4))).mean(1) @ x
    ),
    "baddbmm": lambda h, x: torch.baddbmm(x, h @ x.transpose(1, 2), x),
    "addbmm": lambda h, x: x + torch.addbmm(torch.zeros(S, D, dtype=x.dtype), x @ x.transpose(1, 2), h)[None] / 100,
    "addcmul": lambda h, x: torch.addcmul(x, h, x, value=0.5) + torch.addcdiv(x, h, x.abs() + 1),
    "lerp": lambda h, x: torch.lerp(x, h, torch.sigmoid(h)) + x.lerp(h, 0.3),
    "atan2": lambda h, x: torch.atan2(h, x.abs() + 1) + torch.hypot(h, x),
    "logaddexp": lambda h, x: torch.logaddexp(h, x) + torch.xlogy(x, h.abs() + 1),
    "maximum": lambda h, x: torch.maximum(h, x) + torch.fmin(h, x) + torch.copysign(h, x),
    "clamp by tensors": lambda h, x: torch.clamp(h, min=-x.abs(), max=x.abs()),
    "heaviside": lambda h, x: h * torch.heaviside(x.detach(), torch.zeros((), dtype=x.dtype)),
    "cdist": lambda h, x: torch.cdist(h, x) @ x,
    "cdist over the batch": lambda h, x: (torch.cdist(h.mean(1), x.mean(1)) @ h.flatten(1)).reshape(h.shape),
    "cosine_similarity": lambda h, x: F.cosine_similarity(h, x, dim=-1)[..., None] * x,
    "cross product": lambda h, x: F.pad(torch.linalg.cross(h[..., :3], x[..., :3]), (0, 5)),
    "masked_fill": lambda h, x: h.masked_fill(x > 0.5, 0.0),
    "masked_scatter": lambda h, x: x.masked_scatter(x > 0, h),
    "masked assignment": _masked,
    "masked_select": lambda h, x: h * h.masked_select(x > 0).mean(),
    "nonzero": lambda h, x: h + h.flatten(0, 1)[(x[..., 0] > 0).flatten().nonzero().squeeze(-1)].sum(0),
    "take_along_dim": lambda h, x: torch.take_along_dim(h, x.argsort(1), 1),
    "gather of argmax": lambda h, x: h.gather(1, x.argmax(1, keepdim=True)).expand_as(h),
    "argsort of tokens": lambda h, x: h.gather(1, x.sum(-1).argsort(1)[..., None].expand_as(h)),
    "argsort of the batch": lambda h, x: h[x.sum((1, 2)).argsort()],
    "argmax of the batch": lambda h, x: h - h[x.sum((1, 2)).argmax()],
    "rank of tokens": _rank_of_tokens,
    "sort of all and back": lambda h, x: (
        lambda order: h.flatten(0, 1)[order].cumsum(0)[order.argsort()].reshape(h.shape) / 10
    )(x.sum(-1).flatten().argsort()),
    "segments": _segments,
    "segments of a sequence": _segments_of_a_sequence,
    "one_hot": lambda h, x: h * F.one_hot(x[..., 0].argsort(1), D),
    "index_put": lambda h, x: torch.zeros_like(x).index_put((_rows(x)[:, None], torch.tensor([0, 2])), h[:, :2]),
    "index_put adding": lambda h, x: torch.zeros_like(x).index_put(
        (_rows(x)[:, None], torch.tensor([0, 0])), h[:, :2], accumulate=True
    ),
    "index_add of the batch": lambda h, x: torch.zeros_like(x).index_add(0, _rows(x) // 2, h),
    "index_fill": lambda h, x: h.index_fill(1, torch.tensor([1, 3]), 0.0),
    "index_copy": lambda h, x: x.index_copy(1, torch.tensor([1, 3]), h[:, :2]),
    "index_select backwards": lambda h, x: h[torch.arange(x.shape[0] - 1, -1, -1)],
    **{
        f"scatter_reduce {how}": lambda h, x, how=how: x.scatter_reduce(1, torch.ones_like(x).long(), h, how)
        for how in ("amax", "mean", "prod", "sum")
    },
    "scatter": lambda h, x: x.scatter(1, torch.zeros_like(x[:, :1]).long(), h[:, :1]),
    "select_scatter": lambda h, x: torch.select_scatter(x, h[:, 0], 1, 2),
    "slice_scatter": lambda h, x: torch.slice_scatter(x, h[:, :2], 1, 1, 3),
    "written slices": _written,
    "searchsorted": lambda h, x: h + torch.searchsorted(torch.linspace(-1, 1, 5, dtype=x.dtype), x.contiguous()),
    "trapezoid": lambda h, x: x * torch.trapezoid(h, dim=1)[:, None],
    "solve of sequences": lambda h, x: torch.linalg.solve(
        h.transpose(1, 2) @ x * 0.1 + 3 * _eye(), x.transpose(1, 2)
    ).transpose(1, 2),
    "det of sequences": lambda h, x: x * torch.linalg.det(x.transpose(1, 2) @ h * 0.1 + _eye())[:, None, None],
    "hook": _hooked,
}

_WEIGHTS: dict[str, Any] = {
    "clamped": lambda w: w.clamp(-0.1, 0.1),
    "soft": lambda w: w.softmax(0),
    "sorted": lambda w: w.sort(0).values,
    "rearranged": lambda w: w[torch.tensor([3, 1, 2, 0, 4, 5, 7, 6])],
    "summed": lambda w: w.cumsum(0),
    "triangular": lambda w: w.tril(),
    "symmetric": lambda w: w + w.t(),
    "skew exponential": lambda w: torch.linalg.matrix_exp(w - w.t()),
    "ternary": lambda w: w + ((w / w.abs().mean()).round().clamp(-1, 1) * w.abs().mean() - w).detach(),
    "standardised": lambda w: (w - w.mean(1, keepdim=True)) / w.std(1, keepdim=True) / 3,
    "low rank": lambda w: w[:, :2] @ w[:2] * 2,
    "kron": lambda w: torch.kron(w[:2, :2], _eye(4)),
    "inverse": lambda w: torch.linalg.inv(w + 3 * _eye()),
    "pseudo-inverse": lambda w: torch.linalg.pinv(w) / 10,
    "power": lambda w: torch.linalg.matrix_power(w, 3),
    "cholesky": lambda w: torch.linalg.cholesky(w @ w.t() + _eye()),
    "qr": lambda w: torch.linalg.qr(w)[0],
    "singular values": lambda w: w / torch.linalg.svdvals(w).amax(),
    "eigenvalues": lambda w: w * torch.linalg.eigvalsh(w + w.t()),
    "determinant": lambda w: w * torch.linalg.slogdet(w + 2 * _eye())[1] + torch.linalg.det(w + _eye()) / 9,
    "trace": lambda w: w * w.trace(),
    "block_diag": lambda w: torch.block_diag(w[:4, :4], w[4:, 4:]),
    "toeplitz": lambda w: w[0][(torch.arange(D)[:, None] - torch.arange(D)) % D],
    "masked": lambda w: w * (w.abs() > w.abs().median()),
    "topk": lambda w: w * w.topk(2, 0).values.sum(),
    "meshgrid": lambda w: w * torch.stack(torch.meshgrid(w[0], w[1], indexing="ij")).sum(0),
    "Householder": lambda w: _eye() - 2 * torch.outer(w[0], w[0]) / w[0].square().sum(),
}

_MODULES: dict[str, Kind] = {
    "no_grad": Kind(linear, _no_grad),
    "detached input": Kind(linear, lambda m, x: m(x.detach()) + (x - x.detach())),
    "checkpoint": Kind(linear, lambda m, x: checkpoint(lambda part: m(part).tanh(), x, use_reentrant=False)),
    "checkpoint reentrant": Kind(linear, lambda m, x: checkpoint(lambda part: m(part).tanh(), x, use_reentrant=True)),
    "func.grad": Kind(linear, _energy),
    "func.jvp": Kind(linear, lambda m, x: torch.func.jvp(m, (x,), (x,))[1]),
    "func.vjp": Kind(linear, lambda m, x: torch.func.vjp(m, x)[1](x)[0]),
    "func.jacrev of rows": Kind(
        linear, lambda m, x: torch.vmap(torch.vmap(torch.func.jacrev(lambda t: m(t).tanh())))(x).sum(-1)
    ),
    "func.functional_call": Kind(linear, _called),
    "vmap of a module": Kind(linear, lambda m, x: torch.vmap(m)(x)),
    "vmap of a weight": Kind(linear, lambda m, x: torch.vmap(lambda row: row @ m.weight)(x)),
    "vmap of weights": Kind(
        linear, lambda m, x: torch.vmap(lambda w: x @ w, in_dims=0)(torch.stack([m.weight, m.weight.t()])).sum(0)
    ),
    "tensordot": Kind(linear, lambda m, x: torch.tensordot(m(x), m.weight, dims=([2], [0]))),
    "mv": Kind(linear, lambda m, x: torch.mv(m(x).reshape(-1, D), m.bias).reshape(*x.shape[:2], 1) * x),
    "addmv": Kind(linear, lambda m, x: m(x) + torch.addmv(m.bias, m.weight, m.bias)),
    "used twice": Kind(linear, lambda m, x: m(F.silu(m(x)))),
    "used transposed": Kind(linear, lambda m, x: F.silu(m(x)) @ m.weight),
    "nn.ParameterList": Kind(
        lambda: nn.ParameterList([nn.Parameter(torch.randn(D)) for _ in range(3)]), lambda m, x: x * sum(m)
    ),
    "nn.ParameterDict": Kind(lambda: nn.ParameterDict({"a": nn.Parameter(torch.randn(D))}), lambda m, x: x * m["a"]),
    "scalar parameter": Kind(lambda: nn.ParameterDict({"a": nn.Parameter(torch.tensor(0.3))}), lambda m, x: x * m["a"]),
    "buffer": Kind(lambda: nn.BatchNorm1d(D).eval(), lambda m, x: x * m.running_var + m.weight),
}

# a backward that is no linear function of the gradient, and what the proof of places does not follow
_REFUSED: dict[str, dict[str, str]] = {
    "custom function of the batch": {"*": "to the incoming gradient in a way that is not linear in it"},
}

KINDS: dict[str, Kind] = {
    **{
        name: after(lambda h, x, change=change: change(h), refused=_REFUSED.get(name, {}))
        for name, change in _UNARY.items()
    },
    **{name: after(change) for name, change in _BINARY.items()},
    **{f"weight {name}": weights(change) for name, change in _WEIGHTS.items()},
    **_MODULES,
}
