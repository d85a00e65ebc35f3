"""What the ops are compared with: plain loops over tokens and experts, and memory that is never clean by luck."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill every uninitialised floating-point tensor with NaN and every integer one with its largest value."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(1).isnan().all(), "this torch does not fill uninitialised memory"
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled


def routing(tokens: int, top_k: int, experts: int, seed: int = 0, idle: tuple[int, ...] = ()) -> Tensor:
    """int64 [tokens, top_k]: distinct experts per token, never those in `idle`."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator)
    scores[:, list(idle)] = -1.0
    return scores.topk(top_k, dim=1).indices


def rand(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0, grad: bool = False) -> Tensor:
    value = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    return value.requires_grad_(grad)


def expert_loop(x: Tensor, ids: Tensor, probs: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None = None) -> Tensor:
    """The layer token by token: y[t] = sum_k probs[t, k] * w2[e] @ silu(w1[e] @ x[t] + b1[e]) with e = ids[t, k]."""
    rows = []
    for t in range(x.shape[0]):
        y = torch.zeros(w2.shape[1], dtype=x.dtype)
        for k in range(ids.shape[1]):
            e = int(ids[t, k])
            h = w1[e] @ x[t]
            if b1 is not None:
                h = h + b1[e]
            y = y + probs[t, k] * (w2[e] @ torch.nn.functional.silu(h))
        rows.append(y)
    return torch.stack(rows) if rows else x.new_zeros(0, w2.shape[1])


def linear_loop(rows: Tensor, counts: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """grouped_linear row by row, from [E] or [S, E] counts."""
    expert_of_row = [
        e for source in counts.reshape(-1, counts.shape[-1]).tolist() for e, n in enumerate(source) for _ in range(n)
    ]
    out = [weight[e] @ row + (0 if bias is None else bias[e]) for e, row in zip(expert_of_row, rows, strict=True)]
    return torch.stack(out) if out else rows.new_zeros(0, weight.shape[1])


def assert_same(got: Tensor, expected: Tensor, tolerance: float = 0.0) -> None:
    """Equal shape and dtype, finite, and equal within `tolerance` relative to the largest entry."""
    assert got.shape == expected.shape and got.dtype == expected.dtype, (
        got.shape,
        got.dtype,
        expected.shape,
        expected.dtype,
    )
    assert got.isfinite().all() and expected.isfinite().all()
    if got.numel():
        error = (got - expected).abs().max().item() / max(expected.abs().max().item(), 1e-30)
        assert error <= tolerance, f"relative error {error} above {tolerance}"
