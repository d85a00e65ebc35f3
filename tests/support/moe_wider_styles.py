"""MoE layers that are more than a weighted sum over chosen experts: weights in front, options without an expert, capacity."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.moe_stacked_styles import OneHotDispatch, Stacked
from tests.support.moe_styles import EXPERTS, INNER, WIDTH, Layer


class InputWeights(Layer):
    """The weight on the input of a nonlinear expert, which has biases."""

    def make(self) -> None:
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)) for _ in range(EXPERTS)]
        )

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, expert(x[t] * w[t, k, None]))
        return y


class InputWeightsTop1(InputWeights):
    top_k = 1

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        best, ids = self.gate(x).topk(1, -1)
        return best.sigmoid(), ids


class BothWeights(Layer):
    """One weight in front of the expert and another one behind it."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        inner = w.sigmoid()
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, expert(inner[t, k, None] * x[t]) * w[t, k, None])
        return y


class DenseInputWeights(Stacked):
    """The Llama 4 form: every expert on all tokens, times scores that are zero where an expert was not chosen."""

    def scores(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        best, ids = logits.topk(self.top_k, dim=1)
        return torch.full_like(logits, float("-inf")).scatter_(1, ids, best).sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(x)
        rows = x.repeat(EXPERTS, 1) * scores.transpose(0, 1).reshape(-1, 1)
        every = rows.view(EXPERTS, -1, WIDTH)
        hidden = torch.bmm(every, self.w1) * F.silu(torch.bmm(every, self.w3))
        out = torch.bmm(hidden, self.w2).view(-1, WIDTH)
        return out.reshape(EXPERTS, -1, WIDTH).sum(dim=0)


class DenseInputLoop(Layer):
    """Every expert on all tokens, each token times its weight or zero."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            y = y + expert(x * (w * (ids == e)).sum(-1, keepdim=True))
        return y


class IdentityExperts(Layer):
    """The LongCat form: options behind the experts hand the token back."""

    def make(self) -> None:
        self.gate = nn.Linear(WIDTH, EXPERTS + 2, bias=False)
        super().make()

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        mask = F.one_hot(ids, EXPERTS + 2).permute(2, 1, 0)
        for hit in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            e = int(hit.item())
            k, t = torch.where(mask[e].squeeze(0))
            rows = self.experts[e](x[t]) if e < EXPERTS else x[t]
            y.index_add_(0, t, rows * w[t, k, None])
        return y


class MixedExperts(Layer):
    """Options before the experts that give nothing and a learned constant."""

    def make(self) -> None:
        self.gate = nn.Linear(WIDTH, EXPERTS + 2, bias=False)
        self.constant = nn.Parameter(torch.randn(WIDTH))
        super().make()

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e in range(1, EXPERTS + 2):
            t, k = torch.where(ids == e)
            rows = self.constant.expand(t.shape[0], -1) if e == 1 else self.experts[e - 2](x[t])
            y = y.index_add(0, t, rows * w[t, k, None])
        return y


class DenseIdentity(Layer):
    """Every expert on all tokens; tokens that skip them keep their value, whatever the router says."""

    top_k = 1

    def make(self) -> None:
        self.gate = nn.Linear(WIDTH, EXPERTS + 1, bias=False)
        super().make()

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        w = self.gate(x).softmax(-1).gather(1, ids)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            y = y + expert(x) * (w * (ids == e)).sum(-1, keepdim=True)
        return torch.where(ids == EXPERTS, x, y)


class SkipExpert(Layer):
    """The Zaya form: the last option's choices go to expert 0 with weight 0."""

    def make(self) -> None:
        self.gate = nn.Linear(WIDTH, EXPERTS + 1, bias=False)
        super().make()

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        skip = ids == EXPERTS
        w, ids = w.masked_fill(skip, 0), ids.masked_fill(skip, 0)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            y = y.index_add(0, t, expert(x[t]) * w[t, k, None])
        return y


class MissingExpert(Layer):
    """The router chooses among five, four are computed: the last option gives nothing."""

    def make(self) -> None:
        self.gate = nn.Linear(WIDTH, EXPERTS + 1, bias=False)
        super().make()

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e in range(EXPERTS):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.experts[e](x[t]) * w[t, k, None])
        return y


