"""Narrow types on tp, sp and cp: sums over ranks are taken in float32, routers keep their type, autocast means what it means alone."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import moecompile as mc
from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.compilation import Request, compile_call
from moecompile.plan import Plan
from moecompile.program import Program
from tests.support.models import Config, build, choose, push_to, tokens
from tests.support.parity import slice_for
from tests.support.thinned import thinned

PLANS = {
    "tp": Plan(dp=1, tp=2, ep=2),
    "cp": Plan(dp=1, cp=2, ep=2),
    "sp": Plan(dp=1, tp=2, ep=2, sequence_parallel=True),
    "dp-cp-sp": Plan(dp=2, cp=2, tp=2, ep=4, sequence_parallel=True),
}
NARROW = Config("ops", hidden=32, heads=4, inner=16, shared=True, aux=0.1, dtype=torch.bfloat16)
# how much farther from the exact gradients than one process in the same type: each rank rounds its part once more
MORE = 1.5


def batch(dtype: torch.dtype) -> dict[str, Tensor]:
    """The choice of experts is forced: in bfloat16 near ties would fall differently."""
    push = push_to(choose(4, 8, 2, [0, 1, 2, 3]), 4, torch.float32).to(dtype)
    return tokens(4, 8, 0, ignored=0.2) | {"push": push}


def check(model: nn.Module, plan: Plan, given: dict[str, Tensor], *, autocast: bool = False) -> Program:
    """Loss and gradients of simulated ranks are as near to those in fp64 as the plain model's own."""
    alone, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        loss = alone(**given)["loss"]
        found = mc.simulate_ranks(model, plan, [slice_for(given, plan, rank) for rank in range(plan.world_size)])
    loss.backward()
    wide = exact(**{name: value.double() if value.is_floating_point() else value for name, value in given.items()})[
        "loss"
    ]
    wide.backward()
    assert found.loss is not None and found.loss.dtype == loss.dtype
    assert float((found.loss - wide).abs() / wide.abs()) < 1e-2
    norm = float(nn.utils.get_total_norm([param.grad for param in exact.parameters() if param.grad is not None]))
    wanted = {name: param.grad for name, param in exact.named_parameters() if param.grad is not None}
    assert wanted.keys() == found.grads.keys()
    for name, param in alone.named_parameters():
        assert param.grad is not None and found.grads[name].dtype == param.grad.dtype, name
        alone_error = float((param.grad.double() - wanted[name]).norm())
        assert alone_error < 0.1 * max(float(wanted[name].norm()), 0.01 * norm), name  # so that it says something
        assert float((found.grads[name].double() - wanted[name]).norm()) < MORE * alone_error + 1e-3 * norm, name
    return found.program


def sums(program: Program) -> list[torch.dtype]:
    """Types in which ranks add something up."""
    adding = [node for node in graphs.find(program.graph, ops.all_reduce) if node.args[1] == "sum"]
    return [meta.tensor(node).dtype for node in [*adding, *graphs.find(program.graph, ops.reduce_scatter)]]


@pytest.mark.parametrize("plan", thinned(PLANS, keep=("tp", "dp-cp-sp")))
def test_bfloat16(plan: Plan) -> None:
    program = check(build(NARROW), plan, batch(torch.bfloat16))
    forward = compile_call(
        build(NARROW), Request((), slice_for(batch(torch.bfloat16), plan, 0), plan), pipeline=PIPELINE, check=False
    )
    found = [dtype for dtype in sums(forward) if dtype.is_floating_point]
    assert (plan.tp > 1) <= bool(found) and torch.bfloat16 not in found
    assert program.gathers == []


PIPELINE = "recognize-moe,seed-random,shard-dense,shard-sequence,shard-linears"


@pytest.mark.parametrize("plan", thinned(PLANS, keep=("tp", "dp-cp-sp")))
def test_autocast(plan: Plan) -> None:
    model = build(Config(**{**vars(NARROW), "dtype": torch.float32}))
    check(model, plan, batch(torch.float32), autocast=True)


@pytest.mark.parametrize("plan", thinned(PLANS, keep=("tp", "dp-cp-sp")))
def test_a_router_in_float32(plan: Plan) -> None:
    """The scores that choose, and what leads to them, are float32 on every rank; the rest stays narrow."""
    plan = Plan(
        **{name: getattr(plan, name) for name in ("dp", "tp", "cp", "ep", "sequence_parallel")}, router_dtype="fp32"
    )
    given = slice_for(tokens(4, 8, 0), plan, 0)
    program = compile_call(build(NARROW), Request((), given, plan))
    chosen = graphs.find(program.graph, torch.ops.aten.topk.default)
    assert len(chosen) == NARROW.layers
    assert all(meta.tensor(node.args[0]).dtype == torch.float32 for node in chosen)  # type: ignore[arg-type]
    experts = graphs.find(program.graph, ops.cpu.grouped_linear)
    assert experts and all(meta.tensor(node).dtype == torch.bfloat16 for node in experts)
