"""The forward of one MoE layer as the passes of the model level leave it, before the backward is derived from it."""

from __future__ import annotations

from torch.fx import Node

from moecompile import meta
from moecompile.printer import comment, node_line
from moecompile.program import Program

LEGEND = (
    "Each line with its type, how the value lies over the ranks (R: equal on all, S(0)@dp: dim 0 cut over dp, V@ep: rows of "
    "this rank, P@dp: partial sums) and the bytes that one rank sends."
)


def layer_module(program: Program, layer: int = 0) -> str:
    """The module path of the MoE layer, one step above its experts, so that the router is seen too; '' for the whole model."""
    path: str = program.layers[layer]["module"]
    head, _, last = path.rpartition(".")
    return head if last == "experts" else path


def layer_nodes(program: Program, module: str) -> list[Node]:
    """The nodes that the module and its children made, in graph order."""
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    return [node for node in calls if not module or f"{meta.module_path(node)}.".startswith(f"{module}.")]


def layer_text(program: Program, layer: int = 0) -> str:
    """The layer's lines of the program, '' for a model without MoE layers."""
    if layer >= len(program.layers):
        return ""
    module = layer_module(program, layer)
    lines = [f"# {module or 'the model'}, the same text on all {program.plan.world_size} ranks"]
    for node in layer_nodes(program, module):
        call = node_line(node).replace("torch.ops.", "").replace(".default(", "(")
        told = comment(node).removesuffix(meta.module_path(node)).rstrip()
        lines.append(f"{call}  # {told}".replace(f"{module.replace('.', '_')}_", ""))
    return "\n".join(lines)
