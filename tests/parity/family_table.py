"""The table of Hugging Face families in docs/recognition.md: each is trained on simulated ranks against its plain model.

    python -m tests.parity.family_table [--log FILE] [--write] [family ...]

Experts in both forms, ``dp=2, ep=2`` and ``dp=4, ep=4``, fp64, random and crowded batches; with ``--half`` the code as written on four
ranks and the interface on two, in half the time. ``--log`` keeps a line of JSON for each
family and takes those that are there; ``--write`` puts the rows into the document.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
from pathlib import Path
from typing import Any

import torch

from moecompile.plan import Plan
from tests.support.families import FAMILIES
from tests.support.family_parity import FORMS, KINDS, PLANS, check, seconds

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "recognition.md"
HEAD = [
    "| family | code as written | experts interface | MoE layers | loss | gradients | norm | weights | idle, one token | capture, s |",
    "|---|---|---|---|---|---|---|---|---|---|",
]


ALL = [(form, plan) for form in FORMS for plan in PLANS]
HALF = [("loop", PLANS[1]), ("interface", PLANS[0])]


def row(family: str, runs: list[tuple[str, Plan]]) -> dict[str, Any]:
    """What is said about one family, or why it differs."""
    worst = dict.fromkeys(KINDS, 0.0)
    how: dict[str, str] = {}
    layers, idle, single = 0, 0, 0
    for form, plan in runs:
        found = check(family, form, plan)
        how[form], layers = found.recognised, found.layers
        worst = {kind: max(worst[kind], found.worst[kind]) for kind in KINDS}
        counts = torch.stack(found.loads) if found.loads else torch.zeros(0, 1, 1, dtype=torch.long)
        idle, single = int((counts == 0).sum()), int((counts.sum(1) == 1).sum())
    return {
        **{"family": family, "loop": how["loop"], "interface": how["interface"], "layers": layers},
        **{"idle": idle, "single": single, "seconds": seconds(family)},
        **worst,
    }


def line(found: dict[str, Any]) -> str:
    """One row of the table."""
    loop = found["loop"] or "none: runs data-parallel, aloud"
    interface = "yes" if found["interface"] == "moe ops" else "no"
    errors = " | ".join(f"{found[kind]:.1e}" for kind in KINDS)
    return (
        f"| `{found['family']}` | {loop} | {interface} | {found['layers']} | {errors} | "
        f"{found['idle']}, {found['single']} | {found['seconds']:.1f} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--log", type=Path)
    parser.add_argument("--half", action="store_true", help="each form under one plan")
    parser.add_argument("--write", action="store_true", help="put the table into docs/recognition.md")
    args = parser.parse_args()
    logging.getLogger("moecompile").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    kept = [json.loads(text) for text in args.log.read_text().splitlines()] if args.log and args.log.exists() else []
    done = {item["family"]: item for item in kept}
    failed = []
    for family in args.families:
        if family in done:
            continue
        try:
            done[family] = row(family, HALF if args.half else ALL)
        except Exception as error:
            failed.append(family)
            print(f"{family}: {type(error).__name__}: {error}", flush=True)
            continue
        print(line(done[family]), flush=True)
        if args.log:
            with args.log.open("a") as log:
                log.write(json.dumps(done[family]) + "\n")
    if args.write and not failed:
        table = "\n".join([*HEAD, *(line(done[family]) for family in FAMILIES if family in done)])
        text = DOCUMENT.read_text()
        DOCUMENT.write_text(
            re.sub(r"(<!-- families -->\n).*?(\n<!-- end of families -->)", rf"\1{table}\2", text, flags=re.S)
        )
    print(f"{len(done)} families agree with their plain models, {len(failed)} do not: {failed}")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
