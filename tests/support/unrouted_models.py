"""Layers with several experts of which no token chooses some: they run data-parallel, exactly, and are named."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.moe_styles import EXPERTS, MLP, WIDTH, Layer

SEQUENCE = 4  # tokens of one batch row; every layer takes [rows, SEQUENCE, WIDTH]


class SlotMixture(nn.Module):
    """Soft MoE: each expert computes on slots, which are mixtures of all tokens of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.randn(EXPERTS * 2, WIDTH))
        self.experts = nn.ModuleList([MLP() for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.einsum("bth,sh->bts", x, self.slots)
        mixed = torch.einsum("bts,bth->bsh", scores.softmax(1), x)
        parts = mixed.reshape(x.shape[0], EXPERTS, 2, WIDTH).unbind(1)
        out = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)], 1)
        return torch.einsum("bts,bsh->bth", scores.softmax(-1), out)


class SoftMixture(nn.Module):
    """Every expert weighs in for every token; stacked weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.einsum("bth,ehf->btef", x, self.up).tanh()
        return (out * self.gate(x).softmax(-1).unsqueeze(-1)).sum(2)


class SeveralGates(nn.Module):
    """MMoE: one gate for each of two tasks over the same experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([MLP() for _ in range(EXPERTS)])
        self.gates = nn.ModuleList([nn.Linear(WIDTH, EXPERTS) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        outs = torch.stack([expert(x) for expert in self.experts], -1)
        first, second = ((outs * gate(x).softmax(-1).unsqueeze(-2)).sum(-1) for gate in self.gates)
        return first + second.tanh()


class ExpertChoice(nn.Module):
    """Every expert takes the tokens of the whole batch that score highest with it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList([MLP() for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        scores = self.gate(flat).softmax(-1)
        weights, tokens = scores.t().topk(flat.shape[0] // EXPERTS * 2, -1)
        y = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            y = y.index_add(0, tokens[e], expert(flat[tokens[e]]) * weights[e].unsqueeze(-1))
        return y.reshape(x.shape)


class ProductKeys(nn.Module):
    """A memory: the best keys of two halves are combined, their values looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.keys = nn.Parameter(torch.randn(2, 6, WIDTH // 2))
        self.values = nn.Embedding(36, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.query(x).chunk(2, -1)
        first, i = F.linear(left, self.keys[0]).topk(3, -1)
        second, j = F.linear(right, self.keys[1]).topk(3, -1)
        both = (first.unsqueeze(-1) + second.unsqueeze(-2)).flatten(-2)
        ids = (i.unsqueeze(-1) * 6 + j.unsqueeze(-2)).flatten(-2)
        best, at = both.topk(3, -1)
        return (self.values(ids.gather(-1, at)) * best.softmax(-1).unsqueeze(-1)).sum(-2)


class AdapterMixture(nn.Module):
    """MoLoRA-like: a linear layer with a soft mixture of low-rank adapters and a router of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.down = nn.ParameterList([nn.Parameter(torch.randn(2, WIDTH) * 0.3) for _ in range(EXPERTS)])
        self.up = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, 2) * 0.3) for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        y = self.base(x)
        for e in range(EXPERTS):
            y = y + F.linear(F.linear(x, self.down[e]), self.up[e]) * weights[..., e : e + 1]
        return y


class PerSequence(nn.Module):
    """A router that looks at a row's mean and mixes the experts for the whole row."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList([MLP() for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x.mean(1)).softmax(-1)
        return sum(expert(x) * weights[:, e, None, None] for e, expert in enumerate(self.experts))  # type: ignore[return-value]


# kind -> part of the reason
UNROUTED: dict[type[nn.Module], str] = {
    SlotMixture: "4 parts of mixture.experts.* stand side by side",
    SoftMixture: "4 parts of mixture.up stand side by side",
    SeveralGates: "4 parts of mixture.experts.* stand side by side",
    ExpertChoice: "experts choose 8 of 16 tokens",
    ProductKeys: "tokens pick rows of mixture.",
    AdapterMixture: "stand side by side",
    PerSequence: "4 parts of mixture.experts.* stand side by side",
}


class Mixed(nn.Module):
    """A real MoE layer and, after it, one that is none."""

    def __init__(self, kind: type[nn.Module], routed: bool = True) -> None:
        super().__init__()
        self.before, self.routed, self.mixture = nn.LayerNorm(WIDTH), Layer() if routed else None, kind()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.before(x)
        if self.routed is not None:
            x = x + self.routed(x.reshape(-1, WIDTH)).reshape(x.shape)
        x = x + self.mixture(x)
        return {"loss": (x - labels).square().mean()}
