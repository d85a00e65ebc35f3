"""Cases from the field about what capture makes of a model: 22, 26, 46."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import moecompile as mc
from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.communication import host_reads
from moecompile.errors import CaptureError
from moecompile.plan import Plan
from tests.support.models import Config, build, tokens
from tests.support.parity import Batch, LockStep, compare, plain

aten = torch.ops.aten
WIDTH, INNER, EXPERTS = 8, 12, 4
PLAN = Plan(dp=2, ep=2)


def batch(seed: int = 0) -> Batch:
    draw = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {"x": draw[0], "labels": draw[1]}


# ---- 22: recomputed routing ----------------------------------------------------------------------------------------------


class Recomputed(nn.Module):
    """An MoE block under activation checkpointing; a gate of zeros makes all logits equal. ``noise`` is added when it runs again."""

    def __init__(self, recompute: bool, noise: float = 0.0) -> None:
        super().__init__()
        self.recompute, self.noise, self.calls = recompute, noise, 0
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        nn.init.zeros_(self.gate.weight)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def block(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        if self.noise:
            self.calls += 1
            if self.calls > 1:
                logits = logits + self.noise * torch.arange(EXPERTS)
        probs, ids = logits.softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(ids == index)
            out.index_add_(0, token, expert(x[token]) * probs[token, slot, None])
        return x + out

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out: Any = checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x)
        return {"loss": (out - labels).square().mean()}


def recomputed(recompute: bool, noise: float = 0.0) -> Recomputed:
    torch.manual_seed(0)
    return Recomputed(recompute, noise).double()


def test_case_22_routing_is_decided_once_and_saved() -> None:
    """All logits equal, the block under checkpointing: one top-k, one read of sizes, both in the forward; the plain gradients."""
    run = LockStep(recomputed(True), PLAN, batch())
    for target in (aten.topk.default, ops.sizes_to_host):
        (node,) = graphs.find(run.program.graph, target)
        assert meta.direction(node) is meta.Direction.FORWARD
    batches = [batch(0)]
    reference = plain(recomputed(False), batches)
    idle = [name for name, grad in reference.steps[0].grads.items() if not grad.any()]
    compare(run.run(batches), reference, zero=idle)


def test_case_22_a_gate_that_changes_when_it_runs_again_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"test_cases_capture\.py:\d+.*calls"):
        mc.trace(recomputed(True, 1e-7), PLAN, (batch()["x"][:8], batch()["labels"][:8]))


# ---- 26: three ways of writing -------------------------------------------------------------------------------------------


class Written(nn.Module):
    """The same layer, its experts ``[E, in, out]``, in one of three ways of writing."""

    def __init__(self, way: Callable[[Written, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.way = way
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * 0.3)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) * 0.3)

    def expert(self, e: int, rows: Tensor) -> Tensor:
        return F.gelu(rows @ self.w1[e]) @ self.w2[e]

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        probs, ids = self.gate(x).softmax(-1).topk(2)
        return {"loss": (x + self.way(self, x, probs, ids) - labels).square().mean()}


def where_and_skip(self: Written, x: Tensor, probs: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        token, slot = torch.where(ids == e)
        if token.numel() == 0:
            continue
        out.index_add_(0, token, self.expert(e, x[token]) * probs[token, slot, None])
    return out


def nonzero_driven(self: Written, x: Tensor, probs: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, EXPERTS).permute(2, 1, 0)
    for hit in torch.greater(mask.sum((-1, -2)), 0).nonzero():
        slot, token = torch.where(mask[hit[0]])
        out.index_add_(0, token, self.expert(int(hit[0]), x[token]) * probs[token, slot, None])
    return out


def stacked_weights(self: Written, x: Tensor, probs: Tensor, ids: Tensor) -> Tensor:
    weight = torch.zeros(x.shape[0], EXPERTS, dtype=x.dtype).scatter(1, ids, probs)
    rows = torch.bmm(F.gelu(torch.bmm(x.expand(EXPERTS, -1, -1), self.w1)), self.w2)
    return (rows * weight.t().unsqueeze(-1)).sum(0)


def one_token_after_the_other(self: Written, x: Tensor, probs: Tensor, ids: Tensor) -> Tensor:
    rows = []
    for t in range(x.shape[0]):
        rows.append(sum(probs[t, k] * self.expert(int(ids[t, k].item()), x[t]) for k in range(2)))
    return torch.stack(rows)


def written(way: Callable[[Written, Tensor, Tensor, Tensor], Tensor]) -> Written:
    torch.manual_seed(0)
    return Written(way).double()


def test_case_26_three_ways_of_writing_are_one_program() -> None:
    """The graphs hold the same ops of MoE layers and communication, and the numbers are those of the plain model."""
    batches, told = [batch(0), batch(1)], set()
    for way in (where_and_skip, nonzero_driven, stacked_weights):
        reference = plain(written(where_and_skip), batches)
        run = LockStep(written(way), PLAN, batches[0])
        compare(run.run(batches), reference)
        counts = {op: count for op, count in run.program.history[-1].ops if op.startswith(("moe.", "moe_cpu."))}
        assert (
            counts["moe.dispatch.default"] == 2 and counts["moe.combine.default"] == 1
        )  # no gradient of the tokens is due
        told.add(tuple(sorted(counts.items())))
    assert len(told) == 1


def test_case_26_what_is_not_recognised_names_line_and_accepted_forms() -> None:
    with pytest.raises(CaptureError, match=r"test_cases_capture\.py:\d+.*loop over the experts"):
        mc.trace(written(one_token_after_the_other), PLAN, (batch()["x"][:8], batch()["labels"][:8]))


# ---- 46: reads on the host -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dispatch", ["alltoall", "allgather"])
@pytest.mark.parametrize("experts", [4, 16])
def test_case_46_one_read_on_the_host_for_each_layer(experts: int, dispatch: str) -> None:
    """Whatever the number of experts; each is listed with the line it is due to."""
    config = Config("loop", experts=experts, layers=3, shared=True)
    program = LockStep(build(config), Plan(dp=2, ep=2, dispatch=dispatch), tokens(4, 5, 0)).program
    found = host_reads(program)
    assert [read.module for read in found] == [f"layers.{at}.moe.experts" for at in range(3)]
    assert all(read.direction == "forward" and ".py:" in read.source for read in found)


def test_case_46_a_read_that_a_pass_forgot_is_listed() -> None:
    program = LockStep(build(Config("loop", layers=1)), PLAN, tokens(4, 5, 0)).program
    (read,) = graphs.find(program.graph, ops.sizes_to_host)
    with program.graph.inserting_after(read):
        total = graphs.call(program.graph, aten.sum.default, read.args[0], like=read)
    with program.graph.inserting_after(total):
        graphs.call(program.graph, aten._local_scalar_dense.default, total, like=read)
    assert len(host_reads(program)) == 2
