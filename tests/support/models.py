"""Tiny plain MoE language models, written as people write them, for parity tests.

One process, no parallelism, no `moe::` op except in the style that asks for it. fp64 unless asked otherwise, so that a wrong sum shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecompile import ops

Style = Literal["loop", "stacked", "dense", "ops"]
VOCAB = 32


@dataclass(frozen=True)
class Config:
    """``style``: how the experts are written. ``aux``: coefficient of a balance loss over the whole batch.

    ``normalize``: whether the chosen scores are made to add up to one; with top_k=1 they must not be, or the router learns
    nothing. ``neighbour``: what a sequence sees of the next one in the batch, which no rank can know by itself: it is added to the
    embedding, or takes its place in a way that makes everything behind it whole on every rank.
    """

    style: Style = "loop"
    experts: int = 4
    top_k: int = 2
    layers: int = 2
    hidden: int = 8
    heads: int = 2
    inner: int = 6
    shared: bool = False
    tied: bool = False
    bias: bool = False
    aux: float = 0.0
    normalize: bool = True
    dropout: float = 0.0
    rotary: bool = False
    neighbour: Literal["", "added", "alone"] = ""
    dtype: torch.dtype = torch.float64
    seed: int = 0


class Expert(nn.Module):
    """One gated MLP."""

    def __init__(self, hidden: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=bias)
        self.up = nn.Linear(hidden, inner, bias=bias)
        self.down = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class LoopExperts(nn.Module):
    """A ModuleList, where and index_add, empty experts skipped."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert(config.hidden, config.inner, config.bias) for _ in range(config.experts))

    def forward(self, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(ids == index)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(x[token]) * probs[token, slot, None])
        return out