class DroppedTokens(OneHotDispatch):
    """GShard with three slots an expert: first choices of all tokens come first."""

    slots = 3


class DroppedLoop(Layer):
    """Each expert takes its first tokens only."""

    limit = 5

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            t, k = t[: self.limit], k[: self.limit]
            y = y.index_add(0, t, expert(x[t]) * w[t, k, None])
        return y


class DroppedBelowThreshold(DroppedLoop):
    """The same behind a threshold that leaves few weights: what the limit drops then shows in few rows."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probs = self.gate(x).softmax(-1)
        first = probs.argmax(-1)
        second = probs.masked_fill(F.one_hot(first, EXPERTS).bool(), 0).argmax(-1)
        ids = torch.stack([first, second], -1)
        w = probs.gather(-1, ids)
        return w * (w > 0.4), ids


class RareThreshold(Layer):
    """Choices of small weight are left out, with a threshold that scores seldom fall below."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        w, ids = (self.gate(x) * 8).softmax(-1).topk(self.top_k, -1)
        return w, ids

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where((ids == e) & (w > 0.09))
            y = y.index_add(0, t, expert(x[t]) * w[t, k, None])
        return y


class SwitchCapacity(Layer):
    """The Switch form: tokens over capacity keep their value, all times the router's probability."""

    top_k = 1
    limit = 4

    def forward(self, x: Tensor) -> Tensor:
        probs = self.gate(x).softmax(-1)
        chosen = F.one_hot(probs.argmax(-1), EXPERTS)
        chosen = chosen * (chosen.cumsum(0) <= self.limit)
        y = x.clone()
        for e, expert in enumerate(self.experts):
            rows = chosen[:, e].bool()
            y[rows] = expert(x[rows]).to(y.dtype)
        return y * probs.max(-1, keepdim=True)[0]


class RenormalisedCapacity(Layer):
    """Weights of what is left after dropping add up to one again."""

    limit = 5

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        chosen = F.one_hot(ids, EXPERTS)
        place = chosen.reshape(-1, EXPERTS).cumsum(0).reshape(chosen.shape)
        w = w * ((place * chosen).sum(-1) <= self.limit)
        w = w / (w.sum(-1, keepdim=True) + 1e-9)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            y = y.index_add(0, t, expert(x[t]) * w[t, k, None])
        return y


class PerChoice(Layer):
    """The JetMoE attention form: experts in front of and behind an operation on each choice, one decision for both."""

    regions = 2

    def make(self) -> None:
        self.first = nn.ParameterList([nn.Parameter(torch.randn(INNER, WIDTH)) for _ in range(EXPERTS)])
        self.second = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, INNER)) for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        flat = ids.flatten()
        order = flat.sort(0)[1]
        counts = torch.zeros(x.shape[0], EXPERTS).scatter(1, ids, 1).long().sum(0).tolist()
        token = order.div(self.top_k, rounding_mode="trunc")
        rows = torch.cat([F.linear(p, self.first[e]) for e, p in enumerate(x[token].split(counts, dim=0))])
        made = torch.zeros(flat.shape[0], INNER, dtype=x.dtype).index_add(0, order, rows)
        made = made.view(-1, self.top_k, INNER)
        made = torch.matmul((made @ made.transpose(1, 2)).softmax(-1), made).reshape(-1, INNER)
        rows = torch.cat([F.linear(p, self.second[e]) for e, p in enumerate(made[order].split(counts, dim=0))])
        return torch.zeros_like(x).index_add(0, token, rows * w.flatten()[order][:, None])


WIDER: list[type[Layer]] = [
    InputWeights,
    InputWeightsTop1,
    BothWeights,
    DenseInputWeights,
    DenseInputLoop,
    IdentityExperts,
    MixedExperts,
    DenseIdentity,
    SkipExpert,
    MissingExpert,
    DroppedTokens,
    DroppedLoop,
    DroppedBelowThreshold,
    RareThreshold,
    SwitchCapacity,
    RenormalisedCapacity,
    PerChoice,
]
