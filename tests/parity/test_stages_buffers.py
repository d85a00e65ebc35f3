"""Buffers that a forward writes, in pipeline stages: each microbatch reads what the one before it left, and all ranks hold the last."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import moecompile as mc
from moecompile import stages
from moecompile.errors import PassError
from moecompile.plan import Plan
from tests.parity.test_buffers_live import Several, buffers, check
from tests.support import buffer_models as models
from tests.support.parity import Batch, difference, slice_for
from tests.support.pool import Ranks, parallel
from tests.support.staged import microbatches
from tests.support.thinned import thinned

pytestmark = pytest.mark.timeout(260)
PP = Plan(dp=1, pp=2, microbatches=4)
FOLDED = Plan(dp=2, pp=2, ep=2, microbatches=2)
PLANS = {
    "pp2": PP,
    "pp2-dp2-ep2": FOLDED,
    "gpipe": replace(PP, schedule="gpipe"),
    "interleaved": replace(PP, schedule="interleaved-1f1b", layout="E|t|t|L"),
    "zero": replace(FOLDED, passes="+shard-params"),
}


# ---- all ranks in one process ------------------------------------------------------------------------------------------


def alone(model: nn.Module, batch: Batch, plan: Plan) -> Tensor:
    """Loss of one process that takes the microbatches one after the other; gradients are added up where they are wanted."""
    total = torch.zeros((), dtype=torch.float64)
    for part in microbatches(batch, plan):
        loss = model(**part)["loss"] * (len(part["x"]) / len(batch["x"]))
        if torch.is_grad_enabled():
            loss.backward()
        total += loss.detach()
    return total


def check_step(kind: type[models.Layer], plan: Plan) -> None:
    batch, model = models.batch(rows=8), models.made(kind)
    found = mc.simulate_ranks(
        models.made(kind), plan, [slice_for(batch, plan, rank) for rank in range(plan.world_size)]
    )
    before = buffers(model)
    assert difference("loss", found.loss, alone(model, batch, plan)) < 1e-12
    for name, param in model.named_parameters():
        assert param.grad is not None
        zero = not param.grad.any()
        assert difference(name, found.grads[name], param.grad, zero=zero) < 1e-11, name
    written = {name: value for name, value in model.named_buffers() if not torch.equal(value, before[name])}
    assert set(written) <= set(found.buffers) and (written or kind is models.NormWithoutTrack)
    for name, value in written.items():
        assert difference(name, found.buffers[name], value) < 1e-12, name


@pytest.mark.parametrize(
    "kind",
    thinned({kind.__name__: kind for kind in models.KINDS}, keep=("Norm",)),
)
def test_a_step(kind: type[models.Layer]) -> None:
    """1F1B: the backward of a microbatch reads what its forward read, though the forward of another one has run since."""
    check_step(kind, PP)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", [plan for plan in PLANS.values() if plan != PP], ids=[name for name in PLANS if name != "pp2"]
)
@pytest.mark.parametrize("kind", models.KINDS, ids=lambda kind: kind.__name__)
def test_a_step_under_other_plans(kind: type[models.Layer], plan: Plan) -> None:
    check_step(kind, plan)


def test_without_what_is_carried_the_difference_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = stages._Cutter._carried
    monkeypatch.setattr(stages._Cutter, "_carried", lambda self, *halves: {})
    with pytest.raises(AssertionError):
        check_step(models.MeanReassigned, PP)
    monkeypatch.setattr(stages._Cutter, "_carried", usual)
    check_step(models.MeanReassigned, PP)


class Across(nn.Module):
    """A mean of the last layer's output that the first layer, or nobody, reads; ``early`` says which."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.early, self.inner = early, models.made(models.Layer)
        self.register_buffer("mean", torch.full((models.WIDTH,), 0.5))

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        out = self.inner(x - self.mean if self.early else x, labels)
        before = self.mean * 1
        self.mean = self.mean.lerp(out["out"].detach().mean((0, 1)), 0.25)
        return {**out, "mean": 0 * out["out"][:, 0] + before}


def across(early: bool) -> Across:
    return Across(early).double()


def test_a_buffer_that_an_earlier_stage_reads_is_refused_by_name() -> None:
    batch = models.batch(rows=8)
    with pytest.raises(
        PassError,
        match=r"test_stages_buffers.py:\d+.* on stage 1 writes a buffer in forward that .*test_stages_buffers.py:\d+.* reads on stage 0.*"
        r"update the buffer after the step, or use pp=1",
    ):
        mc.simulate_ranks(across(True), PP, [batch, batch])


def test_a_buffer_as_it_was_before_comes_from_the_stage_that_writes_it() -> None:
    batch, model = models.batch(rows=8), across(False)
    found = mc.simulate_ranks(across(False), PP, [batch, batch])
    rows = [model(**part)["mean"] for part in microbatches(batch, PP)]
    assert [len(outputs) for outputs in found.outputs] == [0, 2]
    means = [value for value in found.outputs[1].values() if value.dim() == 2]
    assert difference("mean", means[0], torch.cat(rows)) < 1e-12
    assert difference("mean", found.buffers["mean"], model.mean) < 1e-12


