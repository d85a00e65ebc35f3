"""Tracing through the ops with fake tensors: graphs of ops only, one run-time size per layer, no guard on it."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

from moecompile import ops

T, K, H, F, E, EP = 6, 2, 8, 4, 8, 4


def expert_parallel(x, ids, probs, w1, b1, w2):  # type: ignore[no-untyped-def]
    rows, counts, row_map = ops.permute(x, ids, E)
    send, recv, tokens = ops.sizes_to_host(counts, ops.exchange_counts(counts, EP, "ep"))
    rows = ops.dispatch(rows, send, recv, recv.sum().item(), "ep")
    h = torch.nn.functional.silu(ops.grouped_linear(rows, tokens, w1, b1))
    rows = ops.combine(ops.grouped_linear(h, tokens, w2), recv, send, T * K, "ep")
    return ops.unpermute(rows, row_map, T, K, probs)


def probabilities_travel(x, ids, probs, w1, b1, w2):  # type: ignore[no-untyped-def]
    """The probability of each row goes with it and is applied before the second expert linear."""
    rows, counts, row_map = ops.permute(x, ids, E)
    send, recv, tokens = ops.sizes_to_host(counts, ops.exchange_counts(counts, EP, "ep"))
    n = recv.sum().item()
    rows = ops.dispatch(rows, send, recv, n, "ep")
    weight = ops.dispatch(ops.gather_rows(probs.reshape(-1, 1), row_map, 1), send, recv, n, "ep")
    h = torch.nn.functional.silu(ops.grouped_linear(rows, tokens, w1, b1)) * weight
    rows = ops.combine(ops.grouped_linear(h, tokens, w2), recv, send, T * K, "ep")
    return ops.unpermute(rows, row_map, T, K)


def gathered(x, ids, probs, w1, b1, w2):  # type: ignore[no-untyped-def]
    """The allgather form: every rank sees all tokens and keeps the rows of its own experts."""
    first = torch.zeros((), dtype=torch.int64)
    all_x, all_ids, all_probs = (ops.all_gather(t, EP, "ep") for t in (x, ids, probs))
    n = ((all_ids >= first) & (all_ids < first + E // EP)).sum().item()
    rows, counts, row_map = ops.permute_local(all_x, all_ids, first, E // EP, n)
    h = torch.nn.functional.silu(ops.grouped_linear(rows, counts, w1, b1))
    y = ops.unpermute(ops.grouped_linear(h, counts, w2), row_map, EP * T, K, all_probs)
    return ops.reduce_scatter(y, EP, "ep")


def traced(layer):  # type: ignore[no-untyped-def]
    def step(x, ids, probs, w1, b1, w2):  # type: ignore[no-untyped-def]
        loss = layer(x, ids, probs, w1, b1, w2).square().sum()
        return loss, *torch.autograd.grad(loss, [x, probs, w1, b1, w2])

    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env, static_shapes=True):
        shapes = [(T, H), (T, K), (T, K), (E // EP, F, H), (E // EP, F), (E // EP, H, F)]
        args = [torch.empty(*shape, requires_grad=i != 1) for i, shape in enumerate(shapes)]
        args[1] = torch.zeros(T, K, dtype=torch.int64)
        graph = make_fx(step)(*args)
    return graph, shape_env, args


@pytest.mark.parametrize("layer", [expert_parallel, probabilities_travel, gathered])
def test_forward_and_gradients_trace_with_one_run_time_size(layer) -> None:  # type: ignore[no-untyped-def]
    graph, shape_env, args = traced(layer)
    symbols = {s for n in graph.graph.nodes for s in free_unbacked_symbols(n.meta.get("val"))}
    assert len(symbols) == 1
    assert not shape_env.guards
    values = [n.meta["val"] for n in graph.graph.output_node().args[0]]
    wanted = [torch.Size([]), *(a.shape for a in args if a.requires_grad)]
    assert [v.shape for v in values] == wanted and not any(free_unbacked_symbols(v) for v in values)
    reads = [n for n in graph.graph.nodes if n.target is torch.ops.aten._local_scalar_dense.default]
    assert len(reads) == 1


def test_the_graph_holds_ops_and_not_their_bodies() -> None:
    graph, _, _ = traced(expert_parallel)
    names = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
    counted = {name: names.count(name) for name in names if name.startswith("moe.")}
    assert counted == {
        "moe.permute.default": 1,
        "moe.exchange_counts.default": 1,
        "moe.sizes_to_host.default": 1,
        "moe.dispatch.default": 2,
        "moe.combine.default": 2,
        "moe.grouped_linear.default": 4,
        "moe.grouped_linear_wgrad.default": 2,
        "moe.grouped_sum.default": 1,
        "moe.unpermute.default": 2,
        "moe.unpermute_backward.default": 1,
    }
    assert not any(word in name for name in names for word in ("sort", "scatter", "index", "mm"))


def test_each_gradient_collective_is_the_transpose_of_its_forward_twin() -> None:
    graph, _, _ = traced(expert_parallel)
    exchanges = [n for n in graph.graph.nodes if n.target in (ops.dispatch, ops.combine)]
    (out, back, back_grad, out_grad) = exchanges
    assert [n.target for n in exchanges] == [ops.dispatch, ops.combine, ops.dispatch, ops.combine]
    for forward, backward in ((out, out_grad), (back, back_grad)):
        assert backward.args[1:3] == (forward.args[2], forward.args[1])
    assert all(n.args[ops.AXIS_ARGUMENT[n.target]] == "ep" for n in exchanges)


def test_shape_errors_are_raised_while_tracing() -> None:
    with FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True):
        counts = torch.zeros(4, dtype=torch.int64)
        with pytest.raises(ValueError, match="cut both for the same experts"):
            ops.grouped_linear(torch.empty(3, H), counts, torch.empty(5, F, H))
        with pytest.raises(ValueError, match="choose ep from the divisors"):
            ops.exchange_counts(counts, 3, "ep")
        with pytest.raises(ValueError, match="one probability per token and choice"):
            ops.unpermute(torch.empty(3, H), torch.zeros(3, dtype=torch.int64), 3, 1, torch.empty(3, 2))
