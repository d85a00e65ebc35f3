"""Ways to write an MoE layer whose experts share storage: weights ``[E, ...]``, or E blocks of rows in one matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.moe_styles import EXPERTS, INNER, TOP_K, WIDTH, Layer


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


class DenseThreeFactors(Stacked):
    """The down projection and the weighing in one product."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(torch.einsum("th,ehi->tei", x, self.w1)) * torch.einsum("th,ehi->tei", x, self.w3)
        return torch.einsum("te,tei,eih->th", self.masked(x), hidden, self.w2)


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


STACKED: list[type[Layer]] = [
    StackedMatmul,
    StackedUnbind,
    StackedLinear,
    FlatStorage,
    DenseBmm,
    DenseEinsum,
    DenseThreeFactors,
    DenseGptOss,
    OneHotDispatch,
]
