"""A model whose layers differ in all that `moecompile inspect` tells about a layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.moe_styles import EXPERTS, MLP, TOP_K, WIDTH, Layer


class Grouped(Layer):
    """Sigmoid scores, a bias for the choice alone, two groups of experts of which one is allowed, a shared expert."""

    def make(self) -> None:
        super().make()
        self.shared = MLP()
        self.register_buffer("bias", torch.linspace(0, 0.1, EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).sigmoid()
        choice = scores + self.bias
        best = choice.view(-1, 2, EXPERTS // 2).max(-1).values.topk(1, -1)[1]
        allowed = torch.zeros(x.shape[0], 2, dtype=x.dtype).scatter(1, best, 1.0)
        mask = allowed.unsqueeze(-1).expand(-1, -1, EXPERTS // 2).reshape(-1, EXPERTS)
        ids = choice.masked_fill(mask == 0, float("-inf")).topk(TOP_K, -1)[1]
        w = scores.gather(1, ids)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            y = y.index_add(0, t, expert(x[t]) * w[t, k, None])
        return y + self.shared(x)


class Dropping(Layer):
    """Softmax over the chosen scores; an expert takes its first three tokens."""

    def forward(self, x: Tensor) -> Tensor:
        top, ids = self.gate(x).topk(TOP_K, -1)
        w = top.softmax(-1)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            t, k = t[:3], k[:3]
            y = y.index_add(0, t, expert(x[t]) * w[t, k, None])
        return y


class Soft(nn.Module):
    """Every expert weighs in."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList([MLP() for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return torch.stack([expert(x) * weights[:, e, None] for e, expert in enumerate(self.experts)]).sum(0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.plain, self.grouped, self.dropping, self.mixture = Layer(), Grouped(), Dropping(), Soft()

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.plain, self.grouped, self.dropping, self.mixture):
            x = x + layer(x)
        return x.square().mean()
