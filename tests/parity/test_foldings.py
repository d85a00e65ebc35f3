"""Every folding of small worlds: attention on tp x cp x dp, experts on etp x ep x edp over the same ranks, against one process.

Loss, outputs, every gradient, the norm and the weights after three steps; copies are bitwise equal. The programs themselves are
looked at, too: linears are cut where the plan says so, and nothing is gathered that the plan does not need.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import moecompile as mc
from moecompile import meta, ops
from moecompile.compilation import Request, compile_call
from moecompile.errors import CaptureError, PassError
from moecompile.placement.types import Shard
from moecompile.plan import Plan
from moecompile.program import InputKind, Program
from tests.support.capture_memo import captured_once
from tests.support.models import Config, build, choose, push_to, tokens
from tests.support.parity import LockStep, compare, plain
from tests.support.pool import Ranks
from tests.support.thinned import thinned

CONFIG = Config("stacked", hidden=16, heads=4, inner=8, shared=True, aux=0.1, rotary=True)


def foldings(world: int) -> list[Plan]:
    """All (tp, cp, dp) x (etp, ep, edp) of a world whose ep divides the four experts, with and without sequence parallelism."""
    found = []
    for tp, cp, ep, etp, sequence in product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8), (False, True)):
        if world % (tp * cp) == 0 and world % (ep * etp) == 0 and not (sequence and tp == 1):
            found.append(Plan(dp=world // (tp * cp), tp=tp, cp=cp, ep=ep, etp=etp, sequence_parallel=sequence))
    return found


def drawn(world: int, every: int) -> list[Plan]:
    """The foldings with whole experts, and some of those whose experts are cut along their width."""
    plans = foldings(world)
    return [plan for plan in plans if plan.etp == 1] + [plan for plan in plans if plan.etp > 1][::every]


def name_of(plan: Plan) -> str:
    return f"dp{plan.dp}-cp{plan.cp}-tp{plan.tp}{'s' if plan.sequence_parallel else ''}-ep{plan.ep}-etp{plan.etp}"


def check(
    config: Config, plan: Plan, *, optimizer: str = "adamw", length: int = 8, batch: int | None = None
) -> LockStep:
    batches = [tokens(batch or 2 * (plan.dp or 1), length, seed, ignored=0.3) for seed in range(3)]
    lock_step = LockStep(build(config), plan, batches[0], optimizer=optimizer)
    compare(lock_step.run(batches), plain(build(config), batches, optimizer=optimizer))
    return lock_step


@pytest.mark.parametrize("plan", foldings(2) + foldings(4), ids=name_of)
def test_small_worlds(plan: Plan) -> None:
    layers = 2 if plan.world_size == 2 else 1
    program = check(replace(CONFIG, layers=layers), plan).program
    assert program.gathers == []
    cut = {item.fqns[0] for item, placed in cut_over(program, "tp")}
    assert len(cut) == (5 * layers if plan.tp > 1 else 0)  # qkv and out, the shared expert's gate, up and down
    for axis in ("ep", "etp"):
        cut = {item.fqns[0] for item, placed in cut_over(program, axis)}
        assert len(cut) == (2 * layers if getattr(plan, axis) > 1 else 0)  # w_in and w_out


@pytest.mark.slow
@pytest.mark.parametrize("plan", drawn(8, 3), ids=name_of)
def test_worlds_of_eight(plan: Plan) -> None:
    check(CONFIG, plan)


@pytest.mark.parametrize("optimizer", thinned({"sgd": "sgd", "adamw-foreach": "adamw-foreach"}))
@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp=2, tp=2, ep=4),
        Plan(dp=1, cp=2, tp=2, ep=2, sequence_parallel=True),
        Plan(dp=2, tp=2, ep=2, etp=2),
    ],
    ids=name_of,
)
def test_optimizers(optimizer: str, plan: Plan) -> None:
    check(CONFIG, plan, optimizer=optimizer)


@pytest.mark.parametrize("style", thinned({"loop": "loop", "ops": "ops", "dense": "dense"}, keep=("loop", "dense")))
@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp=1, tp=2, ep=2),
        Plan(dp=1, cp=2, ep=2),
        Plan(dp=1, tp=2, ep=2, sequence_parallel=True),
        Plan(dp=2, etp=2),
        Plan(dp=2, tp=2, ep=2, etp=2),
    ],
    ids=name_of,
)
def test_styles(style: str, plan: Plan) -> None:
    check(Config(style, hidden=16, heads=4, bias=True, tied=True, aux=0.05), plan)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["alltoall", "allgather"])
def test_backends(backend: str) -> None:
    for sequence in (False, True):
        check(CONFIG, Plan(dp=2, tp=2, ep=4, sequence_parallel=sequence, dispatch=backend))  # type: ignore[arg-type]
    for ep, etp in ((1, 2), (2, 2), (1, 4)):
        check(CONFIG, Plan(dp=4, ep=ep, etp=etp, dispatch=backend))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp=1, tp=2, ep=2),
        Plan(dp=1, cp=2, ep=2),
        Plan(dp=2, cp=2, tp=2, ep=4, sequence_parallel=True),
        Plan(dp=2, etp=2),
        Plan(dp=4, ep=2, etp=2),
    ],
    ids=name_of,
)
def test_idle_experts_and_ranks_without_labels(plan: Plan) -> None:
    """All tokens to two experts, then to others; the labels of all but the first sequence ignored."""
    size, batches = 2 * (plan.dp or 1), []
    for seed, experts in enumerate(([0, 1], [3, 2], [1, 3])):
        batch = tokens(size, 8, seed)
        batch["labels"][1:] = -100
        batches.append(batch | {"push": push_to(choose(size, 8, 2, experts, seed), 4)})
    lock_step = LockStep(build(CONFIG), plan, batches[0])
    compare(lock_step.run(batches), plain(build(CONFIG), batches))


# ---- what the programs look like ---------------------------------------------------------------------------------------


def of(config: Config, plan: Plan, length: int = 8) -> Program:
    batch = tokens(2, length, 0)
    with captured_once():
        return compile_call(build(config), Request((), batch, plan))


@pytest.mark.parametrize("sequence", [False, True])
def test_a_chain_costs_what_megatron_pays(sequence: bool) -> None:
    """Per layer, two chains (attention, shared expert): one all-reduce each way, or one all-gather and one reduce-scatter each way.

    Collectives on statistics, which are smaller than the activations, are not counted.
    """
    one, two = (
        of(replace(CONFIG, layers=layers, aux=0.0), Plan(dp=1, tp=2, sequence_parallel=sequence)) for layers in (1, 2)
    )
    more = collectives(two) - collectives(one)
    if sequence:
        assert more == Counter(all_gather=4, reduce_scatter=4)
    else:  # the experts' results are gathered once, and their gradient scattered
        assert more == Counter(all_reduce=4, all_gather=1, reduce_scatter=1)


def test_all_ranks_share_one_text() -> None:
    """What differs between ranks is an input."""
    plan = Plan(dp=2, cp=2, tp=2, ep=4, sequence_parallel=True)
    program = of(CONFIG, plan)
    offsets = {item.axis for item in program.inputs if item.kind is InputKind.OFFSET}
    assert offsets == {"cp", "tp"}
    assert program.text() == of(CONFIG, plan).text()


def test_parameters_per_rank() -> None:
    """tp cuts the chains' weights exactly."""
    program = of(CONFIG, Plan(dp=1, tp=4))
    for item, placed in cut_over(program, "tp"):
        node = next(node for node, found in program.items() if found is item)
        whole = list(item.shape)
        whole[placed.dim] //= 4
        assert list(meta.tensor(node).shape) == whole


