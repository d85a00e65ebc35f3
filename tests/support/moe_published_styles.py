"""MoE layers in the manner of published repositories: decisions in [batch, sequence], offsets on the host, masks over experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.moe_styles import EXPERTS, MLP, TOP_K, WIDTH, Layer

SEQUENCE = 4


class MaskedSequences(Layer):
    """The makeMoE form: scores masked with -inf, rows of [batch, sequence, width] written where a mask holds."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens.view(-1, SEQUENCE, WIDTH)
        logits = self.gate(x)
        top, ids = logits.topk(self.top_k, dim=-1)
        gates = torch.full_like(logits, float("-inf")).scatter(-1, ids, top).softmax(-1)
        y, flat, flat_gates = torch.zeros_like(x), x.view(-1, WIDTH), gates.view(-1, EXPERTS)
        for e, expert in enumerate(self.experts):
            mask = (ids == e).any(dim=-1)
            flat_mask = mask.view(-1)
            if flat_mask.any():
                weighted = expert(flat[flat_mask]) * flat_gates[flat_mask, e].unsqueeze(1)
                y[mask] += weighted.squeeze(1)
        return y.view(tokens.shape)


class AddedThroughView(Layer):
    """The sum is kept in [batch, sequence, width] and added to through a flat view of it."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens.view(-1, SEQUENCE, WIDTH)
        w, ids = self.route(x)
        gates = torch.zeros_like(self.gate(x)).scatter(-1, ids, w).view(-1, EXPERTS)
        y, flat = torch.zeros_like(x), x.view(-1, WIDTH)
        for e, expert in enumerate(self.experts):
            rows = (ids == e).any(-1).view(-1).nonzero().squeeze(-1)
            if len(rows):
                y.view(-1, WIDTH).index_add_(0, rows, expert(flat[rows]) * gates[rows, e : e + 1])
        return y.view(tokens.shape)


class SwitchSequences(Layer):
    """Top-1 by argmax over [batch, sequence], rows replaced in a copy of the tokens, a z-loss and a balance loss added."""

    top_k = 1

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens.view(-1, SEQUENCE, WIDTH)
        logits = self.gate(x)
        probs = logits.softmax(-1)
        chosen = F.one_hot(probs.argmax(-1), EXPERTS)
        balance = (chosen.to(x.dtype).mean((0, 1)) * probs.mean((0, 1))).sum() * EXPERTS
        y = x.clone()
        for e, expert in enumerate(self.experts):
            mask = chosen[:, :, e].bool()
            y[mask] = expert(x[mask]).to(y.dtype)
        y = probs.max(-1).values.unsqueeze(-1) * y
        return y.view(tokens.shape) + 0.01 * balance + 0.001 * logits.logsumexp(-1).square().mean()


class HostOffsets(Layer):
    """The DeepSeek form: running sums as an array on the host, slices of sorted choices, a sum by scatter_reduce."""

    def make(self) -> None:
        super().make()
        self.shared = MLP()

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        order = ids.view(-1).argsort()
        ends = ids.view(-1).bincount(minlength=EXPERTS).cpu().numpy().cumsum(0)
        y = torch.zeros_like(x)
        for e, end in enumerate(ends):
            start = 0 if e == 0 else ends[e - 1]
            if start == end:
                continue
            token = order[start:end] // TOP_K
            out = self.experts[e](x[token]).mul(w.view(-1, 1)[order[start:end]])
            y = y.scatter_reduce(0, token.view(-1, 1).repeat(1, WIDTH), out, reduce="sum")
        return y + self.shared(x)


class ResidualExperts(Layer):
    """A norm and a residual inside each expert's part of the loop; ``len`` asks whether it has tokens."""

    def make(self) -> None:
        super().make()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e in range(EXPERTS):
            t, k = (ids == e).nonzero(as_tuple=True)
            if len(t) == 0:
                continue
            rows = x[t]
            y.index_add_(0, t, (rows + self.experts[e](self.norms[e](rows))) * w[t, k].unsqueeze(1))
        return y


class Hydra(Layer):
    """A linear layer, one matrix down for all and one up for each adapter, top-k of them on every token."""

    def make(self) -> None:
        self.base, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.ModuleList([nn.Linear(2, WIDTH, bias=False) for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        gates = torch.zeros(x.shape[0], EXPERTS, dtype=x.dtype).scatter(-1, ids, w)
        y, inner = self.base(x), self.down(x)
        for e, up in enumerate(self.up):
            y = y + gates[..., e : e + 1] * up(inner)
        return y


class Sinkhorn(Layer):
    """Top-1 of scores balanced by a few Sinkhorn steps over the whole batch, weighed by a sigmoid."""

    top_k = 1

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        with torch.no_grad():
            cost = logits.detach().exp()
            rows, columns = cost.new_ones(cost.shape[0]), cost.new_ones(EXPERTS)
            for _ in range(3):
                rows = 1 / (cost.shape[0] * ((columns * cost).sum(1) + 1e-8))
                columns = 1 / (EXPERTS * ((rows[:, None] * cost).sum(0) + 1e-8))
            ids = (columns * cost * rows[:, None]).topk(1, dim=1)[1]
        weights = logits.sigmoid().gather(1, ids)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            at = (ids == e).nonzero()[:, 0]
            y[at, :] = expert(x[at, :]) * weights[at]
        return y


class CountsByItem(Layer):
    """``item`` of each expert's count, and the experts hit as a list of numbers."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e in torch.unique(ids).tolist():
            mask = ids == e
            if mask.sum().item() == 0:
                continue
            t = mask.any(-1).nonzero()[:, 0]
            y[t] = y[t] + (w * mask).sum(-1, keepdim=True)[t] * self.experts[e](x[t])
        return y


class WhereChain(Layer):
    """Every expert on all tokens, the choice's result kept by ``where``; top-k by a full descending argsort."""

    def forward(self, x: Tensor) -> Tensor:
        probs = self.gate(x).softmax(-1)
        order = probs.argsort(dim=-1, descending=True)[:, : self.top_k]
        w = probs.gather(1, order)
        y = torch.zeros_like(x)
        for k in range(self.top_k):
            for e, expert in enumerate(self.experts):
                y = y + torch.where(order[:, k : k + 1] == e, expert(x) * w[:, k : k + 1], torch.zeros_like(x))
        return y


PUBLISHED: list[type[Layer]] = [
    MaskedSequences,
    AddedThroughView,
    SwitchSequences,
    HostOffsets,
    ResidualExperts,
    Hydra,
    Sinkhorn,
    CountsByItem,
    WhereChain,
]
