"""Kinds of layers that stand in few models: recognised, run data-parallel and named, or refused with a line."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.moe_styles import EXPERTS, MLP, TOP_K, WIDTH, Layer

SEQUENCE = 4  # tokens of one batch row; every kind takes [rows, SEQUENCE, WIDTH]


class _Tokens(Layer):
    """A layer over tokens whose batch rows are joined."""

    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(x.reshape(-1, WIDTH)).reshape(x.shape)

    def mixed(self, x: Tensor) -> Tensor:
        return super().forward(x)


class AdapterLinear(nn.Module):
    """MoLoRA: a linear layer with low-rank adapters, of which a router of its own picks two for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.router = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.down = nn.ModuleList([nn.Linear(WIDTH, 2, bias=False) for _ in range(EXPERTS)])
        self.up = nn.ModuleList([nn.Linear(2, WIDTH, bias=False) for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.router(x).softmax(-1).topk(TOP_K, -1)
        w = w / w.sum(-1, keepdim=True)
        y: Tensor = self.base(x)
        for e in range(EXPERTS):
            y = y + self.up[e](self.down[e](x)) * (w * (ids == e)).sum(-1, keepdim=True)
        return y


class RouterPerLinear(nn.Module):
    """An attention whose four linear layers are such mixtures: what one routes goes through products into the next."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (AdapterLinear() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.q(x) @ self.k(x).transpose(-1, -2)).softmax(-1)
        found: Tensor = self.o(scores @ self.v(x))
        return found


class WeighedGroups(nn.Module):
    """Two MoE layers side by side, mixed by a gate that every token weighs both with."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.groups = nn.Linear(WIDTH, 2), nn.ModuleList([_Tokens() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        w = self.gate(x).softmax(-1)
        return self.groups[0](x) * w[..., :1] + self.groups[1](x) * w[..., 1:]


class OneDecisionForTwo(_Tokens):
    """Two sets of experts, one linear layer each, behind one another and routed by one decision."""

    def make(self) -> None:
        self.first = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)])
        self.second = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)])

    def mixed(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        for experts in (self.first, self.second):
            y = torch.zeros_like(x)
            for e, expert in enumerate(experts):
                t, k = torch.where(ids == e)
                y = y.index_add(0, t, expert(x[t]) * w[t, k, None])
            x = y.relu()
        return x


class AnyElif(_Tokens):
    """Masks over tokens; an idle expert adds zero times its result for one token."""

    def mixed(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mask = (ids == e).any(-1)
            if mask.any():
                y[mask] += expert(x[mask]) * (w * (ids == e)).sum(-1)[mask, None]
            elif self.training:
                y = y + expert(x[:1]).sum() * 0
        return y


# kind -> number of MoE layers
class LoadCounter(_Tokens):
    """Tokens per expert, added up in a buffer."""

    def make(self) -> None:
        super().make()
        self.register_buffer("load", torch.zeros(EXPERTS))

    def mixed(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.load += torch.bincount(self.route(x)[1].flatten(), minlength=EXPERTS)
        return super().mixed(x)


RECOGNISED: dict[type[nn.Module], int] = {
    RouterPerLinear: 4,
    WeighedGroups: 2,
    OneDecisionForTwo: 2,
    AnyElif: 1,
    LoadCounter: 1,
}


class SeveralTopKGates(nn.Module):
    """MMoE with two gates that each pick two of the same experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([MLP() for _ in range(EXPERTS)])
        self.gates = nn.ModuleList([nn.Linear(WIDTH, EXPERTS) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        outs = torch.stack([expert(x) for expert in self.experts], -2)
        mixed = []
        for gate in self.gates:
            w, ids = gate(x).softmax(-1).topk(TOP_K, -1)
            full = torch.zeros(*x.shape[:-1], EXPERTS, dtype=x.dtype).scatter(-1, ids, w)
            mixed.append((outs * full[..., None]).sum(-2))
        return mixed[0] + mixed[1].tanh()


class BatchPicks(nn.Module):
    """The mean of the whole batch picks two of the stacked weights, for all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, EXPERTS), nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.gate(x.mean((0, 1))).softmax(-1).topk(TOP_K, -1)
        return torch.einsum("bth,khf,k->btf", x, self.up[ids], w).tanh()


class BatchWeighs(nn.Module):
    """The mean of the whole batch picks two experts; all compute, the others' results count zero."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS), nn.ModuleList([MLP() for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.gate(x.mean((0, 1))).softmax(-1).topk(TOP_K, -1)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            y = y + expert(x) * (w * (ids == e)).sum()
        return y


class RowsChosen(nn.Module):
    """Every expert takes the two best tokens of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS), nn.ModuleList([MLP() for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        w, at = self.gate(x).softmax(-1).topk(2, 1)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            places = at[:, :, e, None].expand(-1, -1, WIDTH)
            y = y.scatter_add(1, places, expert(x.gather(1, places)) * w[:, :, e, None])
        return y


# kind -> part of the reason why it runs data-parallel
DATA_PARALLEL: dict[type[nn.Module], str] = {
    SeveralTopKGates: "several decisions weigh the results of the same experts",
    BatchPicks: "tokens pick rows of mixture.up",
    BatchWeighs: "4 parts of mixture.experts.* stand side by side",
    RowsChosen: "4 parts of mixture.experts.* stand side by side",
}


class Groups(nn.Module):
    """Experts that are MoE layers themselves: tokens go to a group, and there to experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.groups = nn.Linear(WIDTH, 2), nn.ModuleList([Layer() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        w, ids = self.gate(rows).softmax(-1).topk(1, -1)
        y = torch.zeros_like(rows)
        for g, group in enumerate(self.groups):
            t, k = torch.where(ids == g)
            y = y.index_add(0, t, group(rows[t]) * w[t, k, None])
        return y.reshape(x.shape)


class ComputedIds(nn.Module):
    """A group, then an expert in it: two decisions that make up one number."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList([MLP() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        p, group = self.outer(rows).softmax(-1).max(-1)
        q, inside = self.inner(rows).view(-1, 2, 2).softmax(-1)[torch.arange(rows.shape[0]), group].max(-1)
        ids, y = group * 2 + inside, torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            t = torch.where(ids == e)[0]
            y[t] += expert(rows[t]) * (p * q)[t, None]
        return y.reshape(x.shape)


class SequencesRouted(nn.Module):
    """Whole rows go to the two experts that their mean picks."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS), nn.ModuleList([MLP() for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.gate(x.mean(1)).softmax(-1).topk(TOP_K, -1)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            b, k = torch.where(ids == e)
            y = y.index_add(0, b, expert(x[b]) * w[b, k, None, None])
        return y


class BatchPicksByNumber(BatchPicks):
    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.gate(x.mean((0, 1))).softmax(-1).topk(TOP_K, -1)
        parts = [(x @ self.up[ids[k].item()]).tanh() * w[k] for k in range(TOP_K)]  # type: ignore[index]
        return parts[0] + parts[1]


class TokenLoop(_Tokens):
    """A loop over tokens that indexes the list of experts with a tensor."""

    def mixed(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for t in range(x.shape[0]):
            for k in range(TOP_K):
                y[t] += self.experts[ids[t, k]](x[t]) * w[t, k]  # type: ignore[index]
        return y


class TokensZipped(_Tokens):
    """Tokens, weights and ids taken apart, each id read by ``int``."""

    def mixed(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        rows = [
            sum(self.experts[int(i)](t) * v for v, i in zip(u, c, strict=True))
            for t, u, c in zip(x, w, ids, strict=True)
        ]
        return torch.stack(rows)  # type: ignore[arg-type]


class LongestQueue(_Tokens):
    """A buffer as long as the busiest expert needs: ``int(t.max())``."""

    def mixed(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        slots = int(torch.bincount(ids.view(-1), minlength=EXPERTS).max())
        buffer, y = x.new_zeros(EXPERTS, slots, WIDTH), torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            buffer[e, : t.numel()] = x[t]
            y = y.index_add(0, t, expert(buffer[e])[: t.numel()] * w[t, k, None])
        return y


class UpToTheLast(_Tokens):
    """As many experts as the largest id says: ``range(ids.max().item() + 1)``."""

    def mixed(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e in range(int(ids.max().item()) + 1):
            t, k = torch.where(ids == e)
            y = y.index_add(0, t, self.experts[e](x[t]) * w[t, k, None])
        return y


class ClassesFromData(_Tokens):
    """``one_hot`` without a number of classes takes the largest id's."""

    def mixed(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        hot, y = F.one_hot(ids), torch.zeros_like(x)
        for e in range(EXPERTS):
            t, k = torch.where(hot[..., e] > 0)
            y = y.index_add(0, t, self.experts[e](x[t]) * w[t, k, None])
        return y


class BinsFromData(_Tokens):
    """``bincount`` without ``minlength``."""

    def mixed(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        order = ids.view(-1).argsort()
        parts = torch.split(x[order // TOP_K], torch.bincount(ids.view(-1)).tolist())
        out = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=False)])
        return torch.zeros_like(x).index_add(0, order // TOP_K, out * w.view(-1)[order, None])


REFUSED: dict[type[nn.Module], str] = {
    Groups: "routes tokens to experts, but an expert hands out 2 values",
    ComputedIds: "the router chooses among 2, and 4 experts were found",
    SequencesRouted: "the experts' rows must come from one tensor of 4 tokens",
    BatchPicksByNumber: r"reads a number out of a tensor \(item\)",
    TokenLoop: "depends on tensor values",
    TokensZipped: "depends on tensor values",
    LongestQueue: "depends on tensor values",
    UpToTheLast: r"reads a number out of a tensor \(item\)",
    ClassesFromData: "depends on tensor values",
    BinsFromData: "depends on tensor values",
}


class Model(nn.Module):
    """One layer of a kind behind a norm; with ``routed``, a plain MoE layer in front of it."""

    def __init__(self, kind: type[nn.Module], routed: bool = False) -> None:
        super().__init__()
        self.before, self.routed, self.mixture = nn.LayerNorm(WIDTH), _Tokens() if routed else None, kind()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.before(x)
        if self.routed is not None:
            x = x + self.routed(x)
        return {"loss": (x + self.mixture(x) - labels).square().mean()}
