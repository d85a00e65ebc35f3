"""cast-router: a router in fp32 under bf16 autocast (case-19)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import moecompile as mc
from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.passes.cast_router import CastRouter, find_gates

HIDDEN, EXPERTS, TOP_K, TOKENS = 64, 16, 4, 4096


class Layer(nn.Module):
    """One MoE layer in moe:: ops; returns the chosen experts beside the result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, 32, HIDDEN) / 8)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 32) / 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.gate(x).softmax(-1)
        probs, ids = scores.topk(TOP_K, -1)
        rows, counts, row_map = ops.permute(x, ids, EXPERTS)
        rows = ops.grouped_linear(ops.grouped_linear(rows, counts, self.up).relu(), counts, self.down)
        balance = (scores.mean(0) ** 2).sum() * EXPERTS
        return ops.unpermute(rows, row_map, x.shape[0], TOP_K, probs), ids, balance


def _trace(router_dtype: str | None, tokens: int = TOKENS) -> mc.Program:
    with torch.autocast("cpu", torch.bfloat16):
        return mc.trace(Layer(), mc.Plan(dp=1, router_dtype=router_dtype), (torch.empty(tokens, HIDDEN),))


def _run(program: mc.Program, x: Tensor) -> dict[int, Tensor]:
    return mc.simulate_ranks(Layer(), program.plan, [(x,)], program=program).outputs[0]


def test_case_19_router_in_fp32_chooses_the_experts_of_the_fp32_reference() -> None:
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    _, reference, balance = Layer()(x)
    found = _run(_trace("fp32"), x)
    assert torch.equal(found[1].sort(-1).values, reference.sort(-1).values)
    torch.testing.assert_close(found[2], balance)
    narrow = _run(_trace(None), x)
    changed = (narrow[1].sort(-1).values != reference.sort(-1).values).any(-1).float().mean()
    assert changed > 0.002, "in bf16 some tokens must change expert, else this test sees nothing"


def test_gate_scores_and_balance_are_wide_and_the_experts_stay_narrow() -> None:
    program = _trace("fp32", 64)
    (permute,) = graphs.find(program.graph, ops.permute)
    (gate,) = find_gates(permute)
    assert meta.tensor(gate).dtype == torch.float32
    assert all(meta.tensor(arg).dtype == torch.float32 for arg in gate.all_input_nodes)
    linears = graphs.find(program.graph, ops.grouped_linear, ops.cpu.grouped_linear)
    assert linears and {meta.tensor(node).dtype for node in linears} == {torch.bfloat16}


def test_does_nothing_for_a_wide_router_and_twice() -> None:
    plain = mc.trace(Layer(), mc.Plan(dp=1, router_dtype="fp32"), (torch.empty(8, HIDDEN),))
    assert [item.rewrites for item in plain.history if item.pass_text.startswith("cast-router")] == [0]
    text = "recognize-moe,cast-router,cast-router"
    with torch.autocast("cpu", torch.bfloat16):
        twice = mc.trace(Layer(), mc.Plan(dp=1, passes=text), (torch.empty(8, HIDDEN),))
    assert [item.rewrites for item in twice.history] == [0, 1, 0]


def test_effect_is_missed_when_the_pass_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CastRouter, "run", lambda self, graph, ctx: 0)
    with pytest.raises(AssertionError):
        test_gate_scores_and_balance_are_wide_and_the_experts_stay_narrow()
