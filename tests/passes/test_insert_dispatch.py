"""insert-dispatch: rows travel to their experts and back, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.errors import PassError, VerifyError
from moecompile.passes.insert_dispatch import InsertDispatch
from moecompile.plan import Plan
from moecompile.program import InputKind, Program
from moecompile.verify import verify_program
from tests.support import golden

BEFORE = "recognize-moe,shard-dense,shard-experts"


def test_golden_alltoall(golden: golden.Golden) -> None:
    golden("alltoall", rewrite("insert-dispatch", model=small()))


def test_golden_allgather(golden: golden.Golden) -> None:
    golden("allgather", rewrite("insert-dispatch{backend=allgather}", model=small()))


def test_golden_probs_before_the_second_linear(golden: golden.Golden) -> None:
    """The weights become rows that travel, and unpermute only adds up."""
    golden("probs_fc2", rewrite("insert-dispatch{probs=fc2}", model=small_weighted()))


def test_golden_width(golden: golden.Golden) -> None:
    """Rows of all ranks that hold parts of an expert; the results are summed on the way home."""
    golden("width", rewrite("insert-dispatch", WIDE, Pair()))


def test_golden_width_allgather(golden: golden.Golden) -> None:
    golden("width_allgather", rewrite("insert-dispatch{backend=allgather}", WIDE, Pair()))


WIDE = Plan(dp=4, ep=2, etp=2)


class Pair(golden.Experts):
    """Two linears, the choice of experts given."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.randn(golden.EXPERTS, golden.WIDTH, golden.WIDTH))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        rows, counts, row_map = ops.permute(x, ids.reshape(-1, 1), golden.EXPERTS)
        rows = ops.grouped_linear(torch.relu(ops.grouped_linear(rows, counts, self.w)), counts, self.v)
        out: Tensor = ops.unpermute(rows, row_map, x.shape[0], 1)
        return out.sum()


def small() -> nn.Module:
    return golden.Experts()


def small_weighted() -> nn.Module:
    return golden.Weighted()


def rewrite(item: str, plan: Plan = golden.PLAN, model: nn.Module | None = None) -> golden.Rewrite:
    return golden.rewrite(BEFORE, item, plan, model)


def assert_dispatched(program: Program) -> None:
    """Every expert linear reads rows that were sent, and what it computes comes back before it is added up."""
    linears = graphs.find(program.graph, ops.grouped_linear)
    assert len(linears) == 2
    away, home = graphs.find(program.graph, ops.dispatch), graphs.find(program.graph, ops.combine)
    assert len(away) == len(home) == 1
    for node in linears:
        assert away[0] in graphs.ancestors(node)
        assert node in graphs.ancestors(home[0])
    (unpermute,) = graphs.find(program.graph, ops.unpermute)
    assert unpermute.args[0] is home[0]


def test_effect() -> None:
    golden.assert_needs(InsertDispatch, lambda: assert_dispatched(rewrite("insert-dispatch").program))


@pytest.mark.parametrize("plan", [WIDE, Plan(dp=2, etp=2)], ids=["ep-etp", "etp"])
def test_effect_of_width(plan: Plan) -> None:
    """Experts read the rows of all ranks of etp, and what leaves them is summed over etp, then sent home."""

    def effect() -> None:
        graph = rewrite("insert-dispatch", plan, Pair()).program.graph
        (gather,), (scatter,) = graphs.find(graph, ops.all_gather_rows), graphs.find(graph, ops.reduce_scatter_rows)
        for node in graphs.find(graph, ops.grouped_linear):
            assert gather in graphs.ancestors(node) and node in graphs.ancestors(scatter)
        away, home = graphs.find(graph, ops.dispatch), graphs.find(graph, ops.combine)
        assert len(away) == len(home) == (1 if plan.ep > 1 else 0)
        assert [gather.args[0]] == (away or [gather.args[0]]) and [item.args[0] for item in home] == [scatter] * len(
            home
        )
        (unpermute,) = graphs.find(graph, ops.unpermute)
        assert unpermute.args[0] is (home[0] if home else scatter)

    golden.assert_needs(InsertDispatch, effect)


