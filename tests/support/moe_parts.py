"""Parts of MoE layers as people write them, to be put together at random: routers, experts, ways to combine them.

A router maps tokens ``[T, WIDTH]`` to weights and ids ``[T, K]``.  Experts are called as ``experts(e, rows)``.  A
combine function sums ``weight * expert(token)`` over each token's choices.  Any three of them make a layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, INNER, EXPERTS, TOP_K = 8, 12, 4, 2


# ---- routers -----------------------------------------------------------------------------------------------------------


class Router(nn.Module):
    """A linear gate; subclasses say how scores become weights and ids."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class SoftmaxTopK(Router):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        w, ids = self.gate(x).softmax(-1).topk(TOP_K, -1)
        return w / w.sum(-1, keepdim=True), ids


class TopKSoftmax(Router):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        top, ids = torch.topk(self.gate(x), TOP_K, dim=-1)
        return F.softmax(top, dim=-1, dtype=torch.float64).to(x.dtype), ids


class SigmoidBias(Router):
    """The bias decides who is chosen and leaves the weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.linspace(-0.2, 0.2, EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x).sigmoid()
        ids = (scores + self.bias).topk(TOP_K, -1, sorted=False)[1]
        w = scores.gather(-1, ids)
        return w / (w.sum(-1, keepdim=True) + 1e-9) * 1.5, ids


class Grouped(Router):
    """The better of two groups of experts is allowed."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x).softmax(-1)
        best = scores.view(-1, 2, EXPERTS // 2).amax(-1).argmax(-1)
        allowed = F.one_hot(best, 2).repeat_interleave(EXPERTS // 2, -1)
        w, ids = scores.masked_fill(allowed == 0, 0.0).topk(TOP_K, -1)
        return w, ids


class Switch(Router):
    """Top-1 with its probability."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        w, ids = self.gate(x).softmax(-1).max(-1)
        return w.unsqueeze(-1), ids.unsqueeze(-1)


class Sorted(Router):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        w, order = self.gate(x).sigmoid().sort(-1, descending=True)
        return w[:, :TOP_K], order[:, :TOP_K]


class Cosine(Router):
    """Directions are compared; a temperature is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.normalize(x, dim=-1) @ F.normalize(self.gate.weight, dim=-1).t() * self.temperature
        w, ids = scores.softmax(-1).topk(TOP_K)
        return w, ids


ROUTERS: list[type[Router]] = [SoftmaxTopK, TopKSoftmax, SigmoidBias, Grouped, Switch, Sorted, Cosine]


# ---- experts -----------------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    def forward(self, e: int, rows: Tensor) -> Tensor:
        raise NotImplementedError


class Gated(nn.Module):
    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        self.up = nn.Linear(WIDTH, 2 * INNER if fused else INNER, bias=False)
        if not fused:
            self.gate = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1) if self.fused else (self.gate(x), self.up(x))
        return self.down(F.silu(gate) * up)


class _Modules(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.ModuleList([self.make() for _ in range(EXPERTS)])

    def make(self) -> nn.Module:
        return Gated()

    def forward(self, e: int, rows: Tensor) -> Tensor:
        out: Tensor = self.items[e](rows)
        return out


class GatedModules(_Modules):
    pass


class FusedModules(_Modules):
    def make(self) -> nn.Module:
        return Gated(fused=True)


class SequentialModules(_Modules):
    def make(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))


class NormedModules(_Modules):
    def make(self) -> nn.Module:
        return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, WIDTH))


class OneLinear(_Modules):
    def make(self) -> nn.Module:
        return nn.Linear(WIDTH, WIDTH)


class NamedModules(Experts):
    """A ModuleDict."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.ModuleDict({f"expert_{e}": Gated() for e in range(EXPERTS)})

    def forward(self, e: int, rows: Tensor) -> Tensor:
        out: Tensor = self.items[f"expert_{e}"](rows)
        return out


class StackedIn(Experts):
    """``rows @ w[e]`` with weights ``[E, in, out]``."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * 0.3)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) * 0.3)

    def forward(self, e: int, rows: Tensor) -> Tensor:
        return F.relu(rows @ self.w1[e]) @ self.w2[e]


