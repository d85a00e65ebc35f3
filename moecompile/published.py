"""Published training configurations of large MoE models, as plans.

Degrees, batch sizes and GPUs are those of the Megatron-Core MoE report, Table 20 (sequence length 4096). Layouts leave out the layer
for multi-token prediction, which the Hugging Face models do not have; the degrees leave dp = GPUs / (tp * cp * pp).
"""

from __future__ import annotations

from dataclasses import dataclass

from moecompile.plan import Plan


@dataclass(frozen=True)
class Published:
    """One row: ``rows`` sequences a microbatch and data rank, ``batch`` sequences a step."""

    model: str
    gpus: str
    layers: int
    rows: int
    batch: int
    plan: Plan


# model, GPUs, number of them, layers, tp, pp, ep, sequences a microbatch, sequences a step, layout
_ROWS = (
    ("DeepSeek-V3", "GB300 MXFP8", 256, 61, 1, 4, 64, 1, 8192, "Et*4|(t*4|)*14,tL"),
    ("DeepSeek-V3", "GB200 MXFP8", 256, 61, 1, 4, 64, 1, 8192, "Et*4|(t*4|)*14,tL"),
    ("DeepSeek-V3", "GB200 BF16", 256, 61, 1, 8, 32, 1, 4096, "Et|(tt|)*30,L"),
    ("DeepSeek-V3", "H100 FP8", 1024, 61, 2, 4, 64, 1, 8192, "Et*4|(t*4|)*14,tL"),
    ("Qwen3-235B", "GB300 MXFP8", 256, 94, 1, 4, 64, 2, 3072, "Et*3|(t*4|)*22,t*3,L"),
    ("Qwen3-235B", "GB200 MXFP8", 256, 94, 1, 4, 64, 3, 3072, "Et*3|(t*4|)*22,t*3,L"),
)


def published() -> list[Published]:
    """The six configurations of the table, in its order."""
    found = []
    for model, gpus, world, layers, tp, pp, ep, rows, batch, layout in _ROWS:
        dp = world // (tp * pp)
        plan = Plan(
            dp=dp,
            tp=tp,
            pp=pp,
            ep=ep,
            sequence_parallel=tp > 1,
            microbatches=batch // (rows * dp),
            schedule="interleaved-1f1b",
            layout=layout,
        )
        found.append(Published(model, f"{gpus} x {world}", layers, rows, batch, plan))
    return found
