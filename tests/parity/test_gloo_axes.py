"""`parallelize` over tp and cp on gloo ranks against the plain model: the ground truth for plans of more than dp x ep.

Ranks of one tp or cp group pass the same tensors. Norms run over two meshes: linears cut over tp, experts over ep.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as DShard

import moecompile as mc
from moecompile.plan import Plan
from tests.support.models import VOCAB, Config, build, tokens
from tests.support.parity import OPTIMIZERS, compare, difference, plain, slice_for
from tests.support.pool import Job, Part, Ranks, gathered, of_data_rank, parallel, train
from tests.support.thinned import thinned

pytestmark = pytest.mark.timeout(240)
CONFIG = Config("ops", hidden=16, heads=4, inner=8, shared=True, tied=True, rotary=True, aux=0.1)
SMALL = replace(CONFIG, layers=1)
BATCHES = [tokens(4, 8, seed, ignored=0.2) for seed in range(3)]
TP, SP = Plan(dp=1, tp=2, ep=2), Plan(dp=1, tp=2, ep=2, sequence_parallel=True)
CP, ALL = Plan(dp=1, cp=2, ep=2), Plan(dp=2, tp=2, ep=4)
BOTH = Plan(dp=1, cp=2, tp=2, ep=2, sequence_parallel=True)
ETP, EXPERTS = Plan(dp=2, etp=2), Plan(dp=2, tp=2, ep=2, etp=2)
PLANS = {"tp": TP, "sp": SP, "cp": CP, "dp-tp": ALL, "cp-sp": BOTH, "etp": ETP, "tp-etp": EXPERTS}


def check(ranks: Ranks, job: Job) -> list[Part]:
    """Three steps on gloo ranks and in the plain model."""
    parts = ranks.run(job.plan.world_size, train, job, BATCHES)
    reference = plain(build(job.config), BATCHES, optimizer=job.optimizer, clip=job.clip)
    compare(gathered(parts, reference, job.plan), reference)
    return parts


CLIPS = {f"{how}-{name}": (plan, how == "stock") for how in ("helper", "stock") for name, plan in PLANS.items()}
EVERY_TIME = ("helper-cp-sp", "helper-tp-etp", "stock-dp-tp", "stock-etp")


@pytest.mark.parametrize(("plan", "stock"), thinned(CLIPS, keep=EVERY_TIME))
def test_three_steps_and_both_ways_to_clip(ranks: Ranks, plan: Plan, stock: bool) -> None:
    """case 04: the norm on every rank is the single process's."""
    parts = check(ranks, Job(CONFIG, plan, "adamw-foreach", clip=0.05, stock=stock))
    assert all(step.norm > 0.05 for part in parts for step in part.steps)
    axes = {axis for found in parts[0].cuts.values() for axis, _ in found}
    assert axes == {axis for axis in ("tp", "ep", "etp") if getattr(plan, axis) > 1}


@pytest.mark.parametrize(
    "optimizer", thinned({"sgd": "sgd", "adamw-fused": "adamw-fused", "adamw": "adamw"}, keep=("sgd", "adamw"))
)
def test_optimizers(ranks: Ranks, optimizer: str) -> None:
    check(ranks, Job(CONFIG, ALL, optimizer, clip=0.05, early=optimizer != "sgd"))


@pytest.mark.parametrize("plan", thinned({"tp": TP, "cp-sp": BOTH}))
def test_the_users_code_never_runs_again(ranks: Ranks, plan: Plan) -> None:
    check(ranks, Job(CONFIG, plan, forbid=True))


# ---- accumulation ------------------------------------------------------------------------------------------------------


def accumulate(rank: int, plan: Plan, way: str) -> dict[str, Tensor]:
    """Gradients of two calls, and what a whole step makes of them."""
    with parallel(build(SMALL), plan) as model:
        if way == "no_sync":
            with model.no_sync():
                model(**slice_for(BATCHES[0], plan, rank))["loss"].backward()
        else:
            model(**slice_for(BATCHES[0], plan, rank))["loss"].backward()
        model(**slice_for(BATCHES[1], plan, rank))["loss"].backward()
        norm = mc.clip_grad_norm_(model, float("inf"))
        return {**{name: grad for name, grad in mc.full_grads(model).items() if grad is not None}, "norm": norm}


ACCUMULATED = {
    f"{name}-{way}": (PLANS[name], way) for name in ("sp", "cp", "dp-tp", "tp-etp") for way in ("plain loop", "no_sync")
}


