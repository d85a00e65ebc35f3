"""How many rows were picked, where that goes into a buffer as a number: the sum of the mask that picked them.

``self.load[e] += tokens.numel()`` adds a size that only the run knows.  As a sum over a mask it is a number of the whole
batch like any other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

from moecompile import graph as ir
from moecompile import meta
from moecompile.compat import FakeTensorMode

aten = torch.ops.aten
_TAKES_NUMBERS = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}


def sum_masks(graph: Graph, written: Iterable[Node], mode: FakeTensorMode) -> None:
    """Replace run-time sizes among the numbers that ``written`` are computed from."""
    masks: dict[str, Node] = {}
    for node in graph.nodes:
        if node.target is aten.where.default and len(node.args) == 1 and isinstance(node.args[0], Node):
            masks |= {str(size): node.args[0] for part in ir.items(node).values() for size in meta.tensor(part).shape}
    roots = list(written)
    for node in [*roots, *ir.ancestors(*roots)] if masks else []:
        if node.target not in _TAKES_NUMBERS or len(node.args) < 2:
            continue
        size = node.args[1]
        mask = masks.get(str(size.meta.get("val"))) if isinstance(size, Node) and not meta.is_tensor(size) else None
        if mask is not None:
            with graph.inserting_before(node):
                count = ir.call(graph, aten.sum.default, _as_mask(graph, mask, mode), like=node, mode=mode)
            node.args = (node.args[0], count, *node.args[2:])


def _as_mask(graph: Graph, picked: Node, mode: FakeTensorMode) -> Any:
    """What `where` picks by: the places that are not zero."""
    if meta.tensor(picked).dtype == torch.bool:
        return picked
    return ir.call(graph, aten.ne.Scalar, picked, 0, like=picked, mode=mode)
