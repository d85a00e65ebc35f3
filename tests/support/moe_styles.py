"""One tiny model for each way people write an MoE layer by hand, and look-alikes that must be refused.

Every accepted model is a `Layer` that maps ``[tokens, width]`` to the same shape, with E = 4 experts and top-2 routing
unless its name says otherwise.  `REFUSED` maps a model to a word of the sentence that refuses it.
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


class Stacked(Layer):
    """Weights ``[E, in, out]``."""

    def make(self) -> None:
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * 0.3)
        self.w3 = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * 0.3)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) * 0.3)

    def masked(self, x: Tensor) -> Tensor:
        """Weights ``[tokens, E]``, zero where not chosen."""
        w, ids = self.route(x)
        return torch.zeros(x.shape[0], EXPERTS, dtype=x.dtype).scatter(1, ids, w)


class StackedMatmul(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e in range(EXPERTS):
            t, k = torch.where(ids == e)
            hidden = F.silu(x[t] @ self.w1[e]) * (x[t] @ self.w3[e])
            y.index_add_(0, t, hidden @ self.w2[e] * w[t, k, None])
        return y


class StackedUnbind(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, (w1, w3, w2) in enumerate(zip(self.w1.unbind(0), self.w3.unbind(0), self.w2.unbind(0), strict=True)):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, torch.mm(F.silu(torch.mm(x[t], w1)) * torch.mm(x[t], w3), w2) * w[t, k, None])
        return y


class StackedLinear(Layer):
    """``F.linear`` over slices ``[E, out, in]`` with biases, gate and up fused, the hit list of newer Hugging Face models."""

    def make(self) -> None:
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH) * 0.3)
        self.gate_up_bias = nn.Parameter(torch.randn(EXPERTS, 2 * INNER) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * 0.3)
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        mask = F.one_hot(ids, num_classes=EXPERTS).permute(2, 1, 0)
        for hit in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            e = hit[0]
            k, t = torch.where(mask[e])
            gate, up = F.linear(x[t], self.gate_up[e], self.gate_up_bias[e]).chunk(2, dim=-1)
            rows = F.linear(F.silu(gate) * up, self.down[e], self.down_bias[e])
            y.index_add_(0, t, (rows * w[t, k, None]).to(y.dtype))
        return y


class FlatStorage(Layer):
    """The DBRX form: weights ``[E * inner, width]`` seen as ``[E, inner, width]``."""

    def make(self) -> None:
        self.w1 = nn.Parameter(torch.randn(EXPERTS * INNER, WIDTH) * 0.3)
        self.w2 = nn.Parameter(torch.randn(EXPERTS * INNER, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        w1, parts = self.w1.view(EXPERTS, INNER, WIDTH), self.w2.chunk(EXPERTS, dim=0)
        for e in range(EXPERTS):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, F.gelu(x[t] @ w1[e].t()) @ parts[e] * w[t, k, None])
        return y


class DenseBmm(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        every = x.unsqueeze(0).expand(EXPERTS, -1, -1)
        hidden = F.silu(torch.bmm(every, self.w1)) * torch.bmm(every, self.w3)
        return (torch.bmm(hidden, self.w2) * self.masked(x).t().unsqueeze(-1)).sum(0)


class DenseEinsum(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(torch.einsum("th,ehi->tei", x, self.w1)) * torch.einsum("th,ehi->tei", x, self.w3)
        return torch.einsum("teh,te->th", torch.einsum("tei,eih->teh", hidden, self.w2), self.masked(x))


class DenseGptOss(Layer):
    """Repeated tokens, bmm with biases ``[E, 1, out]``, interleaved gate and up, clamps."""

    def make(self) -> None:
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * INNER) * 0.3)
        self.gate_up_bias = nn.Parameter(torch.randn(EXPERTS, 2 * INNER) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) * 0.3)
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        weights = torch.zeros(x.shape[0], EXPERTS, dtype=x.dtype).scatter_(1, ids, w)
        every = x.repeat(EXPERTS, 1).view(EXPERTS, -1, WIDTH)
        both = torch.bmm(every, self.gate_up) + self.gate_up_bias[..., None, :]
        gate, up = both[..., ::2], both[..., 1::2]
        gate, up = gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)
        rows = torch.bmm((up + 1) * (gate * torch.sigmoid(gate * 1.702)), self.down) + self.down_bias[..., None, :]
        return (rows * weights.transpose(0, 1)[..., None]).sum(dim=0)


class OneHotDispatch(Stacked):
    """GShard: one-hot dispatch and combine over slots, as many slots as there are tokens."""

    slots = 0

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        slots = self.slots or x.shape[0]
        chosen = F.one_hot(ids, EXPERTS)
        place = (
            chosen.permute(1, 0, 2).reshape(-1, EXPERTS).cumsum(0).reshape(TOP_K, -1, EXPERTS).permute(1, 0, 2) * chosen
            - 1
        )
        keep = (place >= 0) & (place < slots)
        slot = F.one_hot(place.clamp(0, slots - 1), slots) * keep.unsqueeze(-1)
        combine = (slot * w[:, :, None, None]).sum(1)
        rows = torch.einsum("tec,th->ech", slot.sum(1).to(x.dtype), x)
        hidden = F.silu(torch.einsum("ech,ehi->eci", rows, self.w1)) * torch.einsum("ech,ehi->eci", rows, self.w3)
        return torch.einsum("tec,ech->th", combine, torch.einsum("eci,eih->ech", hidden, self.w2))


ACCEPTED: list[type[Layer]] = [
    WhereLoop, WhereLoopShared, HitList, BoolMask, UniqueIds, SortSplit, SortUnsort, RepeatMask, ChoiceLoop, BackwardLoop,
    SwitchTop1, ArgmaxTop1, SortedScores, BiasedGroups, DenseLoop, DenseMaskedProbs, StackedOutputs, BiasNormExperts,
    LinearLists, WeightBeforeDown, LinearExperts, DetachedWeights, LoraExperts, StackedMatmul, StackedUnbind, StackedLinear,
    FlatStorage, DenseBmm, DenseEinsum, DenseGptOss, OneHotDispatch,
]  # fmt: skip


# Look-alikes ----------------------------------------------------------------------------------------------------


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
    """The weight on the input of a nonlinear expert."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, expert(x[t] * w[t, k, None]))
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


class DroppedTokens(OneHotDispatch):
    """Three slots an expert."""

    slots = 3


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


class MissingExpert(Layer):
    """The router chooses among four, three are computed."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e in range(EXPERTS - 1):
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


REFUSED: dict[type[Layer], str] = {
    SeesNeighbours: "does not treat each row for itself",
    CentersRows: "on probes",
    WeightInside: "nonlinear",
    WeightBeforeBias: "nonlinear",
    ShiftedRows: "on probes",
    WrongWeights: "second time",
    DroppedTokens: "dropped",
    OddExpert: "experts.2",
    OddActivation: "experts.3",
    ReusedParameter: "experts.1.w1.weight",
    FrozenSome: "freeze",
    MissingExpert: "3 experts were found",
    Threshold: "not recognised",
}


# Without routing ------------------------------------------------------------------------------------------------


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
