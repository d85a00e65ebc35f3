"""Experts cut along their width (etp): every way of writing them, what is refused, and their state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import moecompile as mc
from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.compilation import Request, compile_call
from moecompile.errors import PassError, PlanError
from moecompile.owned import OwnedTensor, PartTensor, StripedTensor
from moecompile.placement.types import Shard
from moecompile.plan import Plan
from moecompile.program import InputKind, Program
from tests.parity import test_expert_dropout as dropout
from tests.parity import test_hf_axes as hf
from tests.parity import test_lora as lora
from tests.parity import test_moe_styles as written
from tests.support import hf_models
from tests.support import moe_styles as styles
from tests.support.models import Config, build, tokens
from tests.support.parity import OPTIMIZERS, LockStep, compare, difference, plain, slice_for
from tests.support.pool import Ranks, parallel
from tests.support.thinned import thinned

pytestmark = pytest.mark.timeout(240)
ALONE, BOTH = Plan(dp=2, etp=2), Plan(dp=2, tp=2, ep=2, etp=2)
GATHERED = Plan(dp=4, ep=2, etp=2, dispatch="allgather")
PLANS = {"etp": ALONE, "tp-ep-etp": BOTH}

# experts of one linear each, with a norm over the features that would be cut, or with something else between their linears
NO_CHAIN = {"LinearExperts", "NormalisedExperts", "PerChoice", "Hydra"}


def cuts(program: Program) -> dict[str, dict[str, Shard]]:
    """How the weights of experts are cut, by axis."""
    found: dict[str, dict[str, Shard]] = {}
    for item in program.inputs:
        for axis, placed in item.placements:
            if item.kind is InputKind.PARAM and axis in ("ep", "etp") and isinstance(placed, Shard):
                found.setdefault(item.fqns[0], {})[axis] = placed
    return found


@pytest.mark.parametrize(
    "kind", thinned({kind.__name__: kind for kind in written.STYLES if kind.__name__ not in NO_CHAIN})
)
def test_style(kind: type[styles.Layer]) -> None:
    batches = [written.batch(0)]
    reference = plain(written.model_of(kind), batches)
    idle = [name for name, grad in reference.steps[0].grads.items() if not grad.any()]
    run = LockStep(written.model_of(kind), ALONE, batches[0])
    assert graphs.find(run.program.graph, ops.all_gather_rows) and cuts(run.program)
    compare(run.run(batches), reference, zero=idle)


@pytest.mark.parametrize(
    "kind", [kind for kind in written.STYLES if kind.__name__ in NO_CHAIN], ids=lambda kind: kind.__name__
)
def test_experts_without_a_chain_are_refused_by_name(kind: type[styles.Layer]) -> None:
    with pytest.raises(PassError, match=r"in layer.*\.py:\d+\) belongs to experts in which no linear .* or use etp=1"):
        LockStep(written.model_of(kind), ALONE, written.batch(0))


def test_a_width_that_does_not_divide_is_refused_with_the_nearest_that_do() -> None:
    model, batch = build(Config("stacked", hidden=16, heads=4, inner=6)), tokens(1, 8, 0)
    with pytest.raises(PlanError, match=r"etp must divide the width 6 of the experts.*nearest legal values? of etp: 2"):
        compile_call(model, Request((), batch, Plan(dp=4, etp=4)))


FAMILIES = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"]


@pytest.mark.parametrize(
    ("family", "plan"),
    thinned(
        {
            f"{name}-{key}": (name, plan)
            for key, plan in PLANS.items()
            for name in FAMILIES[:: 1 if key == "etp" else -1]
        }
    ),
)
def test_families(family: str, plan: Plan) -> None:
    """Gate and up side by side are each cut; interleaved they are cut in one piece, with the biases."""
    found = hf.check(hf.build(family), plan, hf_models.batch())
    placed = {item["etp"] for item in cuts(found.program).values() if "etp" in item}
    assert placed == ({Shard(1), Shard(2)} if family == "gpt_oss" else {Shard(1, 2), Shard(2)})


@pytest.mark.parametrize("plan", [ALONE, BOTH, Plan(dp=4, etp=4)], ids=["etp", "tp-ep-etp", "etp4"])
def test_dropout_draws_the_same_features(plan: Plan) -> None:
    run = LockStep(dropout.model_of(True), plan, dropout.batch())
    assert len(graphs.find(run.program.graph, ops.uniform_rows)) == 2
    compare(run.run([dropout.batch()]), dropout.on_one_rank(True))


def test_dropout_with_allgather_is_refused() -> None:
    with pytest.raises(PassError, match="backend=allgather does not move; use backend=alltoall"):
        LockStep(dropout.model_of(False), GATHERED, dropout.batch())


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("targets", thinned({"attention": lora.ATTENTION, "experts": lora.EXPERTS}, keep=("experts",)))
def test_adapters(targets: dict[str, Any], plan: Plan) -> None:
    """Adapters of experts are cut as the weights that they are added to; frozen weights are cut, too."""
    found = hf.check(lora._adapted(targets), plan, hf_models.batch(size=4))
    placed = {name: item["etp"] for name, item in cuts(found.program).items() if "etp" in item}
    assert len(placed) == (8 if targets is lora.EXPERTS else 4)  # of each layer gate and up, and down


@pytest.mark.parametrize(
    "plan", thinned({"etp": ALONE, "tp-ep-etp": BOTH, "allgather": GATHERED}, keep=("tp-ep-etp", "allgather"))
)
def test_weights_applied_before_the_last_linear(plan: Plan) -> None:
    """The routing weights travel with the rows; their gradient is a sum over the parts of the width."""
    config, batches = Config("stacked", hidden=16, heads=4, inner=8), [tokens(4, 8, seed) for seed in range(2)]
    text = compile_call(build(config), Request((), slice_for(batches[0], plan, 0), plan)).history
    pipeline = ",".join(item.pass_text for item in text).replace("insert-dispatch{", "insert-dispatch{probs=fc2,")
    pipeline = pipeline.replace("insert-dispatch,", "insert-dispatch{probs=fc2},")
    run = LockStep(build(config), plan, batches[0], pipeline=pipeline)
    gathers = graphs.find(run.program.graph, ops.all_gather_rows)
    forward = [node for node in gathers if meta.direction(node) is meta.Direction.FORWARD]
    assert len(forward) == (0 if plan is GATHERED else 2 * config.layers)
    compare(run.run(batches), plain(build(config), batches))


def test_one_read_on_the_host_and_two_sizes_a_layer() -> None:
    config = Config("stacked", layers=3, hidden=16, heads=4, inner=8)
    program = compile_call(build(config), Request((), tokens(2, 8, 0), Plan(dp=4, ep=2, etp=2)))
    assert len(graphs.find(program.graph, ops.gathered_sizes_to_host)) == 3
    assert not graphs.find(program.graph, ops.sizes_to_host)
    assert len(graphs.find(program.graph, torch.ops.aten._local_scalar_dense.default)) == 2 * 3


# ---- state ---------------------------------------------------------------------------------------------------------------

CONFIGS = {
    "stripes": Config("stacked", layers=1, hidden=16, heads=4, inner=8, shared=True),
    "modules": Config("loop", layers=1, hidden=16, heads=4, inner=8, shared=True),
    "biases": Config("ops", layers=1, hidden=16, heads=4, inner=8, bias=True, tied=True),
}
BATCHES = [tokens(4, 8, seed, ignored=0.2) for seed in range(4)]


def stepped(model: Any, stepper: Any, plan: Plan, rank: int, at: tuple[int, ...]) -> list[float]:
    losses = []
    for index in at:
        loss = model(**slice_for(BATCHES[index], plan, rank))["loss"]
        loss.backward()
        clip = mc.clip_grad_norm_ if hasattr(model, "plain") else nn.utils.clip_grad_norm_
        clip(model if hasattr(model, "plain") else model.parameters(), 0.5)
        stepper.step()
        stepper.zero_grad()
        losses.append(loss.item())
    return losses


def save(rank: int, config: Config, plan: Plan, folder: str) -> dict[str, tuple[str, int]]:
    """Two steps, then a checkpoint; says how the state's tensors were spread and what was held."""
    with parallel(build(config), plan) as model:
        stepper = OPTIMIZERS["adamw"](model.parameters())
        stepped(model, stepper, plan, rank, (0, 1))
        state = model.state_dict()
        dcp.save({"model": state, "optim": mc.optimizer_state_dict(model, stepper)}, checkpoint_id=folder)
        sizes = {name: param.numel() for name, param in model.named_parameters()}
        return {
            name: (type(value).__name__, sizes[name]) for name, value in state.items() if isinstance(value, PartTensor)
        }


