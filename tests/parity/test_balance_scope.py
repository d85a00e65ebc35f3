"""Balance losses of the global batch, and with ``balance_scope="local"`` the mean of those of each rank's batch, against one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moecompile as mc
from moecompile.errors import MoeCompileError
from tests.support import hf_models
from tests.support.moe_styles import EXPERTS, MLP, TOP_K, WIDTH, Layer
from tests.support.parity import Batch, slice_for

RANKS = 2


def by_means(probs: Tensor, ids: Tensor) -> Tensor:
    """Switch: share of choices times mean probability."""
    share = F.one_hot(ids, EXPERTS).sum(1).to(probs.dtype).mean(0) / TOP_K
    return EXPERTS * (share * probs.mean(0)).sum()


def by_counts(probs: Tensor, ids: Tensor) -> Tensor:
    """The same with numbers of tokens as plain Python numbers."""
    tokens = probs.shape[0]
    counts = torch.zeros(EXPERTS, dtype=probs.dtype).scatter_add(
        0, ids.flatten(), torch.ones(ids.numel(), dtype=probs.dtype)
    )
    return EXPERTS / (TOP_K * tokens**2) * (counts * probs.sum(0)).sum()


def by_variation(probs: Tensor, ids: Tensor) -> Tensor:
    """Shazeer: the squared coefficient of variation of the experts' importance."""
    importance = probs.sum(0)
    return importance.var() / importance.mean().square()


def by_logits(probs: Tensor, ids: Tensor) -> Tensor:
    """A z-loss: a mean over tokens, the same in both scopes."""
    return probs.logsumexp(-1).square().mean()


class Model(nn.Module):
    def __init__(self, term: Callable[[Tensor, Tensor], Tensor], weight: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.term, self.weight = term, weight
        self.before, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList([MLP() for _ in range(EXPERTS)])
        self.double()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        rows = self.before(x)
        probs = self.gate(rows).softmax(-1)
        w, ids = probs.topk(TOP_K, -1)
        y = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            y = y.index_add(0, t, expert(rows[t]) * w[t, k, None])
        main, aux = (x + y - labels).square().mean() * self.weight, self.term(probs, ids)
        return {"loss": main + 0.1 * aux, "main": main, "aux": aux}


def batch() -> Batch:
    draw = torch.randn(2, 24, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draw[0, :9] = draw[0, :1]  # ranks differ in their balance
    return {"x": draw[0], "labels": draw[1]}


def reference(model: nn.Module, scope: str, whole: Batch, parts: list[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one process: its own balance loss, or the mean over the ranks' batches."""
    model = copy.deepcopy(model)
    out: Any = model(**whole)
    loss = out["main"] + 0.1 * (
        out["aux"] if scope == "global" else torch.stack([model(**part)["aux"] for part in parts]).mean()
    )
    loss.backward()
    return loss.detach(), {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("scope", ["global", "local"])
@pytest.mark.parametrize("term", [by_means, by_counts, by_variation, by_logits], ids=lambda term: term.__name__)
def test_both_scopes_mean_what_they_say(term: Callable[[Tensor, Tensor], Tensor], scope: str) -> None:
    plan = mc.Plan(dp=RANKS, ep=RANKS, balance_scope=scope)
    parts = [slice_for(batch(), plan, rank) for rank in range(RANKS)]
    loss, grads = reference(Model(term), scope, batch(), parts)
    found = mc.simulate_ranks(Model(term), plan, parts)
    torch.testing.assert_close(found.loss, loss, rtol=1e-12, atol=0)
    for name, grad in grads.items():
        torch.testing.assert_close(found.grads[name], grad, rtol=1e-9, atol=1e-12)
    other, _ = reference(Model(term), "global" if scope == "local" else "local", batch(), parts)
    assert (term is by_logits) == bool(torch.isclose(other, loss, rtol=1e-6)), "the two scopes cannot be told apart"
    (layer,) = {key for key in found.metrics if key.endswith(".aux")}
    torch.testing.assert_close(found.metrics[layer], loss - Model(term)(**batch())["main"].detach(), rtol=1e-9, atol=0)


def test_case_07_the_balance_gradient_does_not_fade_with_dp() -> None:
    """Identical shards: the part of the router's gradient that comes from the balance loss is the same for 1 and 4 ranks."""
    one = {name: item[:6] for name, item in batch().items()}
    parts: list[torch.Tensor] = []
    for dp in (1, 4):
        for scope in ("global", "local"):
            found = mc.simulate_ranks(Model(by_counts, 0.0), mc.Plan(dp=dp, balance_scope=scope), [one] * dp)
            parts.append(found.grads["gate.weight"])
    assert float(parts[0].norm()) > 1e-4
    for other in parts[1:]:
        torch.testing.assert_close(other, parts[0], rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("family", ["mixtral"])
def test_a_hugging_face_model_with_local_statistics(family: str) -> None:
    model, whole = hf_models.build(family).double(), hf_models.batch(size=4)
    parts = [{name: item[rank * 2 : rank * 2 + 2] for name, item in whole.items()} for rank in range(RANKS)]
    plain = copy.deepcopy(model)
    plain.config._experts_implementation = "eager"
    out: Any = plain(**whole, output_router_logits=True)
    coef = plain.config.router_aux_loss_coef
    aux = torch.stack([plain(**part, output_router_logits=True).aux_loss for part in parts]).mean()
    (out.loss - coef * out.aux_loss + coef * aux).backward()
    assert abs(float(aux - out.aux_loss)) > 1e-4
    found = mc.simulate_ranks(
        model, mc.Plan(dp=2, ep=2, balance_scope="local"), [{**part, "output_router_logits": True} for part in parts]
    )
    for name, param in plain.named_parameters():
        if "router" in name or "mlp.gate." in name or "block_sparse_moe.gate" in name:
            assert param.grad is not None
            torch.testing.assert_close(found.grads[name], param.grad, rtol=1e-5, atol=1e-9)


def test_a_statistic_that_something_else_reads_is_refused() -> None:
    class Shared(Model):
        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            rows = self.before(x)
            probs = self.gate(rows).softmax(-1)
            w, ids = probs.topk(TOP_K, -1)
            mean = probs.mean(0)
            y = torch.zeros_like(rows)
            for e, expert in enumerate(self.experts):
                t, k = torch.where(ids == e)
                y = y.index_add(0, t, expert(rows[t]) * w[t, k, None])
            return {"loss": (x + y - labels).square().mean() + mean.square().sum(), "load": mean}

    plan = mc.Plan(dp=RANKS, ep=RANKS, balance_scope="local")
    with pytest.raises(MoeCompileError, match=r"test_balance_scope.py:\d+.*compute it apart for the loss"):
        mc.simulate_ranks(Shared(by_means), plan, [slice_for(batch(), plan, rank) for rank in range(RANKS)])


def test_layers_without_balance_loss_need_nothing() -> None:
    torch.manual_seed(0)

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": (self.layer(x) - labels).square().mean()}

    model = Plain().double()
    plans = [mc.Plan(dp=RANKS, balance_scope=scope) for scope in ("global", "local")]
    parts = [slice_for(batch(), plans[0], rank) for rank in range(RANKS)]
    one, other = (mc.simulate_ranks(copy.deepcopy(model), plan, parts) for plan in plans)
    assert torch.equal(one.loss, other.loss)
