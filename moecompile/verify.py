"""Graph verifier: what must hold after every pass, whatever the pass was."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from . import meta
from .errors import VerifyError
from .graph import symbolic_sizes
from .mesh import AXES
from .ops import AXIS_ARGUMENT
from .printer import node_line
from .program import Program


def verify_program(program: Program) -> None:
    """Raise a VerifyError with the surrounding lines at the first broken invariant."""
    graph = program.graph
    try:
        graph.lint()
    except RuntimeError as error:
        raise VerifyError(f"the graph is malformed: {error}") from error
    _check_interface(program)
    _check_values(program)
    _check_axes(program)
    _check_symbols(program)
    _check_meta(program)


def _context(node: Node) -> str:
    """The ten lines around a node."""
    nodes = list(node.graph.nodes)
    at = nodes.index(node)
    lines = []
    for other in nodes[max(0, at - 5) : at + 5]:
        mark = ">" if other is node else " "
        text = node_line(other) if other.op == "call_function" else other.format_node() or other.op
        lines.append(f"  {mark} {text}")
    return "\n" + "\n".join(lines)


def _check_interface(program: Program) -> None:
    placeholders = program.placeholders()
    if len(placeholders) != len(program.inputs):
        raise VerifyError(
            f"the graph has {len(placeholders)} placeholders but {len(program.inputs)} inputs are described; add_input keeps both in step."
        )
    outputs = program.output_nodes()
    if len(outputs) != len(program.outputs):
        raise VerifyError(f"the graph returns {len(outputs)} values but {len(program.outputs)} outputs are described.")


def _check_values(program: Program) -> None:
    for node in program.graph.nodes:
        if node.op in ("placeholder", "call_function") and "val" not in node.meta:
            raise VerifyError(f"{meta.where(node)} carries no value; build nodes with graph.call().{_context(node)}")
        if node.op not in ("placeholder", "call_function", "output"):
            raise VerifyError(
                f"{node.name} is a {node.op} node; only calls of functions on placeholders are allowed.{_context(node)}"
            )


def _check_axes(program: Program) -> None:
    for node in program.graph.nodes:
        if node.target not in AXIS_ARGUMENT:
            continue
        axis = node.args[AXIS_ARGUMENT[node.target]]
        if axis not in AXES:
            known = ", ".join(AXES)
            raise VerifyError(
                f"{meta.where(node)} runs over the axis '{axis}', which is none of {known}.{_context(node)}"
            )
        if not node.users:
            raise VerifyError(
                f"{meta.where(node)} is a collective whose result nobody uses; a rank would wait for nothing.{_context(node)}"
            )


def _check_symbols(program: Program) -> None:
    """Unbacked sizes are defined before use."""
    defined: set[Any] = set()
    for node in program.graph.nodes:
        if node.op not in ("placeholder", "call_function"):
            continue
        found = node.meta["val"]
        if isinstance(found, torch.SymInt):
            defined |= found.node.expr.free_symbols
            continue
        for size in symbolic_sizes(found):
            missing = size.node.expr.free_symbols - defined
            if missing:
                names = ", ".join(sorted(str(symbol) for symbol in missing))
                raise VerifyError(
                    f"{meta.where(node)} has the size {size}, but {names} is not read before it.{_context(node)}"
                )


def _check_meta(program: Program) -> None:
    seen: dict[int, str] = {}
    for node in program.graph.nodes:
        for key, found in node.meta.items():
            if key != "custom" or not isinstance(found, dict):
                continue
            other = seen.setdefault(id(found), node.name)
            if other != node.name:
                raise VerifyError(
                    f"{node.name} and {other} share one meta['{key}']; copy it with meta.copy_meta().{_context(node)}"
                )


def verify_values(program: Program) -> None:
    """Compute every value again and compare; once, after the last pass."""