def resume(rank: int, config: Config, plan: Plan, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    with parallel(build(config), plan) as model:
        stepper = OPTIMIZERS["adamw"](model.parameters())
        model(**slice_for(BATCHES[3], plan, rank))  # cut before the state comes
        state = {"model": model.state_dict(), "optim": mc.optimizer_state_dict(model, stepper)}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        mc.load_optimizer_state_dict(model, stepper, state["optim"])
        return stepped(model, stepper, plan, rank, (2, 3)), mc.full_state_dict(model)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_case_33_saved_under_tp2_etp2_resumed_under_ep4_and_on_one_rank(
    ranks: Ranks, tmp_path: Path, config: Config
) -> None:
    alone = build(config)
    stepper = OPTIMIZERS["adamw"](alone.parameters())
    stepped(alone, stepper, Plan(dp=1), 0, (0, 1))
    (spread, *_) = ranks.run(4, save, config, BOTH, str(tmp_path))
    kind = OwnedTensor if config.style == "loop" else StripedTensor
    experts = {name: found for name, found in spread.items() if "experts" in name}
    assert experts and {name for name, _ in experts.values()} == {kind.__name__}
    whole = dict(alone.named_parameters())
    held = sum(size for name, (_, size) in experts.items() if whole[name].dim() > (2 if kind is StripedTensor else 1))
    wanted = sum(whole[name].numel() for name in experts if whole[name].dim() > (2 if kind is StripedTensor else 1))
    assert held * 4 == wanted  # ep=2 times etp=2

    before = {name: value.clone() for name, value in alone.state_dict().items()}
    read = {name: torch.full_like(value, float("nan")) for name, value in before.items()}
    dcp.load({"model": read}, checkpoint_id=str(tmp_path), no_dist=True)
    for name, value in before.items():
        assert difference(name, read[name], value) < 1e-11

    losses = stepped(alone, stepper, Plan(dp=1), 0, (2, 3))
    for plan in (Plan(dp=4, ep=4), Plan(dp=1), Plan(dp=2, etp=2), BOTH):
        for found, weights in ranks.run(plan.world_size, resume, config, plan, str(tmp_path)):
            assert found == pytest.approx(losses, rel=1e-11, abs=0), plan
            for name, value in alone.state_dict().items():
                assert difference(name, weights[name], value) < 1e-10, (plan, name)


def on_meta(rank: int, config: Config, plan: Plan) -> tuple[dict[str, Tensor], float]:
    with torch.device("meta"):
        model = build(config)
    torch.manual_seed(3)
    with parallel(model, plan, init_fn=_normal) as made:
        loss = made(**slice_for(BATCHES[0], plan, rank))["loss"]
        return mc.full_state_dict(made), loss.item()


def _normal(module: nn.Module) -> None:
    for param in module.parameters(recurse=False):
        nn.init.normal_(param, std=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stripes", "modules"])
def test_first_weights_do_not_depend_on_the_plan(ranks: Ranks, name: str) -> None:
    ((wanted, loss),) = ranks.run(1, on_meta, CONFIGS[name], Plan(dp=1))
    for found, other in ranks.run(4, on_meta, CONFIGS[name], BOTH):
        assert other == pytest.approx(loss, rel=1e-11)
        for key, value in wanted.items():
            assert torch.equal(found[key], value), key


def muon(rank: int, config: Config) -> str:
    with parallel(build(config), ALONE, example=slice_for(BATCHES[0], ALONE, rank)) as model:
        weights = [param for name, param in model.named_parameters() if "experts" in name and param.dim() == 2]
        stepper = torch.optim.Muon(weights, lr=0.1)
        model(**slice_for(BATCHES[0], ALONE, rank))["loss"].backward()
        try:
            stepper.step()
        except PlanError as error:
            return str(error)
    return ""


def test_optimizers_of_whole_matrices_are_refused(ranks: Ranks) -> None:
    for said in ranks.run(2, muon, CONFIGS["modules"]):
        assert "is cut over the ranks of etp" in said and said.endswith("or etp=1.")
