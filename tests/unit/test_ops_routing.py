"""permute, permute_local, gather_rows, unpermute: meaning, gradients, empty sizes, padding, errors."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

from moecompile import ops
from tests.support.ops_oracle import assert_same, poisoned_memory, rand, routing

T, K, H, E = 7, 2, 4, 5


def permuted(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    x, ids = rand(T, H, dtype=dtype), routing(T, K, E)
    return (x, ids, *ops.permute(x, ids, E))


def test_permute_sorts_rows_by_expert_and_keeps_token_order() -> None:
    x, ids, rows, counts, row_map = permuted()
    expected = [(e, t, k) for e in range(E) for t in range(T) for k in range(K) if ids[t, k] == e]
    assert row_map.tolist() == [t * K + k for _, t, k in expected]
    assert counts.tolist() == [sum(e == n for e, _, _ in expected) for n in range(E)]
    assert_same(rows, torch.stack([x[t] for _, t, _ in expected]))
    assert counts.dtype == row_map.dtype == torch.int64


def test_unpermute_is_the_weighted_sum_over_choices() -> None:
    _, _, rows, _, row_map = permuted()
    probs = rand(T, K, seed=1)
    expected = torch.zeros(T, H, dtype=torch.float64)
    for r, choice in enumerate(row_map.tolist()):
        expected[choice // K] += probs.reshape(-1)[choice] * rows[r]
    assert_same(ops.unpermute(rows, row_map, T, K, probs), expected, 1e-15)
    assert_same(
        ops.unpermute(rows, row_map, T, K, torch.ones(T, K, dtype=torch.float64)),
        ops.unpermute(rows, row_map, T, K),
    )


def test_unpermute_adds_in_order_of_k_whatever_the_order_of_rows() -> None:
    """Floating-point sums depend on order; the order must be that of the choices and not of the experts."""
    tokens, top_k = 64, 6
    ids = routing(tokens, top_k, 8)
    x = rand(tokens * top_k, H, dtype=torch.float32, seed=2)
    results = []
    for flip in (False, True):
        _, _, row_map = ops.permute(torch.zeros(tokens, 1), 7 - ids if flip else ids, 8)
        results.append(ops.unpermute(x[row_map], row_map, tokens, top_k))
    assert torch.equal(results[0], results[1])
    total = torch.zeros(tokens, H)
    for k in range(top_k):
        total += x.view(tokens, top_k, H)[:, k]
    assert torch.equal(results[0], total)


@pytest.mark.parametrize("first", [0, 2, 3])
def test_permute_local_keeps_the_rows_of_local_experts(first: int) -> None:
    x, ids, rows, counts, row_map = permuted()
    num_local = 2
    here = (ids >= first) & (ids < first + num_local)
    local = ops.permute_local(x, ids, torch.tensor(first), num_local, int(here.sum()))
    start, stop = int(counts[:first].sum()), int(counts[: first + num_local].sum())
    assert_same(local[0], rows[start:stop])
    assert torch.equal(local[1], counts[first : first + num_local])
    assert torch.equal(local[2], row_map[start:stop])
    masked = torch.where(here, rand(T, K, seed=3), 0)
    whole = ops.unpermute(rows, row_map, T, K, masked)
    assert_same(ops.unpermute(local[0], local[2], T, K, rand(T, K, seed=3)), whole, 1e-15)


def test_the_parts_of_all_ranks_add_up_to_the_whole() -> None:
    x, ids, rows, _, row_map = permuted()
    probs = rand(T, K, seed=4)
    total = torch.zeros(T, H, dtype=torch.float64)
    for first, num_local in ((0, 2), (2, 2), (4, 1)):
        n = int(((ids >= first) & (ids < first + num_local)).sum())
        part, _, part_map = ops.permute_local(x, ids, torch.tensor(first), num_local, n)
        total += ops.unpermute(part, part_map, T, K, probs)
    assert_same(total, ops.unpermute(rows, row_map, T, K, probs), 1e-15)


def test_padding_rows_count_nothing_and_get_no_gradient() -> None:
    _, _, rows, _, row_map = permuted()
    probs = rand(T, K, seed=5)
    whole = ops.unpermute(rows, row_map, T, K, probs)
    padded_map = torch.cat([row_map[:3], torch.tensor([-1, -1]), row_map[3:], torch.tensor([-1])])
    padded = torch.full((padded_map.shape[0], H), torch.nan, dtype=torch.float64)
    padded[padded_map >= 0] = rows
    assert_same(ops.unpermute(padded, padded_map, T, K, probs), whole)
    grad = rand(T, H, seed=6)
    grad_rows, grad_probs = ops.unpermute_backward(grad, padded.nan_to_num(7.0), padded_map, probs)
    expected_rows, expected_probs = ops.unpermute_backward(grad, rows, row_map, probs)
    assert_same(grad_rows[padded_map >= 0], expected_rows)
    assert (grad_rows[padded_map < 0] == 0).all()
    assert_same(grad_probs, expected_probs)
    gathered = ops.gather_rows(grad, padded_map, K)
    assert (gathered[padded_map < 0] == 0).all()
    assert_same(gathered[padded_map >= 0], grad[row_map // K])


def test_absent_choices_do_not_see_the_row_read_in_their_place() -> None:
    rows = torch.tensor([[torch.inf], [2.0]], dtype=torch.float64)
    out = ops.unpermute(rows, torch.tensor([1, 2]), 2, 2, torch.ones(2, 2, dtype=torch.float64))
    assert out.tolist() == [[torch.inf], [2.0]]
    assert ops.unpermute(rows[1:], torch.tensor([3]), 2, 2).tolist() == [[0.0], [2.0]]


def test_gradients() -> None:
    x, ids, rows, _, row_map = permuted()
    probs = rand(T, K, seed=1, grad=True)
    x.requires_grad_()
    rows = rows.detach().requires_grad_()
    short, short_map = rows[:9].detach().requires_grad_(), row_map[:9]
    n = int((ids < 2).sum())
    cases = [
        (lambda x: ops.permute(x, ids, E)[0], (x,)),
        (lambda x: ops.permute_local(x, ids, torch.tensor(0), 2, n)[0], (x,)),
        (lambda x: ops.gather_rows(x, row_map, K), (x,)),
        (lambda r, p: ops.unpermute(r, row_map, T, K, p), (rows, probs)),
        (lambda r: ops.unpermute(r, row_map, T, K), (rows,)),
        (lambda r, p: ops.unpermute(r, short_map, T, K, p), (short, probs)),
    ]
    for function, inputs in cases:
        assert gradcheck(function, inputs)
        assert gradgradcheck(function, inputs)


def test_opcheck() -> None:
    x, ids, rows, _, row_map = permuted()
    x.requires_grad_()
    rows = rows.detach().requires_grad_()
    probs = rand(T, K, seed=1, grad=True)
    n = int((ids < 2).sum())
    opcheck(ops.permute, (x, ids, E))
    opcheck(ops.permute_local, (x, ids, torch.tensor(0), 2, n))
    opcheck(ops.gather_rows, (x, row_map, K))
    opcheck(ops.unpermute, (rows, row_map, T, K, probs))
    opcheck(ops.unpermute, (rows, row_map, T, K))
    opcheck(ops.unpermute_backward, (rand(T, H), rows, row_map, probs))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_tokens(dtype: torch.dtype) -> None:
    x = rand(0, H, dtype=dtype, grad=True)
    probs = rand(0, K, dtype=dtype, grad=True)
    ids = torch.zeros(0, K, dtype=torch.int64)
    rows, counts, row_map = ops.permute(x, ids, E)
    assert rows.shape == (0, H) and counts.tolist() == [0] * E and row_map.shape == (0,)
    y = ops.unpermute(rows, row_map, 0, K, probs)
    assert y.shape == (0, H) and y.dtype == dtype
    grads = torch.autograd.grad(y.sum(), (x, probs))
    assert [g.shape for g in grads] == [x.shape, probs.shape]


def test_tokens_but_no_local_rows() -> None:
    x, ids = rand(T, H, grad=True), torch.zeros(T, K, dtype=torch.int64)
    with poisoned_memory():
        rows, counts, row_map = ops.permute_local(x, ids, torch.tensor(3), 2, 0)
        y = ops.unpermute(rows, row_map, T, K, torch.ones(T, K, dtype=torch.float64))
        (grad,) = torch.autograd.grad(y.sum() + rows.sum(), x)
    assert counts.tolist() == [0, 0] and y.abs().sum() == 0 and grad.abs().sum() == 0


def test_low_precision_sums_in_float32_and_rounds_once() -> None:
    tokens, top_k = 32, 8
    ids, probs = routing(tokens, top_k, 16), torch.rand(tokens, top_k)
    x = rand(tokens, H, dtype=torch.bfloat16)
    rows, _, row_map = ops.permute(x, ids, 16)
    y = ops.unpermute(rows, row_map, tokens, top_k, probs)
    assert y.dtype == torch.bfloat16
    wide = ops.unpermute(rows.double(), row_map, tokens, top_k, probs.double())
    assert torch.equal(y, wide.float().to(torch.bfloat16))
    grad_rows, grad_probs = ops.unpermute_backward(y, rows, row_map, probs)
    assert grad_rows.dtype == torch.bfloat16 and grad_probs.dtype == torch.float32


def test_outputs_never_alias_inputs() -> None:
    x, ids = rand(3, H), torch.tensor([[0], [1], [2]])
    rows, _, row_map = ops.permute(x, ids, 3)
    before = x.clone()
    for out in (rows, ops.unpermute(rows, row_map, 3, 1), ops.gather_rows(x, row_map, 1)):
        out.zero_()
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        (lambda x, ids, m: ops.permute(x, ids, 3), "check num_experts against the router's width"),
        (lambda x, ids, m: ops.permute(x[:2], ids, E), "flatten batch and sequence of both"),
        (lambda x, ids, m: ops.permute(x, ids.int(), E), "convert it with .to"),
        (lambda x, ids, m: ops.permute(x[None], ids, E), "flatten the leading ones"),
        (lambda x, ids, m: ops.permute_local(x, ids, torch.tensor(0), 2, 0), "count the same topk_ids"),
        (lambda x, ids, m: ops.unpermute(x, m, T, K), "pass the row_map of the permute"),
        (lambda x, ids, m: ops.unpermute(x, m[:T] + 90, T, K), "pass the num_tokens and top_k"),
        (lambda x, ids, m: ops.unpermute(x, m[:T], T, K, x), "one probability per token and choice"),
        (lambda x, ids, m: ops.gather_rows(x, m.view(T, K), K), "pass the row_map that permute returned"),
    ],
)
def test_errors_say_what_to_do(call, advice: str) -> None:  # type: ignore[no-untyped-def]
    x, ids, _, _, row_map = permuted()
    with pytest.raises(ValueError, match=advice) as error:
        call(x, ids, row_map)
    assert str(error.value).startswith("moe::") and str(error.value).count("\n") == 0
