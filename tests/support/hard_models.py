"""MoE layers written with what a tracer cannot see through by itself; each is captured exactly, or named in `REFUSED`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils.checkpoint import checkpoint

from tests.support.moe_styles import EXPERTS, MLP, TOP_K, WIDTH, Layer


class BranchThatAddsZero(Layer):
    """An idle expert adds zero times its weights, so that every parameter has a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            hit = ids == e
            if hit.any():
                t, k = torch.where(hit)
                y = y.index_add(0, t, expert(x[t]) * w[t, k, None])
            elif self.training:
                y = y + 0 * sum(p.sum() for p in expert.parameters())
        return y


class Asserts(Layer):
    """Asserts on values, in all the ways their truth can be asked for."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        assert (ids < EXPERTS).all(), "an expert that is not there"
        assert torch.isfinite(w).all() and (w >= 0).all()
        assert not (ids < 0).any()
        assert not torch.isnan(x).any(), f"NaN in {tuple(x.shape)}"
        return super().forward(x)


class _Sorted(Layer):
    def sorted(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        w, ids = self.route(x)
        order = ids.view(-1).argsort()
        return w, ids, order, x[order // TOP_K]

    def combined(self, x: Tensor, w: Tensor, order: Tensor, parts: list[Tensor]) -> Tensor:
        out = torch.cat(parts) * w.view(-1)[order, None]
        return torch.zeros_like(x).index_add(0, order // TOP_K, out)


class EndsAsList(_Sorted):
    """Slices between running sums that are read as a list, with a guard against empty ones."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids, order, rows = self.sorted(x)
        ends = torch.bincount(ids.view(-1), minlength=EXPERTS).cumsum(0).tolist()
        parts, start = [], 0
        for e, end in enumerate(ends):
            if end == start:
                continue
            parts.append(self.experts[e](rows[start:end]))
            start = end
        return self.combined(x, w, order, parts)