class StackedOut(Experts):
    """`F.linear` with weights ``[E, out, in]`` and biases ``[E, out]``."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH) * 0.3)
        self.b1 = nn.Parameter(torch.randn(EXPERTS, 2 * INNER) * 0.1)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * 0.3)

    def forward(self, e: int, rows: Tensor) -> Tensor:
        gate, up = F.linear(rows, self.w1[e], self.b1[e]).split(INNER, -1)
        return F.linear(gate.sigmoid() * up, self.w2[e])


EXPERT_KINDS: list[type[Experts]] = [
    GatedModules, FusedModules, SequentialModules, NormedModules, OneLinear, NamedModules, StackedIn, StackedOut,
]  # fmt: skip

# ---- combining ---------------------------------------------------------------------------------------------------------


def where_loop(x: Tensor, w: Tensor, ids: Tensor, experts: Experts) -> Tensor:
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        t, k = torch.where(ids == e)
        if t.numel() == 0:
            continue
        y.index_add_(0, t, experts(e, x[t]) * w[t, k, None])
    return y


def masked_rows(x: Tensor, w: Tensor, ids: Tensor, experts: Experts) -> Tensor:
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        hit = ids == e
        rows = hit.any(-1)
        if rows.any():
            y[rows] += experts(e, x[rows]) * (w * hit).sum(-1, keepdim=True)[rows]
    return y


def hit_list(x: Tensor, w: Tensor, ids: Tensor, experts: Experts) -> Tensor:
    y = torch.zeros_like(x)
    mask = F.one_hot(ids, EXPERTS).permute(2, 1, 0)
    for e in torch.greater(mask.sum((-1, -2)), 0).nonzero():
        k, t = torch.where(mask[e].squeeze(0))
        y.index_add_(0, t, experts(int(e[0]), x[t]) * w[t, k, None])
    return y


def sorted_split(x: Tensor, w: Tensor, ids: Tensor, experts: Experts) -> Tensor:
    flat, top_k = ids.reshape(-1), ids.shape[-1]
    order = flat.argsort(stable=True)
    parts = x[order // top_k].split(torch.bincount(flat, minlength=EXPERTS).tolist())
    out = torch.cat([experts(e, part) for e, part in enumerate(parts)])
    return torch.zeros_like(x).index_add(0, order // top_k, out * w.reshape(-1)[order, None])


def sorted_slices(x: Tensor, w: Tensor, ids: Tensor, experts: Experts) -> Tensor:
    flat, top_k = ids.reshape(-1), ids.shape[-1]
    order = flat.argsort()
    ends = F.one_hot(flat, EXPERTS).sum(0).cumsum(0).tolist()
    rows, outs, start = x[order // top_k], [], 0
    for e, end in enumerate(ends):
        if start == end:
            continue
        outs.append(experts(e, rows[start:end]))
        start = end
    out = torch.cat(outs)
    back = torch.empty_like(out)
    back[order] = out
    return (back.view(-1, top_k, WIDTH) * w.unsqueeze(-1)).sum(1)


def over_choices(x: Tensor, w: Tensor, ids: Tensor, experts: Experts) -> Tensor:
    """One choice after the other, then one expert after the other."""
    y = torch.zeros_like(x)
    for k in range(ids.shape[-1]):
        for e in range(EXPERTS):
            rows = (ids[:, k] == e).nonzero().squeeze(-1)
            y = y.index_add(0, rows, w[rows, k].unsqueeze(-1) * experts(e, x[rows]))
    return y


def dense_sum(x: Tensor, w: Tensor, ids: Tensor, experts: Experts) -> Tensor:
    """Every expert on all tokens, zero weights for those that were not chosen."""
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        y = y + experts(e, x) * (w * (ids == e)).sum(-1, keepdim=True)
    return y


def dense_einsum(x: Tensor, w: Tensor, ids: Tensor, experts: Experts) -> Tensor:
    full = torch.zeros(x.shape[0], EXPERTS, dtype=w.dtype, device=x.device).scatter(1, ids, w)
    outs = torch.stack([experts(e, x) for e in range(EXPERTS)], 1)
    return torch.einsum("teh,te->th", outs, full)


Combine = Callable[[Tensor, Tensor, Tensor, Experts], Tensor]
COMBINES: list[Combine] = [
    where_loop, masked_rows, hit_list, sorted_split, sorted_slices, over_choices, dense_sum, dense_einsum,
]  # fmt: skip
