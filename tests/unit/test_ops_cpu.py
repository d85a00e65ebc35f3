"""The `moe_cpu::` kernels against the reference ops and against ATen, on every kind of input the ops take."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import moecompile.runtime.cpu_kernels  # noqa: F401  registers the kernels
from moecompile import ops
from moecompile.runtime import products
from tests.support.ops_oracle import assert_same, poisoned_memory, rand, routing

cpu = ops.cpu
silu = torch.nn.functional.silu
# Sums in another order, relative to the largest entry.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2**-7}
DTYPES = list(TOLERANCE)
E, IN, OUT = 4, 6, 8
COUNTS = {
    "all busy": [3, 1, 2, 4],
    "idle": [0, 6, 0, 1],
    "no rows": [0, 0, 0, 0],
    "sources": [[2, 0, 1, 0], [0, 0, 3, 0], [1, 0, 0, 2]],
}
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


@every_dtype
@pytest.mark.parametrize("case", COUNTS)
def test_experts(case: str, dtype: torch.dtype) -> None:
    counts = torch.tensor(COUNTS[case])
    n = int(counts.sum())
    rows, grad = rand(n, IN, dtype=dtype), rand(n, OUT, dtype=dtype, seed=1)
    weight, bias = rand(E, OUT, IN, dtype=dtype, seed=2), rand(E, OUT, dtype=dtype, seed=3)
    strided = weight.transpose(1, 2).contiguous().transpose(1, 2)
    expanded = grad[:, :1].expand(n, OUT)
    with poisoned_memory():
        pairs = [
            (cpu.grouped_linear, ops.grouped_linear, (rows, counts, weight, bias)),
            (cpu.grouped_linear, ops.grouped_linear, (rows, counts, weight)),
            (cpu.grouped_linear, ops.grouped_linear, (rows, counts, strided)),
            (cpu.grouped_linear, ops.grouped_linear, (grad, counts, weight.transpose(1, 2))),
            (cpu.grouped_linear_wgrad, ops.grouped_linear_wgrad, (grad, rows, counts)),
            (cpu.grouped_linear_wgrad, ops.grouped_linear_wgrad, (expanded, rows, counts)),
        ]
        for fast, reference, args in pairs:
            assert_same(fast(*args), reference(*args), TOLERANCE[dtype])
        idle = counts.reshape(-1, E).sum(0) == 0
        assert (cpu.grouped_linear_wgrad(grad, rows, counts)[idle] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("most", [1, 2, 128])
@pytest.mark.parametrize("case", COUNTS)
def test_grouped_mlp(case: str, most: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two products and a swiglu, with the gradients that autograd finds, in blocks of any number of rows."""
    monkeypatch.setattr("moecompile.runtime.grouped_mlp.BLOCK_ELEMENTS", most * IN)
    monkeypatch.setattr("moecompile.runtime.grouped_mlp.LEAST_ROWS", 1)
    counts = torch.tensor(COUNTS[case])
    n = int(counts.sum())
    leaves = rand(n, OUT, dtype=dtype), rand(E, 2 * IN, OUT, dtype=dtype, seed=1), rand(E, OUT, IN, dtype=dtype, seed=2)
    rows, w_in, w_out = (t.requires_grad_() for t in leaves)
    h = ops.grouped_linear(rows, counts, w_in)
    y = ops.grouped_linear(ops.swiglu(h), counts, w_out)
    grad = rand(n, OUT, dtype=dtype, seed=3)
    wanted = torch.autograd.grad(y, (rows, w_in, w_out), grad)
    halves = torch.stack(h.detach().chunk(2, 1))
    with torch.no_grad(), poisoned_memory():
        for first, last in ((w_in, w_out), (_strided(w_in), _strided(w_out))):
            found = cpu.grouped_mlp_backward(grad, rows, counts, first, last, halves)
            for fast, reference in zip(
                (*cpu.grouped_mlp(rows, counts, first, last), *found), (y.detach(), halves, *wanted), strict=True
            ):
                assert_same(fast, reference, TOLERANCE[dtype])
        idle = counts.reshape(-1, E).sum(0) == 0
        assert all((part[idle] == 0).all() for part in found[1:])