class StartsAndEnds(_Sorted):
    """Slices ``rows[starts[e]:starts[e + 1]]``."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids, order, rows = self.sorted(x)
        starts = [0, *F.one_hot(ids.view(-1), EXPERTS).sum(0).cumsum(0).tolist()]
        parts = [self.experts[e](rows[starts[e] : starts[e + 1]]) for e in range(EXPERTS)]
        return self.combined(x, w, order, parts)


class NumpyCounts(Layer):
    """Counts on the host as an array, a running start, results put back in choice order."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        counts = ids.new_zeros((ids.shape[0], EXPERTS))
        counts.scatter_(1, ids, 1)
        order = ids.view(-1).argsort()
        rows, outs, start = x[order // TOP_K], [], 0
        for e, count in enumerate(counts.sum(0).cpu().numpy()):
            end = start + count
            if count == 0:
                continue
            outs.append(self.experts[e](rows[start:end, :]))
            start = end
        out = torch.cat(outs) if len(outs) else rows.new_empty(0)
        back = torch.empty_like(out)
        back[order] = out
        return (back.view(*ids.shape, -1) * w.unsqueeze(-1)).sum(1)


class Dispatcher:
    """Sends rows to experts and brings them back, as an object made for each batch."""

    def __init__(self, gates: Tensor) -> None:
        chosen, by_expert = torch.nonzero(gates).sort(0)
        self.experts = chosen[:, 1:]
        self.rows = torch.nonzero(gates)[by_expert[:, 1], 0]
        self.sizes = (gates > 0).sum(0).tolist()
        self.weights = torch.gather(gates[self.rows], 1, self.experts)
        self.count = gates.shape[0]

    def dispatch(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.split(x[self.rows], self.sizes, dim=0)

    def combine(self, parts: list[Tensor]) -> Tensor:
        out = torch.cat(parts) * self.weights
        return out.new_zeros(self.count, out.shape[1]).index_add(0, self.rows, out)


class DispatcherObject(Layer):
    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        object_ = Dispatcher(torch.zeros(x.shape[0], EXPERTS, dtype=x.dtype).scatter(1, ids, w))
        return object_.combine([expert(part) for expert, part in zip(self.experts, object_.dispatch(x), strict=True)])


class MovesExperts(Layer):
    """Experts are moved to where they already are."""

    def forward(self, x: Tensor) -> Tensor:
        self.experts.to(x.device)
        for expert in self.experts:
            expert.to(device=x.device, dtype=x.dtype)
        return super().forward(x)


class KeepsLoss(Layer):
    """The layer leaves its balance loss in an attribute, and a list of what it saw; both are read in the same call."""

    aux: Tensor

    def forward(self, x: Tensor) -> Tensor:
        probs = self.gate(x).softmax(-1)
        self.seen: list[Tensor] = []
        self.seen.append(probs.mean(0))
        self.aux = self.seen[0].square().sum()
        return super().forward(x) + self.aux


class CheckpointedLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


class CheckpointedExperts(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = self.gate.weight.sum() * 0 + x  # reentrant checkpoints want an input with a gradient
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, checkpoint(expert, x[t], use_reentrant=True) * w[t, k, None])
        return y


class MappedExperts(Layer):
    """``vmap`` over stacked modules."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        states = [dict(expert.named_parameters()) for expert in self.experts]
        params = {name: torch.stack([state[name] for state in states]) for name in states[0]}
        body = self.experts[0]
        outs = vmap(lambda one, rows: functional_call(body, one, (rows,)), in_dims=(0, None))(params, x)
        full = torch.zeros(x.shape[0], EXPERTS, dtype=x.dtype).scatter(1, ids, w)
        return torch.einsum("eth,te->th", outs, full)


class FunctionalCall(Layer):
    """One module computes with every expert's parameters."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            out = functional_call(self.experts[0], dict(expert.named_parameters()), (x[t],))
            y = y.index_add(0, t, out * w[t, k, None])
        return y


class Counter(Layer):
    """A buffer that counts tokens over all calls."""

    def make(self) -> None:
        super().make()
        self.register_buffer("seen", torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        _, ids = self.route(x)
        self.seen += F.one_hot(ids, EXPERTS).sum((0, 1))
        return super().forward(x)


class RunningStatistics(Layer):
    def make(self) -> None:
        super().make()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class AdaptedScale(nn.Module):
    """A number that the forward changes before it uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mlp = Layer(), MLP()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Any:
        self.scale.mul_(0.9)
        return self.layer(x) * self.scale


EXACT: list[type[nn.Module]] = [
    BranchThatAddsZero,
    Asserts,
    EndsAsList,
    StartsAndEnds,
    NumpyCounts,
    DispatcherObject,
    MovesExperts,
    KeepsLoss,
    CheckpointedLayer,
    CheckpointedExperts,
    MappedExperts,
    FunctionalCall,
    Counter,
    RunningStatistics,
    AdaptedScale,
]


class SizeFromMax(Layer):
    """Buffers as long as the busiest expert needs."""

    def forward(self, x: Tensor) -> Tensor:
        _, ids = self.route(x)
        slots = int(torch.bincount(ids.view(-1), minlength=EXPERTS).max())
        return x + x.new_zeros(EXPERTS, slots, WIDTH).sum()


class ItemAsIndex(Layer):
    """A loop over tokens that reads each expert's number."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        outs = [self.experts[ids[t, 0].item()](x[t]) * w[t, 0] for t in range(x.shape[0])]  # type: ignore[index]
        return torch.stack(outs)


class CountsItsCalls(Layer):
    """Plain state that changes what the third call computes; the first two do not show it."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (0.5 if self.calls > 2 else 1.0)


class KeepsPrivateTensor(Layer):
    """A running mean in an attribute whose name begins with an underscore."""

    _mean: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self._mean = 0.9 * self._mean + x.mean()
        return super().forward(x) + self._mean


class PutsLossIn(torch.autograd.Function):
    """The DeepSeek form of a balance loss: a gradient of 1 for a value that the output does not depend on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], torch.ones((), dtype=grads[0].dtype)


class LossByGradient(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return PutsLossIn.apply(super().forward(x), self.gate(x).softmax(-1).mean(0).square().sum())


class AssertOnNumber(Layer):
    def forward(self, x: Tensor) -> Tensor:
        _, ids = self.route(x)
        assert ids.max().item() < EXPERTS
        return super().forward(x)


REFUSED: dict[type[nn.Module], str] = {
    SizeFromMax: "depends on tensor values",
    ItemAsIndex: "reads a number out of a tensor.*item.*loop over the experts",
    CountsItsCalls: "changes attribute 'calls'.*repeats one call",
    LossByGradient: "gradient that does not depend on the incoming one.*add that term to the loss",
    KeepsPrivateTensor: "assigns a tensor to attribute '_mean'",
    AssertOnNumber: "reads a number out of a tensor.*item",
}
