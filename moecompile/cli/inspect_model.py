"""``moecompile inspect``: which MoE layers a model has, how they are recognised, and what the passes make of the model."""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn

from moecompile import api
from moecompile.errors import CaptureError
from moecompile.phases import split_phases
from moecompile.program import InputKind, Program
from moecompile.stages import Relayed, cut_stages

from .loading import load_example, load_model, load_plan, one_example, usual_example

NAME = "inspect"
HELP = "show the MoE layers of a model, how each is recognised, and the program a plan makes of it"
EXAMPLE = (
    "moecompile inspect --model examples.qwen3_moe_plain:build --dp 4 --ep 4 \\\n"
    "      --example 'input_ids=int64[2,64]<256,labels=int64[2,64]<256'"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="package.module:name", help="a module, or what returns one")
    parser.add_argument(
        "--example",
        metavar="SPEC",
        help="what one rank passes: name=dtype[sizes]<bound by commas, or package.module:function; token ids if left out",
    )
    parser.add_argument("--plan", metavar="PLAN", help="TOML file, or fields such as dp=4,ep=2 (one rank)")
    parser.add_argument("--dp", type=int, help="data parallel degree")
    parser.add_argument("--ep", type=int, help="expert parallel degree")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--print", dest="show", action="store_true", help="print the whole program, too")


def run(arguments: argparse.Namespace, console: Console) -> int:
    model = load_model(arguments.model)
    plan = load_plan(arguments.plan, {"dp": arguments.dp, "ep": arguments.ep})
    world_size = None if plan.dp is not None else plan.least_world_size
    example = usual_example(model) if arguments.example is None else one_example(load_example(arguments.example))
    try:
        program = api.trace(model, plan, example, world_size=world_size)
    except CaptureError as error:
        if arguments.json:
            print(json.dumps(refusal(error), indent=2))
        raise
    found = report(model, program)
    if arguments.json:
        print(json.dumps(found, indent=2))
        return 0
    console.print(
        "\n".join([*_layer_lines(found), *_stage_lines(found), *_gather_lines(found)]),
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    console.print(_passes(found))
    if arguments.show:
        print(program)
    return 0


def refusal(error: CaptureError) -> dict[str, Any]:
    """What stands in the way, as plain data: the line of the user's code and the sentence."""
    line = re.search(r"[^\s(]+\.py:\d+", str(error))
    return {"refused": {"source": _relative(line.group()) if line else "", "reason": str(error)}}


def report(model: nn.Module, program: Program) -> dict[str, Any]:
    """Layers, what looks like one and is none, gathered lines and passes, as plain data.

    ``parameters`` counts a layer's expert weights.
    """
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters(remove_duplicate=False)}
    layers = [
        {
            "module": layer["module"],
            "source": _relative(layer["source"]),
            "how": layer["how"],
            "experts": layer["num_experts"],
            "experts_per_rank": layer["num_experts"] // program.plan.ep,
            "top_k": layer["top_k"],
            "router": layer.get("router"),
            "shared_experts": list(layer.get("shared_experts", ())),
            "capacity": layer.get("capacity"),
            "parameters": sum(sizes.get(name, 0) for name in layer["params"]),
            "names": list(layer["params"]),
        }
        for layer in program.layers
    ]
    passes = [
        {
            "pass": entry.pass_text,
            "rewrites": entry.rewrites,
            "nodes": entry.nodes_after,
            "seconds": round(entry.seconds, 3),
        }
        for entry in program.history
    ]
    gathers = [
        {
            "op": item.op,
            "module": item.module,
            "source": _relative(item.source),
            "axis": item.axis,
            "bytes_per_step": item.step_bytes,
            "reason": item.reason,
        }
        for item in program.gathers
    ]
    return {
        "plan": str(program.plan),
        "world_size": program.plan.world_size,
        "layers": layers,
        "not_layers": [{**item, "source": _relative(item["source"])} for item in program.unrouted],
        "stages": _stages(program),
        "gathers": gathers,
        "passes": passes,
    }


