"""fuse-experts: one op for an expert's products and activation, forward and backward, with the same loss and gradients."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecompile import graph as graphs
from moecompile import ops
from moecompile.compilation import Request, compile_call
from moecompile.errors import VerifyError
from moecompile.ops import cpu
from moecompile.passes.fuse_experts import FuseExperts
from moecompile.plan import Plan
from moecompile.verify import verify_program
from moecompile.verify.expand import expanded
from tests.support import golden
from tests.support.fusion import ALONE, same_as_plain

SHARDED = "recognize-moe,normalize-loss,shard-dense,shard-experts,insert-dispatch"
BEFORE = f"{SHARDED},fuse-swiglu,differentiate,sync-grads,canonicalize,lower-ops"
INNER = 3


class Experts(nn.Module):
    """Gated experts; ``form`` says what departs from two products with a swiglu between them."""

    def __init__(self, form: str = "plain", dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.form = form
        self.transposed = form == "transposed"
        first, last = (2 * INNER, golden.WIDTH), (golden.WIDTH, INNER)
        if self.transposed:
            first, last = first[::-1], last[::-1]
        self.w_in = nn.Parameter(torch.randn(golden.EXPERTS, *first, dtype=dtype))
        self.w_out = nn.Parameter(torch.randn(golden.EXPERTS, *last, dtype=dtype), requires_grad=form != "frozen")
        self.scale = nn.Parameter(torch.randn(golden.WIDTH, dtype=dtype))  # so that rows have a gradient
        self.bias = nn.Parameter(torch.randn(golden.EXPERTS, golden.WIDTH, dtype=dtype)) if form == "bias" else None

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = x.to(self.scale.dtype) * self.scale
        rows, counts, row_map = ops.permute(x, ids.reshape(-1, 1), golden.EXPERTS)
        w_in, w_out = self.w_in, self.w_out
        if self.transposed:
            w_in, w_out = w_in.transpose(1, 2), w_out.transpose(1, 2)
        h = ops.grouped_linear(rows, counts, w_in)
        gate, up = h.chunk(2, -1)
        act = F.gelu(gate) * up if self.form == "gelu" else F.silu(gate) * up
        y = ops.grouped_linear(act, counts, w_out, self.bias)
        out: Tensor = ops.unpermute(y, row_map, x.shape[0], 1).square().sum()
        if self.form == "activation read twice":
            out = out + act.square().sum()
        return out


def fused(form: str = "plain", plan: Plan = golden.PLAN) -> golden.Rewrite:
    return golden.rewrite(BEFORE, "fuse-experts", plan, Experts(form))


def test_golden(golden: golden.Golden) -> None:
    golden("experts", fused(plan=ALONE))


@pytest.mark.parametrize("form", ["plain", "transposed"])
@pytest.mark.parametrize("plan", [ALONE, golden.PLAN], ids=str)
def test_applies(form: str, plan: Plan) -> None:
    found = fused(form, plan)
    assert found.rewrites == 1
    left = graphs.find(
        found.program.graph, cpu.grouped_linear, cpu.grouped_linear_wgrad, cpu.swiglu, cpu.swiglu_backward
    )
    assert not left
    assert golden.run(found.program, "fuse-experts").history[-1].rewrites == 0


@pytest.mark.parametrize("form", ["bias", "gelu", "frozen", "activation read twice"])
def test_declines(form: str) -> None:
    found = fused(form)
    assert found.rewrites == 0
    assert found.before == found.after


def test_narrow_types_are_left_alone() -> None:
    joined = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, ids = torch.randn(golden.TOKENS, golden.WIDTH), torch.randint(golden.EXPERTS, (golden.TOKENS,))
        program = compile_call(Experts(dtype=dtype), Request((x, ids), {}, ALONE))
        joined[dtype] = len(graphs.find(program.graph, cpu.grouped_mlp))
    assert joined == {torch.float32: 1, torch.bfloat16: 0}


@pytest.mark.parametrize("form", ["plain", "transposed"])
def test_same_loss_and_gradients(form: str) -> None:
    torch.manual_seed(0)
    assert same_as_plain(Experts(form), "fuse-swiglu,differentiate,lower-ops,fuse-experts") == 4


def test_effect() -> None:
    def effect() -> None:
        assert graphs.find(fused().program.graph, cpu.grouped_mlp_backward)

    golden.assert_needs(FuseExperts, effect)


# ---- what the checks read in its place -----------------------------------------------------------------------------------


def test_written_out_again_it_is_the_graph_before() -> None:
    """As many calls of each op as before; only the activation is computed once more, for the backward."""
    found = fused()
    before = golden.rewrite(
        SHARDED, "fuse-swiglu,differentiate,sync-grads,canonicalize,lower-ops", golden.PLAN, Experts()
    )
    for target in (cpu.grouped_linear, cpu.grouped_linear_wgrad, cpu.swiglu_backward):
        again = graphs.find(expanded(found.program).graph, target)
        assert len(again) == len(graphs.find(before.program.graph, target)) > 0
    assert len(graphs.find(expanded(found.program).graph, cpu.swiglu)) == 2


def test_a_program_without_joined_ops_is_itself() -> None:
    program = golden.captured(golden.PLAN, Experts())
    assert expanded(program) is program


def test_an_error_inside_is_found() -> None:
    """Rows that were not sent are refused in a joined op as in its parts."""
    program = fused().program
    (node,) = graphs.find(program.graph, cpu.grouped_mlp)
    (permute,) = graphs.find(program.graph, ops.permute)
    node.update_arg(0, graphs.items(permute)[0])
    with pytest.raises(VerifyError, match="sends rows away that no combine"):
        verify_program(dataclasses.replace(program))
