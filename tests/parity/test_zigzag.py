"""Ring context parallelism whose ranks hold an early and a late piece of the sequence, against one process: loss, gradients, weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

import moecompile as mc
from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.meta import Direction
from moecompile.placement.types import Shard
from moecompile.plan import Plan
from moecompile.program import OutputKind
from moecompile.verify import check_spread
from moecompile.verify.order import collective_order
from tests.parity import test_ring_attention
from tests.parity.test_chains import check as check_layers
from tests.parity.test_gloo_axes import compare_outside
from tests.parity.test_hf_axes import build as build_hf
from tests.parity.test_hf_axes import check as check_hf
from tests.parity.test_hf_axes import packed, padded
from tests.parity.test_turned_attention import CONFIG, SDPA
from tests.support import hf_models
from tests.support.chain_models import WIDTH, Attention, Layered, heads, join, linear
from tests.support.models import build, tokens
from tests.support.parity import LockStep, compare, difference, plain, slice_for
from tests.support.pool import Ranks, parallel
from tests.support.thinned import thinned

pytestmark = pytest.mark.timeout(240)
ZIGZAG = "+shard-sequence{attention=ring,order=zigzag}"


def plan_of(**fields: Any) -> Plan:
    return Plan(passes=ZIGZAG, **fields)


PLANS = [
    plan_of(dp=2, cp=2, ep=4, dispatch="allgather"),
    *(replace(plan, passes=ZIGZAG) for plan in test_ring_attention.PLANS),
]


@pytest.mark.usefixtures("proving")
@pytest.mark.parametrize(
    "plan", thinned({str(plan): plan for plan in PLANS}, keep=tuple(map(str, PLANS[2:3] + PLANS[-2:])))
)
def test_three_steps(plan: Plan) -> None:
    """All is proved; only the logits travel more than in a ring without zigzag, to where they belong."""
    batches = [tokens(2 * (plan.dp or 1), 8, seed, ignored=0.3) for seed in range(3)]
    lock_step = LockStep(build(CONFIG), plan, batches[0])
    compare(lock_step.run(batches), plain(build(CONFIG), batches))
    program = lock_step.program
    turns = Counter(meta.direction(node) for node in graphs.find(program.graph, ops.rotate))
    assert turns == dict.fromkeys((Direction.FORWARD, Direction.BACKWARD), CONFIG.layers * (plan.cp - 1))
    assert not graphs.find(program.graph, SDPA) and program.gathers == []
    assert not [node for node in graphs.find(program.graph, ops.all_gather) if node.args[2] == "cp"]
    (turned,) = graphs.find(program.graph, ops.zigzag_exchange)
    assert turned.args[4:] == (False, "cp") and sum("out of zigzag" in line for line in collective_order(program)) == 1
    covered = check_spread(program)
    assert covered.checked and covered.proved == covered.ops and not covered.unproved


def test_random_numbers_are_those_of_one_rank() -> None:
    config, batches = replace(CONFIG, dropout=0.5), [tokens(2, 8, seed) for seed in range(2)]
    found = LockStep(build(config), plan_of(dp=1, cp=2, ep=2), batches[0])
    assert graphs.find(found.program.graph, ops.uniform)
    compare(found.run(batches), LockStep(build(config), Plan(dp=1), batches[0]).run(batches))


@pytest.mark.parametrize(
    ("name", "cp"),
    thinned(
        {f"{name}-{cp}": (name, cp) for name in ("left", "right", "packed", "window") for cp in (2, 3)},
        keep=("left-3", "packed-2", "window-3"),
    ),
)
def test_masks_of_hugging_face_models(name: str, cp: int) -> None:
    """Grouped queries; masks and positions are cut in the order of the queries, columns found in that of the keys."""
    window = {"sliding_window": 3} if name == "window" else {}
    model = build_hf("mixtral", attn_implementation="sdpa", num_key_value_heads=2, num_hidden_layers=1, **window)
    batch = {"window": hf_models.batch(), "packed": packed()}.get(name) or padded(name)
    found = check_hf(model, plan_of(dp=1, cp=cp), batch)
    assert not graphs.find(found.program.graph, SDPA) and graphs.find(found.program.graph, ops.attention_part)
    assert found.program.gathers == []


def test_latent_attention() -> None:
    """Values of another width than keys."""
    found = check_hf(build_hf("deepseek_v3", attn_implementation="sdpa"), plan_of(dp=1, cp=2, ep=2), packed())
    assert graphs.find(found.program.graph, ops.attention_part) and not graphs.find(found.program.graph, SDPA)


def test_attention_by_hand() -> None:
    """Scores, a mask of positions and a softmax: keys and values are put in order first."""
    found = check_hf(build_hf("mixtral", attn_implementation="eager"), plan_of(dp=1, cp=2), padded("right"))
    assert not graphs.find(found.program.graph, ops.attention_part)


# ---- what needs the order of the sequence ------------------------------------------------------------------------------


class Summed(Attention):
    """Sums of all that came before, and the neighbour before."""

    def body(self, x: Tensor) -> Tensor:
        seen = x.cumsum(1) / WIDTH + F.pad(x, (0, 0, 1, 0))[:, :-1]
        return super().body(seen)


class FirstOnly(Layered):
    """Causal over more keys than queries, which no ring takes."""

    def make(self) -> None:
        self.q, self.k, self.v, self.o = (linear(WIDTH, WIDTH) for _ in range(4))
        self.memory = torch.nn.Parameter(torch.randn(1, 4, WIDTH))

    def body(self, x: Tensor) -> Tensor:
        seen = torch.cat([self.memory.expand(len(x), -1, -1), x], 1)
        parts = (heads(y, 4) for y in (self.q(x), self.k(seen), self.v(seen)))
        return x + self.o(join(F.scaled_dot_product_attention(*parts, is_causal=True)))


@pytest.mark.parametrize("tp", [1, 2])
def test_ops_along_the_sequence_see_it_in_order(tp: int) -> None:
    program = check_layers(Summed, plan_of(dp=1, cp=2, tp=tp, sequence_parallel=tp > 1))
    named = {item.op for item in program.gathers if item.axis == "cp"}
    assert any("cumsum" in name for name in named) and any("pad" in name for name in named)


def test_attention_that_no_ring_takes_has_its_rows_of_the_mask() -> None:
    program = check_layers(FirstOnly, plan_of(dp=1, cp=2))
    (done,) = [item for item in program.history if item.pass_text.startswith("shard-sequence")]
    assert len(done.declined) == 1 and "it is causal over 8 queries and 12 keys" in done.declined[0]


class Shifted(Attention):
    """The loss of the next token, shifted by the model."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits[:, :-1], labels[:, 1:])