def _strided(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().transpose(1, 2).contiguous().transpose(1, 2)


def test_grouped_mlp_refuses_what_it_does_not_compute() -> None:
    rows, counts, w_in, w_out = rand(3, OUT), torch.tensor([1, 1, 1, 0]), rand(E, 2 * IN, OUT), rand(E, OUT, IN)
    with pytest.raises(ValueError, match="stack gate over up"):
        cpu.grouped_mlp(rows, counts, rand(E, IN, OUT), w_out)
    with pytest.raises(ValueError, match="grouped_linear and swiglu"):
        cpu.grouped_mlp(rows.bfloat16(), counts, w_in.bfloat16(), w_out.bfloat16())
    with pytest.raises(ValueError, match="pass the counts"):
        cpu.grouped_mlp(rows, torch.tensor([1, 1, 0, 0]), w_in, w_out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("most", [1, 64 * 130 * 2, 1 << 18])
@pytest.mark.parametrize(
    "shape", [(2, 3, 130, 8), (1, 1, 64, 5), (3, 2, 7, 4), (2, 5, 65, 1), (0, 2, 9, 4), (2, 2, 0, 4)]
)
def test_causal_attention(
    shape: tuple[int, ...], most: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that end in mid-sequence, one or several heads at a time, operands that lie in any order."""
    monkeypatch.setattr("moecompile.runtime.attention.BLOCK_ELEMENTS", most)
    batch, heads, length, width = shape
    lying = (shape, (batch, length, heads, width), (width, batch, heads, length))
    leaves = [
        rand(*sizes, dtype=dtype, seed=seed).permute(order).requires_grad_()
        for seed, (sizes, order) in enumerate(zip(lying, [(0, 1, 2, 3), (0, 2, 1, 3), (1, 2, 3, 0)], strict=True))
    ]
    seen = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, scale=0.7)
    grad = rand(*shape, dtype=dtype, seed=4)
    wanted = torch.autograd.grad(seen, leaves, grad)
    with torch.no_grad(), poisoned_memory():
        out, probs = cpu.causal_attention(*leaves, 0.7)
        found = cpu.causal_attention_backward(grad, *leaves, out, probs, 0.7)
    for fast, reference in zip((out, *found), (seen.detach(), *wanted), strict=True):
        assert_same(fast, reference, 10 * TOLERANCE[dtype])


def test_causal_attention_refuses_what_it_does_not_compute() -> None:
    query, fewer = rand(1, 2, 4, 3), rand(1, 1, 4, 3)
    with pytest.raises(ValueError, match="use scaled_dot_product_attention"):
        cpu.causal_attention(query, fewer, fewer, 1.0)
    with pytest.raises(ValueError, match="use scaled_dot_product_attention"):
        cpu.causal_attention(*[query.bfloat16()] * 3, 1.0)


def test_counts_that_do_not_fit_are_refused() -> None:
    rows, weight = rand(3, IN), rand(E, OUT, IN)
    with pytest.raises(ValueError, match="pass the counts"):
        cpu.grouped_linear(rows, torch.tensor([1, 1, 0, 0]), weight)
    with pytest.raises(ValueError, match="pass the counts"):
        cpu.grouped_linear_wgrad(rows, rows, torch.tensor([1, 1, 0, 0]))
    with pytest.raises(ValueError, match="pass the row_map"):
        cpu.unpermute(rows, torch.tensor([0, 1]), 3, 1)


def row_maps(tokens: int, top_k: int) -> dict[str, Tensor]:
    ids = routing(tokens, top_k, E)
    _, _, row_map = ops.permute(torch.zeros(tokens, 1), ids, E)
    padded = row_map.clone()
    padded[1::3] = -1
    return {
        "full": row_map,
        "short": row_map[::2].clone(),
        "one token missing": row_map[row_map // top_k != 2],
        "last missing": row_map[row_map < (tokens - 1) * top_k],
        "padded": padded,
        "empty": row_map[:0],
    }


@every_dtype
@pytest.mark.parametrize("name", row_maps(3, 2))
@pytest.mark.parametrize("top_k", [1, 3])
def test_unpermute(name: str, dtype: torch.dtype, top_k: int) -> None:
    tokens = 9
    row_map = row_maps(tokens, top_k)[name]
    rows, grad = rand(row_map.shape[0], IN, dtype=dtype), rand(tokens, IN, dtype=dtype, seed=1)
    with poisoned_memory():
        for probs in (None, rand(tokens, top_k, dtype=dtype, seed=2), rand(tokens, top_k, dtype=torch.float32)):
            args = (rows, row_map, tokens, top_k, probs)
            assert_same(cpu.unpermute(*args), ops.unpermute(*args), TOLERANCE[dtype])
            if probs is not None:
                fast = cpu.unpermute_backward(grad, rows, row_map, probs)
                for got, want in zip(fast, ops.unpermute_backward(grad, rows, row_map, probs), strict=True):
                    assert_same(got, want, TOLERANCE[dtype])


def test_unpermute_without_probs_adds_in_order_of_k() -> None:
    tokens, top_k = 33, 7
    _, _, row_map = ops.permute(torch.zeros(tokens, 1), routing(tokens, top_k, 8), 8)
    rows = rand(tokens * top_k, IN, dtype=torch.float32)
    assert torch.equal(cpu.unpermute(rows, row_map, tokens, top_k), ops.unpermute(rows, row_map, tokens, top_k))


def test_no_tokens() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert cpu.unpermute(rand(0, IN), none, 0, 2, rand(0, 2)).shape == (0, IN)
    grads = cpu.unpermute_backward(rand(0, IN), rand(0, IN), none, rand(0, 2))
    assert [g.shape for g in grads] == [(0, IN), (0, 2)]


SHAPES: list[tuple[int, ...]] = [(5, 6), (0, 6), (2, 3, 4), (700, 512)]


@every_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu_is_atens_bit_by_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    h, grad = rand(*shape, dtype=dtype), rand(*shape[:-1], shape[-1] // 2, dtype=dtype, seed=1)
    gate, up = (t.clone().requires_grad_() for t in h.chunk(2, -1))
    expected = silu(gate) * up
    wanted = torch.autograd.grad(expected, (gate, up), grad)
    with poisoned_memory():
        assert torch.equal(cpu.swiglu(h), expected)
        assert torch.equal(cpu.silu_mul(gate.detach(), up.detach()), expected)
        assert torch.equal(cpu.swiglu_backward(grad, h), torch.cat(wanted, -1))
        for got, want in zip(cpu.silu_mul_backward(grad, gate.detach(), up.detach()), wanted, strict=True):
            assert torch.equal(got, want)


@every_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = rand(*shape, dtype=dtype, grad=True), rand(shape[-1], dtype=dtype, seed=1, grad=True)
    grad = rand(*shape, dtype=dtype, seed=2)
    with poisoned_memory():
        y, rstd = cpu.rms_norm(x.detach(), weight.detach(), 1e-5)
        grads = cpu.rms_norm_backward(grad, x.detach(), weight.detach(), rstd)
    expected = torch.nn.functional.rms_norm(x, shape[-1:], weight, 1e-5)
    wanted = torch.autograd.grad(expected, (x, weight), grad)
    # bf16: ATen rounds the normalised value and the partial products, here only results are rounded.
    tolerance = 4 * TOLERANCE[dtype]
    assert_same(y, expected.detach(), tolerance)
    for got, want in zip(grads, wanted, strict=True):
        assert_same(got, want, tolerance)


def test_rms_norm_in_bf16_is_nearer_to_the_truth_than_aten() -> None:
    x, weight, grad = (rand(*s, dtype=torch.bfloat16, seed=i) for i, s in enumerate([(64, 32), (32,), (64, 32)]))
    exact_inputs = [t.double().requires_grad_() for t in (x, weight)]
    exact = torch.nn.functional.rms_norm(exact_inputs[0], (32,), exact_inputs[1], 1e-5)
    truth = torch.autograd.grad(exact, exact_inputs, grad.double())
    _, rstd = cpu.rms_norm(x, weight, 1e-5)
    inputs = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    atens = torch.autograd.grad(torch.nn.functional.rms_norm(inputs[0], (32,), inputs[1], 1e-5), inputs, grad)
    for ours, aten, want in zip(cpu.rms_norm_backward(grad, x, weight, rstd), atens, truth, strict=True):
        assert (ours.double() - want).norm() <= (aten.double() - want).norm()


def test_strided_inputs() -> None:
    """Only close: where strides are not dense ATen's silu takes another path, one unit in the last place apart."""
    wide = rand(4, 5, 12)
    h, x, g = wide[:, ::2], wide[..., ::2], rand(5, 4, 6, seed=1).transpose(0, 1)
    half, weight = rand(4, 3, 6), rand(6)
    rstd = cpu.rms_norm(x, weight, 1e-6)[1]
    for op, args in (
        (cpu.swiglu, (h,)),
        (cpu.swiglu_backward, (half, h)),
        (cpu.silu_mul, (x, g)),
        (cpu.silu_mul_backward, (g, x, g)),
        (cpu.rms_norm, (x, weight, 1e-6)),
        (cpu.rms_norm_backward, (g, x, weight, rstd)),
    ):
        dense = op(*(a.contiguous() if isinstance(a, Tensor) else a for a in args))
        strided = op(*args)
        if isinstance(dense, Tensor):
            dense, strided = (dense,), (strided,)
        for got, want in zip(strided, dense, strict=True):
            assert got.is_contiguous()
            assert_same(got, want, 1e-15)


def test_inputs_are_left_alone() -> None:
    h, x, weight, grad = rand(6, 8), rand(6, 4), rand(4), rand(6, 4, seed=1)
    _, _, row_map = ops.permute(rand(3, 1), routing(3, 2, E), E)
    probs = rand(3, 2)
    _, rstd = cpu.rms_norm(x, weight, 1e-6)
    calls: list[tuple[Callable[..., object], tuple[Tensor | int, ...]]] = [
        (cpu.swiglu, (h,)),
        (cpu.swiglu_backward, (grad, h)),
        (cpu.silu_mul, (x, grad)),
        (cpu.silu_mul_backward, (grad, x, x)),
        (cpu.rms_norm, (x, weight, 1e-6)),  # type: ignore[list-item]
        (cpu.rms_norm_backward, (grad, x, weight, rstd)),
        (cpu.unpermute, (x, row_map, 3, 2, probs)),
        (cpu.unpermute_backward, (grad[:3], x, row_map, probs)),
    ]
    before = [t.clone() for t in (h, x, weight, grad, probs, rstd, row_map)]
    for op, args in calls:
        out = op(*args)
        for t in out if isinstance(out, tuple) else (out,):
            t.zero_()  # type: ignore[attr-defined]
        for old, now in zip(before, (h, x, weight, grad, probs, rstd, row_map), strict=True):
            assert torch.equal(old, now), op


def test_opcheck() -> None:
    """Schema, shapes and aliasing; none has a gradient, so those parts of the check are left out."""
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    _, _, row_map = ops.permute(rand(3, 1), routing(3, 2, E), E)
    counts = torch.tensor([3, 0, 1, 2])
    rows, weight, probs, grad = rand(6, IN), rand(E, OUT, IN), rand(3, 2), rand(6, OUT)
    _, rstd = cpu.rms_norm(rows, rand(IN), 1e-6)
    for op, args in [
        (cpu.grouped_linear, (rows, counts, weight, rand(E, OUT))),
        (cpu.grouped_linear, (rows, counts, weight)),
        (cpu.grouped_linear_wgrad, (grad, rows, counts)),
        (cpu.grouped_mlp, (rows, counts, rand(E, 2 * OUT, IN), rand(E, IN, OUT))),
        (
            cpu.grouped_mlp_backward,
            (rows, rows.clone(), counts, rand(E, 2 * OUT, IN), rand(E, IN, OUT), rand(2, 6, OUT)),
        ),
        (cpu.causal_attention, (rand(2, 3, 70, 4), rand(2, 3, 70, 4), rand(2, 3, 70, 4), 0.5)),
        (
            cpu.causal_attention_backward,
            (*[rand(1, 2, 5, 4, seed=seed) for seed in range(5)], rand(1, 2 * 5 * 5), 0.5),
        ),
        (cpu.unpermute, (rows, row_map, 3, 2, probs)),
        (cpu.unpermute, (rows, row_map, 3, 2)),
        (cpu.unpermute_backward, (rand(3, IN), rows, row_map, probs)),
        (cpu.swiglu, (rows,)),
        (cpu.swiglu_backward, (rand(6, IN // 2), rows)),
        (cpu.silu_mul, (rows, rows.clone())),
        (cpu.silu_mul_backward, (rows, rows.clone(), rows.clone())),
        (cpu.rms_norm, (rows, rand(IN), 1e-6)),
        (cpu.rms_norm_backward, (rows, rows.clone(), rand(IN), rstd)),
    ]:
        opcheck(op, args, test_utils=tests)


def test_a_gradient_is_refused_and_never_silently_missing() -> None:
    x, weight = rand(3, 4, grad=True), rand(4, grad=True)
    for call in (
        lambda: cpu.swiglu(x),
        lambda: cpu.silu_mul(x, x),
        lambda: cpu.rms_norm(x, weight, 1e-6)[0],
        lambda: cpu.grouped_linear(x, torch.tensor([3]), weight[None, None]),
    ):
        with pytest.raises(RuntimeError, match="use the moe:: or ATen op it replaces"):
            call()
        with torch.no_grad():
            assert call().isfinite().all()


@every_dtype
@pytest.mark.parametrize("shape", [(3, 4, 5), (128, 96, 64), (65, 130, 70), (0, 4, 5), (5, 0, 4)])
def test_mm(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Every layout of the operands that a step has: weights as they are and transposed, gradients transposed."""
    rows, inner, columns = shape
    lefts = rand(rows, inner, dtype=dtype), rand(inner, rows, dtype=dtype).t()
    rights = rand(inner, columns, dtype=dtype, seed=1), rand(columns, inner, dtype=dtype, seed=1).t()
    for left in lefts:
        for right in rights:
            made = cpu.mm(left, right)
            assert made.is_contiguous()
            assert_same(made, torch.mm(left, right), TOLERANCE[dtype])


def test_mm_takes_onednn_for_large_contiguous_fp32_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def onednn(a: Tensor, b: Tensor, *rest: object) -> Tensor:
        calls.append((a.dtype, tuple(a.shape)))
        return a @ b.t()

    monkeypatch.setattr(products, "onednn_linear", onednn)
    monkeypatch.setattr(products, "prefers_onednn", lambda: True)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        products.mm(rand(64, 64, dtype=dtype), rand(64, 64, dtype=dtype))
    products.mm(rand(64, 64, dtype=torch.float32).t(), rand(64, 64, dtype=torch.float32))
    products.mm(rand(63, 64, dtype=torch.float32), rand(64, 64, dtype=torch.float32))
    assert calls == [(torch.float32, (64, 64))]
