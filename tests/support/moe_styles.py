"""One tiny model for each way people write an MoE layer by hand, with experts that are modules of their own.

Every model is a `Layer` that maps ``[tokens, width]`` to the same shape, with E = 4 experts and top-2 routing unless its
name says otherwise.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, INNER, EXPERTS, TOP_K = 8, 12, 4, 2


class MLP(nn.Module):
    """A gated expert of three linear layers."""

    def __init__(self, width: int = WIDTH, inner: int = INNER, act: nn.Module | None = None) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)
        self.act = act or nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.act(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    """Router and separate experts; subclasses say how they are combined."""

    top_k = TOP_K
    regions = 1  # sets of experts that one decision routes to

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.make()

    def make(self) -> None:
        self.experts = nn.ModuleList([MLP() for _ in range(EXPERTS)])

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self.gate(x).softmax(-1).topk(self.top_k, -1)
        return weights / weights.sum(-1, keepdim=True), ids

    def forward(self, x: Tensor) -> Tensor:
        """A loop over all experts with a guard against idle ones."""
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            if t.numel() == 0:
                continue
            y.index_add_(0, t, expert(x[t]) * w[t, k, None])
        return y


class WhereLoop(Layer):
    pass


class WhereLoopShared(Layer):
    """Batch and sequence dims, a shared expert, the sum kept in the shared expert's output."""

    def make(self) -> None:
        super().make()
        self.shared = MLP()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, WIDTH)
        w, ids = self.route(tokens)
        y = self.shared(tokens)
        for e in range(EXPERTS):
            t, k = torch.where(ids == e)
            if t.shape[0] > 0:
                y = y.index_add(0, t, (self.experts[e](tokens[t]) * w[t, k].unsqueeze(-1)).to(y.dtype))
        return (y * 0.5).view(x.shape)


