"""Every router that the field knows, written plainly: exact under dp and ep against one process, or refused by name.

Balanced and normalised over tokens means over the global batch. Where numbers are random, the oracle is the program of one rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecompile import ops
from moecompile.compilation import Request, compile_call
from moecompile.errors import CaptureError
from moecompile.plan import Plan
from tests.support.parity import Batch, LockStep, compare, plain, slice_for

PLAN = Plan(dp=2, ep=2)
WIDTH, EXPERTS, TOP_K, GROUPS, TOKENS = 8, 8, 2, 4, 24
Chosen = tuple[Tensor, Tensor]
Router = Callable[["Layer", Tensor, Batch], Chosen]


class Layer(nn.Module):
    """A router by name, a loop over experts, and the loss with what the router adds to it."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self.router = router
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.register_buffer("bias", torch.linspace(-0.3, 0.3, EXPERTS))
        self.register_buffer("table", torch.arange(64).reshape(32, 2) % EXPERTS)

    def forward(self, x: Tensor, labels: Tensor, **more: Tensor) -> dict[str, Tensor]:
        found = self.router(self, x, more)
        (weights, ids), extra = found[:2], found[2] if len(found) > 2 else 0.0
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(ids == index)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return {"loss": (x + out - labels).square().mean() + extra}


def model_of(router: Router) -> Layer:
    torch.manual_seed(0)
    return Layer(router).double()


def batch(seed: int) -> Batch:
    source = torch.Generator().manual_seed(seed)
    draw = torch.randn(2, TOKENS, WIDTH, generator=source, dtype=torch.float64)
    return {"x": draw[0], "labels": draw[1]}


# ---- scores ------------------------------------------------------------------------------------------------------------


def softmax_behind(self: Layer, x: Tensor, more: Batch) -> Chosen:
    top, ids = self.gate(x).topk(TOP_K)
    return top.softmax(-1), ids


def softmax_before(self: Layer, x: Tensor, more: Batch) -> Chosen:
    top, ids = self.gate(x).softmax(-1).topk(TOP_K)
    return top, ids


def softmax_normalised(self: Layer, x: Tensor, more: Batch) -> Chosen:
    top, ids = self.gate(x).softmax(-1).topk(TOP_K)
    return top / top.sum(-1, keepdim=True), ids


def other_precision(self: Layer, x: Tensor, more: Batch) -> Chosen:
    logits = F.linear(x.float(), self.gate.weight.float(), self.gate.bias.float())
    top, ids = logits.softmax(-1).topk(TOP_K)
    return top.to(x.dtype), ids


def switch(self: Layer, x: Tensor, more: Batch) -> Chosen:
    top, ids = self.gate(x).softmax(-1).max(-1, keepdim=True)
    return top, ids


def _by_bias(self: Layer, scores: Tensor, top_k: int = TOP_K) -> Chosen:
    """The bias decides who is chosen and never enters the weights."""
    ids = (scores + self.bias).topk(top_k).indices
    top = scores.gather(-1, ids)
    return (top / (top.sum(-1, keepdim=True) + 1e-20) if top_k > 1 else top), ids


def sigmoid_bias(self: Layer, x: Tensor, more: Batch) -> Chosen:
    return _by_bias(self, self.gate(x).sigmoid())


def sigmoid_bias_top_1(self: Layer, x: Tensor, more: Batch) -> Chosen:
    return _by_bias(self, self.gate(x).sigmoid(), 1)


def sqrtsoftplus(self: Layer, x: Tensor, more: Batch) -> Chosen:
    return _by_bias(self, F.softplus(self.gate(x)).sqrt())


def scaling_factor(self: Layer, x: Tensor, more: Batch) -> Chosen:
    weights, ids = _by_bias(self, self.gate(x).sigmoid())
    return weights * 2.5, ids


