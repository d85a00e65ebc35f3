"""The forward of one MoE layer as the passes of the model level leave it, before the backward is derived from it.

Written for reading: the same nodes in the same order as in the program, with short names, and tuples unpacked in place.
"""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from moecompile import meta, ops
from moecompile.placement.types import text as placement_text
from moecompile.printer import moved_bytes, type_text
from moecompile.program import Program

# How the results of ops that return several values are called here.
_PARTS: dict[Any, tuple[str, ...]] = {
    ops.permute: ("rows", "tokens_per_expert", "row_map"),
    ops.sizes_to_host: ("send", "recv", "tokens_from_rank"),
    ops.permute_local: ("rows", "tokens_per_expert", "row_map"),
    torch.ops.aten.topk.default: ("top_probs", "top_ids"),
}
_OVERLOAD = re.compile(r"_(default|tensor|scalar|int|dim_int_list|dim)(?=$|_\d+$)")
LEGEND = "each value with its type and how it lies over the ranks: R equal on all, S(0)@dp cut along dim 0, V@ep rows, P@dp partial sums"


def layer_module(program: Program, layer: int = 0) -> str:
    """The module path of the MoE layer, one step above its experts, so that the router is seen too; '' without a layer."""
    if layer >= len(program.layers):
        return ""
    path: str = program.layers[layer]["module"]
    head, _, last = path.rpartition(".")
    return head if last == "experts" and head else path


def layer_nodes(program: Program, module: str) -> list[Node]:
    """The nodes that the module and its children made, in graph order."""
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    return [node for node in calls if f"{meta.module_path(node)}.".startswith(f"{module}.")]


def layer_text(program: Program, layer: int = 0) -> str:
    """One line a call: ``name: "type placement" = op(...)  # sends N B``."""
    module = layer_module(program, layer)
    nodes = layer_nodes(program, module) if module else []
    names = _Names(module)
    lines = [f"# {module}, the same text on all {program.plan.world_size} ranks"] if nodes else []
    for node in nodes:
        if node.target is not operator.getitem:
            lines.append(_line(node, names))
    return "\n".join(lines)


class _Names:
    """Short names, each used once. Values from outside the layer keep theirs, without the layer's own path."""

    def __init__(self, module: str) -> None:
        self._prefix = module.replace(".", "_") + "_"
        self._given: dict[Node, str] = {}
        self._used: set[str] = set()

    def of(self, node: Node) -> str:
        if node not in self._given:
            self._given[node] = self._free(self._wanted(node))
        return self._given[node]

    def _wanted(self, node: Node) -> str:
        if node.op == "call_function" and node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, Node) and isinstance(index, int)
            parts = _PARTS.get(source.target, ())
            return parts[index] if index < len(parts) else f"{self.of(source)}_{index}"
        short = re.sub(r"_\d+$", "", _OVERLOAD.sub("", node.name)) if node.op == "call_function" else node.name
        return "num_rows" if "local_scalar" in short else short.removeprefix(self._prefix)

    def _free(self, wanted: str) -> str:
        name, count = wanted, 2
        while name in self._used:
            name, count = f"{wanted}_{count}", count + 1
        self._used.add(name)
        return name


def _line(node: Node, names: _Names) -> str:
    parts = [user for user in node.users if user.target is operator.getitem]
    shown = sorted(parts, key=lambda user: user.args[1]) if parts else [node]  # type: ignore[arg-type, return-value]
    targets = [f"{names.of(item)}: \"{_kind(item)}\"" for item in shown]
    args = map_arg((node.args, node.kwargs), lambda item: _Bare(names.of(item)))
    words = [repr(arg) for arg in args[0]] + [f"{key}={arg!r}" for key, arg in args[1].items()]
    op = str(node.target).removesuffix(".default")
    sent = moved_bytes(node).replace("moves", "sends")
    call = f"{op}({', '.join(words)})" + (f"  # {sent}" if sent else "")
    return f"{targets[0]} = {call}" if len(targets) == 1 else f"{', '.join(targets)} = {call}"


def _kind(node: Node) -> str:
    return f"{type_text(node.meta.get('val'))} {placement_text(meta.placements(node))}".strip()


class _Bare(str):
    """A name, printed without quotes."""

    def __repr__(self) -> str:
        return str(self)
