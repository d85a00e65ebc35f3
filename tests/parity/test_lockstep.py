"""Every kind of model under every dp x ep plan of small worlds, all ranks in one process, against the plain model.

Loss, outputs, every gradient, its norm and the weights after three steps, in fp64. Batches hold what breaks programs in the
field: experts without tokens, a rank whose tokens all go to one expert, labels ignored unevenly, a rank without any label.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moecompile import ops
from moecompile.plan import Plan
from tests.support.models import Config, build, choose, push_to, tokens
from tests.support.parity import Batch, LockStep, compare, plain
from tests.support.thinned import thinned

MODELS = {
    "loop": Config("loop"),
    "stacked": Config("stacked"),
    "dense": Config("dense"),
    "ops": Config("ops"),
    "loop-shared-balance": Config("loop", shared=True, aux=0.1),
    "loop-bias-tied-rotary": Config("loop", bias=True, tied=True, rotary=True, aux=0.05),
    "stacked-shared-tied-balance": Config("stacked", shared=True, tied=True, aux=0.1),
    "one-expert-a-token": Config("stacked", top_k=1, normalize=False, experts=8),
}


def name_of(plan: Plan) -> str:
    return f"dp{plan.dp}-ep{plan.ep}" + ("" if plan.dispatch == "alltoall" else f"-{plan.dispatch}")


# every model where experts have copies and where they have none; the other foldings with the richest models
PLANS = [(model, plan) for plan in (Plan(dp=2, ep=2), Plan(dp=4, ep=2)) for model in MODELS]
PLANS += [
    (model, plan)
    for plan in (Plan(dp=1), Plan(dp=2), Plan(dp=4, ep=4))
    for model in ("loop-shared-balance", "stacked-shared-tied-balance")
]


def check(
    config: Config, plan: Plan, batches: list[Batch], *, optimizer: str = "adamw", zero: tuple[str, ...] = ()
) -> None:
    """Parity, and that it is not parity of a program that shards nothing."""
    lock_step = LockStep(build(config), plan, batches[0], optimizer=optimizer)
    assert len(lock_step.program.layers) == config.layers
    found = {node.target for node in lock_step.program.graph.nodes}
    if plan.ep > 1:
        assert (ops.dispatch in found) == (ops.combine in found) == (plan.dispatch == "alltoall")
        assert (ops.reduce_scatter in found) == (plan.dispatch == "allgather")
    compare(lock_step.run(batches), plain(build(config), batches, optimizer=optimizer), zero=zero)


@pytest.mark.parametrize(
    ("model", "plan"), thinned({f"{model}-{name_of(plan)}": (model, plan) for model, plan in PLANS})
)
def test_models_and_plans(model: str, plan: Plan) -> None:
    check(MODELS[model], plan, [tokens(8, 5, seed, ignored=0.2) for seed in range(3)])


@pytest.mark.parametrize(
    "plan", [Plan(dp=2, ep=2, dispatch="allgather"), Plan(dp=4, ep=2, dispatch="allgather")], ids=name_of
)
@pytest.mark.parametrize("style", ["loop", "stacked"])
def test_the_allgather_backend(style: str, plan: Plan) -> None:
    config = Config(style, shared=True, aux=0.1)  # type: ignore[arg-type]
    check(config, plan, [tokens(8, 5, seed, ignored=0.2) for seed in range(3)])


@pytest.mark.parametrize("option", ["probs=fc2", "backend=allgather"])
def test_options_of_insert_dispatch(option: str) -> None:
    config, batches = Config("stacked", aux=0.1), [tokens(8, 5, seed) for seed in range(2)]
    plan = Plan(dp=4, ep=2)
    default = LockStep(build(config), plan, batches[0]).program.pipeline
    changed = default.replace("insert-dispatch", f"insert-dispatch{{{option}}}")
    lock_step = LockStep(build(config), plan, batches[0], pipeline=changed)
    assert option in lock_step.program.pipeline
    compare(lock_step.run(batches), plain(build(config), batches))


@pytest.mark.parametrize("seed", thinned({"3": 3, "4": 4, "5": 5}, keep=("4",)))
def test_seeds(seed: int) -> None:
    """Other weights, other tokens, four layers."""
    config = Config("stacked", seed=seed, layers=3, experts=8, top_k=3, shared=True, aux=0.1)
    check(config, Plan(dp=4, ep=4), [tokens(8, 4, 100 * seed + at, ignored=0.3) for at in range(3)])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw-foreach", "adamw-fused"])
def test_optimizers(optimizer: str) -> None:
    batches = [tokens(8, 5, seed) for seed in range(3)]
    check(Config("loop", aux=0.1), Plan(dp=4, ep=2), batches, optimizer=optimizer)


# ---- uneven routing ----------------------------------------------------------------------------------------------------


def routed(choices: Tensor, experts: int, steps: int = 3) -> list[Batch]:
    batch, length = choices.shape[:2]
    push = push_to(choices, experts)
    return [tokens(batch, length, seed, ignored=0.2) | {"push": push} for seed in range(steps)]


@pytest.mark.parametrize(
    "plan",
    thinned({"dp2-ep2": Plan(dp=2, ep=2), "dp4-ep4": Plan(dp=4, ep=4), "dp4-ep2": Plan(dp=4, ep=2)}, keep=("dp4-ep2",)),
)
@pytest.mark.parametrize("style", ["loop", "stacked"])
def test_idle_experts(style: str, plan: Plan) -> None:
    """Experts 1 and 2 never get a token, whichever rank holds them: exact zeros, and AdamW still decays their weights."""
    choices = choose(8, 4, 2, [0, 3])
    zero = ("*.experts.1.*", "*.experts.2.*") if style == "loop" else ()
    config = Config(style, aux=0.1)  # type: ignore[arg-type]
    batches = routed(choices, 4)
    check(config, plan, batches, zero=zero)
    lock_step = LockStep(build(config), plan, batches[0])
    if style == "stacked":
        grads = lock_step.step(batches[0]).grads
        stacked = [grad for name, grad in grads.items() if ".experts." in name]
        assert len(stacked) == 4
        assert all(not grad[1:3].count_nonzero() and grad[0].count_nonzero() for grad in stacked)


@pytest.mark.parametrize(
    "plan",
    thinned({"dp2-ep2": Plan(dp=2, ep=2), "dp4-ep4": Plan(dp=4, ep=4), "dp4-ep2": Plan(dp=4, ep=2)}, keep=("dp4-ep2",)),
)
@pytest.mark.parametrize("dispatch", ["alltoall", "allgather"])
def test_a_rank_whose_tokens_all_go_to_one_expert(plan: Plan, dispatch: str) -> None:
    """Rank 0 sends everything to expert 3, so experts of other ranks get nothing from it, and its own get nothing at all."""
    choices = choose(8, 4, 1, [1, 2, 3])
    choices[: 8 // plan.num_data_ranks] = 3
    config = Config("stacked", top_k=1, normalize=False, aux=0.1)
    check(config, Plan(dp=plan.dp, ep=plan.ep, dispatch=dispatch), routed(choices, 4))


@pytest.mark.parametrize("plan", [Plan(dp=2, ep=2), Plan(dp=4, ep=4)], ids=name_of)
def test_everything_goes_to_one_rank(plan: Plan) -> None:
    """All tokens of all ranks choose experts of the last rank: the others compute on zero rows."""
    config = Config("loop", experts=8, aux=0.1)
    last = list(range(8 - 8 // plan.ep, 8))
    idle = tuple(f"*.experts.{index}.*" for index in range(8) if index not in last)
    check(config, plan, routed(choose(8, 4, 2, last), 8), zero=idle)


# ---- uneven labels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan", thinned({"dp2": Plan(dp=2), "dp2-ep2": Plan(dp=2, ep=2), "dp4-ep2": Plan(dp=4, ep=2)}, keep=("dp4-ep2",))
)
@pytest.mark.parametrize("left", [0, 1], ids=["none-left", "one-left"])
def test_uneven_labels(plan: Plan, left: int) -> None:
    """The mean is over all valid labels of the batch: rank 0 has none or one of them, the others have different numbers."""
    batches = []
    for seed in range(3):
        batch = tokens(8, 5, seed)
        share = 8 // plan.num_data_ranks
        batch["labels"][:share] = -100
        if left:
            batch["labels"][0, 2] = 7
        batch["labels"][share, : 1 + seed] = -100
        batches.append(batch)
    check(Config("loop", shared=True, aux=0.1), plan, batches)


def test_counts_differ_between_steps_under_one_program() -> None:
    """One program serves a step in which a rank gets no rows and one in which it gets them all."""
    config = Config("stacked", aux=0.1)
    spread, low, high = (choose(8, 4, 2, among, seed=5) for among in ([0, 1, 2, 3], [0, 1], [2, 3]))
    batches = [tokens(8, 4, at) | {"push": push_to(part, 4)} for at, part in enumerate((spread, low, high))]
    check(config, Plan(dp=2, ep=2), batches)
    assert torch.equal(low.unique(), torch.tensor([0, 1]))