def test_fused_projections_are_cut_in_stripes() -> None:
    """query, key and value lie side by side in one weight: every rank has its heads of all three."""
    placed = {item.fqns[0]: found for item, found in cut_over(of(CONFIG, Plan(dp=1, tp=2)), "tp")}
    assert placed["layers.0.qkv.weight"] == Shard(0, outer=3)
    assert placed["layers.0.out.weight"] == Shard(1)


@pytest.mark.parametrize(
    ("plan", "length"), [(Plan(dp=1, tp=2, sequence_parallel=True), 7), (Plan(dp=1, cp=2), 7)], ids=["tp", "cp"]
)
def test_case_40_a_length_that_does_not_divide_is_refused(plan: Plan, length: int) -> None:
    with pytest.raises(PassError, match="pad or cut it to a multiple of 2, such as 6 or 8"):
        of(CONFIG, plan, length)


def test_heads_that_tp_does_not_divide_stay_whole_and_are_named() -> None:
    program = of(replace(CONFIG, heads=1), Plan(dp=1, tp=2))
    assert not any("qkv" in item.fqns[0] for item, _ in cut_over(program, "tp"))
    entry = next(item for item in program.history if item.pass_text == "shard-linears")
    assert any("layers.0.qkv" in reason and "whole on each" in reason for reason in entry.declined)


def cut_over(program: Program, axis: str) -> list[tuple[object, Shard]]:
    return [
        (item, placed)
        for item in program.inputs
        for name, placed in item.placements
        if name == axis and item.kind is InputKind.PARAM and isinstance(placed, Shard)
    ]


def collectives(program: Program) -> Counter[str]:
    names = {ops.all_reduce: "all_reduce", ops.all_gather: "all_gather", ops.reduce_scatter: "reduce_scatter"}
    return Counter(
        names[node.target]
        for node in program.graph.nodes
        if node.target in names and meta.tensor(node).numel() >= 2 * 8 * 16 // 2 and meta.module_path(node)
    )


# ---- cases of the field ------------------------------------------------------------------------------------------------


