"""MoE layers with the usual meaning whose parts are written in unusual ways: decisions, experts, rows and results."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.moe_styles import EXPERTS, INNER, MLP, WIDTH, Layer


class DictExperts(Layer):
    """Experts under names."""

    def make(self) -> None:
        self.experts = nn.ModuleDict({f"expert{e}": MLP() for e in range(EXPERTS)})

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e in range(EXPERTS):
            t, k = torch.where(ids == e)
            y = y.index_add(0, t, self.experts[f"expert{e}"](x[t]) * w[t, k, None])
        return y


class InTurns(Layer):
    """The Granite form: all experts' first layers, an activation of all rows, all experts' second layers."""

    def make(self) -> None:
        self.first = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH))
        self.second = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        order = ids.flatten().sort(0)[1]
        counts = F.one_hot(ids.flatten(), EXPERTS).sum(0).tolist()
        token = order.div(self.top_k, rounding_mode="trunc")
        rows = torch.cat([F.linear(p, self.first[e]) for e, p in enumerate(x[token].split(counts, dim=0))])
        gate, up = rows.chunk(2, dim=-1)
        parts = (F.silu(gate) * up).split(counts, dim=0)
        rows = torch.cat([F.linear(p, self.second[e]) for e, p in enumerate(parts)])
        return torch.zeros_like(x).index_add(0, token, rows * w.flatten()[order][:, None])


class OneByOne(Layer):
    """Experts chosen one after the other, each from what is left; their weights meet in one matrix."""

    def forward(self, x: Tensor) -> Tensor:
        probs = self.gate(x).softmax(-1)
        first = F.one_hot(probs.argmax(-1), EXPERTS)
        second = F.one_hot(probs.masked_fill(first.bool(), float("-inf")).argmax(-1), EXPERTS)
        weights = probs * (first + second)
        weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t = torch.where(weights[:, e] > 0)[0]
            y = y.index_add(0, t, expert(x[t]) * weights[t, e, None])
        return y


class SideBySide(Layer):
    """The Phi form: two decisions whose ids are put side by side."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.gate(x)
        first = logits.max(-1, keepdim=True)[1]
        second = logits.scatter(-1, first, float("-inf")).max(-1, keepdim=True)[1]
        ids = torch.cat([first, second], -1)
        return logits.softmax(-1).gather(-1, ids), ids


class ConvExperts(Layer):
    """Experts of 1x1 convolutions, a row being one place."""

    def make(self) -> None:
        def expert() -> nn.Module:
            return nn.Sequential(nn.Conv1d(WIDTH, INNER, 1), nn.GELU(), nn.Conv1d(INNER, WIDTH, 1, bias=False))

        self.experts = nn.ModuleList([expert() for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            y = y.index_add(0, t, expert(x[t].unsqueeze(-1)).squeeze(-1) * w[t, k, None])
        return y


class Normalised(nn.Module):
    """An expert with all kinds of normalisation of a row, written by hand and not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.norm, self.groups = nn.LayerNorm(INNER), nn.GroupNorm(3, INNER)

    def forward(self, x: Tensor) -> Tensor:
        h = self.groups(self.norm(self.up(x)))
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        h = (h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + 0.1)
        return self.down(F.normalize(h, dim=-1) + h)


class NormalisedExperts(Layer):
    def make(self) -> None:
        self.experts = nn.ModuleList([Normalised() for _ in range(EXPERTS)])


class IndexPairs(Layer):
    """Batch and sequence kept apart: rows are picked and put back by two indices."""

    def forward(self, x: Tensor) -> Tensor:
        apart = x.unsqueeze(1)
        w, ids = self.route(apart)
        y = torch.zeros_like(apart)
        for e, expert in enumerate(self.experts):
            b, s, k = torch.where(ids == e)
            y = y.index_put((b, s), expert(apart[b, s]) * w[b, s, k, None], accumulate=True)
        return y.view(x.shape)


class CopiedRows(Layer):
    """Results put at their choice's place, then summed over the choices."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        made = x.new_zeros(x.shape[0] * self.top_k, WIDTH)
        for e, expert in enumerate(self.experts):
            at = (ids.flatten() == e).nonzero().squeeze(-1)
            made = made.index_copy(0, at, expert(x[at // self.top_k]))
        return (made.view(-1, self.top_k, WIDTH) * w[..., None]).sum(1)


class MaskedRows(Layer):
    """Every expert on rows that are zero unless it was chosen; a bias does no harm, as the results are weighed, too."""

    def make(self) -> None:
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)) for _ in range(EXPERTS)]
        )

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        chosen = F.one_hot(ids, EXPERTS).to(x.dtype)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mask = chosen[:, :, e].sum(-1, keepdim=True)
            y = y + expert(x * mask) * (w * chosen[:, :, e]).sum(-1, keepdim=True)
        return y


class TwoLevels(Layer):
    """The product of a group's probability and that of an expert in it; the best of all of them."""

    def make(self) -> None:
        super().make()
        self.groups = nn.Linear(WIDTH, 2)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inner = self.gate(x).view(-1, 2, EXPERTS // 2).softmax(-1)
        weights, ids = (self.groups(x).softmax(-1)[:, :, None] * inner).flatten(1).topk(self.top_k, -1)
        return weights, ids


class JoinedModules(Layer):
    """Weights of separate modules, stacked in the forward."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        w1, w3, w2 = (torch.stack([getattr(e, name).weight for e in self.experts]) for name in ("w1", "w3", "w2"))
        hidden = F.silu(torch.einsum("th,eih->eti", x, w1)) * torch.einsum("th,eih->eti", x, w3)
        mask = torch.zeros(x.shape[0], EXPERTS, dtype=x.dtype).scatter(1, ids, w)
        return (torch.einsum("eti,ehi->eth", hidden, w2) * mask.t().unsqueeze(-1)).sum(0)


ODD: list[type[Layer]] = [
    DictExperts,
    InTurns,
    OneByOne,
    SideBySide,
    ConvExperts,
    NormalisedExperts,
    IndexPairs,
    CopiedRows,
    MaskedRows,
    TwoLevels,
    JoinedModules,
]
