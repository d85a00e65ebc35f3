"""Canonical text of a program: runnable Python, one line a node, with shapes, placements and the bytes moved.

Values are named by op (``dispatch``, ``dispatch_1``), so one inserted node changes one line; run-time sizes are ``u0``,
``u1``, ... in the order in which they are read. The same program always gives the same text.
"""

from __future__ import annotations

import ast
import base64
import dataclasses
import enum
import operator
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.fx import Graph, Node

from . import meta
from .compat import OpOverload, OpOverloadPacket, TreeSpec, treespec_dumps
from .errors import CaptureError
from .layout import Layout
from .ops import AXIS_ARGUMENT
from .placement.types import text as placement_text
from .plan import Plan

DTYPES = {
    "f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "b1": torch.bool,
    "c64": torch.complex64, "c128": torch.complex128,
}  # fmt: skip
_SHORT = {dtype: short for short, dtype in DTYPES.items()}
_SYMBOL = re.compile(r"\bu\d+\b")
BACKWARD, FORWARD = "# -- backward --", "# -- forward --"


class Printable(Protocol):
    """What the printer reads of a program; a protocol, because programs print themselves."""

    @property
    def graph(self) -> Graph: ...
    @property
    def outputs(self) -> Sequence[Any]: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def level(self) -> Any: ...
    @property
    def facts(self) -> Iterable[Any]: ...
    @property
    def pipeline(self) -> str: ...
    @property
    def in_spec(self) -> TreeSpec | None: ...
    @property
    def out_spec(self) -> TreeSpec | None: ...
    @property
    def out_template(self) -> tuple[Any, ...]: ...
    @property
    def layers(self) -> list[dict[str, Any]]: ...
    @property
    def layout(self) -> Layout | None: ...
    @property
    def unrouted(self) -> list[dict[str, Any]]: ...
    @property
    def gathers(self) -> Sequence[Any]: ...
    @property
    def constants(self) -> dict[str, torch.Tensor]: ...
    def items(self) -> Iterator[tuple[Node, Any]]: ...
    def output_nodes(self) -> list[Any]: ...


# ---- values and arguments ------------------------------------------------------------------------------------------


def type_text(found: Any) -> str:
    """``f32[2, 16]`` for a tensor, ``u0`` for a symbolic size, a tuple of these for a tuple."""
    if isinstance(found, torch.Tensor):
        return f"{_SHORT.get(found.dtype, str(found.dtype))}[{', '.join(str(size) for size in found.shape)}]"
    if isinstance(found, (tuple, list)):
        return "(" + ", ".join(type_text(item) for item in found) + ")"
    return str(found) if isinstance(found, (torch.SymInt, int, float)) else type(found).__name__


def argument_text(arg: Any) -> str:
    """One argument as Python that evaluates to it where ``torch`` is imported."""
    if isinstance(arg, Node):
        return arg.name
    if isinstance(arg, (list, tuple)):
        inner = ", ".join(argument_text(item) for item in arg)
        return f"[{inner}]" if isinstance(arg, list) else f"({inner}{',' if len(arg) == 1 else ''})"
    if isinstance(arg, dict):
        return "{" + ", ".join(f"{key!r}: {argument_text(item)}" for key, item in arg.items()) + "}"
    if isinstance(arg, slice):
        return f"slice({argument_text(arg.start)}, {argument_text(arg.stop)}, {argument_text(arg.step)})"
    if isinstance(arg, float) and (arg != arg or arg in (float("inf"), float("-inf"))):
        return f'float("{arg}")'
    if isinstance(arg, torch.device):
        return f'torch.device("{arg}")'
    return repr(arg)


def _target(node: Node) -> str:
    target: Any = node.target
    name = getattr(target, "__name__", "")
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return f"torch.ops.{target}"
    if getattr(operator, name, None) is target:
        return f"operator.{name}"
    return f"torch.{name}" if getattr(torch, name, None) is target else f"{target.__module__}.{name}"


