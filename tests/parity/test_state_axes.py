"""State of models that are cut over tp as well as ep: checkpoints, plain state, the meta device, frozen and adapted linears.

One weight that holds several projections side by side is cut in stripes: a rank's part of it is no block of the whole.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import moecompile as mc
from moecompile.owned import PartTensor
from moecompile.parallel_model import ParallelModel
from moecompile.placement.types import Shard
from moecompile.plan import Plan
from tests.support.models import Config, TinyMoe, build, tokens
from tests.support.parity import OPTIMIZERS, difference, slice_for
from tests.support.pool import Ranks, cuts, parallel

pytestmark = pytest.mark.timeout(240)
CONFIG = Config("ops", layers=1, hidden=16, heads=4, inner=8, shared=True, tied=True, bias=True, rotary=True, aux=0.1)
BATCHES = [tokens(4, 8, seed, ignored=0.2) for seed in range(5)]
SAVED = Plan(dp=1, tp=2, ep=2)
STRIPED = {
    "layers.0.qkv.weight": Shard(0, 3),
    "layers.0.qkv.bias": Shard(0, 3),
    "layers.0.out.weight": Shard(1),
    "layers.0.moe.shared.gate_up.weight": Shard(0, 2),
    "layers.0.moe.shared.gate_up.bias": Shard(0, 2),
    "layers.0.moe.shared.down.weight": Shard(1),
}


class GateUp(nn.Module):
    """A gated MLP whose first weight holds gate and up."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(hidden, 2 * inner), nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


def make(seed: int = 0) -> TinyMoe:
    """The model of the tests: query, key and value in one weight, gate and up in another."""
    model = build(replace(CONFIG, seed=seed))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 1)
        for layer in model.layers:
            layer.moe.shared = GateUp(CONFIG.hidden, CONFIG.inner).to(CONFIG.dtype)  # type: ignore[union-attr]
    return model


class Run:
    """A plain training loop over this rank's slices."""

    def __init__(self, model: Any, plan: Plan, rank: int) -> None:
        self.model, self.plan, self.rank = model, plan, rank
        self.stepper = OPTIMIZERS["adamw"](model.parameters())

    def steps(self, *at: int) -> list[float]:
        losses = []
        for index in at:
            loss = self.model(**slice_for(BATCHES[index], self.plan, self.rank))["loss"]
            loss.backward()
            clip = mc.clip_grad_norm_ if isinstance(self.model, ParallelModel) else plain_clip
            clip(self.model, 0.5)
            self.stepper.step()
            self.stepper.zero_grad()
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": mc.optimizer_state_dict(self.model, self.stepper)}


def plain_clip(model: nn.Module, limit: float) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), limit)


def save(rank: int, plan: Plan, folder: str) -> dict[str, tuple[tuple[str, Shard], ...]]:
    with parallel(make(), plan) as model:
        run = Run(model, plan, rank)
        run.steps(0, 1)
        dcp.save(run.state(), checkpoint_id=folder)
        return cuts(model)


