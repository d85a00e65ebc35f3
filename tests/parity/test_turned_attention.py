"""Context parallelism that turns the cut from the sequence to the heads for attention (Ulysses), against one process."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.compilation import Request, compile_call
from moecompile.errors import PassError
from moecompile.plan import Plan
from moecompile.program import Program
from tests.parity.test_hf_axes import build as build_hf
from tests.parity.test_hf_axes import check as check_hf
from tests.parity.test_hf_axes import packed, padded
from tests.support.models import Config, build, tokens
from tests.support.parity import LockStep, compare, difference, plain, slice_for
from tests.support.pool import Ranks, parallel
from tests.support.thinned import thinned

pytestmark = pytest.mark.timeout(240)
TURNED = "+shard-sequence{attention=alltoall}"
CONFIG = Config("stacked", hidden=16, heads=4, inner=8, shared=True, aux=0.1, rotary=True)
SDPA = torch.ops.aten.scaled_dot_product_attention.default


def plan_of(**degrees: Any) -> Plan:
    return Plan(passes=TURNED, **degrees)


PLANS = [plan_of(dp=1, cp=2), plan_of(dp=1, cp=4, ep=4), plan_of(dp=2, cp=2, ep=4), plan_of(dp=2, cp=2, ep=2, etp=2)]


def turns(program: Program) -> list[tuple[Any, Any]]:
    """Dims split and joined by each exchange."""
    return [node.args[2:4] for node in graphs.find(program.graph, ops.all_to_all)]


@pytest.mark.usefixtures("proving")
@pytest.mark.parametrize("plan", thinned({str(plan): plan for plan in PLANS}, keep=(str(PLANS[1]), str(PLANS[3]))))
def test_three_steps(plan: Plan) -> None:
    """Queries, keys, values and results travel once each way; nothing is gathered over cp, and causality needs no offset."""
    batches = [tokens(2 * (plan.dp or 1), 8, seed, ignored=0.3) for seed in range(3)]
    lock_step = LockStep(build(CONFIG), plan, batches[0])
    compare(lock_step.run(batches), plain(build(CONFIG), batches))
    program = lock_step.program
    assert Counter(turns(program)) == {(1, 2): 4 * CONFIG.layers, (2, 1): 4 * CONFIG.layers}
    assert not [node for node in graphs.find(program.graph, ops.all_gather) if node.args[2] == "cp"]
    assert program.gathers == []


def of(config: Config, plan: Plan) -> Program:
    return compile_call(build(config), Request((), slice_for(tokens(2, 8, 0), plan, 0), plan))


def test_each_rank_sees_the_whole_sequence_for_its_heads() -> None:
    model = build(CONFIG)
    given = slice_for(tokens(2, 8, 0), PLANS[0], 0)
    with torch.no_grad():
        program = compile_call(model, Request((), given, PLANS[0]))
    found = graphs.find(program.graph, SDPA)
    assert len(found) == CONFIG.layers
    for node in found:
        shapes = {tuple(meta.tensor(item).shape) for item in node.args[:3]}  # type: ignore[arg-type]
        assert shapes == {(2, CONFIG.heads // 2, 8, CONFIG.hidden // CONFIG.heads)}
        assert graphs.arguments(node)["is_causal"] is True


def test_heads_that_do_not_divide_are_gathered_and_named() -> None:
    plan = plan_of(dp=1, cp=4, ep=4)
    config = replace(CONFIG, heads=2)
    batches = [tokens(2, 8, seed) for seed in range(3)]
    lock_step = LockStep(build(config), plan, batches[0])
    compare(lock_step.run(batches), plain(build(config), batches))
    assert not turns(lock_step.program)
    (done,) = [item for item in lock_step.program.history if item.pass_text.startswith("shard-sequence")]
    assert len(done.declined) == CONFIG.layers and "2 heads are not divided by cp=4" in done.declined[0]


def test_beside_tensor_parallelism_it_is_refused() -> None:
    with pytest.raises(PassError, match="use attention=allgather with tp, or tp=1"):
        of(CONFIG, plan_of(dp=1, cp=2, tp=2))


@pytest.mark.parametrize("batch", thinned({"left": padded("left"), "right": padded("right"), "packed": packed()}))
def test_masks_of_hugging_face_models(batch: dict[str, Tensor]) -> None:
    """Grouped queries; a mask over [queries, keys] is read whole."""
    model = build_hf("mixtral", attn_implementation="sdpa", num_key_value_heads=2)
    found = check_hf(model, plan_of(dp=1, cp=2, ep=2), batch)
    assert found.loss.isfinite()


def trained(rank: int, plan: Plan, batches: list[dict[str, Tensor]]) -> dict[str, Any]:
    with parallel(build(CONFIG), plan) as model:
        for batch in batches:
            model(**slice_for(batch, plan, rank))["loss"].backward()
        return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def test_on_gloo_ranks(ranks: Ranks) -> None:
    batches = [tokens(2, 8, seed) for seed in range(2)]
    model = build(CONFIG)
    for batch in batches:
        model(**batch)["loss"].backward()
    whole = {name: param.grad for name, param in model.named_parameters() if ".experts." not in name}
    plan = plan_of(dp=1, cp=2)
    for found in ranks.run(plan.world_size, trained, plan, batches, timeout=200.0):
        for name, grad in whole.items():
            assert grad is not None and difference(name, found[name], grad) <= 1e-10
