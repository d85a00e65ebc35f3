"""Cases from the field about state: 33 (checkpoints of cut experts) and 35 (initialisation on the meta device)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import moecompile as mc
from moecompile.plan import Plan
from tests.support.models import Config, TinyMoe, build, tokens
from tests.support.parity import OPTIMIZERS, Batch, difference, plain, slice_for
from tests.support.pool import Part, Ranks, gathered, held_grads, held_weights, parallel
from tests.support.thinned import thinned

pytestmark = pytest.mark.timeout(150)
BATCHES = [tokens(8, 5, seed, ignored=0.2) for seed in range(3)]


def advance(model: Any, stepper: torch.optim.Optimizer, batch: Batch, plan: Plan, rank: int) -> dict[str, Tensor]:
    out = model(**slice_for(batch, plan, rank))
    out["loss"].backward()
    grads = held_grads(model)
    stepper.step()
    stepper.zero_grad()
    return {"loss": out["loss"].detach(), **grads}


def save_after_two_steps(rank: int, config: Config, plan: Plan, folder: str) -> None:
    with parallel(build(config), plan) as model:
        stepper = OPTIMIZERS["adamw"](model.parameters())
        for batch in BATCHES[:2]:
            advance(model, stepper, batch, plan, rank)
        dcp.save({"model": model.state_dict(), "optim": mc.optimizer_state_dict(model, stepper)}, checkpoint_id=folder)


def load_and_go_on(rank: int, config: Config, plan: Plan, folder: str) -> Part:
    """Load into a model with other weights, then take the third step."""
    with parallel(
        build(Config(**{**vars(config), "seed": 99})), plan, example=slice_for(BATCHES[0], plan, rank)
    ) as model:
        stepper = OPTIMIZERS["adamw"](model.parameters())
        state = {"model": model.state_dict(), "optim": mc.optimizer_state_dict(model, stepper)}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        mc.load_optimizer_state_dict(model, stepper, state["optim"])
        advance(model, stepper, BATCHES[2], plan, rank)
        return Part(weights=held_weights(model))


@pytest.mark.parametrize(
    ("style", "plans"),
    thinned({"loop": ("loop", [Plan(dp=2), Plan(dp=4, ep=4)]), "stacked": ("stacked", [Plan(dp=2, ep=2), Plan(dp=2)])}),
)
def test_case_33_experts_survive_a_change_of_ep(ranks: Ranks, style: str, plans: list[Plan], tmp_path: Path) -> None:
    """Saved at ep=2 after two steps; at other degrees the third step ends at the weights of an uninterrupted run.

    AdamW's third step depends on both moments, so these came along, too.
    """
    config = Config(style, experts=4)  # type: ignore[arg-type]
    ranks.run(2, save_after_two_steps, config, Plan(dp=2, ep=2), str(tmp_path))
    reference = plain(build(config), BATCHES)
    reference.steps.clear()
    for plan in plans:
        parts = ranks.run(plan.world_size, load_and_go_on, config, plan, str(tmp_path))
        found = gathered(parts, reference, plan)
        for name, expected in reference.weights.items():
            assert difference(name, found.weights[name], expected) < 1e-11, (plan, name)


@pytest.mark.parametrize("style", ["loop", "stacked"])
def test_case_33_the_file_holds_every_expert_once(ranks: Ranks, style: str, tmp_path: Path) -> None:
    """E different experts, each equal to the original's, readable by plain code."""
    config = Config(style, experts=4)  # type: ignore[arg-type]
    ranks.run(2, save_after_two_steps, config, Plan(dp=2, ep=2), str(tmp_path))
    weights = plain(build(config), BATCHES[:2]).weights
    read = {name: torch.full_like(weight, float("nan")) for name, weight in weights.items()}
    dcp.load({"model": read}, checkpoint_id=str(tmp_path), no_dist=True)
    experts = [weight for name, weight in read.items() if ".experts." in name]
    singles = experts if style == "loop" else [part for weight in experts for part in weight.unbind(0)]
    assert len(singles) == config.layers * config.experts * (3 if style == "loop" else 2)
    for at, one in enumerate(singles):
        assert not any(torch.equal(one, other) for other in singles[at + 1 :])
    for name, weight in weights.items():
        assert difference(name, read[name], weight) < 1e-11


def load_without_one(rank: int, config: Config, plan: Plan, folder: str, missing: str) -> str:
    with parallel(build(config), plan, example=slice_for(BATCHES[0], plan, rank)) as model:
        state = model.state_dict()
        del state[missing]
        try:
            model.load_state_dict(state)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_case_33_a_missing_expert_is_an_error(ranks: Ranks, tmp_path: Path) -> None:
    missing = "layers.1.moe.experts.experts.2.up.weight"
    said = ranks.run(2, load_without_one, Config("loop"), Plan(dp=2, ep=2), str(tmp_path), missing)
    assert all(missing in one for one in said), said


