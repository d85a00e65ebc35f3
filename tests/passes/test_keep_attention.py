"""keep-attention: the probabilities of short causal attention reach its backward; loss and gradients stay what they were."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from moecompile import graph as graphs
from moecompile.ops import cpu
from moecompile.passes.keep_attention import KeepAttention
from moecompile.plan import Plan
from moecompile.verify.expand import expanded
from tests.support import golden
from tests.support.fusion import ALONE, SHARDED, same_as_plain
from tests.support.models import Config, build, tokens
from tests.support.parity import LockStep, compare, plain

aten = torch.ops.aten
BEFORE = f"{SHARDED},differentiate,sync-grads,canonicalize,lower-ops"
KEEP = "keep-attention{least=1}"
FLASH = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)


class Seen(golden.Attentive):
    """Attention; ``form`` says what departs from that of each token to those before it."""

    def __init__(self, form: str = "plain") -> None:
        super().__init__()
        self.form = form
        self.register_buffer("bias", torch.randn(self.LENGTH, self.LENGTH))

    def forward(self, ids: Tensor) -> Tensor:
        query, key, value = self.qkv(self.embed(ids)).unflatten(-1, (3, 2, 1)).permute(2, 0, 3, 1, 4).unbind(0)
        given = {"is_causal": self.form not in ("all tokens", "mask")}
        if self.form == "mask":
            given = {"attn_mask": self.bias}
        if self.form == "scale":
            given["scale"] = 0.3
        if self.form == "fewer queries":
            query = query[:, :, :3]
        seen = F.scaled_dot_product_attention(query, key, value, **given)
        out: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return out.square().sum()


class Bare(nn.Module):
    """Attention of a linear to itself: the smallest graph that has one and is lowered."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        return F.scaled_dot_product_attention(x, x, x, is_causal=True).sum()

    def example(self) -> tuple[Tensor, ...]:
        return (torch.randn(1, 1, 4, 2, dtype=torch.float64),)


def kept(form: str = "plain", item: str = KEEP, model: nn.Module | None = None) -> golden.Rewrite:
    return golden.rewrite(BEFORE, item, ALONE, model or Seen(form))


def test_golden(golden: golden.Golden) -> None:
    golden("attention", kept(model=Bare()))


@pytest.mark.parametrize("form", ["plain", "scale"])
@pytest.mark.parametrize("plan", [ALONE, Plan(dp=2)], ids=str)
def test_applies(form: str, plan: Plan) -> None:
    found = golden.rewrite(BEFORE, KEEP, plan, Batched(form, plan.dp))
    assert found.rewrites == 1
    assert not graphs.find(found.program.graph, *FLASH)
    assert golden.run(found.program, KEEP).history[-1].rewrites == 0


class Batched(Seen):
    """With one sequence for each rank."""

    def __init__(self, form: str, ranks: int) -> None:
        super().__init__(form)
        self.ranks = ranks

    def example(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        return (torch.randint(0, self.VOCAB, (self.ranks, self.LENGTH)),)


@pytest.mark.parametrize("form", ["all tokens", "mask", "fewer queries"])
def test_declines(form: str) -> None:
    found = kept(form)
    assert found.rewrites == 0
    assert found.before == found.after


@pytest.mark.parametrize(
    ("item", "rewrites"),
    [
        ("keep-attention", 0),
        ("keep-attention{least=4,longest=4}", 1),
        ("keep-attention{least=5}", 0),
        ("keep-attention{least=1,longest=3}", 0),
    ],
)
def test_only_for_lengths_that_are_worth_it(item: str, rewrites: int) -> None:
    assert kept(item=item).rewrites == rewrites


def test_leaves_a_graph_of_another_backend() -> None:
    before = BEFORE.replace("lower-ops", "lower-ops{backend=reference}")
    assert golden.rewrite(before, KEEP, ALONE, Seen()).rewrites == 0


@pytest.mark.parametrize("form", ["plain", "scale"])
def test_same_loss_and_gradients(form: str) -> None:
    torch.manual_seed(0)
    assert same_as_plain(Seen(form), f"differentiate,canonicalize,lower-ops,{KEEP}") == 4


@pytest.mark.parametrize(
    "plan", [Plan(dp=2, ep=2), Plan(dp=2, tp=2, ep=2, sequence_parallel=True), Plan(dp=1, tp=2, etp=2)], ids=str
)
def test_equals_the_plain_model(plan: Plan) -> None:
    config = Config("stacked", rotary=True)
    batches = [tokens(4, 8, seed, ignored=0.3) for seed in range(3)]
    plan = dataclasses.replace(plan, passes=f"+{KEEP}")
    lock_step = LockStep(build(config), plan, batches[0], optimizer="adamw")
    assert graphs.find(lock_step.program.graph, cpu.causal_attention_backward)
    compare(lock_step.run(batches), plain(build(config), batches, optimizer="adamw"))


def test_effect() -> None:
    def effect() -> None:
        assert graphs.find(kept().program.graph, cpu.causal_attention_backward)

    golden.assert_needs(KeepAttention, effect)


def test_written_out_again_it_is_the_graph_before() -> None:
    """One attention and one backward with the constants that they had; the scale is written out, 1 / sqrt(1)."""
    again, before = (
        expanded(kept().program).graph,
        golden.rewrite(SHARDED, "differentiate", ALONE, Seen()).program.graph,
    )
    for target in FLASH:
        (now,), (then,) = graphs.find(again, target), graphs.find(before, target)
        assert _constants(now) == {**_constants(then), "scale": 1.0}


def _constants(node: Node) -> dict[str, Any]:
    return {name: given for name, given in graphs.arguments(node).items() if not isinstance(given, Node)}
