"""Kinds of layers: the modules of torch.nn, attention in many forms, recurrences, mixers."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.support.op_zoo import LENGTH, WIDTH, Kind, after, channels, layer, linear

D, S = WIDTH, LENGTH


def _heads(x: Tensor, count: int = 2) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(-2)


def _qkv(count: int = 3) -> nn.Module:
    return nn.Linear(D, count * D)


def attention(scores: Any, **options: Any) -> Kind:
    """Softmax attention by hand; ``scores`` changes ``[batch, head, query, key]`` before the softmax."""

    def apply(inner: nn.Module, x: Tensor) -> Tensor:
        q, k, v = (_heads(part) for part in inner(x).chunk(3, -1))
        return _joined(scores(q @ k.transpose(-1, -2) / 2).softmax(-1) @ v)

    return Kind(_qkv, apply, **options)


def _causal(size: int = S) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()


def _grouped(inner: nn.Module, x: Tensor) -> Tensor:
    q, k, v = inner(x).split([D, D // 2, D // 2], -1)
    return _joined(F.scaled_dot_product_attention(_heads(q, 4), _heads(k), _heads(v), is_causal=True, enable_gqa=True))


def _rotated(x: Tensor) -> Tensor:
    angle = torch.arange(S, dtype=x.dtype)[:, None] * (0.5 ** torch.arange(x.shape[-1] // 2))
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def _rotary(inner: nn.Module, x: Tensor) -> Tensor:
    q, k, v = (_heads(part) for part in inner(x).chunk(3, -1))
    return _joined(F.scaled_dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True))


def _linear_attention(inner: nn.Module, x: Tensor) -> Tensor:
    q, k, v = inner(x).chunk(3, -1)
    q, k = F.elu(q) + 1, F.elu(k) + 1
    state = torch.einsum("bsd,bse->bsde", k, v).cumsum(1)
    return torch.einsum("bsd,bsde->bse", q, state) / (q * k.cumsum(1)).sum(-1, keepdim=True)


def _retention(inner: nn.Module, x: Tensor) -> Tensor:
    q, k, v = inner(x).chunk(3, -1)
    at = torch.arange(S, dtype=x.dtype)
    decay = (0.8 ** (at[:, None] - at)).tril()
    return (q @ k.transpose(1, 2) * decay) @ v


def _gated_scan(inner: nn.Module, x: Tensor) -> Tensor:
    value, gate = inner(x).chunk(2, -1)
    decay = F.logsigmoid(gate).cumsum(1)
    return ((value.exp().log() - decay).exp() * 0.1).cumsum(1) * decay.exp()


def _delta_rule(inner: nn.Module, x: Tensor) -> Tensor:
    q, k, v = inner(x).chunk(3, -1)
    k = F.normalize(k, dim=-1)
    state, out = x.new_zeros(x.shape[0], D, D), []
    for at in range(S):
        read = torch.einsum("bd,bde->be", k[:, at], state)
        state = state + 0.5 * torch.einsum("bd,be->bde", k[:, at], v[:, at] - read)
        out.append(torch.einsum("bd,bde->be", q[:, at], state))
    return torch.stack(out, 1)


def _recurrence(inner: nn.Module, x: Tensor) -> Tensor:
    state, out = torch.zeros_like(x[:, 0]), []
    for at in range(x.shape[1]):
        state = torch.tanh(inner(state) + x[:, at])
        out.append(state)
    return torch.stack(out, 1)


def _long_convolution(inner: nn.Module, x: Tensor) -> Tensor:
    kernel = inner(torch.arange(S, dtype=x.dtype)[:, None] / S)  # [sequence, width]
    spectrum = torch.fft.rfft(x, n=2 * S, dim=1) * torch.fft.rfft(kernel, n=2 * S, dim=0)
    return torch.fft.irfft(spectrum, n=2 * S, dim=1)[:, :S]


def _depth(inner: nn.Module, x: Tensor) -> Tensor:
    """The three tokens of a sequence with the largest score go through a layer."""
    scores, at = x.sum(-1).topk(3, dim=1)
    at = at[..., None].expand(-1, -1, D)
    chosen = x.gather(1, at)
    return torch.zeros_like(x).scatter_add(1, at, inner(chosen) * scores.sigmoid()[..., None])


class Latent(nn.Module):
    """Learned queries read the tokens, and the tokens read them back."""

    def __init__(self) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.randn(3, D))
        self.read, self.write = (nn.MultiheadAttention(D, 2, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        state, _ = self.read(self.latent.expand(x.shape[0], -1, -1), x, x)
        return self.write(x, state, state)[0]


class SoftSlots(nn.Module):
    """Soft mixture of experts: every slot is a mean over the tokens of its sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.phi, self.w = nn.Parameter(torch.randn(D, 4)), nn.Parameter(torch.randn(4, D, D) / 3)

    def forward(self, x: Tensor) -> Tensor:
        logits = x @ self.phi
        slots = torch.einsum("bsn,bsd->bnd", logits.softmax(1), x)
        return torch.einsum("bsn,bne->bse", logits.softmax(-1), torch.einsum("bnd,nde->bne", slots, self.w).relu())


