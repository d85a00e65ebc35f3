"""The moe:: ops on one GPU against the same ops on the CPU; skipped without CUDA."""

from __future__ import annotations

import pytest
import torch

from moecompile import ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def layer(device: str) -> list[torch.Tensor]:
    """Output and gradients of a small MoE layer whose last expert is idle, float64."""
    seed = torch.Generator().manual_seed(0)
    like = {"generator": seed, "dtype": torch.float64}
    x, w1, w2 = (torch.randn(*size, **like) for size in ((13, 8), (6, 12, 8), (6, 8, 6)))
    probs, ids = torch.rand(13, 6, **like)[:, :5].topk(2, dim=-1)
    leaves = [item.to(device).requires_grad_() for item in (x, w1, w2, probs)]
    x, w1, w2, probs = leaves
    rows, counts, row_map = ops.permute(x, ids.to(device), 6)
    out = ops.unpermute(
        ops.grouped_linear(ops.swiglu(ops.grouped_linear(rows, counts, w1)), counts, w2), row_map, 13, 2, probs
    )
    (out * torch.arange(8, device=device)).sum().backward()
    return [out.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves if leaf.grad is not None)]


def test_layer_equals_cpu() -> None:
    here, there = layer("cpu"), layer("cuda")
    assert len(here) == len(there) == 5
    for a, b in zip(here, there, strict=True):
        assert a.norm() > 0
        assert (a - b).norm() <= 1e-12 * a.norm()  # float64, sums in another order


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norm_and_rotary_equal_cpu(dtype: torch.dtype) -> None:
    seed = torch.Generator().manual_seed(0)
    x, weight, angle = (torch.randn(*size, generator=seed, dtype=dtype) for size in ((3, 5, 8), (8,), (1, 5, 8)))
    for run in (lambda *t: ops.rms_norm(t[0], t[1], 1e-6)[0], lambda *t: ops.rotary(t[0], t[2].cos(), t[2].sin())):
        here, there = run(x, weight, angle), run(x.cuda(), weight.cuda(), angle.cuda()).cpu()
        torch.testing.assert_close(here, there)
