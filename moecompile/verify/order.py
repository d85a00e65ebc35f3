"""What the ranks have to agree on before a program runs: its text, its mesh, and every collective that it issues, in order.

All ranks run one text without branches, so equal texts mean equal orders. The collectives are spelled out nevertheless: the text of a
graph names no types and few shapes, and two ranks that disagree are told where.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.fx import Node

from .. import meta, ops
from ..ops import AXIS_ARGUMENT
from ..program import Program


def collective_order(program: Program) -> list[str]:
    """One line for each collective: its number, op, type and shape, axis and group size, and whose sizes it goes by.

    Sizes that are known only at run time are named in the order in which they appear.
    """
    names: dict[str, str] = {}
    calls = [node for node in program.graph.nodes if node.target in AXIS_ARGUMENT]
    return [f"collective {at}: {_described(program, node, names)}" for at, node in enumerate(calls)]


def _described(program: Program, node: Node, names: dict[str, str]) -> str:
    axis, source = str(node.args[AXIS_ARGUMENT[node.target]]), node.args[0]  # type: ignore[index]
    assert isinstance(source, Node)
    found = meta.tensor(source)
    shape = ", ".join(_size(size, names) for size in found.shape)
    kind = f" {node.args[1]}" if node.target is ops.all_reduce else ""
    by = f" by {node.args[1]}, {node.args[2]}" if node.target in (ops.dispatch, ops.combine) else ""
    if node.target is ops.zigzag_exchange:
        by = " into zigzag" if node.args[4] else " out of zigzag"
    name = str(node.target).removesuffix(".default")
    stage = meta.stage(node)
    at = "" if stage is None else f" on stage {stage}"
    return f"{name}{kind} of {str(found.dtype).removeprefix('torch.')}[{shape}] over {axis} of {program.mesh.size(axis)}{by}{at}"


def _size(size: Any, names: dict[str, str]) -> str:
    if not isinstance(size, torch.SymInt):
        return str(size)
    text = str(size.node.expr)
    for symbol in sorted(map(str, size.node.expr.free_symbols)):
        names.setdefault(symbol, f"n{len(names)}")
    return " ".join(names.get(word, word) for word in text.replace("*", " * ").split())


def agreement(program: Program) -> str:
    """All of it as text, one fact a line; nothing in it may differ between the ranks of a program."""
    degrees = ", ".join(f"{axis}={size}" for axis, size in sorted(program.mesh.sizes.items()))
    code = hashlib.sha256(program.graph_module.code.encode()).hexdigest()
    return "\n".join([f"mesh {degrees}", *_stages(program), *collective_order(program), f"text of the program {code}"])


def _stages(program: Program) -> list[str]:
    """What decides which messages the stages of a pipeline send, and in which order."""
    if program.layout is None:
        return []
    plan = program.plan
    tags = ",".join(str(meta.stage(node)) for node in program.graph.nodes)
    return [
        f"pipeline {plan.schedule or '1f1b'} of {plan.microbatches} microbatches, layout {program.layout}",
        f"stages of the nodes {hashlib.sha256(tags.encode()).hexdigest()}",
    ]
