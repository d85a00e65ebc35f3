"""shard-experts: each rank keeps its share of the experts, whatever the weight is computed from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.errors import PassError
from moecompile.passes.shard_experts import ShardExperts
from moecompile.placement.types import PARTIAL, Shard
from moecompile.plan import Plan
from moecompile.program import InputKind, Program
from tests.support import golden

BEFORE = "recognize-moe,shard-dense"


def rewrite(model: nn.Module | None = None, plan: Plan = golden.PLAN) -> golden.Rewrite:
    return golden.rewrite(BEFORE, "shard-experts", plan, model)


def test_golden(golden: golden.Golden) -> None:
    golden("stacked", rewrite())


WIDE = Plan(dp=4, ep=2, etp=2)


class Pair(golden.Experts):
    """Two linears and a bias behind the second, the choice of experts given."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.randn(golden.EXPERTS, golden.WIDTH, golden.WIDTH))
        self.b = nn.Parameter(torch.randn(golden.EXPERTS, golden.WIDTH))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        rows, counts, row_map = ops.permute(x, ids.reshape(-1, 1), golden.EXPERTS)
        rows = ops.grouped_linear(torch.relu(ops.grouped_linear(rows, counts, self.w)), counts, self.v, self.b)
        out: Tensor = ops.unpermute(rows, row_map, x.shape[0], 1)
        return out.sum()


def test_golden_width(golden: golden.Golden) -> None:
    golden("width", rewrite(Pair(), WIDE))


def test_effect_on_the_width() -> None:
    def effect() -> None:
        program = rewrite(Pair(), WIDE).program
        placed = {item.fqns[0]: dict(item.placements) for item in program.inputs if item.kind is InputKind.PARAM}
        assert placed["w"] == {"ep": Shard(0), "etp": Shard(1)} and placed["v"] == {"ep": Shard(0), "etp": Shard(2)}
        assert placed["b"] == {"ep": Shard(0)}
        first, last = graphs.find(program.graph, ops.grouped_linear)
        assert meta.placements(first)["etp"] == Shard(1) and meta.placements(last)["etp"] == PARTIAL
        for node, item in program.items():
            assert item.kind is not InputKind.PARAM or meta.tensor(node).shape == item.local_shape(program.mesh)

    golden.assert_needs(ShardExperts, effect)


class Adapter(golden.Experts):
    """A low-rank update per expert on a frozen weight, and a factor that all experts share."""

    def __init__(self) -> None:
        super().__init__()
        self.w.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(golden.EXPERTS, golden.WIDTH, 1))
        self.b = nn.Parameter(torch.randn(golden.EXPERTS, 1, golden.WIDTH))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        rows, counts, row_map = ops.permute(x, ids.reshape(-1, 1), golden.EXPERTS)
        out: Tensor = ops.unpermute(
            ops.grouped_linear(rows, counts, self.w + torch.bmm(self.a, self.b)), row_map, x.shape[0], 1
        )
        return out.sum()


def test_golden_adapter(golden: golden.Golden) -> None:
    golden("adapter", rewrite(Adapter()))


def assert_cut(program: Program) -> None:
    """Weight of the linear, parameter and description agree on E / ep experts."""
    for node in graphs.find(program.graph, ops.grouped_linear):
        assert meta.tensor(node.args[2]).shape[0] == golden.EXPERTS // program.mesh.size("ep")  # type: ignore[arg-type]
    stacked = [(node, item) for node, item in program.items() if item.kind is InputKind.PARAM and len(item.shape) == 3]
    assert stacked
    for node, item in stacked:
        assert dict(item.placements)["ep"] == Shard(0)
        assert item.shape[0] == golden.EXPERTS
        assert list(meta.tensor(node).shape) == list(item.local_shape(program.mesh))


@pytest.mark.parametrize("ep", [2, 4])
def test_effect(ep: int) -> None:
    golden.assert_needs(ShardExperts, lambda: assert_cut(rewrite(plan=Plan(dp=4, ep=ep)).program))


def test_effect_on_an_adapter() -> None:
    golden.assert_needs(ShardExperts, lambda: assert_cut(rewrite(Adapter()).program))


def test_nothing_to_do_without_expert_parallelism() -> None:
    found = rewrite(plan=Plan(dp=2, ep=1))
    assert found.rewrites == 0 and found.before == found.after


class Odd(golden.Experts):
    """Three experts."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, golden.WIDTH, golden.WIDTH))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        rows, counts, row_map = ops.permute(x, ids.reshape(-1, 1), 3)
        out: Tensor = ops.unpermute(ops.grouped_linear(rows, counts, self.w), row_map, x.shape[0], 1)
        return out.sum()


def test_experts_that_ep_does_not_divide_are_refused() -> None:
    with pytest.raises(PassError, match=r"holds 3 experts, which ep=2 does not divide; choose ep from \[1, 3\]"):
        rewrite(Odd())


class Penalty(golden.Experts):
    """Expert weights are read outside the experts."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return super().forward(x, ids) + self.w.square().sum()


def test_a_second_reader_of_the_weights_is_refused() -> None:
    with pytest.raises(PassError, match="reads an expert weight outside the expert's own linear"):
        rewrite(Penalty())


def test_a_second_run_is_refused() -> None:
    with pytest.raises(PassError, match="'shard-experts' would run twice"):
        golden.run(rewrite().program, "shard-experts")
