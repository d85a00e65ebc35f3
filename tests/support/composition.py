"""Pipeline stages together with every other way to cut a model, against one process: the cases, and a table of them.

python -m tests.support.composition                 all cases, as a table
python -m tests.support.composition --only jamba    those whose name contains a word
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from moecompile import verification
from moecompile.plan import Plan
from moecompile.verification import Job, Report, Trace
from tests.support import families, hf_models
from tests.support.models import Config, build, tokens
from tests.support.pool import Ranks

TIED = Config("ops", hidden=16, heads=4, inner=8, layers=2, shared=True, tied=True, rotary=True)
HAND_WRITTEN = Config("loop", hidden=16, heads=4, inner=8, layers=4)
Batch = Callable[[int], dict[str, Tensor]]


@dataclass(frozen=True)
class Model:
    """A plain model in fp64, and ``batch(number)``: what one data rank passes."""

    build: Callable[[], nn.Module]
    batch: Batch


def _hugging_face(name: str) -> Model:
    """Three layers: with dense first layers, a stage has no MoE layer and the other one only such."""
    return Model(
        lambda: hf_models.build(name, num_hidden_layers=3).double(),
        lambda number: hf_models.batch(size=8, seed=number),
    )


def _family(name: str) -> Model:
    return Model(lambda: families.build(name), lambda number: families.batch(number, size=8))


def _own(config: Config) -> Model:
    return Model(lambda: build(config), lambda number: tokens(8, 8, number, ignored=0.2))


MODELS = {
    "mixtral": _hugging_face("mixtral"),
    "deepseek_v3": _hugging_face("deepseek_v3"),
    "jamba": _family("jamba"),
    "nemotron_h": _family("nemotron_h"),
    "tied": _own(TIED),
    "hand-written": _own(HAND_WRITTEN),
}

PLANS = {
    "pp2": Plan(dp=1, pp=2, microbatches=4),
    "pp2 interleaved": Plan(dp=1, pp=2, microbatches=4, schedule="interleaved-1f1b", layout="Et|t|t|tL"),
    "pp2 dp2 ep2": Plan(dp=2, pp=2, ep=2, microbatches=4),
    "pp2 dp2 etp2": Plan(dp=2, pp=2, etp=2, microbatches=4),
    "pp2 tp2": Plan(dp=1, pp=2, tp=2, microbatches=2),
    "pp2 tp2 sp ep2": Plan(dp=1, pp=2, tp=2, ep=2, microbatches=2, sequence_parallel=True),
    "pp2 tp2 etp2": Plan(dp=1, pp=2, tp=2, etp=2, microbatches=2),
    "pp2 cp2": Plan(dp=1, pp=2, cp=2, microbatches=2),
    "pp2 cp2 ep2": Plan(dp=1, pp=2, cp=2, ep=2, microbatches=2),
    "pp4": Plan(dp=1, pp=4, microbatches=4),
    "pp2 dp2 zero1": Plan(dp=2, pp=2, microbatches=4, passes="+shard-params{level=1}"),
    "pp2 dp2 ep2 zero2": Plan(dp=2, pp=2, ep=2, microbatches=4, passes="+shard-params{level=2}"),
    "pp2 dp2 ep2 zero3": Plan(dp=2, pp=2, ep=2, microbatches=4, passes="+shard-params"),
    "pp2 dp4 ep4": Plan(dp=4, pp=2, ep=4, microbatches=2),
    "pp2 dp2 tp2 ep4": Plan(dp=2, pp=2, tp=2, ep=4, microbatches=2),
    "pp2 dp2 tp2 ep2": Plan(dp=2, pp=2, tp=2, ep=2, microbatches=2),
    "pp2 dp2 cp2 ep2": Plan(dp=2, pp=2, cp=2, ep=2, microbatches=2),
    "pp2 dp2 ep2 etp2": Plan(dp=4, pp=2, ep=2, etp=2, microbatches=2),
    "pp2 cp2 tp2 ep4": Plan(dp=1, pp=2, cp=2, tp=2, ep=4, microbatches=2),
    "pp4 dp2 ep2": Plan(dp=2, pp=4, ep=2, microbatches=4),
    "pp4 dp2 ep2 by hand": Plan(dp=2, pp=4, ep=2, microbatches=4, layout="Et|t|t|L"),
}

# In every run of the tests; the others are slow.
SMALL = (("jamba", "pp2"), ("nemotron_h", "pp2 interleaved"))
CASES = (
    *SMALL,
    *((name, plan) for name in ("mixtral", "deepseek_v3", "jamba") for plan in ("pp2", "pp2 dp2 ep2", "pp2 dp2 etp2")),
    *(
        (name, plan)
        for name in ("mixtral", "deepseek_v3", "jamba", "nemotron_h")
        for plan in ("pp2 tp2", "pp2 tp2 sp ep2", "pp2 tp2 etp2", "pp2 cp2", "pp2 cp2 ep2")
    ),
    *(
        (name, plan)
        for name in ("mixtral", "deepseek_v3", "nemotron_h")
        for plan in ("pp2 dp2 tp2 ep2", "pp2 dp2 cp2 ep2")
    ),
    *((name, "pp4 dp2 ep2 by hand") for name in ("mixtral", "deepseek_v3")),
    ("nemotron_h", "pp2 dp2 ep2"),
    ("nemotron_h", "pp4 dp2 ep2"),
    *(("deepseek_v3", plan) for plan in PLANS if "zero" in plan),
    ("mixtral", "pp2 dp2 zero1"),
    ("jamba", "pp2 dp2 ep2 zero3"),
    ("nemotron_h", "pp2 dp2 zero1"),
    *(("tied", plan) for plan in PLANS if not plan.startswith(("pp4", "pp2 interleaved"))),
    *(("hand-written", plan) for plan in PLANS if plan != "pp4 dp2 ep2 by hand"),
)


def on_rank(rank: int, job: Job) -> Trace:
    """One rank; what models compute in fp32 on purpose is computed in fp64 here."""
    with families.WideFloats():
        return verification.on_rank(rank, job)


def check(ranks: Ranks, name: str, plan: str) -> Report:
    """Three steps of AdamW with clipping on ranks, beside the plain model over the whole batches."""
    model = MODELS[name]
    with families.WideFloats():
        job = verification.prepare(model.build(), PLANS[plan], model.batch)
        alone = verification.run_alone(job)
    found: Any = ranks.run(job.plan.world_size, on_rank, job, timeout=400.0)
    return verification.report(job, alone, found)


def table(only: str = "") -> Iterator[str]:
    """The table's lines, each as soon as its case has run."""
    ranks = Ranks()
    kinds = ("loss", "gradient", "norm", "weight")
    yield "| model | plan | ranks | " + " | ".join(kinds) + " |"
    yield "|---|---|---|" + "---|" * len(kinds)
    try:
        for name, plan in dict.fromkeys(CASES):
            if only in f"{name} {plan}":
                report = check(ranks, name, plan)
                worst = [report.worst(kind) for kind in kinds]
                errors = " | ".join(f"{row.error:.0e}" for row in worst if row is not None)
                yield f"| {name} | `{plan}` | {report.plan.world_size} | {errors} |" + ("" if report else " NOT EQUAL")
    finally:
        ranks.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="stages and other cuts against one process: worst relative errors")
    parser.add_argument("--only", default="", help="a part of the names of model and plan")
    for line in table(parser.parse_args().only):
        print(line, flush=True)


if __name__ == "__main__":
    main()
