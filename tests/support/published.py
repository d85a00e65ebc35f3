"""The published plans over models of their depth and kind, but small; and a table of what tracing them takes.

python -m tests.support.published                 all of them, as a table
python -m tests.support.published --only H100     those whose name contains a word
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from torch import Tensor, nn

import moecompile as mc
from moecompile.published import Published, published
from moecompile.stages import Stage, cut_stages
from tests.support import hf_models

DISTINCT = list({row.plan: row for row in reversed(published())}.values())[::-1]  # two GPUs, one plan: traced once


def build(row: Published) -> nn.Module:
    """All layers of the model with as many experts as ranks share them, routed as published; small in every other number."""
    if row.model.startswith("DeepSeek"):
        groups = {"n_routed_experts": 64, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8}
        return hf_models.build("deepseek_v3", num_hidden_layers=row.layers, first_k_dense_replace=3, **groups)
    return hf_models.build("qwen3_moe", num_hidden_layers=row.layers, num_experts=64, num_experts_per_tok=8)


def batch(row: Published) -> dict[str, Tensor]:
    """What one data rank passes in a step, in short sequences."""
    return hf_models.batch(size=row.rows * row.plan.microbatches, length=8)


def trace(row: Published) -> tuple[mc.Program, list[Stage]]:
    """The program of the whole model, and its stages."""
    program = mc.trace(build(row), row.plan, batch(row))
    return program, cut_stages(program)


def table(only: str = "") -> Iterator[str]:
    """The table's lines, each as soon as its plan is traced: CPU seconds of one process."""
    yield "| model | GPUs | plan | layers | stages | nodes | CPU s |"
    yield "|---|---|---|---|---|---|---|"
    for row in DISTINCT:
        if only in f"{row.model} {row.gpus}":
            start = time.process_time()
            program, stages = trace(row)
            plan = row.plan
            degrees = f"dp={plan.dp} tp={plan.tp} pp={plan.pp} ep={plan.ep} microbatches={plan.microbatches}"
            yield (
                f"| {row.model} | {row.gpus} | `{degrees}` | {row.layers} | {len(stages)} | {len(program.graph.nodes)} | "
                f"{time.process_time() - start:.0f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="published plans, traced in one process")
    parser.add_argument("--only", default="", help="a part of the names of model and GPUs")
    for line in table(parser.parse_args().only):
        print(line, flush=True)


if __name__ == "__main__":
    main()
