"""On one GPU: the plain kernels of an MoE layer against the roofline, and a whole layer's rate.

    python -m benchmarks.gpu.moe_layer [--json FILE]

Says that it skips, and ends with 0, on a machine without CUDA. bf16, forward and backward; each figure is the median of 20
runs after 5, timed with CUDA events.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from moecompile import ops

TOKENS, HIDDEN, EXPERTS, TOP_K, WIDTH = 8192, 2048, 64, 8, 1024
COPY_BYTES = 1 << 30


def milliseconds(run: Callable[[], object]) -> float:
    for _ in range(5):
        run()
    times = []
    for _ in range(20):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def limits() -> dict[str, float]:
    """What this GPU reaches: TFLOP/s of one large product and TB/s of a copy."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    source = torch.empty(COPY_BYTES, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return {
        "tflops": 2 * 8192**3 / milliseconds(lambda: a @ a) / 1e9,
        "tbytes": 2 * COPY_BYTES / milliseconds(lambda: target.copy_(source)) / 1e9,
    }


def layer(x: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    rows, counts, row_map = ops.permute(x, ids, EXPERTS)
    gate, up = ops.grouped_linear(rows, counts, w1).chunk(2, -1)
    out: torch.Tensor = ops.unpermute(
        ops.grouped_linear(F.silu(gate) * up, counts, w2), row_map, x.shape[0], TOP_K, probs
    )
    return out


def measure() -> dict[str, float]:
    """Milliseconds of each op, and the layer's TFLOP/s forward and backward."""
    like = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True, **like)
    w1 = (torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, **like) * 0.02).requires_grad_()
    w2 = (torch.randn(EXPERTS, HIDDEN, WIDTH, **like) * 0.02).requires_grad_()
    probs, ids = torch.randn(TOKENS, EXPERTS, **like).softmax(-1).topk(TOP_K, dim=-1)
    with torch.no_grad():
        rows, counts, row_map = ops.permute(x, ids, EXPERTS)
        h = ops.grouped_linear(rows, counts, w1)
        found = {
            "permute": milliseconds(lambda: ops.permute(x, ids, EXPERTS)),
            "grouped_linear": milliseconds(lambda: ops.grouped_linear(rows, counts, w1)),
            "swiglu": milliseconds(lambda: ops.swiglu(h)),
            "unpermute": milliseconds(lambda: ops.unpermute(rows, row_map, TOKENS, TOP_K, probs)),
        }

    def step() -> None:
        layer(x, ids, probs, w1, w2).sum().backward()
        x.grad = w1.grad = w2.grad = None

    flops = 3 * 2 * TOKENS * TOP_K * HIDDEN * 3 * WIDTH
    found["layer"] = milliseconds(step)
    found["layer_tflops"] = flops / found["layer"] / 1e9
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return
    bound, found = limits(), measure()
    rows_bytes = 2 * TOKENS * TOP_K * HIDDEN
    found["permute_of_copy"] = 2 * rows_bytes / found["permute"] / 1e9 / bound["tbytes"]
    found["layer_of_matmul"] = found["layer_tflops"] / bound["tflops"]
    result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "limits": bound, "found": found}
    print(json.dumps(result, indent=1))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
