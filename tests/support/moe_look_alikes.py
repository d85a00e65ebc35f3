"""What looks like an MoE layer and must be refused, with a word of the sentence that refuses it; and what has no routing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.moe_styles import EXPERTS, INNER, MLP, WIDTH, Layer, WeightBeforeDown


class SeesNeighbours(Layer):
    """An expert that reads the row above."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            rows = x[t]
            y.index_add_(0, t, expert(rows + rows.roll(1, 0)) * w[t, k, None])
        return y


class CentersRows(Layer):
    """An expert that subtracts the mean over its rows."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            rows = expert(x[t])
            y.index_add_(0, t, (rows - rows.mean(0, keepdim=True)) * w[t, k, None])
        return y


class WeightInside(Layer):
    """The weight in the middle of an expert, before its activation."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, expert.w2(F.silu(expert.w1(x[t]) * w[t, k, None])))
        return y


class DenseInputBias(Layer):
    """Every expert on all tokens times masked weights: with a bias, experts that were not chosen give something, too."""

    def make(self) -> None:
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, WIDTH)) for _ in range(EXPERTS)]
        )

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            y = y + expert(x * (w * (ids == e)).sum(-1, keepdim=True))
        return y


class WeightBeforeBias(WeightBeforeDown):
    """The weight before a linear layer with a bias."""

    def make(self) -> None:
        super().make()
        for expert in self.experts:
            expert.w2 = nn.Linear(INNER, WIDTH)


class ShiftedRows(Layer):
    """Every result is added one token further."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, (t + 1) % x.shape[0], expert(x[t]) * w[t, k, None])
        return y


class WrongWeights(Layer):
    """Each choice is weighed with another choice's weight."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, expert(x[t]) * w[t, k, None] * w[t, k, None])
        return y


class RandomlyDropped(Layer):
    """Tokens are dropped by the size of their router score."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            best = w[t, k].argsort(descending=True)[:4]
            t, k = t[best], k[best]
            y.index_add_(0, t, expert(x[t]) * w[t, k, None])
        return y


class LastComeFirst(Layer):
    """Each expert takes its last tokens, which no order of this compiler says."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            t, k = t.flip(0)[:4], k.flip(0)[:4]
            y.index_add_(0, t, expert(x[t]) * w[t, k, None])
        return y


class HalfTokens(Layer):
    """An option without an expert hands back half of the token."""

    def make(self) -> None:
        self.gate = nn.Linear(WIDTH, EXPERTS + 1, bias=False)
        super().make()

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e in range(EXPERTS + 1):
            t, k = torch.where(ids == e)
            rows = self.experts[e](x[t]) if e < EXPERTS else x[t].sin()
            y.index_add_(0, t, rows * w[t, k, None])
        return y


class OddExpert(Layer):
    def make(self) -> None:
        super().make()
        self.experts[2] = MLP(inner=INNER + 4)


class OddActivation(Layer):
    def make(self) -> None:
        super().make()
        self.experts[3] = MLP(act=nn.GELU())


class ReusedParameter(Layer):
    """An expert's weight is also used outside the expert."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(x, self.experts[1].w1.weight)[:, :WIDTH]


class FrozenSome(Layer):
    def make(self) -> None:
        super().make()
        self.experts[0].w1.weight.requires_grad_(False)


class ExpertBetween(Layer):
    """An option without an expert between two that have one."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e in (0, 2, 3):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.experts[e](x[t]) * w[t, k, None])
        return y


class Threshold(Layer):
    """Experts chosen by a threshold instead of a fixed number."""

    def forward(self, x: Tensor) -> Tensor:
        probs = self.gate(x).softmax(-1)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t = torch.where(probs[:, e] > 0.3)[0]
            y = y.index_add(0, t, expert(x[t]) * probs[t, e].unsqueeze(-1))
        return y


class GatheredWeights(Layer):
    """A whole weight is gathered for each token."""

    def make(self) -> None:
        self.w = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        return torch.einsum("tkoh,th,tk->to", self.w[ids], x, w)


class RareGuard(Layer):
    """Choices of small weight hand the token back: no score that softmax gives to evenly drawn logits is that small."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            rows = torch.where(w[t, k, None] > 0.01, expert(x[t]), x[t])
            y = y.index_add(0, t, rows * w[t, k, None])
        return y


class RareClamp(Layer):
    """What a choice adds is clamped, far out."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            y = y.index_add(0, t, (expert(x[t]) * w[t, k, None]).clamp(-50, 50))
        return y


class ScaledDifferently(Layer):
    """Each expert's weights have a factor of their own, written into the loop."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, (1 + 0.5 * e) * w[t, k][:, None] * expert(x[t]))
        return y


class NormalisedInLoop(Layer):
    """The sum of a token's weights is taken where an expert has picked its tokens."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.gate(x).softmax(-1).topk(self.top_k)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, (w[t, k] / w[t].sum(-1))[:, None] * expert(x[t]))
        return y


class WideNorm(Layer):
    """All experts' linears as two wide ones, with a norm over the features of all experts between them."""

    def make(self) -> None:
        self.up, self.down = nn.Linear(WIDTH, EXPERTS * INNER), nn.Linear(EXPERTS * INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        masked = torch.zeros(x.shape[0], EXPERTS, dtype=x.dtype).scatter(1, ids, w)
        hidden = F.layer_norm(self.up(x), (EXPERTS * INNER,)).unflatten(-1, (EXPERTS, INNER))
        return self.down((hidden * masked.unsqueeze(-1)).flatten(-2))


class SparseFeatures(Layer):
    """The largest features of each token, and no experts."""

    def make(self) -> None:
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(torch.zeros_like(hidden).scatter(-1, *reversed(hidden.topk(self.top_k, -1))))


REFUSED: dict[type[Layer], str] = {
    RareGuard: "does more than choose weights",
    RareClamp: "applies a nonlinear function",
    SeesNeighbours: "does not treat each row for itself",
    CentersRows: "on probes",
    WeightInside: "nonlinear",
    WeightBeforeBias: "nonlinear",
    ShiftedRows: "on probes",
    WrongWeights: "second time",
    DenseInputBias: "on probes",
    RandomlyDropped: "dropped",
    LastComeFirst: "dropped",
    HalfTokens: "depends on the routing decision",
    OddExpert: "experts.2",
    OddActivation: "experts.3",
    ReusedParameter: "experts.1.w1.weight",
    FrozenSome: "freeze",
    ExpertBetween: "come before or behind",
    Threshold: "not recognised",
    ScaledDifferently: "on probes",
    NormalisedInLoop: "on probes",
    GatheredWeights: "gathers a whole weight for each token",
}


class NoMoe(nn.Module):
    """A plain gated network."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


class SoftMixture(Layer):
    """Every expert weighs in for every token, and the model only reports which one is first: no routing."""

    def forward(self, x: Tensor) -> Tensor:
        probs = self.gate(x).softmax(-1)
        y = torch.stack([expert(x) for expert in self.experts], 1)
        return (y * probs.unsqueeze(-1)).sum(1) + 0 * probs.topk(2, -1)[0].sum()
