"""All ranks in one process:

the collectives mean what they say, and whatever would hang or give garbage is named.
"""

from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from moecompile import ops
from moecompile.errors import VerifyError
from moecompile.mesh import Mesh
from moecompile.plan import Plan
from moecompile.runtime.simulator import simulate
from tests.support.hand_graphs import Builder, moe_graph, moe_inputs, plain_moe

TWO = Mesh(Plan(dp=2, ep=2))
FOUR = Mesh(Plan(dp=4, ep=2))


def one_op(op: Any, *constants: Any) -> GraphModule:
    build = Builder()
    return build.finish(build.call(op, build.input("x"), *constants))


def test_each_collective_on_two_groups_of_an_axis() -> None:
    x = [torch.arange(4.0) + 10 * rank for rank in range(4)]
    inputs = [[item] for item in x]

    def run(op: Any, *constants: Any) -> list[torch.Tensor]:
        return [out for (out,) in simulate(one_op(op, *constants), inputs, FOUR)]

    # edp groups are (0, 2) and (1, 3), ep groups (0, 1) and (2, 3).
    sums = run(ops.all_reduce, "sum", "edp")
    assert [out.tolist() for out in sums] == [(x[0] + x[2]).tolist(), (x[1] + x[3]).tolist()] * 2
    assert [out.tolist() for out in run(ops.all_reduce, "max", "world")] == [x[3].tolist()] * 4
    assert run(ops.all_gather, 2, "ep")[3].tolist() == torch.cat([x[2], x[3]]).tolist()
    assert run(ops.reduce_scatter, 2, "ep")[1].tolist() == (x[0] + x[1])[2:].tolist()
    assert run(ops.reduce_scatter, 2, "ep")[2].tolist() == (x[2] + x[3])[:2].tolist()
    counts = [torch.arange(4) + 10 * rank for rank in range(4)]
    received = simulate(one_op(ops.exchange_counts, 2, "ep"), [[item] for item in counts], FOUR)
    assert received[1][0].tolist() == [[2, 3], [12, 13]]
    assert received[2][0].tolist() == [[20, 21], [30, 31]]


def test_rows_are_gathered_and_their_sums_scattered() -> None:
    """Each rank with a number of its own; a rank that says another number is named."""
    build = Builder()
    rows, sizes, parts, own = (build.input(name) for name in ("rows", "sizes", "parts", "own"))
    every = build.call(ops.all_gather_rows, rows, sizes, 3, "ep")
    graph = build.finish(every, build.call(ops.reduce_scatter_rows, parts, sizes, own, "ep"))
    x, wide = [torch.arange(float(1 + rank % 2)) for rank in range(4)], torch.arange(3.0)
    inputs = [[x[rank], torch.tensor([1, 2]), wide + rank, 1 + rank % 2] for rank in range(4)]
    found = simulate(graph, inputs, FOUR)
    assert [item[0].tolist() for item in found] == [[0.0, 0.0, 1.0]] * 4
    assert [item[1].tolist() for item in found] == [[1.0], [3.0, 5.0], [5.0], [7.0, 9.0]]
    inputs[1][1] = torch.tensor([2, 1])
    with pytest.raises(VerifyError, match="gather the counts of this very routing first"):
        simulate(graph, inputs, FOUR)


def test_sums_are_taken_in_rank_order() -> None:
    x = [1e16, 1.0, -1e16, 1.0]
    outs = simulate(one_op(ops.all_reduce, "sum", "world"), [[torch.tensor(item).double()] for item in x], FOUR)
    assert [out.item() for (out,) in outs] == [((x[0] + x[1]) + x[2]) + x[3]] * 4