@pytest.mark.parametrize(
    ("plan", "way"),
    thinned(ACCUMULATED, keep=("sp-plain loop", "cp-no_sync", "dp-tp-no_sync", "tp-etp-plain loop")),
)
def test_accumulated_gradients_are_those_of_the_plain_loop(ranks: Ranks, plan: Plan, way: str) -> None:
    model = build(SMALL)
    for batch in BATCHES[:2]:
        model(**batch)["loss"].backward()
    wanted = {name: param.grad for name, param in model.named_parameters()}
    norm = nn.utils.get_total_norm(wanted.values())
    for found in ranks.run(plan.world_size, accumulate, plan, way):
        assert difference("norm", found.pop("norm"), norm) < 1e-11
        assert found.keys() == wanted.keys()
        for name, grad in wanted.items():
            assert grad is not None and difference(name, found[name], grad) < 1e-11


def microbatched(rank: int, plan: Plan) -> dict[str, Any]:
    with parallel(build(SMALL), plan) as model:
        out = model(**slice_for(BATCHES[0], plan, rank))
        out["loss"].backward()
        (layer,) = mc.metrics(model).values()
        return {
            "loss": out["loss"].detach(),
            "logits": of_data_rank(out["logits"]),
            "grads": mc.full_grads(model),
            "load": layer.tokens_per_expert,
        }


@pytest.mark.parametrize("plan", thinned({"sp": SP, "cp": CP, "dp-tp": ALL, "cp-sp": BOTH, "tp-etp": EXPERTS}))
def test_microbatches(ranks: Ranks, plan: Plan) -> None:
    """Normalised by the valid tokens of the step, balance terms of each microbatch averaged; results put together again."""
    compare_microbatches(ranks, plan)


def compare_microbatches(ranks: Ranks, plan: Plan) -> None:
    plan = replace(plan, microbatches=2)
    model, batch, of = build(SMALL), BATCHES[0], plan.num_data_ranks
    parts = [
        {name: torch.cat([one.chunk(2)[at] for one in value.chunk(of)]) for name, value in batch.items()}
        for at in range(2)
    ]
    valid = [int((part["labels"] != -100).sum()) for part in parts]
    outs = [model(**part) for part in parts]
    loss = sum(
        F.cross_entropy(out["logits"].flatten(0, 1), part["labels"].flatten(), reduction="sum") / sum(valid)
        + SMALL.aux * out["balance"] / 2
        for out, part in zip(outs, parts, strict=True)
    )
    assert isinstance(loss, Tensor) and valid[0] != valid[1]
    loss.backward()
    whole = build(SMALL)(**batch)["logits"]
    for rank, found in enumerate(ranks.run(plan.world_size, microbatched, plan)):
        assert difference("loss", found["loss"], loss) < 1e-11
        assert difference("logits", found["logits"], whole.chunk(of)[plan.data_rank(rank)]) < 1e-11
        assert found["load"].sum() == batch["ids"].numel() * SMALL.top_k
        for name, param in model.named_parameters():
            assert param.grad is not None and difference(name, found["grads"][name], param.grad) < 1e-11


# ---- calls without a loss, a loss from outside, evaluation --------------------------------------------------------------


class Logits(nn.Module):
    """The model without its loss; ``flat`` puts the tokens of all sequences in a row."""

    def __init__(self, flat: bool = False) -> None:
        super().__init__()
        self.inner, self.flat = build(SMALL), flat

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        out = self.inner(ids, ids)
        logits = out["logits"].flatten(0, 1) if self.flat else out["logits"]
        return {"logits": logits, "balance": out["balance"]}


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """This data rank's share of a mean over all tokens."""
    return F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), reduction="sum") / BATCHES[0]["ids"].numel()


def loss_fn(output: dict[str, Tensor], ids: Tensor) -> Tensor:
    return F.cross_entropy(output["logits"].reshape(-1, VOCAB), ids.reshape(-1))


def without_loss(rank: int, plan: Plan, how: str, flat: bool) -> dict[str, Tensor]:
    mine = slice_for(BATCHES[0], plan, rank)
    with parallel(Logits(flat), plan, loss_fn=loss_fn if how == "loss_fn" else None) as model:
        out = model(mine["ids"])
        if how == "loss_fn":
            out.backward()
        elif how == "whole":
            logits = out["logits"]
            token_loss(logits.full_tensor() if isinstance(logits, DTensor) else logits, mine["ids"]).backward()
        else:
            logits, ids = out["logits"], mine["ids"].flatten() if flat else mine["ids"]
            if isinstance(logits, DTensor):  # each rank takes the loss of the part that it holds
                rows, (placed,) = logits.to_local(), logits.placements
                assert logits.device_mesh.ndim == 1 and placed == DShard(1)
                ids = ids.chunk(logits.device_mesh.size(), 1)[logits.device_mesh.get_local_rank()]
                token_loss(rows, ids).backward()
            else:
                token_loss(logits, ids).backward()
        return {name: grad for name, grad in mc.full_grads(model).items() if grad is not None}