class StackedExperts(nn.Module):
    """Weights of all experts in one parameter each: ``[E, 2 * inner, hidden]`` and ``[E, hidden, inner]``."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.num_experts = config.experts
        shape = (config.experts, 2 * config.inner, config.hidden)
        self.w_in = nn.Parameter(torch.randn(shape) * 0.3)
        self.w_out = nn.Parameter(torch.randn(config.experts, config.hidden, config.inner) * 0.3)

    def forward(self, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for index in range(self.num_experts):
            token, slot = torch.where(ids == index)
            gate, up = F.linear(x[token], self.w_in[index]).chunk(2, dim=-1)
            rows = F.linear(F.silu(gate) * up, self.w_out[index])
            out.index_add_(0, token, rows * probs[token, slot, None])
        return out


class DenseExperts(nn.Module):
    """Every expert sees every token, its weight is zero where it was not chosen; weights are ``[E, in, out]``."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.num_experts = config.experts
        self.w_gate = nn.Parameter(torch.randn(config.experts, config.hidden, config.inner) * 0.3)
        self.w_up = nn.Parameter(torch.randn(config.experts, config.hidden, config.inner) * 0.3)
        self.w_down = nn.Parameter(torch.randn(config.experts, config.inner, config.hidden) * 0.3)

    def forward(self, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        weight = torch.zeros(x.shape[0], self.num_experts, dtype=x.dtype).scatter(1, ids, probs)
        every = x.unsqueeze(0).expand(self.num_experts, -1, -1)
        rows = torch.bmm(F.silu(torch.bmm(every, self.w_gate)) * torch.bmm(every, self.w_up), self.w_down)
        return (rows * weight.t().unsqueeze(-1)).sum(0)


class OpsExperts(StackedExperts):
    """The stacked weights, used by the compiler's own ops: nothing is left to recognise."""

    def forward(self, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        rows, tokens_per_expert, row_map = ops.permute(x, ids, self.num_experts)
        gate, up = ops.grouped_linear(rows, tokens_per_expert, self.w_in).chunk(2, dim=-1)
        rows = ops.grouped_linear(F.silu(gate) * up, tokens_per_expert, self.w_out)
        out: Tensor = ops.unpermute(rows, row_map, x.shape[0], ids.shape[1], probs)
        return out


EXPERTS: dict[Style, type[nn.Module]] = {
    "loop": LoopExperts,
    "stacked": StackedExperts,
    "dense": DenseExperts,
    "ops": OpsExperts,
}


class MoeLayer(nn.Module):
    """Router, experts, and a gated shared expert if asked for. ``push`` [B, S, E] is added to the router's logits."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(config.hidden, config.experts, bias=False)
        self.experts = EXPERTS[config.style](config)
        if config.shared:
            self.shared = Expert(config.hidden, config.inner, config.bias)
            self.shared_gate = nn.Linear(config.hidden, 1, bias=False)

    def forward(self, x: Tensor, push: Tensor | None) -> tuple[Tensor, Tensor]:
        shape, tokens = x.shape, x.reshape(-1, x.shape[-1])
        logits = self.router(tokens)
        if push is not None:
            logits = logits + push.reshape(logits.shape)
        scores = logits.softmax(-1)
        probs, ids = scores.topk(self.config.top_k, dim=-1)
        if self.config.normalize:
            probs = probs / probs.sum(-1, keepdim=True)
        out = self.experts(tokens, ids, probs)
        if self.config.shared:
            out = out + torch.sigmoid(self.shared_gate(tokens)) * self.shared(tokens)
        # Switch's balance loss: E * sum_e (share of assignments) * (mean score), both over every token of the call
        share = F.one_hot(ids, self.config.experts).sum(1).to(scores.dtype).mean(0) / self.config.top_k
        return out.reshape(shape), self.config.experts * (share * scores.mean(0)).sum()


class HandNorm(nn.Module):
    """An RMS norm as it is written by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def rotated(x: Tensor) -> Tensor:
    """A rotary position embedding of ``[B, heads, S, D]``."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2], dtype=x.dtype)[None, None, :, None] / 10 ** torch.arange(half, dtype=x.dtype)
    cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos + turned * sin


class Block(nn.Module):
    """Causal attention, then the MoE layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.norm_1 = nn.LayerNorm(config.hidden, bias=config.bias)
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=config.bias)
        self.out = nn.Linear(config.hidden, config.hidden, bias=config.bias)
        self.norm_2 = HandNorm(config.hidden)
        self.rotary = config.rotary
        self.heads = config.heads
        self.moe = MoeLayer(config)

    def forward(self, x: Tensor, push: Tensor | None) -> tuple[Tensor, Tensor]:
        batch, length, hidden = x.shape
        qkv = (
            self.qkv(self.norm_1(x)).reshape(batch, length, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)
        )
        query, key, value = qkv.unbind(0)
        if self.rotary:
            query, key = rotated(query), rotated(key)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + F.dropout(self.out(seen.transpose(1, 2).reshape(batch, length, hidden)), self.dropout, self.training)
        out, balance = self.moe(self.norm_2(x), push)
        return x + out, balance


class TinyMoe(nn.Module):
    """``(ids, labels, push) -> {"loss", "logits", "balance"}``; labels of -100 are ignored."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(VOCAB, config.hidden)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, VOCAB, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor, push: Tensor | None = None) -> dict[str, Tensor]:
        x, balance = self.embed(ids), torch.zeros((), dtype=self.head.weight.dtype)
        if self.config.neighbour == "added":
            x = x + x.roll(-1, 0)
        elif self.config.neighbour == "alone":
            x = x.repeat(2, 1, 1)[1 : len(x) + 1]
        for layer in self.layers:
            x, extra = layer(x, push)
            balance = balance + extra
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), ignore_index=-100)
        return {"loss": loss + self.config.aux * balance, "logits": logits, "balance": balance}


def build(config: Config) -> TinyMoe:
    """The model of ``config``; equal configs give equal weights, whatever ran before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return TinyMoe(config).to(config.dtype)


def tokens(batch: int, length: int, seed: int, *, ignored: float = 0.0) -> dict[str, Tensor]:
    """One global batch. Labels are drawn independently of the ids; a share of them is ignored."""
    source = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (batch, length), generator=source)
    labels = torch.randint(0, VOCAB, (batch, length), generator=source)
    labels[torch.rand(batch, length, generator=source) < ignored] = -100
    return {"ids": ids, "labels": labels}


def push_to(choices: Tensor, experts: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The ``push`` that makes each token choose exactly ``choices`` [B, S, K]; router scores still decide the weights."""
    return torch.full((*choices.shape[:2], experts), -40.0, dtype=dtype).scatter(2, choices, 0.0)


def choose(batch: int, length: int, top_k: int, among: list[int], seed: int = 0) -> Tensor:
    """Random choices [B, S, K] of distinct experts among those given, each used at least once."""
    source = torch.Generator().manual_seed(seed)
    allowed = torch.tensor(among)
    order = torch.rand(batch, length, len(among), generator=source).argsort(-1)
    chosen = allowed[order[..., :top_k]]
    assert set(chosen.unique().tolist()) == set(among), "too few tokens for so many experts"
    return chosen