@pytest.mark.parametrize("mesh", [TWO, FOUR], ids=["dp2ep2", "dp4ep2"])
def test_an_expert_parallel_layer_equals_one_process(mesh: Mesh) -> None:
    inputs = [moe_inputs(rank, num_experts=4, ep=2) for rank in range(mesh.world_size)]
    weight = torch.cat([inputs[0][3], inputs[1][3]])
    expected = [plain_moe(x, ids, probs, weight) for x, ids, probs, _ in inputs]
    outs = simulate(moe_graph(4, ep=2), inputs, mesh)
    for (y, total), wanted in zip(outs, expected, strict=True):
        torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(total, sum(item.square().sum() for item in expected), rtol=1e-12, atol=0.0)


def test_a_rank_without_tokens_takes_part() -> None:
    inputs = [moe_inputs(0, 4, 2), moe_inputs(1, 4, 2, tokens=6)]
    inputs[1][:3] = [item[:0] for item in inputs[1][:3]]
    weight = torch.cat([inputs[0][3], inputs[1][3]])
    (first, _), (second, _) = simulate(moe_graph(4, ep=2), inputs, TWO)
    torch.testing.assert_close(first, plain_moe(*inputs[0][:3], weight), rtol=1e-12, atol=1e-12)
    assert second.shape == (0, 4)


def test_autograd_runs_across_the_ranks() -> None:
    inputs = [moe_inputs(rank, 4, 2) for rank in range(2)]
    x0 = inputs[0][0].requires_grad_()
    weights = [item[3].requires_grad_() for item in inputs]
    outs = simulate(moe_graph(4, ep=2), inputs, TWO)
    loss = sum(y.square().sum() for y, _ in outs)
    grads = torch.autograd.grad(loss, [x0, *weights])

    weight = torch.cat([item.detach() for item in weights]).requires_grad_()
    plain = sum(plain_moe(x, ids, probs, weight).square().sum() for x, ids, probs, _ in inputs)
    wanted_x, wanted_weight = torch.autograd.grad(plain, [x0, weight])
    torch.testing.assert_close(grads[0], wanted_x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat(grads[1:]), wanted_weight, rtol=1e-12, atol=1e-12)
    assert wanted_weight[:3].abs().sum() > 0


def test_trace_sees_every_node_of_every_rank() -> None:
    seen: list[tuple[int, str]] = []

    def trace(rank: int, node: Node, value: Any) -> None:
        seen.append((rank, node.name))

    graph = moe_graph(4, ep=2)
    simulate(graph, [moe_inputs(rank, 4, 2) for rank in range(2)], TWO, trace=trace)
    names = [node.name for node in graph.graph.nodes if node.op != "output"]
    assert [name for rank, name in seen if rank == 0] == names
    assert [name for rank, name in seen if rank == 1] == names


# ---- what would hang ---------------------------------------------------------------------------------------


def moe_inputs_of_two() -> list[list[torch.Tensor]]:
    return [moe_inputs(rank, 4, 2) for rank in range(2)]


def without(graph: GraphModule, name: str) -> GraphModule:
    """The graph with one collective taken out, its input handed on."""
    node = next(node for node in graph.graph.nodes if node.name == name)
    node.replace_all_uses_with(node.args[0])
    graph.graph.erase_node(node)
    graph.recompile()
    return graph


def test_a_collective_missing_on_one_rank_is_a_deadlock_that_names_both() -> None:
    graphs = [moe_graph(4, 2), without(moe_graph(4, 2), "all_reduce")]
    with pytest.raises(VerifyError) as caught:
        simulate(graphs, moe_inputs_of_two(), TWO)
    said = str(caught.value)
    assert "deadlock" in said
    assert "rank 0 at all_reduce in layers.0.mlp: moe::all_reduce sum of float64[] on axis world, ranks (0, 1)" in said
    assert "waits for rank 1" in said
    assert "rank 1 has finished" in said


def test_different_ops_of_one_group_do_not_fit() -> None:
    graphs = [one_op(ops.all_reduce, "sum", "ep"), one_op(ops.all_gather, 2, "ep")]
    with pytest.raises(VerifyError, match=r"do not fit: rank 0 at all_reduce: .*; rank 1 at all_gather: "):
        simulate(graphs, [[torch.ones(2)], [torch.ones(2)]], TWO)


