"""Ways to bring routing weights in: with factors, through shapes of other tensors, folded into the product that adds the experts up."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.moe_stacked_styles import Stacked
from tests.support.moe_styles import EXPERTS, INNER, WIDTH, Layer


class ScaledChoices(Layer):
    """A constant on the weights that an expert has picked by token and slot."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            weight = 2.5 * w[t, k]
            y.index_add_(0, t, weight[:, None] * expert(x[t]))
        return y


class DividedChoices(Layer):
    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            y[t] += (w[t, k].unsqueeze(-1) / 0.4) * expert(x[t])
        return y


class ScaledByParameter(Layer):
    """A learned factor on them, which gets its gradient."""

    def make(self) -> None:
        super().make()
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, (w[t, k] * self.factor)[:, None] * expert(x[t]))
        return y


class ScaledScores(Layer):
    """The scores of all experts, of which each takes its own."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        ids = scores.topk(self.top_k)[1]
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t = torch.where(ids == e)[0]
            y.index_add_(0, t, (0.5 * scores[t, e])[:, None] * expert(x[t]))
        return y


class ScaledByTable(Layer):
    """A factor for each expert, looked up where the choice is made."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        w = w * torch.linspace(0.5, 2, EXPERTS, dtype=x.dtype)[ids]
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, w[t, k, None] * expert(x[t]))
        return y


class ShapedAlike(Layer):
    """Sequences that are put back in the shape of what came in."""

    def forward(self, x: Tensor) -> Tensor:
        sequences = x.unflatten(0, (4, -1))
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, w[t, k, None] * expert(x[t]))
        return y.view_as(sequences).reshape_as(x)


class FoldedSum(Stacked):
    """Weights on the hidden values, and one product over experts and their features."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(torch.einsum("th,ehf->tef", x, self.w1)) * torch.einsum("th,ehf->tef", x, self.w3)
        return torch.einsum("tef,efh->th", hidden * self.masked(x)[..., None], self.w2)


class FoldedSumOfSequences(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        sequences, weights = x.unflatten(0, (4, -1)), self.masked(x).unflatten(0, (4, -1))
        hidden = torch.einsum("bsh,ehf->bsef", sequences, self.w3)
        hidden = F.silu(torch.einsum("bsh,ehf->bsef", sequences, self.w1)) * hidden
        return torch.einsum("efh,bsef->bsh", self.w2, weights[..., None] * hidden).flatten(0, 1)


class FoldedSumExpertsFirst(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(torch.einsum("th,ehf->etf", x, self.w1)) * torch.einsum("th,ehf->etf", x, self.w3)
        return torch.einsum("etf,efh->th", hidden * self.masked(x).t()[..., None], self.w2)


class FlattenedSum(Stacked):
    """The same with experts and features flattened into one dim, on both sides of a product."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(torch.einsum("th,ehf->tef", x, self.w1)) * torch.einsum("th,ehf->tef", x, self.w3)
        return (hidden * self.masked(x)[..., None]).flatten(1) @ self.w2.flatten(0, 1)


class FlattenedSumOfSequences(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        sequences, weights = x.unflatten(0, (4, -1)), self.masked(x).unflatten(0, (4, -1))
        hidden = torch.einsum("bsh,ehf->bsef", sequences, self.w3)
        hidden = F.silu(torch.einsum("bsh,ehf->bsef", sequences, self.w1)) * hidden
        rows = (hidden * weights.unsqueeze(-1)).reshape(x.shape[0], -1)
        return torch.mm(rows, self.w2.reshape(-1, WIDTH))


class SumOverTwoDims(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(torch.einsum("th,ehf->tef", x, self.w1)) * torch.einsum("th,ehf->tef", x, self.w3)
        return torch.tensordot(hidden * self.masked(x)[..., None], self.w2, dims=([1, 2], [0, 1]))


class WideLinears(Stacked):
    """All experts' first linears as one, and all last ones as one with a bias that every token gets once."""

    def make(self) -> None:
        self.up, self.down = nn.Linear(WIDTH, EXPERTS * INNER), nn.Linear(EXPERTS * INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x)).unflatten(-1, (EXPERTS, INNER))
        return self.down((hidden * self.masked(x).unsqueeze(-1)).flatten(-2))


class WideGatedLinears(Stacked):
    """The same with gate and up of each expert side by side, over ``[batch, sequence]``."""

    def make(self) -> None:
        self.up = nn.Linear(WIDTH, EXPERTS * 2 * INNER, bias=False)
        self.down = nn.Linear(EXPERTS * INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        sequences, weights = x.unflatten(0, (4, -1)), self.masked(x).unflatten(0, (4, -1))
        gate, up = self.up(sequences).view(*sequences.shape[:2], EXPERTS, 2 * INNER).chunk(2, -1)
        hidden = weights[..., None] * (F.silu(gate) * up)
        return self.down(hidden.reshape(*sequences.shape[:2], EXPERTS * INNER)).flatten(0, 1)


WEIGHED: list[type[Layer]] = [
    ScaledChoices,
    DividedChoices,
    ScaledByParameter,
    ScaledScores,
    ScaledByTable,
    ShapedAlike,
    FoldedSum,
    FoldedSumOfSequences,
    FoldedSumExpertsFirst,
    FlattenedSum,
    FlattenedSumOfSequences,
    SumOverTwoDims,
    WideLinears,
    WideGatedLinears,
]
