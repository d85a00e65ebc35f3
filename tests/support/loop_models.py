"""One MoE layer with the same meaning in the ways people write it: loops over experts, sorted splits, dense forms.

T tokens, H width, E experts, K choices.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, silu

H, E, K = 12, 4, 2


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(H, 20, bias=False)
        self.down = nn.Linear(20, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.up(x)))


class Layer(nn.Module):
    """Router and experts; each subclass combines them in another style."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(E))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self.router(x).softmax(-1).topk(K, dim=-1)
        return weights / weights.sum(-1, keepdim=True), ids


class WhereLoop(Layer):
    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(ids == index)
            if token.numel() == 0:
                continue
            y.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return y


class HitListLoop(Layer):
    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        mask = one_hot(ids, E).permute(2, 1, 0)
        for hit in (mask.sum((-1, -2)) > 0).nonzero():
            slot, token = torch.where(mask[hit].squeeze(0))
            y.index_add_(0, token, self.experts[hit](x[token]) * weights[token, slot, None])
        return y


class HitListOfNumbers(Layer):
    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        counts = torch.bincount(ids.flatten(), minlength=E)
        for index in counts.nonzero().flatten().tolist():
            token, slot = torch.where(ids == index)
            y = y.index_add(0, token, self.experts[index](x[token]) * weights[token, slot, None])
        return y


class MaskLoop(Layer):
    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            chosen = ids == index
            rows = chosen.any(-1)
            if rows.any():
                y[rows] += expert(x[rows]) * (weights * chosen).sum(-1)[rows].unsqueeze(-1)
        return y


class UniqueLoop(Layer):
    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        for index in ids.unique().tolist():
            token, slot = torch.where(ids == index)
            y = y.index_add(0, token, self.experts[index](x[token]) * weights[token, slot].unsqueeze(1))
        return y


class CountedLoop(Layer):
    """Skips an expert by its entry in the counts."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        counts = torch.bincount(ids.view(-1), minlength=E)
        for index, expert in enumerate(self.experts):
            if counts[index] == 0:
                continue
            token, slot = (ids == index).nonzero(as_tuple=True)
            y.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return y


class SortedSplit(Layer):
    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        flat = ids.view(-1)
        order = flat.argsort()
        sizes = torch.bincount(flat, minlength=E).tolist()
        parts = x[order // K].split(sizes)
        rows = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return torch.zeros_like(x).index_add(0, order // K, rows * weights.view(-1)[order].unsqueeze(1))


class CountedSlices(Layer):
    """Cuts the sorted rows at counts read through numpy."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        counts = ids.new_zeros((ids.shape[0], E)).scatter_(1, ids, 1).sum(dim=0)
        order = ids.view(-1).argsort()
        rows = x[order // ids.shape[1]]
        parts, start = [], 0
        for index, count in enumerate(counts.cpu().numpy()):
            end = start + count
            if count == 0:
                continue
            parts.append(self.experts[index](rows[start:end]))
            start = end
        joined = torch.cat(parts, dim=0)
        back = torch.empty_like(joined)
        back[order] = joined
        return (back.view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)


class GateColumns(Layer):
    """Finds an expert's tokens in a dense matrix of gates."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        gates = torch.zeros(x.shape[0], E).scatter_(1, ids, weights)
        for index, expert in enumerate(self.experts):
            token = (gates[:, index] > 0).nonzero(as_tuple=False).squeeze(-1)
            if token.numel() > 0:
                y[token] += expert(x[token]) * gates[token, index].unsqueeze(-1)
        return y


class FirstChoice(Layer):
    """One expert per token, chosen by max."""

    def forward(self, x: Tensor) -> Tensor:
        gate, chosen = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = chosen == index
            if not rows.any():
                continue
            y[rows] = expert(x[rows]) * gate[rows, None]
        return y


class DenseLoop(Layer):
    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            y = y + expert(x) * (weights * (ids == index)).sum(-1, keepdim=True)
        return y


LAYERS: tuple[type[Layer], ...] = (
    WhereLoop,
    HitListLoop,
    HitListOfNumbers,
    MaskLoop,
    UniqueLoop,
    CountedLoop,
    SortedSplit,
    CountedSlices,
    GateColumns,
    FirstChoice,
    DenseLoop,
)