# ---- on gloo -----------------------------------------------------------------------------------------------------------

SEVERAL = replace(PP, layout="Et|L")
SEVERAL_FOLDED = replace(FOLDED, layout="Et|L")


def made() -> Several:
    """A counter and a running mean of the raw batch, which both stages keep; a norm on the first, a load on the last."""
    torch.manual_seed(0)
    return Several().double()


def session(model: Any, plan: Plan, rank: int | None) -> list[dict[str, Tensor]]:
    """Training, accumulation, evaluation in both modes, and a batch that the microbatches do not divide.

    The losses and buffers of every call, and the weights at the end. ``rank`` None: one process with the same microbatches.
    """
    quiet = getattr(model, "no_sync", contextlib.nullcontext)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.01), list[dict[str, Tensor]]()

    def call(seed: int, rows: int = 8) -> None:
        batch = models.batch(seed, rows)
        if rank is None:
            loss = alone(model, batch, plan)
        else:
            loss = model(**slice_for(batch, plan, rank))["loss"]
            if torch.is_grad_enabled():
                loss.backward()
        found.append({**buffers(model), "loss": loss.detach()})

    for rows in (8, 6):
        with quiet():
            call(rows, rows)
        call(rows + 10)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            call(rows + 20)
            model.eval()
            call(rows + 30)
            model.train()
    weights = model.state_dict() if rank is None else mc.full_state_dict(model)
    return [*found, dict(weights)]


def on_rank(rank: int, plan: Plan) -> tuple[list[dict[str, Tensor]], bool]:
    """The session, and whether every buffer still lies where it lay."""
    model = made()
    places = [value.data_ptr() for value in model.buffers()]
    with parallel(model, plan) as sharded:
        return session(sharded, plan, rank), places == [value.data_ptr() for value in model.buffers()]


@pytest.mark.slow
@pytest.mark.parametrize("plan", [SEVERAL, SEVERAL_FOLDED], ids=["pp2", "pp2-dp2-ep2"])
def test_a_session(ranks: Ranks, plan: Plan) -> None:
    """Bitwise the same buffers on all ranks, of all stages."""
    wanted = session(made(), plan, None)
    runs = ranks.run(plan.world_size, on_rank, plan, timeout=230.0)
    for found, same in runs:
        assert same
        check(found, wanted)
        for here, there in zip(runs[0][0], found, strict=True):
            assert all(torch.equal(value, there[name]) for name, value in here.items())


def stale(rank: int, plan: Plan) -> list[dict[str, Tensor]]:
    """The session without messages between stages about buffers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast", lambda *args, **kwargs: None)
        return on_rank(rank, plan)[0]


@pytest.mark.slow
def test_without_the_messages_the_difference_is_seen(ranks: Ranks) -> None:
    first, last = ranks.run(2, stale, SEVERAL, timeout=230.0)
    assert not torch.equal(first[0]["load"], last[0]["load"]) and torch.equal(first[0]["steps"], last[0]["steps"])


def save(rank: int, plan: Plan, path: str) -> None:
    with parallel(made(), plan) as model:
        model(**slice_for(models.batch(0, 8), plan, rank))["loss"].backward()
        dcp.save({"model": model.state_dict()}, checkpoint_id=path)


def resume(rank: int, plan: Plan, path: str) -> dict[str, Tensor]:
    batch = slice_for(models.batch(1, 8), plan, rank)
    with parallel(made(), plan, example=batch) as model:
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=path)
        model.load_state_dict(state["model"])
        loss = model(**batch)["loss"]
        loss.backward()
        grads = {f"gradient of {name}": grad for name, grad in mc.full_grads(model).items() if grad is not None}
        return {**buffers(model), **grads, "loss": loss.detach()}


PAIRS = {
    "pp-dp": (SEVERAL, Plan(dp=2, ep=2, microbatches=2)),
    "dp-pp": (Plan(dp=2, ep=2, microbatches=2), SEVERAL_FOLDED),
}


@pytest.mark.parametrize(("first", "then"), thinned(PAIRS, keep=("pp-dp",)))
def test_saved_under_one_plan_and_resumed_under_another(ranks: Ranks, tmp_path: Path, first: Plan, then: Plan) -> None:
    ranks.run(first.world_size, save, first, str(tmp_path), timeout=230.0)
    before, model = made(), made()
    alone(before, models.batch(0, 8), first)
    model.load_state_dict(before.state_dict())
    loss = alone(model, models.batch(1, 8), then)
    grads = {f"gradient of {name}": param.grad for name, param in model.named_parameters() if param.grad is not None}
    wanted = {**buffers(model), **grads, "loss": loss}
    for found in ranks.run(then.world_size, resume, then, str(tmp_path), timeout=230.0):
        check([found], [wanted])
