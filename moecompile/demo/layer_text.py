"""The rewritten forward of one MoE layer, as lines of the program that runs."""

from __future__ import annotations

from torch.fx import Node

from moecompile import meta
from moecompile.printer import comment, node_line
from moecompile.program import Program


def layer_module(program: Program, layer: int = 0) -> str:
    """The module path of the MoE layer, one step above its experts, so that the router is seen too; '' without a layer."""
    if layer >= len(program.layers):
        return ""
    path: str = program.layers[layer]["module"]
    head, _, last = path.rpartition(".")
    return head if last == "experts" and head else path


def layer_nodes(program: Program, module: str) -> list[Node]:
    """The forward nodes that the module and its children made, in graph order."""
    return [
        node
        for node in program.graph.nodes
        if node.op == "call_function"
        and meta.direction(node) is meta.Direction.FORWARD
        and (meta.module_path(node) + ".").startswith(f"{module}.")
    ]


def layer_text(program: Program, layer: int = 0, width: int = 64) -> str:
    """One line a node: the call, then type, placement and bytes moved. Comments start at column ``width`` where they can."""
    module = layer_module(program, layer)
    nodes = layer_nodes(program, module) if module else []
    lines = [f"# {module}, as every one of {program.plan.world_size} ranks runs it"] if nodes else []
    for node in nodes:
        told = comment(node).removesuffix(meta.module_path(node)).rstrip()
        lines.append(f"{node_line(node).replace('torch.ops.', ''):<{width}}  # {told}".rstrip())
    return "\n".join(lines)