class HitList(Layer):
    """The old Mixtral form: one-hot mask, nonzero hit list, ``x[None, rows]``."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        mask = F.one_hot(ids, EXPERTS).permute(2, 1, 0)
        for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            k, t = torch.where(mask[e].squeeze(0))
            rows = x[None, t].reshape(-1, WIDTH)
            y.index_add_(0, t, self.experts[e](rows) * w[t, k, None])
        return y


class BoolMask(Layer):
    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e in range(EXPERTS):
            hit = ids == e
            rows = hit.any(-1)
            if rows.any():
                y[rows] = y[rows] + self.experts[e](x[rows]) * (w * hit).sum(-1)[rows].unsqueeze(-1)
        return y


class UniqueIds(Layer):
    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e in ids.unique().tolist():
            t, k = torch.where(ids == e)
            y = y.index_add(0, t, self.experts[e](x[t]) * w[t, k].unsqueeze(1))
        return y


class SortSplit(Layer):
    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        flat = ids.view(-1)
        order = flat.argsort()
        counts = torch.bincount(flat, minlength=EXPERTS).tolist()
        parts = x[order // TOP_K].split(counts)
        z = torch.cat([self.experts[e](part) for e, part in enumerate(parts)])
        return torch.zeros_like(x).index_add(0, order // TOP_K, z * w.view(-1)[order].unsqueeze(1))


class SortUnsort(Layer):
    """Sorted, split, put back in choice order, then summed over the choices."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        order = ids.view(-1).argsort()
        counts = F.one_hot(ids.view(-1), EXPERTS).sum(0).tolist()
        parts = x[order // TOP_K].split(counts)
        outs = torch.cat([self.experts[e](part) for e, part in enumerate(parts)], dim=0)
        back = torch.empty_like(outs)
        back[order] = outs
        return (back.view(*ids.shape, -1).type(w.dtype) * w.unsqueeze(-1)).sum(1).type(x.dtype)


class RepeatMask(Layer):
    """The DeepSeek training form: each token repeated per choice, written where the choice is this expert."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        rows, flat = x.repeat_interleave(TOP_K, dim=0), ids.view(-1)
        y = torch.empty_like(rows)
        for e, expert in enumerate(self.experts):
            y[flat == e] = expert(rows[flat == e])
        return (y.view(*w.shape, -1) * w.unsqueeze(-1)).sum(dim=1)


class ChoiceLoop(Layer):
    """A loop over the K choices around the loop over experts."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for k in range(TOP_K):
            for e in range(EXPERTS):
                rows = torch.nonzero(ids[:, k] == e).flatten()
                y = y.index_add(0, rows, self.experts[e](x[rows]) * w[rows, k : k + 1])
        return y


class BackwardLoop(Layer):
    """Experts visited last to first."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e in reversed(range(EXPERTS)):
            t, k = torch.where(ids == e)
            y = y.index_add(0, t, self.experts[e](x[t]) * w[t, k, None])
        return y


class SwitchTop1(Layer):
    top_k = 1

    def forward(self, x: Tensor) -> Tensor:
        prob, ids = self.gate(x).softmax(-1).max(dim=-1)
        y = torch.zeros_like(x)
        for e in range(EXPERTS):
            t = torch.where(ids == e)[0]
            y[t] = self.experts[e](x[t])
        return y * prob.unsqueeze(-1)


class ArgmaxTop1(Layer):
    top_k = 1

    def forward(self, x: Tensor) -> Tensor:
        probs = self.gate(x).softmax(-1)
        ids = probs.argmax(-1)
        y = torch.zeros_like(x)
        for e in range(EXPERTS):
            mask = ids == e
            if mask.sum() > 0:
                y[mask] = self.experts[e](x[mask]) * probs[mask, e].unsqueeze(-1)
        return y


class SortedScores(Layer):
    """Top-k by a descending sort, weights gathered, a scaling factor."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x).sigmoid()
        ids = scores.argsort(dim=-1, descending=True)[:, :TOP_K]
        w = scores.gather(1, ids)
        return w / w.sum(-1, keepdim=True) * 2.5, ids


class BiasedGroups(Layer):
    """DeepSeek-V3 routing: groups first, a correction bias that chooses but does not weigh."""

    def make(self) -> None:
        super().make()
        self.register_buffer("bias", torch.linspace(-0.1, 0.1, EXPERTS))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x).sigmoid()
        choice = scores + self.bias
        best = choice.view(-1, 2, EXPERTS // 2).topk(2, dim=-1)[0].sum(-1)
        group = torch.topk(best, k=1, dim=-1, sorted=False)[1]
        mask = (
            torch.zeros_like(best).scatter_(1, group, 1).unsqueeze(-1).expand(-1, 2, EXPERTS // 2).reshape(-1, EXPERTS)
        )
        ids = torch.topk(choice.masked_fill(~mask.bool(), 0.0), k=TOP_K, dim=-1, sorted=False)[1]
        w = scores.gather(1, ids)
        return w / (w.sum(-1, keepdim=True) + 1e-20), ids


class DenseLoop(Layer):
    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = 0
        for e, expert in enumerate(self.experts):
            y = y + expert(x) * (w * (ids == e)).sum(-1, keepdim=True)
        return y


class DenseMaskedProbs(Layer):
    """Weights renormalised over a mask; no ``[tokens, top_k]`` weights anywhere."""

    def forward(self, x: Tensor) -> Tensor:
        probs = self.gate(x).softmax(-1)
        ids = probs.topk(TOP_K, -1)[1]
        probs = probs * torch.zeros_like(probs).scatter(1, ids, 1.0)
        probs = probs / probs.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        for e in range(EXPERTS):
            y = y + probs[:, e].unsqueeze(-1) * self.experts[e](x)
        return y


class StackedOutputs(Layer):
    """All experts on all tokens, stacked; each token picks its choices."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        every = torch.stack([expert(x) for expert in self.experts], dim=1)
        picked = every.gather(1, ids.unsqueeze(-1).expand(-1, -1, WIDTH))
        return (picked * w.unsqueeze(-1)).sum(1)


class BiasNormExperts(Layer):
    """Experts with biases, a norm of their own, dropout off, and a learned output scale."""

    def make(self) -> None:
        def expert() -> nn.Module:
            return nn.Sequential(
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, INNER),
                nn.GELU(),
                nn.Dropout(0.0),
                nn.Linear(INNER, WIDTH),
            )

        self.experts = nn.ModuleList([expert() for _ in range(EXPERTS)])
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(WIDTH) + 0.5) for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e in range(EXPERTS):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.experts[e](x[t]) * self.scales[e] * w[t, k, None])
        return y


class LinearLists(Layer):
    """Lists of linear layers instead of a list of experts; fused gate and up."""

    def make(self) -> None:
        self.up = nn.ModuleList([nn.Linear(WIDTH, 2 * INNER) for _ in range(EXPERTS)])
        self.down = nn.ModuleList([nn.Linear(INNER, WIDTH) for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e in range(EXPERTS):
            t, k = torch.where(ids == e)
            gate, up = self.up[e](x[t]).chunk(2, dim=-1)
            y.index_add_(0, t, self.down[e](F.silu(gate) * up) * w[t, k, None])
        return y


class WeightBeforeDown(Layer):
    """The weight enters before the last linear layer, which has no bias: the same meaning."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            hidden = F.silu(expert.w1(x[t])) * expert.w3(x[t])
            y.index_add_(0, t, expert.w2(hidden * w[t, k, None]))
        return y


class LinearExperts(Layer):
    """Experts that are one linear layer, the weight on their input: the same meaning."""

    def make(self) -> None:
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, expert(x[t] * w[t, k, None]))
        return y


class DetachedWeights(Layer):
    """Straight-through weights: the value is one thing, the gradient another."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        w = w + (1 - w).detach()
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, expert(x[t]) * w[t, k, None])
        return y


class LoraExperts(Layer):
    """A low-rank adapter on each expert."""

    def make(self) -> None:
        super().make()
        self.down = nn.ModuleList([nn.Linear(WIDTH, 2, bias=False) for _ in range(EXPERTS)])
        self.up = nn.ModuleList([nn.Linear(2, WIDTH, bias=False) for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            rows = x[t]
            y.index_add_(0, t, (expert(rows) + 0.5 * self.up[e](self.down[e](rows))) * w[t, k, None])
        return y


SEPARATE: list[type[Layer]] = [
    WhereLoop,
    WhereLoopShared,
    HitList,
    BoolMask,
    UniqueIds,
    SortSplit,
    SortUnsort,
    RepeatMask,
    ChoiceLoop,
    BackwardLoop,
    SwitchTop1,
    ArgmaxTop1,
    SortedScores,
    BiasedGroups,
    DenseLoop,
    DenseMaskedProbs,
    StackedOutputs,
    BiasNormExperts,
    LinearLists,
    WeightBeforeDown,
    LinearExperts,
    DetachedWeights,
    LoraExperts,
]
