"""How a broken invariant is told: one sentence, and the ten lines around the node."""

from __future__ import annotations

from torch.fx import Node

from .. import meta
from ..errors import VerifyError
from ..printer import node_line


def fault(node: Node, message: str) -> VerifyError:
    """An error that says where, what and what to try; ``message`` continues the name of the place."""
    return VerifyError(f"{meta.where(node)} {message}.{surroundings(node)}")


def surroundings(node: Node) -> str:
    """The lines before and after a node, which is marked."""
    nodes = list(node.graph.nodes)
    at = nodes.index(node)
    lines = []
    for other in nodes[max(0, at - 5) : at + 5]:
        mark = ">" if other is node else " "
        text = node_line(other) if other.op == "call_function" else f"{other.op} {other.name}"
        lines.append(f"  {mark} {text}")
    return "\n" + "\n".join(lines)
