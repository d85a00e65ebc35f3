"""cast-grads: gradients are summed in a type of their own, and rounded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.compilation import default_pipeline
from moecompile.errors import PassError, PlanError
from moecompile.passes.cast_grads import CastGrads
from moecompile.plan import Plan
from moecompile.program import OutputKind, Program
from tests.support import golden
from tests.support.pool import Ranks, parallel

BEFORE = "recognize-moe,shard-dense,shard-experts,insert-dispatch,differentiate"


def rewrite(item: str = "cast-grads", plan: Plan = golden.PLAN, model: nn.Module | None = None) -> golden.Rewrite:
    return golden.rewrite(BEFORE, item, plan, model)


def types(program: Program) -> set[torch.dtype]:
    """Types of the gradients that the program returns."""
    return {
        meta.tensor(found).dtype
        for found, item in zip(program.output_nodes(), program.outputs, strict=True)
        if item.kind is OutputKind.GRAD
    }


def test_golden_dense(golden: golden.Golden) -> None:
    golden("dense", rewrite(plan=Plan(dp=2), model=line()))


def line() -> golden.Line:
    return golden.Line()


def test_effect() -> None:
    def effect() -> None:
        assert types(rewrite(plan=Plan(dp=4, ep=2)).program) == {torch.float32}

    golden.assert_needs(CastGrads, effect)


def test_nothing_to_do_where_gradients_have_the_type() -> None:
    found = rewrite("cast-grads{dtype=fp64}")
    assert found.rewrites == 0 and found.before == found.after


@pytest.mark.parametrize("behind", ["sync-grads", "shard-params,sync-grads"])
def test_reductions_run_in_the_type(behind: str) -> None:
    program = golden.run(rewrite(plan=Plan(dp=4, ep=2)).program, behind)
    sums = [
        node
        for node in graphs.find(program.graph, ops.all_reduce, ops.reduce_scatter)
        if meta.direction(node) is meta.Direction.BACKWARD
    ]
    assert sums and {meta.tensor(node).dtype for node in sums} == {torch.float32}


@pytest.mark.parametrize("before", ["sync-grads", "shard-params"])
def test_behind_a_reduction_it_is_too_late(before: str) -> None:
    with pytest.raises(PassError, match="put it before"):
        golden.run(golden.captured(Plan(dp=2)), f"{BEFORE},{before},cast-grads")


# ---- as a field of the plan --------------------------------------------------------------------------------------------


def test_a_plan_asks_for_it() -> None:
    text = default_pipeline(Plan(dp=2, reduce_dtype="fp64", passes="+shard-params"), step=True)
    assert "sync-loss,cast-grads{dtype=fp64},shard-params,sync-grads" in text


def test_a_pipeline_that_does_not_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"without cast-grads\{dtype=fp32\}; put that behind sync-loss, or begin passes with"
    ):
        default_pipeline(Plan(dp=2, reduce_dtype="fp32", passes=f"{BEFORE},sync-grads"), step=True)


class Scaled(nn.Module):
    """The gradient of the weight is the sum of the rows, exactly: one row a rank and microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 4, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (x * self.weight).sum()}


# a microbatch counts half; 128 + 0.5 is 128 in bf16, whose next number is 129; 129.5 rounds to 130
ROWS = torch.tensor([256.0, 1.0, 1.0, 1.0], dtype=torch.bfloat16)


def summed(rank: int, plan: Plan) -> tuple[float, torch.dtype]:
    """One element of the gradient over two ranks and two microbatches."""
    mine = ROWS.view(2, 2)[rank].view(2, 1, 1).expand(2, 2, 4).contiguous()
    with parallel(Scaled(), plan) as model:
        model(x=mine)["loss"].backward()
        grad: Any = model.weight.grad.as_subclass(torch.Tensor)  # this rank's part alone
        assert (grad == grad.flatten()[0]).all()
        return float(grad.flatten()[0]), grad.dtype


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "passes", [None, "+shard-params", "+shard-params{level=1}"], ids=["whole", "level 3", "level 1"]
)
def test_sums_over_ranks_and_microbatches_are_rounded_once(ranks: Ranks, passes: str | None) -> None:
    for dtype, wanted in ((None, 129.0), ("fp32", 130.0)):
        plan = Plan(dp=2, microbatches=2, reduce_dtype=dtype, passes=passes)
        assert ranks.run(2, summed, plan) == [(wanted, torch.bfloat16)] * 2
