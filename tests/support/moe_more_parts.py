"""More parts of MoE layers in the sense of `moe_parts`: rarer routers, experts and ways to combine them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.moe_parts import EXPERTS, INNER, TOP_K, WIDTH, Combine, Experts, Router, _Modules

# ---- routers -----------------------------------------------------------------------------------------------------------


class BestPairs(Router):
    """Groups are ranked by the sum of their two best scores plus bias; the bias leaves the weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.linspace(-0.1, 0.1, EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x, self.gate.weight).sigmoid()
        biased = scores + self.bias.unsqueeze(0)
        groups = biased.view(-1, 2, EXPERTS // 2).topk(2, dim=-1)[0].sum(dim=-1)
        allowed = torch.zeros_like(groups).scatter_(1, groups.topk(1, dim=-1, sorted=False)[1], 1)
        allowed = allowed.unsqueeze(-1).expand(-1, 2, EXPERTS // 2).reshape(-1, EXPERTS)
        ids = biased.masked_fill(~allowed.bool(), float("-inf")).topk(TOP_K, dim=-1, sorted=False)[1]
        return scores.gather(1, ids) * 2.5, ids


class DeepRouter(Router):
    """Two layers with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        w, ids = (self.gate(x) + self.last(self.hidden(x).tanh())).softmax(-1).topk(TOP_K, dim=-1)
        return w, ids


class Capped(Router):
    """Scores that tanh keeps small."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.tanh(self.gate(x) / 5.0) * 5.0
        values, ids = logits.topk(TOP_K, dim=-1)
        return torch.exp(values - torch.logsumexp(values, dim=-1, keepdim=True)), ids


class Masked(Router):
    """Everything but the chosen is masked before the softmax."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.gate(x)
        ids = logits.topk(TOP_K, dim=-1).indices
        kept = torch.full_like(logits, float("-inf")).scatter(1, ids, logits.gather(1, ids))
        return F.softmax(kept, dim=-1).gather(1, ids), ids


class OneByOne(Router):
    """The best, then the best of the rest."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probs = self.gate(x).softmax(dim=1)
        first = probs.argmax(dim=1)
        rest = probs * (1 - F.one_hot(first, EXPERTS).to(probs.dtype))
        ids = torch.stack([first, rest.argmax(dim=1)], dim=1)
        return probs.gather(1, ids), ids


class RouterNorm(Router):
    """The token is normed for the router alone, and the weights are square roots."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        top, ids = F.softplus(self.gate(self.norm(x))).sqrt().topk(TOP_K)
        return top / top.sum(-1, keepdim=True).clamp_min(1e-9), ids


ROUTERS: list[type[Router]] = [BestPairs, DeepRouter, Capped, Masked, OneByOne, RouterNorm]

# ---- experts -----------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, INNER), nn.SiLU(), nn.Linear(INNER, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


class ResidualModules(_Modules):
    def make(self) -> nn.Module:
        return Residual()


class Squared(nn.Module):
    """A squared ReLU and a gain of each expert's own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.square(F.relu(self.up(x)))) * self.gain


class SquaredModules(_Modules):
    def make(self) -> nn.Module:
        return Squared()


class ThreeLayers(_Modules):
    def make(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, INNER), nn.LeakyReLU(0.1), nn.Linear(INNER, WIDTH)
        )


class ClampedStack(Experts):
    """Interleaved gate and up with biases, clamped, a gate of its own; weights ``[E, in, out]``."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * INNER) * 0.3)
        self.b1 = nn.Parameter(torch.randn(EXPERTS, 2 * INNER) * 0.1)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) * 0.3)
        self.b2 = nn.Parameter(torch.randn(EXPERTS, WIDTH) * 0.1)

    def forward(self, e: int, rows: Tensor) -> Tensor:
        both = rows @ self.w1[e] + self.b1[e]
        gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(min=-7.0, max=7.0)
        return ((up + 1) * (gate * torch.sigmoid(gate * 1.702))) @ self.w2[e] + self.b2[e]


class OneMatrix(Experts):
    """All experts in the rows of one matrix, taken apart by `view`."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS * INNER, WIDTH) * 0.3)
        self.w2 = nn.Parameter(torch.randn(EXPERTS * INNER, WIDTH) * 0.3)

    def forward(self, e: int, rows: Tensor) -> Tensor:
        up, down = self.w1.view(EXPERTS, INNER, WIDTH)[e], self.w2.view(EXPERTS, INNER, WIDTH)[e]
        return F.gelu(rows.matmul(up.t()), approximate="tanh").matmul(down)


class Lists(Experts):
    """A list of parameters for each matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ParameterList([torch.randn(INNER, WIDTH) * 0.3 for _ in range(EXPERTS)])
        self.down = nn.ParameterList([torch.randn(WIDTH, INNER) * 0.3 for _ in range(EXPERTS)])

    def forward(self, e: int, rows: Tensor) -> Tensor:
        return F.linear(F.mish(F.linear(rows, self.up[e])), self.down[e])


class LinearLists(Experts):
    """A list of linears for each matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList([nn.Linear(WIDTH, INNER) for _ in range(EXPERTS)])
        self.down = nn.ModuleList([nn.Linear(INNER, WIDTH) for _ in range(EXPERTS)])

    def forward(self, e: int, rows: Tensor) -> Tensor:
        out: Tensor = self.down[e](self.up[e](rows).tanh())
        return out


EXPERT_KINDS: list[type[Experts]] = [
    ResidualModules, SquaredModules, ThreeLayers, ClampedStack, OneMatrix, Lists, LinearLists,
]  # fmt: skip

# ---- combining ---------------------------------------------------------------------------------------------------------


def scatter_added(x: Tensor, w: Tensor, ids: Tensor, experts: Experts) -> Tensor:
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        t, k = (ids == e).nonzero(as_tuple=True)
        rows = experts(e, x.index_select(0, t)) * w[t, k].unsqueeze(-1)
        y = y.scatter_add(0, t.unsqueeze(-1).expand(-1, WIDTH), rows)
    return y


def put_back(x: Tensor, w: Tensor, ids: Tensor, experts: Experts) -> Tensor:
    """Weighted rows are accumulated by `index_put`."""
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        t, k = torch.where(ids == e)
        y = y.index_put((t,), experts(e, x[t]) * w[t, k, None], accumulate=True)
    return y


def unique_ids(x: Tensor, w: Tensor, ids: Tensor, experts: Experts) -> Tensor:
    y = torch.zeros_like(x)
    for e in ids.unique().tolist():
        t, k = torch.where(ids == e)
        y[t] = y[t] + experts(e, x[t]) * w[t, k].view(-1, 1)
    return y


def repeated_rows(x: Tensor, w: Tensor, ids: Tensor, experts: Experts) -> Tensor:
    """Each token once for each choice, experts by mask, summed over the choices: the old Mixtral-like inference form."""
    top_k = ids.shape[-1]
    rows, flat = x.repeat_interleave(top_k, dim=0), ids.reshape(-1)
    out = torch.empty_like(rows)
    for e in range(EXPERTS):
        out[flat == e] = experts(e, rows[flat == e])
    return (out.view(*w.shape, -1) * w.unsqueeze(-1)).sum(dim=1)


def dense_gather(x: Tensor, w: Tensor, ids: Tensor, experts: Experts) -> Tensor:
    """All experts on all tokens; the chosen results are gathered."""
    outs = torch.stack([experts(e, x) for e in range(EXPERTS)], dim=1)
    chosen = outs.gather(1, ids.unsqueeze(-1).expand(-1, -1, WIDTH))
    return (chosen * w.unsqueeze(-1)).sum(1)


def one_hot_slots(x: Tensor, w: Tensor, ids: Tensor, experts: Experts) -> Tensor:
    """Slots ``[tokens, E, slots]`` for every token that could come, by einsum there and back."""
    chosen = F.one_hot(ids, EXPERTS)
    flat = chosen.reshape(-1, EXPERTS)
    place = (flat.cumsum(0) - flat).reshape(chosen.shape)
    slots = F.one_hot((place * chosen).sum(-1), ids.shape[0] * ids.shape[1]).to(x.dtype)
    spread = torch.einsum("tke,tks->tkes", chosen.to(x.dtype), slots)
    dispatch = spread.sum(1)
    combine = torch.einsum("tk,tkes->tes", w, spread)
    buffers = torch.einsum("tes,th->esh", dispatch, x)
    outs = torch.stack([experts(e, buffers[e]) for e in range(EXPERTS)])
    return torch.einsum("tes,esh->th", combine, outs)


def weighed_input(x: Tensor, w: Tensor, ids: Tensor, experts: Experts) -> Tensor:
    """The weight goes in front of the expert."""
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        t, k = torch.where(ids == e)
        y = y.index_add(0, t, experts(e, x[t] * w[t, k, None]))
    return y


def first_rows(x: Tensor, w: Tensor, ids: Tensor, experts: Experts) -> Tensor:
    """Each expert takes its first seven tokens only."""
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        t, k = torch.where(ids == e)
        t, k = t[:7], k[:7]
        y = y.index_add(0, t, experts(e, x[t]) * w[t, k, None])
    return y


COMBINES: list[Combine] = [
    scatter_added, put_back, unique_ids, repeated_rows, dense_gather, one_hot_slots, weighed_input, first_rows,
]  # fmt: skip
