"""Properties of the routing ops over random routings, sizes and idle experts."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moecompile.runtime.cpu_kernels  # noqa: F401  registers the kernels
from moecompile import ops

Case = tuple[int, torch.Tensor]


@st.composite
def routings(draw: st.DrawFn) -> Case:
    """Number of experts and ids [T, K]; experts may repeat within a token and may be idle."""
    experts = draw(st.integers(1, 6))
    tokens, top_k = draw(st.integers(0, 8)), draw(st.integers(1, 4))
    expert = st.integers(0, experts - 1)
    ids = draw(st.lists(expert, min_size=tokens * top_k, max_size=tokens * top_k))
    return experts, torch.tensor(ids, dtype=torch.int64).view(tokens, top_k)


def integers(*shape: int) -> torch.Tensor:
    """Distinct small integers: sums of them are exact in any order."""
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel(), dtype=torch.float64).view(shape)


fast = settings(max_examples=100, deadline=None)


@fast
@given(routings())
def test_rows_are_a_permutation_in_expert_order(case: Case) -> None:
    experts, ids = case
    x = integers(ids.shape[0], 3)
    rows, counts, row_map = ops.permute(x, ids, experts)
    assert int(counts.sum()) == ids.numel()
    assert sorted(row_map.tolist()) == list(range(ids.numel()))
    in_order = ids.reshape(-1)[row_map]
    assert torch.equal(in_order, torch.arange(experts).repeat_interleave(counts))
    for expert in range(experts):  # stable: tokens stay in order within an expert
        assert (row_map[in_order == expert].diff() > 0).all()
    assert torch.equal(rows, x[row_map // ids.shape[1]])


@fast
@given(routings())
def test_unpermute_undoes_permute(case: Case) -> None:
    experts, ids = case
    tokens, top_k = ids.shape
    x = integers(tokens, 3)
    rows, _, row_map = ops.permute(x, ids, experts)
    assert torch.equal(ops.unpermute(rows, row_map, tokens, top_k), top_k * x)
    # Probabilities that add up to one, exactly representable: one half, one quarter, ..., the last one twice.
    probs = torch.tensor([0.5 ** min(k + 1, top_k - 1) for k in range(top_k)], dtype=torch.float64)
    assert float(probs.sum()) == 1.0
    assert torch.equal(ops.unpermute(rows, row_map, tokens, top_k, probs.expand(tokens, top_k)), x)
    assert torch.equal(ops.gather_rows(x, row_map, top_k), rows)


@fast
@given(routings(), st.data())
def test_parts_of_the_experts_add_up(case: Case, data: st.DataObject) -> None:
    experts, ids = case
    tokens, top_k = ids.shape
    x, probs = integers(tokens, 3), integers(tokens, top_k)
    rows, counts, row_map = ops.permute(x, ids, experts)
    cut = data.draw(st.integers(0, experts))
    total = torch.zeros_like(x)
    for first, number in ((0, cut), (cut, experts - cut)):
        n = int(counts[first : first + number].sum())
        part, part_counts, part_map = ops.permute_local(x, ids, torch.tensor(first), number, n)
        assert torch.equal(part_counts, counts[first : first + number])
        y = ops.unpermute(part, part_map, tokens, top_k, probs)
        assert torch.equal(y, ops.cpu.unpermute(part, part_map, tokens, top_k, probs))
        total += y
    assert torch.equal(total, ops.unpermute(rows, row_map, tokens, top_k, probs))


@fast
@given(routings(), st.data())
def test_unpermute_ignores_the_order_of_rows_and_padding(case: Case, data: st.DataObject) -> None:
    experts, ids = case
    tokens, top_k = ids.shape
    x, probs = integers(tokens, 3), integers(tokens, top_k)
    rows, _, row_map = ops.permute(x, ids, experts)
    expected = ops.unpermute(rows, row_map, tokens, top_k, probs)
    padded_rows = torch.cat([rows, torch.full((2, 3), torch.nan, dtype=torch.float64)])
    padded_map = torch.cat([row_map, torch.tensor([-1, -1])])
    order = torch.tensor(data.draw(st.permutations(range(padded_map.shape[0]))))
    for unpermute in (ops.unpermute, ops.cpu.unpermute):
        got = unpermute(padded_rows[order], padded_map[order], tokens, top_k, probs)
        assert torch.equal(got, expected)


@fast
@given(routings())
def test_gradient_is_the_adjoint(case: Case) -> None:
    """<y, unpermute(rows)> = <unpermute_backward(y), rows>, exactly on integers."""
    experts, ids = case
    tokens, top_k = ids.shape
    x, probs, y = integers(tokens, 3), integers(tokens, top_k), integers(tokens, 3) - 7
    rows, _, row_map = ops.permute(x, ids, experts)
    out = ops.unpermute(rows, row_map, tokens, top_k, probs)
    for backward in (ops.unpermute_backward, ops.cpu.unpermute_backward):
        grad_rows, grad_probs = backward(y, rows, row_map, probs)
        assert (y * out).sum() == (grad_rows * rows).sum() == (grad_probs * probs).sum()


@fast
@given(routings(), st.integers(1, 3))
def test_source_major_counts_equal_expert_major_rows(case: Case, sources: int) -> None:
    """The same rows, grouped by [source, expert] or by expert, give the same linear layer and gradients."""
    experts, ids = case
    top_k = ids.shape[1]
    parts = [ops.permute(integers(ids.shape[0], 2) + s, ids, experts) for s in range(sources)]
    source_major = torch.cat([rows for rows, _, _ in parts])
    counts = torch.stack([c for _, c, _ in parts])
    everything = torch.cat([integers(ids.shape[0], 2) + s for s in range(sources)])
    by_expert, per_expert, row_map = ops.permute(everything, ids.repeat(sources, 1), experts)
    weight = integers(experts, 2, 2)
    choice = torch.cat([m + s * ids.numel() for s, (_, _, m) in enumerate(parts)])
    for linear, wgrad in (
        (ops.grouped_linear, ops.grouped_linear_wgrad),
        (ops.cpu.grouped_linear, ops.cpu.grouped_linear_wgrad),
    ):
        ours = linear(source_major, counts, weight)
        theirs = linear(by_expert, per_expert, weight)
        size = everything.shape[0], top_k
        assert torch.equal(ops.unpermute(ours, choice, *size), ops.unpermute(theirs, row_map, *size))
        assert torch.equal(wgrad(ours, source_major, counts), wgrad(theirs, by_expert, per_expert))