def resume(rank: int, plan: Plan, folder: str, called: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Into other weights; ``called``: the model is cut before the state comes."""
    with parallel(make(seed=9), plan) as model:
        run = Run(model, plan, rank)
        if called:
            model(**slice_for(BATCHES[4], plan, rank))
        state = run.state()
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        mc.load_optimizer_state_dict(model, run.stepper, state["optim"])
        return run.steps(2, 3), mc.full_state_dict(model)


OTHERS = [
    (Plan(dp=2, ep=2), False),
    (Plan(dp=1, tp=2, ep=2, sequence_parallel=True), True),
    (Plan(dp=1, tp=4, ep=2), True),
    (Plan(dp=2, tp=2, ep=4), False),
    (Plan(dp=1, cp=2, ep=2), True),
]


def test_case_33_resume_under_another_plan(ranks: Ranks, tmp_path: Path) -> None:
    """Saved under tp2 ep2; losses and weights of the steps that follow are those of a run that was never interrupted."""
    alone = Run(make(), Plan(dp=1), 0)
    alone.steps(0, 1)
    (cut, *_) = ranks.run(2, save, SAVED, str(tmp_path))
    assert {name: placed for name, found in cut.items() for axis, placed in found if axis == "tp"} == STRIPED
    before = {name: value.clone() for name, value in alone.model.state_dict().items()}
    losses = alone.steps(2, 3)
    after = alone.model.state_dict()

    # plain code on one process reads the file
    read = {name: torch.full_like(value, float("nan")) for name, value in before.items()}
    dcp.load({"model": read}, checkpoint_id=str(tmp_path), no_dist=True)
    for name, value in before.items():
        assert difference(name, read[name], value) < 1e-11

    for plan, called in OTHERS:
        for found, weights in ranks.run(plan.world_size, resume, plan, str(tmp_path), called):
            assert found == pytest.approx(losses, rel=1e-11, abs=0), plan
            for name, value in after.items():
                assert difference(name, weights[name], value) < 1e-10, (plan, name)


@pytest.mark.slow
def test_saved_under_one_plan_resumed_under_stripes(ranks: Ranks, tmp_path: Path) -> None:
    """The other way round: what was whole is read in stripes."""
    alone = Run(make(), Plan(dp=1), 0)
    alone.steps(0, 1)
    ranks.run(2, save, Plan(dp=2, ep=2), str(tmp_path))
    losses = alone.steps(2, 3)
    for called in (True, False):
        for found, weights in ranks.run(4, resume, Plan(dp=2, tp=2, ep=2), str(tmp_path), called):
            assert found == pytest.approx(losses, rel=1e-11, abs=0)
            for name, value in alone.model.state_dict().items():
                assert difference(name, weights[name], value) < 1e-10, name


def plain_state(rank: int, plan: Plan) -> dict[str, Any]:
    """Whole state out, another model's plain state in, shapes and types on the way."""
    found: dict[str, Any] = {}
    with parallel(make(), plan, example=slice_for(BATCHES[0], plan, rank)) as model:
        found["first"] = mc.full_state_dict(model)
        state = model.state_dict()
        found["shapes"] = {name: tuple(value.shape) for name, value in state.items()}
        found["spread"] = {name for name, value in state.items() if isinstance(value, DTensor | PartTensor)}
        found["whole"] = {
            name: value.full_tensor() for name, value in state.items() if isinstance(value, DTensor | PartTensor)
        }
        model.load_state_dict(make(seed=5).state_dict())
        found["second"] = mc.full_state_dict(model)
        model.load_state_dict(state)  # views of this rank's parts, now with the second model's numbers
        found["loss"] = model(**slice_for(BATCHES[0], plan, rank))["loss"].item()
        missing = dict(model.state_dict())
        missing["layers.0.qkv.weight"] = missing["layers.0.qkv.weight"].to_local()
        try:
            model.load_state_dict(missing)
        except RuntimeError as error:
            found["part"] = str(error)
    return found


@pytest.mark.parametrize("plan", [SAVED, Plan(dp=2, tp=2, ep=4)], ids=["tp2", "dp2-tp2"])
def test_plain_state_in_and_out(ranks: Ranks, plan: Plan) -> None:
    first, second = make().state_dict(), make(seed=5)
    with torch.no_grad():
        loss = second(**BATCHES[0])["loss"].item()
    for found in ranks.run(plan.world_size, plain_state, plan):
        assert found["shapes"] == {name: tuple(value.shape) for name, value in first.items()}
        assert found["spread"] >= set(STRIPED)
        for name, value in first.items():
            assert torch.equal(found["first"][name], value), name
            assert torch.equal(found["second"][name], second.state_dict()[name]), name
        for name, value in found["whole"].items():
            assert torch.equal(value, first[name]), name
        assert found["loss"] == pytest.approx(loss, rel=1e-11)
        assert "'layers.0.qkv.weight' has shape [24, 16], but the plain model's is [48, 16]" in found["part"]


# ---- the meta device ----------------------------------------------------------------------------------------------------


def drawn_on_meta(rank: int, plan: Plan) -> tuple[dict[str, Tensor], float, int]:
    """The weights that a model on the meta device gets under a plan, the loss of a step, how many elements are held."""
    with torch.device("meta"):
        model = make()
    torch.manual_seed(3)
    torch.rand(rank)  # another place in the stream on each rank: only the seed counts
    with parallel(model, plan, init_fn=normal) as made:
        loss = made(**slice_for(BATCHES[0], plan, rank))["loss"]
        loss.backward()
        return mc.full_state_dict(made), loss.item(), sum(param.numel() for param in made.parameters())


def normal(module: nn.Module) -> None:
    """A user's initialisation: every parameter of its own, in place."""
    for param in module.parameters(recurse=False):
        nn.init.normal_(param, std=0.3)


@pytest.mark.parametrize("plan", [SAVED, Plan(dp=2, tp=2, ep=4, sequence_parallel=True)], ids=["tp2", "dp2-sp2"])
def test_case_35_weights_from_meta_do_not_depend_on_tp(ranks: Ranks, plan: Plan) -> None:
    """Stripes too; tied weights stay one."""
    torch.manual_seed(3)
    alone = make()
    for module in alone.modules():
        normal(module)
    wanted = alone.state_dict()
    loss = alone(**BATCHES[0])["loss"].item()
    whole = sum(param.numel() for param in alone.parameters())
    chains = sum(wanted[name].numel() for name in STRIPED)
    experts = sum(value.numel() for name, value in wanted.items() if ".experts." in name)
    for found, its_loss, held in ranks.run(plan.world_size, drawn_on_meta, plan):
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        assert its_loss == pytest.approx(loss, rel=1e-11)
        assert held == whole - chains // 2 - experts + experts // plan.ep


# ---- frozen and adapted linears -----------------------------------------------------------------------------------------


def frozen(rank: int, plan: Plan) -> tuple[dict[str, Tensor | None], dict[str, Tensor], float, dict[str, Any]]:
    model = make()
    freeze(model)
    with parallel(model, plan) as made:
        run = Run(made, plan, rank)
        made(**slice_for(BATCHES[0], plan, rank))["loss"].backward()
        grads = mc.full_grads(made)
        norm = mc.clip_grad_norm_(made, 0.5).item()
        run.stepper.step()
        return grads, mc.full_state_dict(made), norm, cuts(made)


def freeze(model: nn.Module) -> None:
    """Parts of chains: one weight of attention, all of the shared expert, the experts themselves."""
    for name, param in model.named_parameters():
        param.requires_grad_(not any(part in name for part in ("qkv.weight", "shared.", "experts.w_in")))


@pytest.mark.parametrize("plan", [SAVED, Plan(dp=1, tp=2, ep=2, sequence_parallel=True)], ids=["tp2", "sp2"])
def test_frozen_linears_are_cut_and_have_no_gradient(ranks: Ranks, plan: Plan) -> None:
    alone = make()
    freeze(alone)
    run = Run(alone, Plan(dp=1), 0)
    alone(**BATCHES[0])["loss"].backward()
    wanted = {name: None if p.grad is None else p.grad.clone() for name, p in alone.named_parameters()}
    norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.5).item()
    run.stepper.step()
    for grads, weights, its_norm, cut in ranks.run(2, frozen, plan):
        assert its_norm == pytest.approx(norm, rel=1e-11)
        assert set(STRIPED) <= set(cut)
        assert [name for name, grad in grads.items() if grad is None] == [
            name for name, grad in wanted.items() if grad is None
        ]
        for name, grad in wanted.items():
            if grad is not None:
                found = grads[name]
                assert found is not None and difference(name, found, grad) < 1e-11
        for name, value in alone.state_dict().items():
            assert difference(name, weights[name], value) < 1e-11, name


def stepped_by_muon(rank: int, plan: Plan) -> tuple[str, str]:
    """What an optimizer of whole matrices says to a linear that is cut over tp, and to one that is whole."""
    said = []
    for name in ("layers.0.out.weight", "layers.0.moe.router.weight"):
        model = make()
        with parallel(model, plan) as made:
            made(**slice_for(BATCHES[0], plan, rank))["loss"].backward()
            try:
                torch.optim.Muon([model.get_parameter(name)], lr=0.1).step()
                said.append("")
            except mc.PlanError as error:
                said.append(str(error))
    return said[0], said[1]


def test_an_optimizer_of_whole_matrices_is_refused_on_a_cut_linear(ranks: Ranks) -> None:
    for cut, whole in ranks.run(2, stepped_by_muon, SAVED):
        assert "'layers.0.out.weight' is cut over the ranks of tp" in cut and cut.endswith("or tp=1.")
        assert whole == ""