def load_copies(rank: int, config: Config, plan: Plan, upcycled: bool) -> list[str]:
    """Expert 3 of layer 1 has the numbers of expert 1, as when two ranks number their experts from 0; or all have those of 0."""
    said = []
    plain, batch = build(config), slice_for(BATCHES[0], plan, rank)
    with parallel(build(config), plan, example=batch) as model:
        for name, value in plain.state_dict().items() if config.style == "stacked" else ():
            if name.startswith("layers.1.moe.experts."):
                value[3] = value[1]
                value[:] = value[:1] if upcycled else value
        experts = plain.layers[1].moe.experts.experts if config.style == "loop" else ()
        for at, expert in enumerate(experts):
            source = 0 if upcycled else 1 if at == 3 else at
            expert.load_state_dict(experts[source].state_dict())
        for strict in (True, False):
            try:
                model.load_state_dict(plain.state_dict(), strict=strict)
                full = mc.full_state_dict(model)
                said.append(str(all(torch.equal(full[name], value) for name, value in plain.state_dict().items())))
            except RuntimeError as error:
                said.append(str(error))
    return said


@pytest.mark.parametrize("style", ["loop", "stacked"])
def test_case_33_an_expert_that_stands_twice_is_an_error(ranks: Ranks, style: str) -> None:
    names = {
        "loop": ("layers.1.moe.experts.experts.3.gate.weight", "layers.1.moe.experts.experts.1.gate.weight"),
        "stacked": ("layers.1.moe.experts.w_in[3]", "layers.1.moe.experts.w_in[1]"),
    }[style]
    for said in ranks.run(2, load_copies, Config(style), Plan(dp=2, ep=2), False):  # type: ignore[arg-type]
        assert f"'{names[0]}' has the numbers of '{names[1]}'" in said[0] and "strict=False" in said[0]
        assert said[1] == "True"


@pytest.mark.parametrize("style", ["loop", "stacked"])
def test_a_dense_model_made_sparse_has_all_experts_alike(ranks: Ranks, style: str) -> None:
    for said in ranks.run(2, load_copies, Config(style), Plan(dp=2, ep=2), True):  # type: ignore[arg-type]
        assert said == ["True", "True"]


def init_on_meta(rank: int, config: Config, plan: Plan) -> Part:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = TinyMoe(config).to(config.dtype)
    with parallel(model, plan, init_fn=init_weights, example=slice_for(BATCHES[0], plan, rank)) as made:
        return Part(weights=held_weights(made))


def init_weights(module: torch.nn.Module) -> None:
    """A user's initialisation: every parameter of its own, from torch's generator, in module order."""
    for param in module.parameters(recurse=False):
        torch.nn.init.normal_(param, std=0.3)


@pytest.mark.parametrize("style", ["loop", "stacked"])
def test_case_35_initialisation_does_not_depend_on_the_layout(ranks: Ranks, style: str) -> None:
    """From the meta device, seed 0, ep=2: all experts differ pairwise and equal those of the same walk on one process."""
    config = Config(style)  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = build(config)
    torch.manual_seed(0)
    for module in model.modules():
        init_weights(module)
    reference = plain(model, [])
    parts = ranks.run(2, init_on_meta, config, Plan(dp=2, ep=2))
    found = gathered(parts, reference, Plan(dp=2, ep=2))
    for name, expected in reference.weights.items():
        assert torch.equal(found.weights[name], expected), name
    experts = [weight for name, weight in found.weights.items() if ".experts." in name]
    singles = experts if style == "loop" else [part for weight in experts for part in weight.unbind(0)]
    for at, one in enumerate(singles):
        assert not any(torch.equal(one, other) for other in singles[at + 1 :])


def test_case_35_a_trained_step_follows(ranks: Ranks) -> None:
    """The initialised model trains: the weights are real, whole and the same on all copies."""
    config = Config("stacked")
    parts = ranks.run(2, init_and_train, config, Plan(dp=2, ep=2))
    model = build(config)
    torch.manual_seed(0)
    for module in model.modules():
        init_weights(module)
    reference = plain(model, BATCHES[:1])
    reference.steps.clear()
    found = gathered(parts, reference, Plan(dp=2, ep=2))
    for name, expected in reference.weights.items():
        assert difference(name, found.weights[name], expected) < 1e-11, name


def init_and_train(rank: int, config: Config, plan: Plan) -> Part:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = TinyMoe(config).to(config.dtype)
    with parallel(model, plan, init_fn=init_weights) as made:
        stepper = OPTIMIZERS["adamw"](made.parameters())
        advance(made, stepper, BATCHES[0], plan, rank)
        return Part(weights=held_weights(made))
