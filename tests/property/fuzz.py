"""Layers put together at random: one recipe's outcome, and many of them by command.

    python -m tests.property.fuzz --count 2000 --seed 0 [--log FILE]

Each distinct recipe is compiled for two ranks with ``dp=2, ep=2`` and held against the plain model on two batches in fp64: loss and
every gradient. A line for each goes to the log as it is done, and a log that is there already is continued.
"""

from __future__ import annotations

import argparse
import logging
import re
import time
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from moecompile import ops
from moecompile.errors import MoeCompileError
from moecompile.plan import Plan
from tests.support import moe_recipes as recipes
from tests.support.parity import LockStep

PLAN = Plan(dp=2, ep=2)
TOLERANCE = 1e-9
EXACT, WHOLE, REFUSED, NAMELESS, WRONG = (
    "exact", "exact, experts whole on every rank", "refused with a line", "refused without a line", "wrong",
)  # fmt: skip


def outcome(recipe: recipes.Recipe, seed: int) -> str:
    """``exact``, or the sentence that refuses the layer. AssertionError for anything in between."""
    model, batch = recipes.build(recipe, seed), recipes.batch(recipe, seed)
    try:
        run = LockStep(model, PLAN, batch)
    except MoeCompileError as error:
        assert re.search(r"\.py:\d+", str(error)), f"{recipe}: refused without a line: {error}"
        return str(error)
    for batch_ in (batch, recipes.batch(recipe, seed + 1)):
        found = run.step(batch_)
        run.reset()
        model.zero_grad()
        loss = model(**batch_)["loss"]
        loss.backward()
        compare(f"{recipe} loss", found.loss, loss.detach())
        for name, param in model.named_parameters():
            reference = torch.zeros_like(param) if param.grad is None else param.grad
            compare(f"{recipe} gradient of {name}", found.grads[name], reference)
    cut = any(node.target is ops.dispatch for node in run.program.graph.nodes)
    return EXACT if cut else WHOLE


def compare(name: str, found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape and torch.isfinite(found).all() and torch.isfinite(wanted).all(), name
    error = float((found - wanted).norm())
    assert error <= TOLERANCE * max(float(wanted.norm()), 1e-6), f"{name}: {error:.3e} of {float(wanted.norm()):.3e}"


def sorted_outcome(recipe: recipes.Recipe, seed: int) -> tuple[str, str]:
    """The kind of outcome, and the sentence that goes with it."""
    try:
        found = outcome(recipe, seed)
    except AssertionError as error:
        kind = NAMELESS if "refused without a line" in str(error) else WRONG
        return kind, str(error)
    except Exception as error:  # a crash of ours refuses without saying where
        return NAMELESS, f"{type(error).__name__}: {error}"
    return (found, "") if found in (EXACT, WHOLE) else (REFUSED, found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="a line for each recipe; continued where it is there")
    args = parser.parse_args()
    logging.getLogger("moecompile").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    lines = args.log.read_text().splitlines() if args.log and args.log.exists() else []
    for at, recipe in enumerate(recipes.distinct(args.count, args.seed)):
        if at < len(lines):
            continue
        start = time.process_time()
        kind, said = sorted_outcome(recipe, args.seed + at % 97)
        line = "\t".join([kind, str(recipe), f"{time.process_time() - start:.2f}", said.replace("\n", " ")])
        lines.append(line)
        if kind != EXACT:
            print(line, flush=True)
        if args.log:
            with args.log.open("a") as log:
                log.write(line + "\n")
    counts = Counter(line.split("\t")[0] for line in lines)
    print(
        f"{len(lines)} of {recipes.number_of_recipes():,} recipes: " + ", ".join(f"{k}: {n}" for k, n in counts.items())
    )
    return int(bool(counts[WRONG] or counts[NAMELESS]))


if __name__ == "__main__":
    raise SystemExit(main())
