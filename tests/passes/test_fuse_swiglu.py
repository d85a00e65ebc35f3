"""fuse-swiglu: one op for a gated activation, whose loss and gradients stay what they were."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecompile import graph as graphs
from moecompile import ops
from moecompile.passes.fuse_swiglu import FuseSwiglu
from moecompile.plan import Plan
from tests.support import golden
from tests.support.fusion import ALONE, same_step

BEFORE = "recognize-moe,normalize-loss,shard-dense,shard-experts,insert-dispatch"


class Gated(nn.Module):
    """silu(gate) * up; ``form`` says how gate and up come about."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.w = nn.Linear(golden.WIDTH, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.w(x)
        if self.form == "chunk":
            gate, up = h.chunk(2, -1)
            out = F.silu(gate) * up
        elif self.form == "slice":
            out = h[..., 2:] * F.silu(h[..., :2])
        elif self.form == "swapped":  # [up|gate]: two tensors to the op, not one
            up, gate = h.chunk(2, -1)
            out = F.silu(gate) * up
        elif self.form == "apart":
            out = F.silu(h) * self.w(x * 2)
        elif self.form == "silu used twice":
            gate, up = h.chunk(2, -1)
            act = F.silu(gate)
            out = act * up + act
        else:
            out = F.silu(h) * 3.0
        return out.square().sum() / out.numel()


def fused(form: str) -> golden.Rewrite:
    return golden.rewrite(BEFORE, "fuse-swiglu", ALONE, _OneArgument(Gated(form)))


class _OneArgument(golden.Line):
    """Gives a module the batch that the golden harness passes to a `Line`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        del self.head
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def test_golden(golden: golden.Golden) -> None:
    golden("chunk", fused("chunk"))


@pytest.mark.parametrize(
    ("form", "target"),
    [("chunk", ops.swiglu), ("slice", ops.swiglu), ("swapped", ops.silu_mul), ("apart", ops.silu_mul)],
)
def test_applies(form: str, target: object) -> None:
    found = fused(form)
    assert found.rewrites == 1
    assert len(graphs.find(found.program.graph, target)) == 1
    assert not graphs.find(found.program.graph, torch.ops.aten.silu.default)
    assert golden.run(found.program, "fuse-swiglu").history[-1].rewrites == 0


@pytest.mark.parametrize("form", ["silu used twice", "a number"])
def test_declines(form: str) -> None:
    found = fused(form)
    assert found.rewrites == 0
    assert found.before == found.after


@pytest.mark.parametrize("form", ["chunk", "slice", "swapped", "apart"])
@pytest.mark.parametrize("lowered", [False, True])
def test_same_loss_and_gradients(form: str, lowered: bool) -> None:
    same_step(_OneArgument(Gated(form)), "fuse-swiglu", lowered)


def test_effect() -> None:
    def effect() -> None:
        assert graphs.find(fused("chunk").program.graph, ops.swiglu)

    golden.assert_needs(FuseSwiglu, effect)


def test_of_every_plan_of_two_ranks() -> None:
    """The rows of a dispatched layer have a size known at run time; the chain is found there as well."""

    class Experts(golden.Experts):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(golden.EXPERTS, 4, golden.WIDTH))

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            rows, counts, row_map = ops.permute(x, ids.reshape(-1, 1), golden.EXPERTS)
            gate, up = ops.grouped_linear(rows, counts, self.w).chunk(2, -1)
            out: Tensor = ops.unpermute(F.silu(gate) * up, row_map, x.shape[0], 1)
            return out.sum()

    found = golden.rewrite(BEFORE, "fuse-swiglu", Plan(dp=2, ep=2), Experts())
    (node,) = graphs.find(found.program.graph, ops.swiglu)
    assert "u" in str(node.meta["val"].shape[0])