def _best_groups(scores: Tensor, kept: int) -> Tensor:
    """Scores outside of the best groups, which are ranked by their best scores, are minus infinity."""
    groups = scores.view(-1, GROUPS, EXPERTS // GROUPS)
    best = groups.topk(max(TOP_K // kept, 1), -1).values.sum(-1).topk(kept).indices
    allowed = torch.zeros(len(scores), GROUPS, dtype=torch.bool).scatter(1, best, True)
    return groups.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(1)


def groups_softmax(self: Layer, x: Tensor, more: Batch) -> Chosen:
    top, ids = _best_groups(self.gate(x), 2).topk(TOP_K)
    return top.softmax(-1), ids


def groups_sigmoid_bias(self: Layer, x: Tensor, more: Batch) -> Chosen:
    scores = self.gate(x).sigmoid()
    ids = _best_groups(scores + self.bias, 1).topk(TOP_K).indices
    top = scores.gather(-1, ids)
    return top / (top.sum(-1, keepdim=True) + 1e-20) * 2.5, ids


def quantile(self: Layer, x: Tensor, more: Batch) -> Chosen:
    """A quantile that is kept from step to step chooses; the weights are those of the live logits."""
    logits = self.gate(x)
    ids = (logits - self.bias).topk(TOP_K).indices
    return logits.gather(-1, ids).softmax(-1), ids


# ---- over all tokens -----------------------------------------------------------------------------------------------------


def _sinkhorn(logits: Tensor, steps: int) -> Tensor:
    """Scores balanced over all tokens of the call, without gradient."""
    cost = logits.detach().exp()
    rows, columns = cost.new_ones(cost.shape[0]), cost.new_ones(EXPERTS)
    for _ in range(steps):
        rows = 1 / (cost.shape[0] * ((columns * cost).sum(1) + 1e-8))
        columns = 1 / (EXPERTS * ((rows[:, None] * cost).sum(0) + 1e-8))
    return columns * cost * rows[:, None]


def sinkhorn_top_1(self: Layer, x: Tensor, more: Batch) -> Chosen:
    logits = self.gate(x)
    ids = _sinkhorn(logits, 4).topk(1).indices
    return logits.sigmoid().gather(-1, ids), ids


def sinkhorn_top_2(self: Layer, x: Tensor, more: Batch) -> Chosen:
    logits = self.gate(x)
    ids = _sinkhorn(logits, 8).topk(TOP_K).indices
    return logits.softmax(-1).gather(-1, ids), ids


def standardised(self: Layer, x: Tensor, more: Batch) -> Chosen:
    """Logits of each expert with mean 0 and deviation 1 over the batch."""
    logits = x @ self.gate.weight.t()
    logits = (logits - logits.mean(0)) / (logits.var(0, unbiased=False) + 1e-5).sqrt() + self.gate.bias
    top, ids = logits.softmax(-1).topk(TOP_K)
    return top, ids


def balanced(self: Layer, x: Tensor, more: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """The balance loss of Switch and the z-loss."""
    logits = self.gate(x)
    probs = logits.softmax(-1)
    top, ids = probs.topk(TOP_K)
    share = F.one_hot(ids, EXPERTS).sum(1).to(probs.dtype).mean(0)
    return top, ids, 0.1 * EXPERTS * (share * probs.mean(0)).sum() + 0.01 * logits.logsumexp(-1).square().mean()


def padded(self: Layer, x: Tensor, more: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Padding is routed and does not count in the balance loss."""
    probs, valid = self.gate(x).softmax(-1), 1 - more["padding"].to(x.dtype)
    top, ids = probs.topk(TOP_K)
    count = valid.sum()
    share = (F.one_hot(ids, EXPERTS).sum(1) * valid[:, None]).sum(0) / (count * TOP_K)
    return top, ids, 0.1 * EXPERTS * (share * (probs * valid[:, None]).sum(0) / count).sum()


# ---- random ------------------------------------------------------------------------------------------------------------


def jitter(self: Layer, x: Tensor, more: Batch) -> Chosen:
    noise = torch.empty_like(x).uniform_(0.9, 1.1)
    top, ids = self.gate(x * noise).softmax(-1).topk(TOP_K)
    return top, ids


def noisy(self: Layer, x: Tensor, more: Batch) -> Chosen:
    logits = self.gate(x)
    ids = (logits + torch.randn_like(logits)).topk(TOP_K).indices
    return logits.softmax(-1).gather(-1, ids), ids


def forced_balance(self: Layer, x: Tensor, more: Batch) -> Chosen:
    """Logits are drawn, and the gradient goes straight through."""
    logits = self.gate(x)
    logits = logits + (torch.randn_like(logits) - logits).detach()
    top, ids = logits.softmax(-1).topk(TOP_K)
    return top, ids


def quantile_updated(self: Layer, x: Tensor, more: Batch) -> Chosen:
    logits = self.gate(x)
    ids = (logits - self.bias).topk(TOP_K).indices
    with torch.no_grad():
        self.bias.copy_(logits.quantile(0.75, dim=0))
    return logits.gather(-1, ids).softmax(-1), ids


EXACT: list[Router] = [
    softmax_behind, softmax_before, softmax_normalised, other_precision, switch, sigmoid_bias, sigmoid_bias_top_1, sqrtsoftplus,
    scaling_factor, groups_softmax, groups_sigmoid_bias, quantile, sinkhorn_top_1, sinkhorn_top_2, standardised, balanced, padded,
    quantile_updated,
]  # fmt: skip
RANDOM: list[Router] = [jitter, noisy, forced_balance]


def batches_of(router: Router) -> list[Batch]:
    found = [batch(0), batch(1)]
    if router is padded:
        for one in found:
            one["padding"] = torch.arange(TOKENS) >= TOKENS - 5  # all of it on one rank
    return found


@pytest.mark.parametrize("router", EXACT, ids=lambda router: router.__name__)
def test_router(router: Router) -> None:
    batches = batches_of(router)
    reference = plain(model_of(router), batches)
    run = LockStep(model_of(router), PLAN, batches[0])
    assert len([node for node in run.program.graph.nodes if node.target is ops.dispatch]) == 2
    idle = [name for name, grad in reference.steps[0].grads.items() if not grad.any()]
    compare(run.run(batches), reference, zero=idle, **({"rtol": 1e-5} if router is other_precision else {}))


@pytest.mark.parametrize("router", RANDOM, ids=lambda router: router.__name__)
def test_random_router(router: Router) -> None:
    """The same numbers for the same token, whatever the layout."""
    batches = batches_of(router)
    alone, run = LockStep(model_of(router), Plan(dp=1), batches[0]), LockStep(model_of(router), PLAN, batches[0])
    assert any(node.target is ops.dispatch for node in run.program.graph.nodes)
    reference = alone.run(batches)
    idle = [name for name, grad in reference.steps[0].grads.items() if not grad.any()]
    compare(run.run(batches), reference, zero=idle)


# ---- refused -----------------------------------------------------------------------------------------------------------


def sinkhorn_until(self: Layer, x: Tensor, more: Batch) -> Chosen:
    logits = self.gate(x)
    cost, columns, error = logits.detach().exp(), torch.ones(EXPERTS, dtype=x.dtype), torch.tensor(1.0)
    while error > 1e-4:
        rows = 1 / (cost.shape[0] * ((columns * cost).sum(1) + 1e-8))
        before, columns = columns, 1 / (EXPERTS * ((rows[:, None] * cost).sum(0) + 1e-8))
        error = (columns - before).abs().mean()
    ids = (columns * cost * rows[:, None]).topk(1).indices
    return logits.sigmoid().gather(-1, ids), ids


def hashed(self: Layer, x: Tensor, more: Batch) -> Chosen:
    ids = self.table[more["words"]]
    return torch.full(ids.shape, 0.5, dtype=x.dtype), ids


def replayed(self: Layer, x: Tensor, more: Batch) -> Chosen:
    return self.gate(x).gather(-1, more["ids"]).softmax(-1), more["ids"]


def threshold(self: Layer, x: Tensor, more: Batch) -> Chosen:
    """As many experts as it takes."""
    order = self.gate(x).softmax(-1).sort(-1, descending=True)
    count = int((order.values.cumsum(-1) < 0.6).sum(-1).max()) + 1
    return order.values[:, :count], order.indices[:, :count]


REFUSED: dict[Router, str] = {
    sinkhorn_until: "a branch, a size or a number depends on tensor values",
    hashed: "computes on rows picked by their values.*accepted forms",
    replayed: "computes on rows picked by their values.*accepted forms",
    threshold: "a branch, a size or a number depends on tensor values",
}


@pytest.mark.parametrize("router", REFUSED, ids=lambda router: router.__name__)
def test_refused(router: Router) -> None:
    given = batch(0) | {"words": torch.arange(TOKENS), "ids": torch.arange(2 * TOKENS).reshape(-1, 2) % EXPERTS}
    given = {name: value for name, value in given.items() if name in ("x", "labels") or router in (hashed, replayed)}
    with pytest.raises(CaptureError) as refused:
        compile_call(model_of(router), Request((), slice_for(given, PLAN, 0), PLAN))
    assert re.search(rf"test_router_table\.py:\d+.*{REFUSED[router]}", str(refused.value))