class OnlyBalance(nn.Module):
    """Main loss weight 0: what remains is the balance loss and a z-loss on the router's logits."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build(replace(CONFIG, aux=0.0))
        self.logits: list[Tensor] = []

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        model, x, loss = self.model, self.model.embed(ids), torch.zeros((), dtype=torch.float64)
        for layer in model.layers:
            z = torch.logsumexp(layer.moe.router(layer.norm_2(x).reshape(-1, CONFIG.hidden)), -1)
            x, balance = layer(x, None)
            loss = loss + 0.1 * balance + 0.01 * z.square().mean()
        return {"loss": loss + 0.0 * model.head(model.norm(x)).sum()}


@pytest.mark.parametrize(
    "plan",
    [Plan(dp=1, tp=2), Plan(dp=1, tp=2, sequence_parallel=True), Plan(dp=2, cp=2, tp=2, ep=2, sequence_parallel=True)],
    ids=name_of,
)
def test_case_05_router_losses_do_not_depend_on_tp(plan: Plan) -> None:
    batches = [tokens(2 * (plan.dp or 1), 8, seed) for seed in range(2)]
    lock_step = LockStep(OnlyBalance(), plan, batches[0])
    silent = ("model.norm.*", "model.head.*", "model.layers.1.moe.experts*", "model.layers.1.moe.shared*")
    compare(lock_step.run(batches), plain(OnlyBalance(), batches), zero=silent)


@pytest.mark.parametrize("plan", [Plan(dp=1, tp=2, sequence_parallel=True), Plan(dp=1, tp=2, ep=2, cp=2)], ids=name_of)
def test_case_31_router_copies_do_not_drift(plan: Plan) -> None:
    """Bitwise equal on all ranks after three steps, and right: routers, norms and the gate of the shared expert."""
    batches = [tokens(2, 8, seed, ignored=0.3) for seed in range(3)]
    lock_step = LockStep(build(CONFIG), plan, batches[0])
    before = build(CONFIG).state_dict()
    lock_step.run(batches)
    for fqn in (
        "layers.0.moe.router.weight",
        "layers.1.norm_2.weight",
        "layers.0.moe.shared_gate.weight",
        "norm.weight",
    ):
        name = next(item.name for item in lock_step.program.inputs if item.fqns[:1] == (fqn,))
        first, *others = (held[name] for held in lock_step.ranks)
        assert not torch.equal(first, before[fqn])
        assert all(torch.equal(first, other) for other in others)


def test_case_32_a_gated_shared_expert_is_whole_where_it_is_added() -> None:
    """tp with sequence parallelism and ep: the shared expert's chain is cut, the routed experts are away."""
    program = check(CONFIG, Plan(dp=1, tp=2, ep=2, sequence_parallel=True)).program
    names = {item.fqns[0] for item, _ in cut_over(program, "tp")}
    assert {"layers.0.moe.shared.gate.weight", "layers.0.moe.shared.down.weight"} <= names
    assert {node.target for node in program.graph.nodes} >= {ops.dispatch, ops.combine, ops.reduce_scatter}


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_drawn_foldings(data: st.DataObject) -> None:
    """Any model of the family on any legal plan of up to eight ranks, with uneven labels."""
    plan = data.draw(st.sampled_from(foldings(2) + foldings(4) + foldings(8)))
    config = Config(
        data.draw(st.sampled_from(["loop", "stacked", "dense", "ops"])),
        hidden=16,
        heads=data.draw(st.sampled_from([2, 4])),
        inner=8,
        layers=data.draw(st.integers(1, 2)),
        shared=data.draw(st.booleans()),
        tied=data.draw(st.booleans()),
        bias=data.draw(st.booleans()),
        rotary=data.draw(st.booleans()),
        aux=data.draw(st.sampled_from([0.0, 0.1])),
    )
    rows = data.draw(st.integers(1, 2)) * (plan.dp or 1)
    batches = [tokens(rows, 8, data.draw(st.integers(0, 99)), ignored=data.draw(st.floats(0, 0.9))) for _ in range(2)]
    for batch in batches:
        batch["labels"][0, 0] = 1  # one label at least
    reference = plain(build(config), batches)
    assume(all(grad.count_nonzero() for step in reference.steps for grad in step.grads.values()))  # no idle expert
    compare(LockStep(build(config), plan, batches[0]).run(batches), reference)


# ---- real processes ----------------------------------------------------------------------------------------------------


def passes_its_own(rank: int, plan: Plan, seeds: list[int]) -> str:
    model = mc.parallelize(build(CONFIG), plan)
    try:
        return f"{float(model(**tokens(2, 8, seeds[rank]))['loss']):.6f}"
    except CaptureError as error:
        return str(error)


def test_ranks_of_one_data_rank_that_pass_other_tensors_are_refused(ranks: Ranks) -> None:
    """Ids of the same shape: nothing but their contents tells."""
    plan = Plan(dp=1, tp=2)
    first, second = ranks.run(2, passes_its_own, plan, [3, 3])
    assert first == second and float(first) > 0
    for said in ranks.run(2, passes_its_own, plan, [3, 4]):
        assert "ranks 0 and 1 pass different tensors" in said
        assert "give every rank the slice number plan.data_rank(rank)" in said