class Codebook(nn.Module):
    """Vector quantisation, gradients straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(5, D))

    def forward(self, x: Tensor) -> Tensor:
        near = self.codes[torch.cdist(x, self.codes.expand(x.shape[0], -1, -1)).argmin(-1)]
        return x + (near - x).detach() + 0.1 * (near - x.detach())


class RelativeBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.bias = _qkv(), nn.Embedding(2 * S, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (_heads(part) for part in self.qkv(x).chunk(3, -1))
        at = torch.arange(x.shape[1])
        bias = self.bias(at[:, None] - at + S).permute(2, 0, 1)[None]
        return _joined(F.scaled_dot_product_attention(q, k, v, attn_mask=bias))


class Sinks(nn.Module):
    """A learned logit for every head takes a part of the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.sink = _qkv(), nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (_heads(part) for part in self.qkv(x).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2)).masked_fill(~_causal(), -torch.inf)
        sink = self.sink[None, :, None, None].expand(x.shape[0], -1, S, 1)
        return _joined(torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ v)


class Films(nn.Module):
    """Every sequence's mean scales and shifts its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.film = nn.LayerNorm(D, elementwise_affine=False), nn.Linear(D, 2 * D)

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self.film(F.silu(x.mean(1, keepdim=True))).chunk(2, -1)
        return self.norm(x) * (1 + scale) + shift


class Excite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(D, 2), nn.Linear(2, D)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.up(self.down(x.mean(1)).relu()).sigmoid()[:, None]


def _hyper(inner: nn.Module, x: Tensor) -> Tensor:
    """Weights that every sequence makes for itself."""
    return torch.einsum("bsd,bde->bse", x, inner(x.mean(1)).unflatten(-1, (D, D)))


def _packed(inner: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
    """Documents end at one id; tokens see their own document alone."""
    document = (ids == 3).cumsum(1)
    mask = (document[:, :, None] == document[:, None, :]) & _causal()
    q, k, v = (_heads(part) for part in inner(x).chunk(3, -1))
    return _joined(F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None]))


def _sinkhorn(scores: Tensor) -> Tensor:
    for _ in range(3):
        scores = scores - scores.logsumexp(-1, keepdim=True)
        scores = scores - scores.logsumexp(-2, keepdim=True)
    return scores


ACTIVATIONS = [
    *[nn.ELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardtanh, nn.Hardswish, nn.LeakyReLU, nn.LogSigmoid, nn.PReLU, nn.ReLU],
    *[nn.ReLU6, nn.SELU, nn.CELU, nn.GELU, nn.Sigmoid, nn.SiLU, nn.Mish, nn.Softplus, nn.Softshrink, nn.Softsign],
    *[nn.Tanh, nn.Tanhshrink],
]

KINDS: dict[str, Kind] = {
    **{f"nn.{kind.__name__}": layer(lambda kind=kind: nn.Sequential(linear(), kind())) for kind in ACTIVATIONS},
    "nn.GELU tanh": layer(lambda: nn.Sequential(linear(), nn.GELU("tanh"))),
    "nn.Threshold": layer(lambda: nn.Sequential(linear(), nn.Threshold(0.1, 0.5))),
    "nn.GLU": layer(lambda: nn.Sequential(nn.Linear(D, 2 * D), nn.GLU())),
    "nn.PReLU of channels": channels(lambda: nn.PReLU(D)),
    **{
        f"nn.{kind.__name__} of the sequence": layer(lambda kind=kind: nn.Sequential(linear(), kind(dim=1)))
        for kind in (nn.Softmax, nn.Softmin, nn.LogSoftmax)
    },
    # norms
    "nn.LayerNorm": layer(lambda: nn.LayerNorm(D)),
    "nn.LayerNorm of tokens and width": layer(lambda: nn.LayerNorm([S, D])),
    "nn.RMSNorm": layer(lambda: nn.RMSNorm(D)),
    "nn.GroupNorm": channels(lambda: nn.GroupNorm(2, D)),
    "nn.InstanceNorm1d": channels(lambda: nn.InstanceNorm1d(D, affine=True)),
    "nn.BatchNorm1d": channels(lambda: nn.BatchNorm1d(D)),
    "nn.BatchNorm1d without statistics": channels(lambda: nn.BatchNorm1d(D, track_running_stats=False)),
    "nn.LocalResponseNorm": channels(lambda: nn.Sequential(nn.Conv1d(D, D, 1), nn.LocalResponseNorm(2))),
    "weight_norm": layer(lambda: parametrizations.weight_norm(linear())),
    "old weight_norm": layer(lambda: nn.utils.weight_norm(linear())),
    "orthogonal": layer(lambda: parametrizations.orthogonal(linear())),
    "spectral_norm": layer(lambda: parametrizations.spectral_norm(linear())),
    # convolutions, pools, pads, resampling
    "nn.Conv1d": channels(lambda: nn.Conv1d(D, D, 3, padding=1, groups=2)),
    "nn.Conv1d causal depthwise": Kind(
        lambda: nn.Conv1d(D, D, 4, groups=D), lambda m, x: m(F.pad(x.transpose(1, 2), (3, 0))).transpose(1, 2)
    ),
    "nn.Conv1d cut off": Kind(
        lambda: nn.Conv1d(D, D, 4, groups=D, padding=3), lambda m, x: m(x.transpose(1, 2))[..., :S].transpose(1, 2)
    ),
    "nn.Conv1d dilated": channels(lambda: nn.Conv1d(D, D, 3, padding="same", dilation=2)),
    "nn.Conv1d circular": channels(lambda: nn.Conv1d(D, D, 3, padding="same", padding_mode="circular")),
    "nn.ConvTranspose1d": channels(lambda: nn.ConvTranspose1d(D, D, 3, padding=1)),
    "nn.Conv2d of a map": Kind(lambda: nn.Conv2d(1, 1, 3, padding=1), lambda m, x: m(x[:, None])[:, 0]),
    "nn.MaxPool1d": channels(lambda: nn.Sequential(nn.Conv1d(D, D, 1), nn.MaxPool1d(3, 1, 1))),
    "nn.AvgPool1d": channels(lambda: nn.Sequential(nn.Conv1d(D, D, 1), nn.AvgPool1d(3, 1, 1))),
    "nn.LPPool1d": channels(lambda: nn.Sequential(nn.Conv1d(D, D, 1), nn.ReplicationPad1d(1), nn.LPPool1d(2, 3, 1))),
    "nn.AdaptiveAvgPool1d": Kind(
        lambda: nn.Sequential(nn.Conv1d(D, D, 1), nn.AdaptiveAvgPool1d(4)),
        lambda m, x: m(x.transpose(1, 2)).mean(-1)[:, None].expand_as(x),
    ),
    "nn.AdaptiveMaxPool1d": layer(lambda: nn.Sequential(linear(), nn.AdaptiveMaxPool1d(4), nn.Linear(4, D))),
    "nn.MaxUnpool1d": Kind(
        linear,
        lambda m, x: F.max_unpool1d(*F.max_pool1d(m(x), 2, return_indices=True), 2),  # type: ignore[misc]
    ),
    "nn.ReflectionPad1d": channels(lambda: nn.Sequential(nn.ReflectionPad1d(1), nn.Conv1d(D, D, 3))),
    "nn.ZeroPad1d": channels(lambda: nn.Sequential(nn.ZeroPad1d((2, 0)), nn.Conv1d(D, D, 3))),
    "nn.CircularPad1d": channels(lambda: nn.Sequential(nn.CircularPad1d(1), nn.Conv1d(D, D, 3))),
    "nn.ChannelShuffle": channels(lambda: nn.Sequential(nn.Conv1d(D, D, 1), nn.ChannelShuffle(2))),
    "nn.Upsample": channels(lambda: nn.Sequential(nn.Conv1d(D, D, 1), nn.AvgPool1d(2), nn.Upsample(scale_factor=2))),
    "nn.Upsample linear": channels(
        lambda: nn.Sequential(nn.Conv1d(D, D, 2, 2), nn.Upsample(scale_factor=2, mode="linear", align_corners=True))
    ),
    "fold": Kind(linear, lambda m, x: F.fold(F.unfold(m(x)[:, None], 3, padding=1), (S, D), 3, padding=1)[:, 0]),
    "windows": Kind(
        lambda: nn.Linear(3 * D, D), lambda m, x: m(F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).reshape(*x.shape[:2], -1))
    ),
    "grid_sample": after(
        lambda h, x: F.grid_sample(
            h[:, None], torch.full((x.shape[0], S, D, 2), 0.1, dtype=x.dtype), align_corners=False
        )[:, 0]
    ),
    "nn.Bilinear": Kind(lambda: nn.Bilinear(D, D, D), lambda m, x: m(x.contiguous(), x.contiguous())),
    "nn.CosineSimilarity": after(lambda h, x: nn.CosineSimilarity(-1)(h, x)[..., None] * x),
    "nn.PairwiseDistance": after(lambda h, x: nn.PairwiseDistance()(h, x)[..., None] * x),
    # embeddings
    "nn.Embedding of ids": Kind(lambda: nn.Embedding(16, D), lambda m, x, ids: m(ids), with_ids=True),
    "nn.Embedding of hashes": Kind(
        lambda: nn.Embedding(7, D), lambda m, x, ids: m((ids * 31 + ids.roll(1, 1)) % 7), with_ids=True
    ),
    "nn.Embedding of positions": Kind(
        lambda: nn.Embedding(S, D), lambda m, x: m(torch.arange(x.shape[1])).expand_as(x)
    ),
    "positions of a mask": Kind(
        lambda: nn.Embedding(S + 1, D), lambda m, x, ids: m((ids != 3).cumsum(1) * (ids != 3)), with_ids=True
    ),
    "nn.Embedding padding": Kind(lambda: nn.Embedding(16, D, padding_idx=3), lambda m, x, ids: m(ids), with_ids=True),
    "nn.Embedding by frequency": Kind(
        lambda: nn.Embedding(16, D, scale_grad_by_freq=True), lambda m, x, ids: m(ids), with_ids=True
    ),
    "nn.Embedding max_norm": Kind(lambda: nn.Embedding(16, D, max_norm=1.0), lambda m, x, ids: m(ids), with_ids=True),
    "nn.Embedding sparse": Kind(lambda: nn.Embedding(16, D, sparse=True), lambda m, x, ids: m(ids), with_ids=True),
    "nn.EmbeddingBag mean": Kind(
        lambda: nn.EmbeddingBag(16, D), lambda m, x, ids: m(ids)[:, None].expand_as(x), with_ids=True
    ),
    "nn.EmbeddingBag sum": Kind(
        lambda: nn.EmbeddingBag(5, D, mode="sum"), lambda m, x: m((x > 0).long().reshape(-1, D)).reshape(x.shape)
    ),
    "buckets": Kind(
        lambda: nn.Embedding(5, D),
        lambda m, x: m(torch.bucketize(x[..., 0], torch.tensor([-1.0, 0, 0.5, 1], dtype=x.dtype))),
    ),
    # recurrent
    "nn.RNN": Kind(lambda: nn.RNN(D, D, batch_first=True), lambda m, x: m(x)[0]),
    "nn.LSTM": Kind(lambda: nn.LSTM(D, D, batch_first=True), lambda m, x: m(x)[0]),
    "nn.LSTM both ways": Kind(
        lambda: nn.LSTM(D, D // 2, batch_first=True, bidirectional=True, num_layers=2), lambda m, x: m(x)[0]
    ),
    "nn.LSTM sequence first": Kind(lambda: nn.LSTM(D, D), lambda m, x: m(x.transpose(0, 1))[0].transpose(0, 1)),
    "nn.GRU": Kind(lambda: nn.GRU(D, D, batch_first=True), lambda m, x: m(x)[0]),
    "nn.GRU last state": Kind(
        lambda: nn.GRU(D, D, batch_first=True), lambda m, x: m(x)[1].transpose(0, 1).expand_as(x)
    ),
    "nn.RNNCell": Kind(lambda: nn.RNNCell(D, D), lambda m, x: m(x.reshape(-1, D)).reshape(x.shape)),
    "nn.LSTMCell": Kind(lambda: nn.LSTMCell(D, D), lambda m, x: m(x.reshape(-1, D))[0].reshape(x.shape)),
    "nn.GRUCell": Kind(lambda: nn.GRUCell(D, D), lambda m, x: m(x.reshape(-1, D), x.reshape(-1, D)).reshape(x.shape)),
    "recurrence": Kind(linear, _recurrence),
    "delta rule": Kind(_qkv, _delta_rule),
    # attention
    "nn.MultiheadAttention": Kind(
        lambda: nn.MultiheadAttention(D, 2, batch_first=True), lambda m, x: m(x, x, x, need_weights=False)[0]
    ),
    "nn.MultiheadAttention with weights": Kind(
        lambda: nn.MultiheadAttention(D, 2, batch_first=True, bias=False, add_bias_kv=True, add_zero_attn=True),
        lambda m, x: m(x, x, x)[0],
    ),
    "nn.MultiheadAttention sequence first": Kind(
        lambda: nn.MultiheadAttention(D, 2), lambda m, x: m(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1)
    ),
    "nn.MultiheadAttention over the batch": Kind(lambda: nn.MultiheadAttention(D, 2), lambda m, x: m(x, x, x)[0]),
    "nn.MultiheadAttention padded": Kind(
        lambda: nn.MultiheadAttention(D, 2, batch_first=True),
        lambda m, x, ids: m(x, x, x, key_padding_mask=(ids == 3) & (torch.arange(S) > 0), attn_mask=~_causal())[0],
        with_ids=True,
    ),
    "nn.TransformerEncoderLayer": layer(lambda: nn.TransformerEncoderLayer(D, 2, 16, 0.0, batch_first=True)),
    "nn.TransformerEncoder": layer(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 16, 0.0, "gelu", batch_first=True), 2)
    ),
    "nn.TransformerDecoderLayer": Kind(
        lambda: nn.TransformerDecoderLayer(D, 2, 16, 0.0, batch_first=True, norm_first=True), lambda m, x: m(x, x)
    ),
    "nn.Transformer": Kind(
        lambda: nn.Transformer(D, 2, 1, 1, 16, 0.0, batch_first=True),
        lambda m, x: m(x, x, tgt_mask=nn.Transformer.generate_square_subsequent_mask(S, dtype=x.dtype)),
    ),
    "sdpa causal": Kind(
        _qkv, lambda m, x: _joined(F.scaled_dot_product_attention(*map(_heads, m(x).chunk(3, -1)), is_causal=True))
    ),
    "sdpa grouped": Kind(lambda: _qkv(2), _grouped),
    "sdpa rotary": Kind(_qkv, _rotary),
    "sdpa without batch dim of heads": Kind(
        _qkv, lambda m, x: F.scaled_dot_product_attention(*m(x).chunk(3, -1), attn_mask=_causal())
    ),
    "attention causal": attention(lambda s: s.masked_fill(~_causal(), -torch.inf)),
    "attention window": attention(
        lambda s: s.masked_fill(~(_causal() & ~_causal().tril(-3)), torch.finfo(s.dtype).min)
    ),
    "attention alibi": attention(
        lambda s: (
            s
            - (torch.arange(S)[:, None] - torch.arange(S)).abs()
            * torch.tensor([0.5, 0.25], dtype=s.dtype)[:, None, None]
        )
    ),
    "attention softcap": attention(lambda s: 5 * torch.tanh(s / 5)),
    "attention where": attention(lambda s: torch.where(_causal(), s, torch.tensor(-1e9, dtype=s.dtype))),
    "attention topk": attention(lambda s: s.masked_fill(s < s.topk(3, -1).values[..., -1:], -torch.inf)),
    "attention sinkhorn": attention(_sinkhorn),
    "attention talking heads": attention(
        lambda s: torch.einsum("bhqk,gh->bgqk", s, torch.ones(2, 2, dtype=s.dtype).triu())
    ),
    "attention detached maximum": attention(lambda s: s - s.amax(-1, keepdim=True).detach()),
    "attention relative bias": layer(RelativeBias),
    "attention sinks": layer(Sinks),
    "attention latent": layer(Latent),
    "attention packed": Kind(_qkv, _packed, with_ids=True),
    "attention linear": Kind(_qkv, _linear_attention),
    "attention retention": Kind(_qkv, _retention),
    "attention over the batch": after(
        lambda h, x: torch.einsum("bcs,csd->bsd", torch.einsum("bsd,csd->bcs", h, x).softmax(1), x)
    ),
    "gated scan": Kind(lambda: _qkv(2), _gated_scan),
    "long convolution": Kind(lambda: nn.Linear(1, D), _long_convolution),
    "fourier mixing": after(lambda h, x: torch.fft.fft(torch.fft.fft(h, dim=-1), dim=1).real / 8),
    "mlp over tokens": Kind(lambda: nn.Linear(S, S), lambda m, x: F.gelu(m(x.transpose(1, 2))).transpose(1, 2)),
    "spatial gating": Kind(
        lambda: nn.Linear(S, S), lambda m, x: x * m(F.layer_norm(x, (D,)).transpose(1, 2)).transpose(1, 2)
    ),
    "token shift": after(lambda h, x: h * 0.5 + 0.5 * F.pad(x, (0, 0, 1, -1))),
    "depth": Kind(linear, _depth),
    "soft slots": layer(SoftSlots),
    "codebook": layer(Codebook),
    "film": layer(Films),
    "excite": layer(Excite),
    "hyper": Kind(lambda: nn.Linear(D, D * D), _hyper),
    "highway": Kind(lambda: _qkv(2), lambda m, x: torch.lerp(x, *map(torch.tanh, m(x).chunk(2, -1)))),
    "sinusoids": after(
        lambda h, x: h + torch.sin(torch.arange(S, dtype=x.dtype)[:, None] / (math.e ** torch.arange(D)))
    ),
    "last token": Kind(
        linear,
        lambda m, x, ids: m(x[torch.arange(x.shape[0]), (ids != 3).sum(1) - 1])[:, None].expand_as(x),
        with_ids=True,
    ),
    "mean of valid tokens": Kind(
        linear,
        lambda m, x, ids: x * m((x * (ids != 3)[..., None]).sum(1) / (ids != 3).sum(1, keepdim=True))[:, None],
        with_ids=True,
    ),
}
