"""grouped_linear and its gradients: against a loop over rows, idle experts, [S, E] counts, dtypes, errors."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

from moecompile import ops
from tests.support.ops_oracle import assert_same, expert_loop, linear_loop, poisoned_memory, rand, routing

E, IN, OUT = 4, 3, 5
COUNTS = {
    "all busy": [3, 1, 2, 4],
    "idle": [0, 6, 0, 1],
    "no rows": [0, 0, 0, 0],
    "sources": [[2, 0, 1, 0], [0, 0, 3, 0], [1, 0, 0, 2]],
    "silent source": [[0, 0, 0, 0], [1, 2, 0, 1]],
}


def arguments(case: str, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    counts = torch.tensor(COUNTS[case])
    n = int(counts.sum())
    return (
        rand(n, IN, dtype=dtype),
        counts,
        rand(E, OUT, IN, dtype=dtype, seed=1),
        rand(E, OUT, dtype=dtype, seed=2),
    )


@pytest.mark.parametrize("case", COUNTS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_the_loop_with_all_gradients(case: str, with_bias: bool) -> None:
    rows, counts, weight, bias = arguments(case)
    inputs = [t.requires_grad_() for t in ([rows, weight, bias] if with_bias else [rows, weight])]
    with poisoned_memory():
        out = ops.grouped_linear(rows, counts, *inputs[1:])
        grads = torch.autograd.grad(out.square().sum(), inputs)
    expected = linear_loop(rows, counts, *inputs[1:])
    expected_grads = torch.autograd.grad(expected.square().sum() + sum(0 * t.sum() for t in inputs), inputs)
    assert_same(out, expected, 1e-14)
    for got, want in zip(grads, expected_grads, strict=True):
        assert_same(got, want, 1e-14)


@pytest.mark.parametrize("case", ["idle", "sources", "no rows", "silent source"])
def test_an_idle_expert_gets_exactly_zero(case: str) -> None:
    rows, counts, _, _ = arguments(case, torch.float32)
    idle = counts.reshape(-1, E).sum(0) == 0
    assert idle.any()
    with poisoned_memory():
        wgrad = ops.grouped_linear_wgrad(rows, rows, counts)
        bgrad = ops.grouped_sum(rows, counts)
    assert (wgrad[idle] == 0).all() and (bgrad[idle] == 0).all()
    assert wgrad.isfinite().all() and bgrad.isfinite().all()


def test_three_steps_with_idle_experts_in_poisoned_memory_follow_the_expert_loop() -> None:
    """NaN from the second step on is how unwritten gradients of idle experts show."""
    tokens, top_k, width = 12, 2, 6
    losses = []
    for layer in ("ops", "loop"):
        w1 = rand(E, OUT, width, seed=1, grad=True)
        w2 = rand(E, width, OUT, seed=2, grad=True)
        b1 = rand(E, OUT, seed=3, grad=True)
        optimizer = torch.optim.AdamW([w1, w2, b1], lr=0.1)
        history = []
        for step in range(3):
            x = rand(tokens, width, seed=10 + step)
            ids = routing(tokens, top_k, E, seed=step, idle=(1, 3) if step < 2 else (0, 3))
            probs = torch.softmax(rand(tokens, top_k, seed=20 + step), 1)
            with poisoned_memory():
                if layer == "ops":
                    rows, counts, row_map = ops.permute(x, ids, E)
                    h = torch.nn.functional.silu(ops.grouped_linear(rows, counts, w1, b1))
                    y = ops.unpermute(ops.grouped_linear(h, counts, w2), row_map, tokens, top_k, probs)
                else:
                    y = expert_loop(x, ids, probs, w1, w2, b1)
                loss = y.square().mean()
                optimizer.zero_grad()
                loss.backward()
            if layer == "ops":
                assert w1.grad is not None and (w1.grad[3] == 0).all()
            optimizer.step()
            history.append(loss.item())
        losses.append((history, w1.detach(), w2.detach(), b1.detach()))
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-12)
    # An idle expert has a zero gradient in both: the loop's stacked weights are one parameter.
    for got, want in zip(losses[0][1:], losses[1][1:], strict=True):
        assert_same(got, want, 1e-9)


@pytest.mark.parametrize("case", ["idle", "sources"])
def test_gradcheck(case: str) -> None:
    rows, counts, weight, bias = (t.requires_grad_() if t.is_floating_point() else t for t in arguments(case))
    grad = rand(rows.shape[0], OUT, seed=4, grad=True)
    for check in (gradcheck, gradgradcheck):
        assert check(lambda r, w, b: ops.grouped_linear(r, counts, w, b), (rows, weight, bias))
        assert check(lambda r, w: ops.grouped_linear(r, counts, w), (rows, weight))
    assert gradcheck(lambda g, r: ops.grouped_linear_wgrad(g, r, counts), (grad, rows))
    assert gradcheck(lambda g: ops.grouped_sum(g, counts), (grad,))


@pytest.mark.parametrize("case", COUNTS)
def test_opcheck(case: str) -> None:
    rows, counts, weight, bias = (t.requires_grad_() if t.is_floating_point() else t for t in arguments(case))
    opcheck(ops.grouped_linear, (rows, counts, weight, bias))
    opcheck(ops.grouped_linear, (rows, counts, weight))
    opcheck(ops.grouped_linear_wgrad, (rand(rows.shape[0], OUT), rows, counts))
    opcheck(ops.grouped_sum, (rows, counts))


def test_only_the_asked_for_gradients_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, counts, weight, bias = arguments("all busy")

    def refuse(*_: object) -> None:
        raise AssertionError("a gradient nobody asked for was computed")

    monkeypatch.setattr("moecompile.ops.experts.grouped_linear_wgrad", refuse)
    monkeypatch.setattr("moecompile.ops.experts.grouped_sum", refuse)
    rows.requires_grad_()
    (grad,) = torch.autograd.grad(ops.grouped_linear(rows, counts, weight, bias).sum(), rows)
    assert grad.shape == rows.shape
    with pytest.raises(AssertionError, match="nobody asked for"):
        torch.autograd.grad(ops.grouped_linear(rows, counts, weight.requires_grad_(), bias).sum(), weight)


def test_sources_are_summed_in_one_product_in_low_precision() -> None:
    counts = torch.tensor([[5, 3]] * 16)
    rows, grad = rand(128, 4, dtype=torch.bfloat16), rand(128, 3, dtype=torch.bfloat16, seed=1)
    expert = torch.tensor(([0] * 5 + [1] * 3) * 16)
    for e in (0, 1):
        exact = grad[expert == e].double().t() @ rows[expert == e].double()
        got = ops.grouped_linear_wgrad(grad, rows, counts)[e]
        assert got.dtype == torch.bfloat16
        # One rounding to bf16: half a unit of 2^-8 relative to the entry, and float32 sums below that.
        assert ((got.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-4).all()
        total = ops.grouped_sum(grad, counts)[e]
        assert torch.equal(total, grad[expert == e].sum(0, dtype=torch.float32).to(torch.bfloat16))


def test_strided_weights_and_gradients() -> None:
    rows, counts, weight, _ = arguments("sources")
    strided = weight.transpose(1, 2).contiguous().transpose(1, 2)
    assert not strided.is_contiguous()
    rows.requires_grad_()
    out = ops.grouped_linear(rows, counts, strided)
    assert_same(out, ops.grouped_linear(rows, counts, weight), 1e-15)
    (grad,) = torch.autograd.grad(out.sum(), rows)  # the incoming gradient is an expanded scalar
    assert_same(grad, torch.autograd.grad(linear_loop(rows, counts, weight).sum(), rows)[0], 1e-14)


def test_autocast_treats_it_like_linear() -> None:
    rows, counts, weight, bias = arguments("all busy", torch.float32)
    inputs = [t.requires_grad_() for t in (rows, weight, bias)]
    with torch.autocast("cpu", torch.bfloat16):
        out = ops.grouped_linear(rows, counts, weight, bias)
        expected = torch.cat(
            [torch.nn.functional.linear(part, weight[e], bias[e]) for e, part in enumerate(rows.split(counts.tolist()))]
        )
        double = ops.grouped_linear(*arguments("all busy"))
    assert out.dtype == expected.dtype == torch.bfloat16 and torch.equal(out, expected)
    assert double.dtype == torch.float64
    grads = torch.autograd.grad(out.float().square().sum(), inputs)
    wanted = torch.autograd.grad(expected.float().square().sum(), inputs)
    for got, want in zip(grads, wanted, strict=True):
        assert_same(got, want, 2**-7)


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ({"counts": torch.tensor([3, 1, 2, 3])}, "pass the counts that permute or sizes_to_host returned"),
        ({"counts": torch.tensor([11, 1, 2, -4])}, "pass the counts that permute or sizes_to_host returned"),
        ({"counts": torch.tensor([3, 1, 6])}, "cut both for the same experts"),
        ({"counts": torch.tensor([3, 1, 2, 4]).int()}, "convert it with"),
        ({"weight": torch.zeros(E, IN, OUT, dtype=torch.float64)}, "transpose the last two dimensions"),
        ({"weight": torch.zeros(OUT, IN, dtype=torch.float64)}, "stack the experts in dim 0"),
        ({"weight": torch.zeros(E, OUT, IN)}, "cast one of them first"),
        ({"bias": torch.zeros(OUT, dtype=torch.float64)}, "stack one bias per expert"),
    ],
)
def test_errors_say_what_to_do(change: dict[str, torch.Tensor], advice: str) -> None:
    rows, counts, weight, bias = arguments("all busy")
    given = {"rows": rows, "counts": counts, "weight": weight, "bias": bias} | change
    with pytest.raises(ValueError, match=advice):
        ops.grouped_linear(given["rows"], given["counts"], given["weight"], given["bias"])