def test_labels_that_the_model_shifts() -> None:
    program = check_layers(Shifted, plan_of(dp=1, cp=2))
    assert [item.axis for item in program.gathers] == ["cp"]


# ---- results -----------------------------------------------------------------------------------------------------------


def test_logits_come_in_the_order_of_the_sequence() -> None:
    plan, batch = plan_of(dp=1, cp=2), tokens(2, 8, 0)
    model = build(CONFIG)
    wanted = build(CONFIG)(**batch)["logits"]
    found = mc.simulate_ranks(model, plan, [slice_for(batch, plan, rank) for rank in range(2)])
    (item,) = [item for item in found.program.outputs if item.kind is OutputKind.USER and item.leaf == 1]
    assert dict(item.placements)["cp"] == Shard(1)
    logits = torch.cat([part[item.leaf] for part in found.outputs], 1)
    torch.testing.assert_close(logits, wanted.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("how", "flat"), [("parts", False), pytest.param("whole", True, marks=pytest.mark.slow)])
def test_a_loss_outside_sees_the_order_of_the_sequence(ranks: Ranks, how: str, flat: bool) -> None:
    """Gradients of the logits come in it and go to where the pieces are."""
    compare_outside(ranks, plan_of(dp=1, cp=2), how, flat)


def on_a_rank(rank: int, plan: Plan, batch: dict[str, Tensor]) -> dict[str, Any]:
    with parallel(build(CONFIG), plan) as model:
        out = model(**slice_for(batch, plan, rank))
        out["loss"].backward()
        logits = out["logits"]
        assert isinstance(logits, DTensor)
        grads = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
        return {"grads": grads, "logits": logits.full_tensor()}


@pytest.mark.parametrize("cp", thinned({"2": 2, "4": 4}))
def test_on_gloo_ranks(ranks: Ranks, cp: int) -> None:
    batch, model = tokens(2, 8, 0), build(CONFIG)
    wanted = model(**batch)
    wanted["loss"].backward()
    whole = {name: param.grad for name, param in model.named_parameters() if ".experts." not in name}
    plan = plan_of(dp=1, cp=cp)
    for found in ranks.run(plan.world_size, on_a_rank, plan, batch, timeout=200.0):
        assert difference("logits", found["logits"], wanted["logits"].detach()) <= 1e-12
        for name, grad in whole.items():
            assert grad is not None and difference(name, found["grads"][name], grad) <= 1e-10
