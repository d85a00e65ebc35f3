"""Context parallelism whose keys and values go round a ring, against one process: loss, every gradient, weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.meta import Direction
from moecompile.plan import Plan
from moecompile.program import Program
from moecompile.verify import check_spread
from tests.parity.test_chains import check as check_layers
from tests.parity.test_hf_axes import build as build_hf
from tests.parity.test_hf_axes import check as check_hf
from tests.parity.test_hf_axes import packed, padded
from tests.parity.test_turned_attention import CONFIG, SDPA
from tests.support.chain_models import LENGTH, WIDTH, Attention, Layered, heads, join, linear
from tests.support.models import build, tokens
from tests.support.parity import LockStep, compare, difference, plain, slice_for
from tests.support.pool import Ranks, parallel
from tests.support.thinned import thinned

pytestmark = pytest.mark.timeout(240)
RING = "+shard-sequence{attention=ring}"


def plan_of(**fields: Any) -> Plan:
    return Plan(passes=RING, **fields)


PLANS = [
    plan_of(dp=1, cp=2),
    plan_of(dp=1, cp=4, ep=4),
    plan_of(dp=2, cp=2, ep=4),
    plan_of(dp=2, cp=2, ep=2, etp=2),
    plan_of(dp=1, cp=2, tp=2, ep=2),
    plan_of(dp=1, cp=2, tp=2, ep=4, sequence_parallel=True),
]


def hops(program: Program) -> Counter[tuple[Direction, int]]:
    """Rotations by direction of the step and of the ring."""
    found = graphs.find(program.graph, ops.rotate)
    assert all(node.args[3] == "cp" for node in found)
    return Counter((meta.direction(node), int(node.args[2])) for node in found)  # type: ignore[call-overload]


@pytest.mark.usefixtures("proving")
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_three_steps(plan: Plan) -> None:
    """Keys and values go round once, their gradients once the other way; nothing is gathered over cp, and all is proved."""
    batches = [tokens(2 * (plan.dp or 1), 8, seed, ignored=0.3) for seed in range(3)]
    lock_step = LockStep(build(CONFIG), plan, batches[0])
    compare(lock_step.run(batches), plain(build(CONFIG), batches))
    program, turns = lock_step.program, CONFIG.layers * (plan.cp - 1)
    assert hops(program) == {(Direction.FORWARD, 1): turns, (Direction.BACKWARD, -1): turns}
    assert len(graphs.find(program.graph, ops.attention_part)) == CONFIG.layers * plan.cp
    assert not graphs.find(program.graph, SDPA) and program.gathers == []
    assert not [node for node in graphs.find(program.graph, ops.all_gather) if node.args[2] == "cp"]
    covered = check_spread(program)
    assert covered.checked and covered.proved == covered.ops and not covered.unproved


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("batch", [padded("left"), padded("right"), packed()], ids=["left", "right", "packed"])
def test_masks_of_hugging_face_models(batch: dict[str, Tensor], cp: int) -> None:
    """Grouped queries; every rank has its rows of a mask, and picks the columns of the keys that are there."""
    model = build_hf("mixtral", attn_implementation="sdpa", num_key_value_heads=2)
    found = check_hf(model, plan_of(dp=1, cp=cp, ep=2), batch)
    assert set(hops(found.program)) == {(Direction.FORWARD, 1), (Direction.BACKWARD, -1)}
    assert not graphs.find(found.program.graph, SDPA)


def test_latent_attention() -> None:
    """Values of another width than keys."""
    model = build_hf("deepseek_v3", attn_implementation="sdpa")
    found = check_hf(model, plan_of(dp=1, cp=2, ep=2), packed())
    parts = graphs.find(found.program.graph, ops.attention_part)
    assert parts and not graphs.find(found.program.graph, SDPA)


def test_narrow_models_lose_nothing_but_a_rounding() -> None:
    """The softmax is merged in float32 and rounded once."""
    config = replace(CONFIG, dtype=torch.bfloat16, aux=0.0)
    batches = [tokens(2, 8, 0)]
    wide = plain(build(replace(config, dtype=torch.float64)), batches).steps[0].loss
    lost = []
    for plan in (plan_of(dp=1, cp=4), Plan(dp=1, cp=4)):
        lost.append(float((LockStep(build(config), plan, batches[0]).run(batches).steps[0].loss - wide).abs()))
    assert lost[0] <= max(2 * lost[1], 1e-2)


# ---- what does not go round --------------------------------------------------------------------------------------------


class Biased(Attention):
    """A learned bias of the scores."""

    def make(self) -> None:
        super().make()
        self.bias = nn.Parameter(torch.randn(LENGTH, LENGTH))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self.bias)


class Memory(Layered):
    """Some more keys and values than queries."""

    def make(self) -> None:
        self.q, self.k, self.v, self.o = (linear(WIDTH, WIDTH) for _ in range(4))
        self.memory = nn.Parameter(torch.randn(1, 4, WIDTH))

    def body(self, x: Tensor) -> Tensor:
        seen = torch.cat([self.memory.expand(len(x), -1, -1), x], 1)
        out = F.scaled_dot_product_attention(*(heads(y, 4) for y in (self.q(x), self.k(seen), self.v(seen))))
        return x + self.o(join(out))


class FirstOnly(Memory):
    """Causal over a memory that does not move the diagonal."""

    def body(self, x: Tensor) -> Tensor:
        seen = torch.cat([self.memory.expand(len(x), -1, -1), x], 1)
        parts = (heads(y, 4) for y in (self.q(x), self.k(seen), self.v(seen)))
        return x + self.o(join(F.scaled_dot_product_attention(*parts, is_causal=True)))


def test_more_keys_than_queries() -> None:
    program = check_layers(Memory, plan_of(dp=1, cp=2))
    assert hops(program)[Direction.FORWARD, 1] == 1


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Biased, "its mask has a gradient"), (FirstOnly, "it is causal over 8 queries and 12 keys")],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_what_cannot_go_round_is_gathered_and_named(kind: type[Layered], reason: str) -> None:
    program = check_layers(kind, plan_of(dp=1, cp=2))
    assert not hops(program)
    (done,) = [item for item in program.history if item.pass_text.startswith("shard-sequence")]
    assert len(done.declined) == 1 and f"{reason}; its keys and values are gathered" in done.declined[0]


def trained(rank: int, plan: Plan, batches: list[dict[str, Tensor]]) -> dict[str, Any]:
    with parallel(build(CONFIG), plan) as model:
        for batch in batches:
            model(**slice_for(batch, plan, rank))["loss"].backward()
        return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("cp", thinned({"2": 2, "4": 4}))
def test_on_gloo_ranks(ranks: Ranks, cp: int) -> None:
    batches = [tokens(2, 8, seed) for seed in range(2)]
    model = build(CONFIG)
    for batch in batches:
        model(**batch)["loss"].backward()
    whole = {name: param.grad for name, param in model.named_parameters() if ".experts." not in name}
    plan = plan_of(dp=1, cp=cp)
    for found in ranks.run(plan.world_size, trained, plan, batches, timeout=200.0):
        for name, grad in whole.items():
            assert grad is not None and difference(name, found[name], grad) <= 1e-10