def node_line(node: Node) -> str:
    """One node as an assignment, without its comment."""
    if node.target is operator.getitem:
        return f"{node.name} = {argument_text(node.args[0])}[{argument_text(node.args[1])}]"
    parts = [argument_text(arg) for arg in node.args]
    parts += [f"{key}={argument_text(arg)}" for key, arg in node.kwargs.items()]
    return f"{node.name} = {_target(node)}({', '.join(parts)})"


# ---- comments ------------------------------------------------------------------------------------------------------


def moved_bytes(node: Node) -> str:
    """What one rank hands to a collective, in bytes, such as ``2048*u0 B``; '' for other nodes."""
    if node.target not in AXIS_ARGUMENT:
        return ""
    source = node.args[0]
    if not isinstance(source, Node) or not meta.is_tensor(source):
        return ""
    found = meta.tensor(source)
    return f"moves {found.numel() * found.element_size()} B"


def _placed_text(node: Node) -> str:
    """Where a value lives, or each element of a tuple; '' where that is not known."""
    items = meta.item_placements(node)
    if items:
        return f"({', '.join(placement_text(item) for item in items)})"
    return placement_text(meta.placements(node)) if meta.has_placements(node) else ""


def _stage_text(node: Node) -> str:
    found = meta.stage(node)
    return "" if found is None else f"stage {found}"


def comment(node: Node, *, sources: bool = False) -> str:
    """Type, recorded placement, bytes moved, pipeline stage and module, two spaces apart; ``sources`` adds ``at file:line``."""
    parts = [
        type_text(node.meta.get("val")),
        _placed_text(node),
        moved_bytes(node),
        _stage_text(node),
        meta.module_path(node),
        f"at {meta.source(node)}" if sources and meta.source(node) else "",
    ]
    return "  ".join(part for part in parts if part)


class _Sizes:
    """Names run-time sizes by first appearance: their numbers in the shape environment depend on its past."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def __call__(self, text: str) -> str:
        return _SYMBOL.sub(lambda found: self.names.setdefault(found.group(), f"u{len(self.names)}"), text)


# ---- whole texts ---------------------------------------------------------------------------------------------------


def graph_text(program: Printable, *, sources: bool = False) -> str:
    """The function alone. ``sources``: name file and line of the user's code behind each node."""
    sizes = _Sizes()
    lines = ["def forward("]
    for node, item in program.items():
        placed = placement_text(dict(item.placements))
        label = item.name if item.name != node.name else ""
        kind = f"{item.kind.value} {type_text(node.meta.get('val'))}"
        described = "  ".join(filter(None, (kind, placed, _stage_text(node), label)))
        lines.append(f"    {node.name},  # {described}")
    lines.append("):")
    direction = meta.Direction.FORWARD
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        if meta.direction(node) is not direction:
            direction = meta.direction(node)
            lines.append(f"    {BACKWARD if direction is meta.Direction.BACKWARD else FORWARD}")
        lines.append(f"    {node_line(node)}  # {sizes(comment(node, sources=sources))}")
    results = ", ".join(argument_text(found) for found in program.output_nodes())
    lines.append(f"    return ({results},)" if results else "    return ()")
    kinds = ", ".join(" ".join(filter(None, (item.kind.value, item.name, item.what))) for item in program.outputs)
    lines.append(f"    # returns: {kinds}")
    return "\n".join(lines) + "\n"


def plan_text(plan: Plan) -> str:
    """The fields of a plan that differ from their defaults, on one line."""
    changed = [
        f"{field.name}={getattr(plan, field.name)!r}"
        for field in dataclasses.fields(plan)
        if field.default is not dataclasses.MISSING and getattr(plan, field.name) != field.default
    ]
    return f"{' '.join(changed) or 'all defaults'}; {plan.world_size} ranks"