@pytest.mark.parametrize(
    ("constants", "x"),
    [
        (("max", "ep"), torch.ones(2)),
        (("sum", "dp"), torch.ones(2)),  # the same ranks, but another process group
        (("sum", "ep"), torch.ones(2, dtype=torch.float64)),
        (("sum", "ep"), torch.ones(3)),
    ],
    ids=["reduction", "axis", "dtype", "shape"],
)
def test_one_rank_differs(constants: tuple[str, str], x: torch.Tensor) -> None:
    graphs = [one_op(ops.all_reduce, "sum", "ep"), one_op(ops.all_reduce, *constants)]
    with pytest.raises(VerifyError, match="do not fit"):
        simulate(graphs, [[torch.ones(2)], [x]], TWO)


def test_crossed_groups_deadlock() -> None:
    # A ring: 0 waits for 1 on ep, 1 for 3 on edp, 3 for 2 on ep, 2 for 0 on edp.
    def two(first: str, second: str) -> GraphModule:
        build = Builder()
        x = build.call(ops.all_reduce, build.input("x"), "sum", first)
        return build.finish(build.call(ops.all_reduce, x, "sum", second))

    ep_first, edp_first = two("ep", "edp"), two("edp", "ep")
    graphs = [ep_first, edp_first, edp_first, ep_first]
    with pytest.raises(VerifyError, match=r"deadlock.*rank 2 at all_reduce: .* waits for rank 0"):
        simulate(graphs, [[torch.ones(1)]] * 4, FOUR)


def test_sizes_that_disagree_are_found_on_both_sides() -> None:
    build = Builder()
    rows, send, recv = map(build.input, ("rows", "send", "recv"))
    dispatch = build.call(ops.dispatch, rows, send, recv, 3, "ep")
    graph = build.finish(dispatch)
    right = [[torch.ones(3, 2), torch.tensor([1, 2]), torch.tensor([1, 2])] for _ in range(2)]
    right[1][1:] = [torch.tensor([2, 1]), torch.tensor([2, 1])]
    assert simulate(graph, right, TWO)[0][0].shape == (3, 2)
    right[1][2] = torch.tensor([1, 2])
    with pytest.raises(VerifyError, match=r"rank 0 sends 2 rows at dispatch to rank 1, which expects 1 at dispatch"):
        simulate(graph, right, TWO)
    right[1][2] = torch.tensor([2, 2])
    with pytest.raises(VerifyError, match=r"recv \[2, 2\] to 3"):
        simulate(graph, right, TWO)


def test_a_graph_for_another_group_size_is_refused() -> None:
    with pytest.raises(VerifyError, match="written for a group of 4, but its group has 2 ranks"):
        simulate(one_op(ops.all_gather, 4, "ep"), [[torch.ones(1)]] * 2, TWO)


def test_wrong_numbers_of_graphs_and_inputs_are_refused() -> None:
    graph = one_op(ops.all_gather, 2, "ep")
    with pytest.raises(VerifyError, match="2 ranks, but 2 graphs and 1 lists of inputs"):
        simulate(graph, [[torch.ones(1)]], TWO)
    with pytest.raises(VerifyError, match="rank 1 got 2 inputs, but its graph has 1"):
        simulate(graph, [[torch.ones(1)], [torch.ones(1), torch.ones(1)]], TWO)


def test_an_error_in_a_node_names_rank_and_node() -> None:
    build = Builder("layers.3.mlp")
    graph = build.finish(build.call(torch.ops.aten.mm.default, build.input("x"), build.input("y")))
    inputs = [[torch.ones(2, 2), torch.ones(2, 2)], [torch.ones(2, 2), torch.ones(3, 2)]]
    with pytest.raises(RuntimeError) as caught:
        simulate(graph, inputs, TWO)
    assert caught.value.__notes__ == ["while simulating rank 1, at mm in layers.3.mlp"]