WAYS = {
    f"{name}-{how}": (name, how)
    for name in PLANS
    for how in ("whole", "parts", "loss_fn")
    if (name, how) != ("cp-sp", "parts")
}


@pytest.mark.parametrize(("name", "how"), thinned(WAYS, every=3))
def test_a_loss_outside_the_model_counts_once_over_tp_and_cp(ranks: Ranks, name: str, how: str) -> None:
    plan = PLANS[name]
    compare_outside(ranks, plan, how, False)


@pytest.mark.parametrize("plan", [SP, CP, BOTH], ids=["sp", "cp", "cp-sp"])
def test_tokens_of_all_sequences_in_a_row(ranks: Ranks, plan: Plan) -> None:
    """What is cut in stripes, one a sequence, is put together in the right order."""
    compare_outside(ranks, plan, "whole", True)


def compare_outside(ranks: Ranks, plan: Plan, how: str, flat: bool) -> None:
    model = Logits()
    ids = BATCHES[0]["ids"]
    token_loss(model(ids)["logits"], ids).backward()
    wanted = {name: param.grad for name, param in model.named_parameters()}
    for found in ranks.run(plan.world_size, without_loss, plan, how, flat):
        assert found.keys() == wanted.keys()
        for name, grad in wanted.items():
            assert grad is not None and difference(name, found[name], grad) < 1e-11


def evaluated(rank: int, plan: Plan) -> list[dict[str, Any]]:
    """With and without a loss, training in between."""
    found = []
    with parallel(build(SMALL), plan) as model:
        mine = slice_for(BATCHES[0], plan, rank)
        for _ in range(2):
            with torch.no_grad():
                out = model.eval()(**mine)
            assert not out["loss"].requires_grad
            found.append({name: of_data_rank(value) for name, value in out.items()})
            model.train()
            stepper = OPTIMIZERS["sgd"](model.parameters())
            model(**slice_for(BATCHES[1], plan, rank))["loss"].backward()
            stepper.step()
            stepper.zero_grad()
    return found


@pytest.mark.parametrize("plan", thinned(PLANS, keep=("cp-sp", "tp-etp")))
def test_evaluation_between_steps(ranks: Ranks, plan: Plan) -> None:
    model, wanted = build(SMALL), []
    stepper = OPTIMIZERS["sgd"](model.parameters())
    for _ in range(2):
        with torch.no_grad():
            wanted.append(model(**BATCHES[0]))
        model(**BATCHES[1])["loss"].backward()
        stepper.step()
        stepper.zero_grad()
        stepper = OPTIMIZERS["sgd"](model.parameters())
    for rank, steps in enumerate(ranks.run(plan.world_size, evaluated, plan)):
        for found, expected in zip(steps, wanted, strict=True):
            logits = expected["logits"].chunk(plan.num_data_ranks)[plan.data_rank(rank)]
            assert difference("logits", found["logits"], logits) < 1e-11
            for name in ("loss", "balance"):
                assert difference(name, found[name], expected[name]) < 1e-11


# ---- what a call returns ------------------------------------------------------------------------------------------------


def returned(rank: int, plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with parallel(build(SMALL), plan) as model:
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                logits = model(**slice_for(BATCHES[0], plan, rank))["logits"]
            spread = isinstance(logits, DTensor)
            found[f"shape {grad}"] = tuple(logits.shape)
            found[f"cut {grad}"] = (
                {
                    axis: placed.dim
                    for axis, placed in zip(logits.device_mesh.mesh_dim_names or (), logits.placements, strict=True)
                }
                if spread and all(isinstance(placed, DShard) for placed in logits.placements)
                else {}
            )
            found[f"local {grad}"] = tuple((logits.to_local() if spread else logits).shape)
            if grad:
                try:
                    logits.sum().backward()
                except RuntimeError as error:
                    found["backward"] = str(error)
    return found


CUTS = {"tp": {}, "sp": {"tp": 1}, "cp": {"cp": 1}, "dp-tp": {}, "cp-sp": {"cp": 1, "tp": 1}, "etp": {}, "tp-etp": {}}


@pytest.mark.parametrize("name", thinned({name: name for name in PLANS}, keep=("cp-sp", "tp-etp")))
def test_a_result_that_is_cut_is_a_dtensor_of_this_data_ranks_shape(ranks: Ranks, name: str) -> None:
    plan = PLANS[name]
    rows = 4 // plan.num_data_ranks
    for found in ranks.run(plan.world_size, returned, plan):
        for grad in (True, False):
            assert found[f"shape {grad}"] == (rows, 8, VOCAB) and found[f"cut {grad}"] == CUTS[name]
            parts = [plan.tp if "tp" in CUTS[name] else 1, plan.cp]
            assert found[f"local {grad}"] == (rows, 8 // parts[0] // parts[1], VOCAB)
        assert "only the loss has gradients" in found["backward"]