def _stages(program: Program) -> list[dict[str, Any]]:
    """What each pipeline stage computes, holds and sends; nothing without stages. ``parameters`` counts one rank's share."""
    if program.layout is None:
        return []
    found = []
    bodies = cut_stages(split_phases(program).body)  # without what is gathered once a step
    for stage, body in zip(cut_stages(program), bodies, strict=True):
        held = {item.fqns: item for item in stage.forward.program.inputs if item.kind is InputKind.PARAM}
        found.append(
            {
                "stage": stage.index,
                "rank": stage.index % program.plan.pp,
                "holds": program.layout.described(stage.index),
                "parameters": sum(math.prod(item.local_shape(program.mesh)) for item in held.values()),
                "sends": [_sent(item) for item in stage.sent],
                "sends_back": [_sent(item) for item in stage.sent_grads],
                "saves": len(body.saved),
            }
        )
    return found


def _sent(item: Relayed) -> str:
    return f"{str(item.dtype).removeprefix('torch.')}{list(item.shape)}"


def _stage_lines(found: dict[str, Any]) -> list[str]:
    """One line a pipeline stage."""
    lines = []
    for stage in found["stages"]:
        sends = f"sends {', '.join(stage['sends'])}" if stage["sends"] else "sends nothing on"
        back = f", {', '.join(stage['sends_back'])} back" if stage["sends_back"] else ""
        lines.append(
            f"stage {stage['stage']} on pipeline rank {stage['rank']}: {stage['holds']}; {stage['parameters']:,} parameters a rank; "
            f"{sends}{back}"
        )
    return lines


def _relative(source: str) -> str:
    """``file:line`` as it reads best: from the current folder, or from the package's place among installed ones."""
    file, _, line = source.rpartition(":")
    path = Path(file)
    if file and path.is_relative_to(Path.cwd()):
        return f"{path.relative_to(Path.cwd())}:{line}"
    return source.rpartition("/site-packages/")[2]


def _layer_lines(found: dict[str, Any]) -> list[str]:
    """Three lines a layer, two for what is none."""
    ranks = found["world_size"]
    lines = [f"{len(found['layers'])} MoE layers; {found['plan']}: {ranks} rank{'s' if ranks > 1 else ''}"]
    for layer in found["layers"]:
        lines.append(f"{layer['module']}  {layer['source']}")
        lines.append(
            f"    {layer['how']}: {layer['experts']} experts, {layer['experts_per_rank']} a rank, top-{layer['top_k']}, "
            f"{layer['parameters']:,} expert parameters"
        )
        lines.append(f"    {_router_text(layer)}")
    for item in found["not_layers"]:
        lines.append(f"{item['module'] or 'the model'}  {item['source']}")
        lines.append(f"    no MoE layer, runs data-parallel: {item['reason']}")
    return lines


def _router_text(layer: dict[str, Any]) -> str:
    """What is known of a layer's router and of what stands beside its experts."""
    router, parts = layer["router"] or {}, []
    if router:
        extras = {"selection bias": router["bias"], "renormalized": router["normalized"], "noise": router["noise"]}
        groups = [f"{router['groups']} groups"] if router["groups"] else []
        parts.append(
            ", ".join(
                [
                    f"router: {router['kind']} {router['where']}".rstrip(),
                    *groups,
                    *(name for name, there in extras.items() if there),
                ]
            )
        )
    parts.append(
        f"shared experts: {_common(layer['shared_experts'])}" if layer["shared_experts"] else "no shared experts"
    )
    parts.append("dropless" if layer["capacity"] is None else f"capacity {layer['capacity']} tokens an expert")
    return "; ".join(parts)


def _common(names: list[str]) -> str:
    """The module that holds these parameters."""
    rows = [name.split(".") for name in names]
    shared = []
    for parts in zip(*rows, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared) or ", ".join(names)


def _gather_lines(found: dict[str, Any]) -> list[str]:
    """What is not computed in parts, one line of the user's code in two; nothing where all is."""
    gathers = found["gathers"]
    if not gathers:
        return []
    total = sum(item["bytes_per_step"] for item in gathers)
    lines = [f"lines that run whole on every rank: {len(gathers)}, {total:,} bytes per step (strict=True refuses them)"]
    for item in gathers:
        lines.append(f"{item['op']}  {item['source']}")
        lines.append(f"    {item['bytes_per_step']:,} bytes over {item['axis']}: {item['reason']}")
    return lines


def _passes(found: dict[str, Any]) -> Table:
    table = Table(title="passes", title_justify="left")
    table.add_column("pass")
    for name in ("rewrites", "nodes after", "seconds"):
        table.add_column(name, justify="right")
    for entry in found["passes"]:
        table.add_row(entry["pass"], str(entry["rewrites"]), str(entry["nodes"]), f"{entry['seconds']:.2f}")
    return table