def test_results_that_are_not_summed_over_etp_are_refused() -> None:
    """The verifier follows the sum from the last linear to where it is taken."""
    program = rewrite("insert-dispatch", Plan(dp=2, etp=2), Pair()).program
    (scatter,) = graphs.find(program.graph, ops.reduce_scatter_rows)
    scatter.target, scatter.args = torch.ops.aten.slice.Tensor, (scatter.args[0], 0, 0, scatter.args[2])
    with pytest.raises(VerifyError, match="recorded as whole on etp, but its operand is partial"):
        verify_program(program)


def test_effect_of_allgather() -> None:
    """All tokens are seen, this rank's experts are computed, and the parts are added at home."""

    def effect() -> None:
        found = rewrite("insert-dispatch{backend=allgather}").program
        assert len(graphs.find(found.graph, ops.all_gather)) == 3  # tokens, ids, probs
        assert (
            len(graphs.find(found.graph, ops.permute_local)) == len(graphs.find(found.graph, ops.reduce_scatter)) == 1
        )
        assert not graphs.find(found.graph, ops.dispatch, ops.combine)
        assert [item.kind for item in found.inputs].count(InputKind.OFFSET) == 1

    golden.assert_needs(InsertDispatch, effect)


def test_effect_of_probs() -> None:
    """No expert output has to be kept for the gradient of the weights: unpermute gets none."""

    def effect() -> None:
        found = rewrite("insert-dispatch{probs=fc2}").program
        assert len(graphs.find(found.graph, ops.dispatch)) == 2
        (unpermute,) = graphs.find(found.graph, ops.unpermute)
        assert len(unpermute.args) == 4 and not unpermute.kwargs

    golden.assert_needs(InsertDispatch, effect)


@pytest.mark.parametrize("backend", ["alltoall", "allgather"])
def test_one_host_read_and_one_size_per_layer(backend: str) -> None:
    plan = Plan(dp=2, ep=2)
    found = golden.rewrite(BEFORE, f"insert-dispatch{{backend={backend}}}", plan, golden.Stack())
    assert len(graphs.find(found.program.graph, ops.sizes_to_host)) == 3
    symbols = {
        str(symbol)
        for node in found.program.graph.nodes
        if node.op == "call_function"
        for size in graphs.symbolic_sizes(meta.value(node))
        for symbol in size.node.expr.free_symbols
    }
    assert len(symbols) == 3


def test_nothing_to_do_without_expert_parallelism() -> None:
    found = rewrite("insert-dispatch", Plan(dp=2, ep=1))
    assert found.rewrites == 0 and found.before == found.after


def test_a_layer_that_cannot_move_its_probs_keeps_them_at_combine() -> None:
    """Rows that do not come straight from a linear: the reason is told, the result stays right."""

    class Scaled(golden.Block):
        def forward(self, x):  # type: ignore[no-untyped-def]
            probs, ids = self.gate(x).softmax(-1).topk(1, dim=-1)
            rows, counts, row_map = ops.permute(x, ids, golden.EXPERTS)
            rows = ops.grouped_linear(rows, counts, self.w1).tanh()
            return ops.unpermute(rows, row_map, x.shape[0], 1, probs).sum()

    found = golden.rewrite(BEFORE, "insert-dispatch{probs=fc2}", model=Scaled())
    assert len(graphs.find(found.program.graph, ops.dispatch)) == 1
    (unpermute,) = graphs.find(found.program.graph, ops.unpermute)
    assert len(unpermute.args) == 5


def test_rows_without_an_expert_are_refused() -> None:
    class Lazy(golden.Block):
        def forward(self, x):  # type: ignore[no-untyped-def]
            probs, ids = self.gate(x).softmax(-1).topk(1, dim=-1)
            rows, counts, row_map = ops.permute(x, ids, golden.EXPERTS)
            kept = ops.grouped_linear(rows, counts, self.w1).sum() * 0
            return ops.unpermute(rows.tanh(), row_map, x.shape[0], 1, probs).sum() + kept

    with pytest.raises(PassError, match=r"no expert computed; give the layer expert weights or use ep=1"):
        golden.rewrite(BEFORE, "insert-dispatch", model=Lazy())


def test_a_second_run_is_refused() -> None:
    with pytest.raises(PassError, match="'insert-dispatch' would run twice"):
        golden.run(rewrite("insert-dispatch").program, "insert-dispatch")
