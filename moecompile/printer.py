"""Canonical text of a program: runnable Python, one line a node, with shapes, placements and the bytes that collectives move.

Values are named by op (``dispatch``, ``dispatch_1``), so one inserted node changes one line.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from . import meta
from .compat import OpOverload
from .ops import AXIS_ARGUMENT
from .placement.types import text as placement_text

if TYPE_CHECKING:
    from .program import Program

_DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b1", torch.complex64: "c64",
}  # fmt: skip


def type_text(found: Any) -> str:
    """``f32[2, 16]`` for a tensor, ``u0`` for a symbolic size, a tuple of these for a tuple."""
    if isinstance(found, torch.Tensor):
        return f"{_DTYPES.get(found.dtype, str(found.dtype))}[{', '.join(str(size) for size in found.shape)}]"
    if isinstance(found, (tuple, list)):
        return "(" + ", ".join(type_text(item) for item in found) + ")"
    return str(found) if isinstance(found, (torch.SymInt, int, float)) else type(found).__name__


def _argument(arg: Any) -> str:
    if isinstance(arg, Node):
        return arg.name
    if isinstance(arg, (list, tuple)):
        inner = ", ".join(_argument(item) for item in arg)
        return f"[{inner}]" if isinstance(arg, list) else f"({inner}{',' if len(arg) == 1 else ''})"
    if isinstance(arg, slice):
        return f"slice({_argument(arg.start)}, {_argument(arg.stop)}, {_argument(arg.step)})"
    if isinstance(arg, float) and arg in (float("inf"), float("-inf")):
        return f'float("{arg}")'
    if isinstance(arg, torch.device):
        return f'torch.device("{arg}")'
    return repr(arg)


def _target(node: Node) -> str:
    target: Any = node.target
    if isinstance(target, OpOverload):
        return f"torch.ops.{target}"
    if getattr(operator, getattr(target, "__name__", ""), None) is target:
        return f"operator.{target.__name__}"
    return f"{target.__module__}.{target.__name__}"


def node_line(node: Node) -> str:
    """One node as an assignment, without its comment."""
    if node.target is operator.getitem:
        return f"{node.name} = {_argument(node.args[0])}[{_argument(node.args[1])}]"
    parts = [_argument(arg) for arg in node.args] + [f"{key}={_argument(arg)}" for key, arg in node.kwargs.items()]
    return f"{node.name} = {_target(node)}({', '.join(parts)})"


def moved_bytes(node: Node) -> str:
    """What one rank hands to a collective, in bytes; '' for other nodes."""
    if node.target not in AXIS_ARGUMENT:
        return ""
    source = node.args[0]
    if not isinstance(source, Node) or not meta.is_tensor(source):
        return ""
    found = meta.tensor(source)
    return f"moves {found.numel() * found.element_size()} B"


def comment(node: Node) -> str:
    """Type, placement, bytes moved and module of a node."""
    parts = [
        type_text(node.meta.get("val")),
        placement_text(meta.placements(node)),
        moved_bytes(node),
        meta.module_path(node),
    ]
    return "  ".join(part for part in parts if part)


def graph_text(program: Program) -> str:
    """The function alone."""
    lines = ["def forward("]
    for node, item in program.items():
        placed = placement_text(dict(item.placements))
        lines.append(
            f"    {node.name},  # {item.kind.value} {type_text(node.meta.get('val'))}  {placed}  {item.name}".rstrip()
        )
    lines.append("):")
    for node in program.graph.nodes:
        if node.op == "call_function":
            lines.append(f"    {node_line(node)}  # {comment(node)}")
    results = ", ".join(f"{_argument(found)}" for found in program.output_nodes())
    lines.append(f"    return ({results},)" if results else "    return ()")
    kinds = ", ".join(" ".join(filter(None, (item.kind.value, item.name, item.what))) for item in program.outputs)
    lines.append(f"    # returns: {kinds}")
    return "\n".join(lines) + "\n"


def program_text(program: Program) -> str:
    """The whole program: facts and pipeline on top, then the function."""
    facts = ", ".join(sorted(fact.name for fact in program.facts)) or "none"
    head = [
        f"# level: {program.level.name.lower()}; pipeline: {program.pipeline or 'none yet'}",
        f"# facts: {facts}",
        f"# mesh: {program.mesh}",
        "import operator",
        "",
        "import torch",
        "",
        "",
    ]
    return "\n".join(head) + graph_text(program)
