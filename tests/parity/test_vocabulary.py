"""A head cut by the vocabulary, with the cross entropy over it and a tied table of embeddings, against one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moecompile as mc
from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.compilation import Request, compile_call
from moecompile.placement.types import Shard
from moecompile.plan import Plan
from tests.parity.test_hf_axes import build as build_hf
from tests.parity.test_hf_axes import check as check_hf
from tests.parity.test_hf_axes import cut
from tests.support import hf_models
from tests.support.models import Config, build, tokens
from tests.support.parity import LockStep, compare, difference, plain, slice_for
from tests.support.pool import Ranks, parallel
from tests.support.thinned import thinned

pytestmark = pytest.mark.timeout(240)
CONFIG = Config("stacked", hidden=16, heads=4, inner=8, shared=True, aux=0.1, rotary=True)


def plan_of(**degrees: Any) -> Plan:
    return Plan(passes="+shard-linears{vocab=true}", **degrees)


TP = plan_of(dp=1, tp=2)
PLANS = [
    TP,
    plan_of(dp=1, tp=2, ep=2, sequence_parallel=True),
    plan_of(dp=2, tp=2, ep=4),
    plan_of(dp=1, cp=2, tp=2, ep=2),
]


STEPS = {f"{plan}-{'tied' if tied else 'own'}": (plan, tied) for plan in PLANS for tied in (False, True)}


@pytest.mark.usefixtures("proving")
@pytest.mark.parametrize(("plan", "tied"), thinned(STEPS, keep=tuple(STEPS)[::3] + tuple(STEPS)[-1:]))
def test_three_steps(plan: Plan, tied: bool) -> None:
    config = replace(CONFIG, tied=tied)
    batches = [tokens(2 * (plan.dp or 1), 8, seed, ignored=0.3) for seed in range(3)]
    lock_step = LockStep(build(config), plan, batches[0])
    compare(lock_step.run(batches), plain(build(config), batches))
    heads = [name for name in cut(lock_step.program) if "layers" not in name]
    assert len(heads) == 1 and cut(lock_step.program)[heads[0]] == Shard(0)
    assert lock_step.program.gathers == []
    assert len(graphs.find(lock_step.program.graph, ops.own_index)) == 1 + tied


def test_what_travels() -> None:
    """A maximum and a sum a token, and the gradient of the sum: not the scores."""
    model, batch = build(CONFIG), tokens(2, 8, 0)
    reduced = {}
    for plan in (TP, Plan(dp=1, tp=2)):
        program = compile_call(model, Request((), slice_for(batch, plan, 0), plan))
        nodes = [node for node in graphs.find(program.graph, ops.all_reduce) if node.args[2] == "tp"]
        reduced[plan] = sorted((str(node.args[1]), meta.tensor(node).numel()) for node in nodes)
    more = list(reduced[TP])
    for item in reduced[Plan(dp=1, tp=2)]:
        if item in more:
            more.remove(item)
    rows = 2 * 8
    assert ("max", rows) in more and more.count(("sum", rows)) == 2


class Loss(nn.Module):
    """A chain, a head and a cross entropy with the options that it has."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(12, 8, padding_idx=options.pop("padding_idx", None))
        self.up, self.down, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 12)
        if options.pop("tied", False):
            self.head.weight = self.embed.weight
        self.router, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        with torch.no_grad():
            self.head.bias[options.pop("closed", [])] = float("-inf")
        self.weight = torch.rand(12, dtype=torch.float64) if options.pop("weighted", False) else None
        self.options = options

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(F.silu(self.up(x)))
        flat = x.reshape(-1, 8)
        best, which = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows = torch.where(which == index)[0]
            out.index_add_(0, rows, expert(flat[rows]) * best[rows, None])
        scores = self.head(flat + out)
        loss = F.cross_entropy(scores, labels.reshape(-1), weight=self.weight, **self.options)
        return loss.square().sum() / loss.numel() if loss.dim() else loss


def loss_batch(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(0, 12, (2, 6), generator=generator) for _ in range(2))
    labels[0, :2] = -100
    return {"ids": ids, "labels": labels}


OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.2},
    "smoothed sum": {"label_smoothing": 0.2, "reduction": "sum"},
    "another index": {"ignore_index": 3},
    "closed classes": {"closed": [0, 6, 11]},  # the first of either rank among them
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options_of_the_loss(options: dict[str, Any]) -> None:
    batch = loss_batch()
    if options.get("ignore_index") == 3:
        batch["labels"][batch["labels"] == -100] = 3
    for index in options.get("closed", ()):
        batch["labels"][batch["labels"] == index] = 1
    model = Loss(**options).double()
    wanted = Loss(**options).double()
    loss = wanted(**batch)
    loss.backward()
    found = mc.simulate_ranks(model, TP, [slice_for(batch, TP, rank) for rank in range(2)])
    torch.testing.assert_close(found.loss, loss.detach(), rtol=1e-12, atol=0)
    for name, param in wanted.named_parameters():
        assert param.grad is not None and difference(name, found.grads[name], param.grad) <= 1e-10
    assert found.program is not None and "head.weight" in cut(found.program)


@pytest.mark.parametrize("options", [{"weighted": True}, {"tied": True, "padding_idx": 1}], ids=["weights", "padding"])
def test_heads_that_stay_whole_and_are_named(options: dict[str, Any]) -> None:
    """Class weights, and a table whose padding row has no gradient."""
    batch, model = loss_batch(), Loss(**options).double()
    loss = Loss(**options).double()(**batch)
    program = compile_call(model, Request((), slice_for(batch, TP, 0), TP))
    assert "head.weight" not in cut(program) and "embed.weight" not in cut(program)
    found = mc.simulate_ranks(model, TP, [slice_for(batch, TP, rank) for rank in range(2)])
    torch.testing.assert_close(found.loss, loss.detach(), rtol=1e-12, atol=0)
    (done,) = [item for item in program.history if item.pass_text.startswith("shard-linears")]
    assert any("head" in text for text in done.declined)


def test_a_label_out_of_range_is_an_error_as_in_one_process() -> None:
    batch = loss_batch()
    batch["labels"][1, 1] = 12
    with pytest.raises(IndexError):
        Loss().double()(**batch)
    with pytest.raises(IndexError, match="12 is out of range for 12 classes"):
        mc.simulate_ranks(Loss().double(), TP, [slice_for(batch, TP, rank) for rank in range(2)])


FAMILIES = {
    "mixtral-sp": ("mixtral", PLANS[1]),
    "mixtral-tp": ("mixtral", TP),
    "deepseek_v3-tp": ("deepseek_v3", TP),
    "deepseek_v3-sp": ("deepseek_v3", PLANS[1]),
}


@pytest.mark.parametrize(("name", "plan"), thinned(FAMILIES, keep=("mixtral-sp",)))
def test_hugging_face_models(name: str, plan: Plan) -> None:
    found = check_hf(build_hf(name), plan, hf_models.batch())
    assert "lm_head.weight" in cut(found.program)


def trained(rank: int, plan: Plan, batches: list[dict[str, Tensor]]) -> dict[str, Any]:
    with parallel(build(replace(CONFIG, tied=True)), plan) as model:
        for batch in batches:
            out = model(**slice_for(batch, plan, rank))
            out["loss"].backward()
        return {"loss": out["loss"].detach(), "grads": mc.full_grads(model)}


def test_on_gloo_ranks(ranks: Ranks) -> None:
    batches = [tokens(2, 8, seed) for seed in range(2)]
    model = build(replace(CONFIG, tied=True))
    for batch in batches:
        loss = model(**batch)["loss"]
        loss.backward()
    for found in ranks.run(TP.world_size, trained, TP, batches, timeout=200.0):
        torch.testing.assert_close(found["loss"], loss.detach(), rtol=1e-12, atol=0)
        for name, param in model.named_parameters():
            if param.grad is not None and param.grad.count_nonzero():
                assert difference(name, found["grads"][name], param.grad) <= 1e-10
