"""The table of docs/verification.md: models under plans without stages, on gloo ranks, against one process.

python -m tests.support.parity_table                prints it
python -m tests.support.parity_table --write        and puts it into the document
python -m tests.support.parity_table --only sp      those whose name contains a word
"""

from __future__ import annotations

import argparse
import logging
import re
from pathlib import Path
from typing import Any

from moecompile import verification
from moecompile.plan import Plan
from moecompile.verification import Report
from tests.support import families, hf_models
from tests.support.composition import Model, on_rank
from tests.support.models import Config, build, tokens
from tests.support.pool import Ranks

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "verification.md"
KINDS = ("loss", "gradient", "norm", "weight")
ROWS, LENGTH = 8, 8  # of the global batch


def _own(style: str, **options: Any) -> Model:
    config = Config(style, hidden=16, heads=4, inner=8, layers=2, **options)  # type: ignore[arg-type]
    return Model(lambda: build(config), lambda number: tokens(ROWS, LENGTH, number, ignored=0.2))


def _hugging_face(name: str) -> Model:
    return Model(
        lambda: hf_models.build(name, num_hidden_layers=2).double(),
        lambda number: hf_models.batch(size=ROWS, seed=number),
    )


MODELS = {
    "ModuleList loop, shared expert, balance loss": _own("loop", shared=True, aux=0.1),
    "stacked weights, bias, tied": _own("stacked", bias=True, tied=True),
    "dense dispatch, rotary": _own("dense", rotary=True),
    "top-1 of 8": _own("stacked", top_k=1, normalize=False, experts=8),
    "Mixtral": _hugging_face("mixtral"),
    "Qwen3-MoE": _hugging_face("qwen3_moe"),
    "DeepSeek-V3": _hugging_face("deepseek_v3"),
}

PLANS = {
    "dp2": Plan(dp=2),
    "dp2 ep2": Plan(dp=2, ep=2),
    "dp2 ep2 allgather": Plan(dp=2, ep=2, dispatch="allgather"),
    "dp4 ep2": Plan(dp=4, ep=2),
    "dp4 ep4": Plan(dp=4, ep=4),
    "dp2 etp2": Plan(dp=2, etp=2),
    "dp2 tp2 ep2 etp2": Plan(dp=2, tp=2, ep=2, etp=2),
    "tp2 ep2 sequence parallel": Plan(dp=1, tp=2, ep=2, sequence_parallel=True),
    "cp2 ep2": Plan(dp=1, cp=2, ep=2),
    "dp4 ep2 microbatches 2": Plan(dp=4, ep=2, microbatches=2),
    "dp4 ep2 ZeRO-3": Plan(dp=4, ep=2, passes="+shard-params"),
}

# A balance loss over a microbatch is another number than over the batch, in one process, too.
LEFT_OUT = {("ModuleList loop, shared expert, balance loss", "dp4 ep2 microbatches 2")}


def check(ranks: Ranks, model: Model, plan: Plan) -> Report:
    """Three steps of AdamW with clipping on ranks, beside the plain model over the whole batches."""
    with families.WideFloats():
        job = verification.prepare(model.build(), plan, model.batch)
        alone = verification.run_alone(job)
    found: Any = ranks.run(plan.world_size, on_rank, job, timeout=400.0)
    return verification.report(job, alone, found)


def rows(only: str) -> tuple[list[str], int]:
    """A line for each model and plan, and how many were not equal."""
    ranks, lines, unequal = Ranks(), [], 0
    try:
        for model in MODELS:
            for plan in PLANS:
                if only not in f"{model} {plan}" or (model, plan) in LEFT_OUT:
                    continue
                report = check(ranks, MODELS[model], PLANS[plan])
                worst = [report.worst(kind) for kind in KINDS]
                errors = " | ".join(f"{row.error:.0e}" for row in worst if row is not None)
                unequal += not report
                lines.append(f"| {model} | {plan} | {errors} |" + ("" if report else " NOT EQUAL"))
                print(lines[-1], flush=True)
    finally:
        ranks.close()
    return lines, unequal


def main() -> int:
    parser = argparse.ArgumentParser(description="models under plans against one process: worst relative errors")
    parser.add_argument("--only", default="", help="a part of the names of model and plan")
    parser.add_argument("--write", action="store_true", help="put the table into docs/verification.md")
    args = parser.parse_args()
    logging.getLogger("moecompile").setLevel(logging.ERROR)
    lines, unequal = rows(args.only)
    if args.write and not unequal and not args.only:
        head = ["| model | plan | " + " | ".join(KINDS) + " |", "|---|---|" + "---|" * len(KINDS)]
        table = "\n".join([*head, *lines])
        text = re.sub(
            r"(<!-- parity -->\n).*?(\n<!-- end of parity -->)", rf"\1{table}\2", DOCUMENT.read_text(), flags=re.S
        )
        DOCUMENT.write_text(text)
    print(f"{len(lines)} compared, {unequal} not equal")
    return int(bool(unequal))


if __name__ == "__main__":
    raise SystemExit(main())