def program_text(program: Printable, *, sources: bool = False) -> str:
    """The whole program: level, pipeline, facts and plan on top, then the function."""
    facts = ", ".join(sorted(fact.name for fact in program.facts)) or "none"
    head = [
        f"# level: {program.level.name.lower()}; pipeline: {program.pipeline or 'none yet'}",
        f"# facts: {facts}",
        f"# plan: {plan_text(program.plan)}",
        *(f"# gathered: {item}" for item in program.gathers),
        "import operator",
        "",
        "import torch",
        "",
        "",
    ]
    return "\n".join(head) + graph_text(program, sources=sources)


# ---- saved programs ------------------------------------------------------------------------------------------------

_NOTE = (
    '"""A program of moecompile, which can be edited: `moecompile.load` reads it back by running this very Python.\n\n'
    "The function may call torch, nothing else; PROGRAM holds literals and says what its inputs and outputs are.\n"
    '"""\n\n'
)


def saved_text(program: Printable) -> str:
    """The text of the program and all that is needed to run it again, as one Python file."""
    _check_literal("the model returns", program.out_template)
    data = {
        "format": 1,
        "level": program.level.name.lower(),
        "pipeline": program.pipeline,
        "facts": sorted(fact.name for fact in program.facts),
        "plan": program.plan.to_toml(),
        "inputs": [_described(item) | _value_text(node) for node, item in program.items()],
        "outputs": [_described(item) for item in program.outputs],
        "in_spec": _spec_text(program.in_spec),
        "out_spec": _spec_text(program.out_spec),
        "out_template": list(program.out_template),
        "layers": program.layers,
        "unrouted": program.unrouted,
        "gathers": [dataclasses.asdict(item) for item in program.gathers],
        "layout": "" if program.layout is None else str(program.layout),
        "constants": {name: tensor_text(found) for name, found in program.constants.items()},
    }
    return f"{_NOTE}{program_text(program)}\n\nPROGRAM = {literal_text(data)}"


def _check_literal(where: str, found: Any) -> None:
    try:
        ast.literal_eval(repr(found))
    except (ValueError, SyntaxError):
        raise CaptureError(
            f"save: {where} {found!r}, which has no text form; return tensors, numbers, strings and None only."
        ) from None


def _described(item: Any) -> dict[str, Any]:
    """The fields of an Input or Output that differ from their defaults; placements as pairs of axis and text."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(item):
        value = getattr(item, field.name)
        if value == field.default:
            continue
        if field.name == "placements":
            value = tuple((axis, str(placed)) for axis, placed in value)
        found[field.name] = value.value if isinstance(value, enum.Enum) else value
    return found


def _value_text(node: Node) -> dict[str, Any]:
    """Type, device and (where unusual) strides of a placeholder's local value."""
    found = meta.tensor(node)
    described: dict[str, Any] = {"value": type_text(found)}
    if found.device.type != "cpu":
        described["device"] = found.device.type
    if not found.is_contiguous():
        described["strides"] = tuple(found.stride())
    if meta.stage(node) is not None:
        described["stage"] = meta.stage(node)
    return described


def _spec_text(spec: TreeSpec | None) -> str | None:
    """The structure of arguments or results; None where one of their types cannot be named in text."""
    if spec is None:
        return None
    try:
        return treespec_dumps(spec)
    except NotImplementedError:
        return None


def tensor_text(found: torch.Tensor) -> tuple[str, str]:
    """A tensor as its type and its packed bytes."""
    raw = found.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return type_text(found), base64.b85encode(zlib.compress(raw)).decode()


def literal_text(found: Mapping[str, Any]) -> str:
    """A dictionary of literals, one item of each list on a line of its own, so that a diff shows what changed."""
    lines = ["{"]
    for key, item in found.items():
        if isinstance(item, list) and item:
            lines += [f"    {key!r}: [", *(f"        {element!r}," for element in item), "    ],"]
        elif isinstance(item, dict) and item:
            lines += [
                f"    {key!r}: {{",
                *(f"        {name!r}: {element!r}," for name, element in item.items()),
                "    },",
            ]
        else:
            lines.append(f"    {key!r}: {item!r},")
    return "\n".join([*lines, "}"]) + "\n"
