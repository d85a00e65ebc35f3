"""Make one op of a gated activation.

Before:  split -> getitem, getitem -> silu -> mul          After:  moe.swiglu
         silu(gate) -> mul(up)                                     moe.silu_mul

The chain then costs one pass over memory and keeps only its input for the backward. Comes before ``differentiate``, which
derives the backward as one op, too; and after sharding, so that no placement rule has to know the fused op.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.pass_base import Fact, Numerics, Pass, PassContext
from moecompile.placement.types import is_partial

aten = torch.ops.aten


@dataclass(frozen=True)
class FuseSwiglu(Pass):
    """Replace silu(gate) * up by moe.swiglu where both are halves of one tensor, else by moe.silu_mul."""

    name: ClassVar[str] = "fuse-swiglu"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TOKENS_SHARDED})
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATING  # the gradient of silu may be rounded at other places

    def run(self, graph: GraphModule, ctx: PassContext) -> int:
        done = 0
        for silu in graphs.find(graph, aten.silu.default):
            found = match(silu)
            if found is None:
                continue
            product, gate, up = found
            whole = halves_of(gate, up)
            with graph.graph.inserting_before(product):
                if whole is not None:
                    fused = graphs.call(graph.graph, ops.swiglu, whole, like=product, mode=ctx.mode)
                else:
                    fused = graphs.call(graph.graph, ops.silu_mul, gate, up, like=product, mode=ctx.mode)
            if meta.has_placements(product):
                meta.set_placements(fused, meta.placements(product))
            graphs.replace(product, fused)
            done += 1
        if done:
            graphs.eliminate_dead(graph.graph)
        return done


def match(silu: Node) -> tuple[Node, Node, Node] | None:
    """(product, gate, up) where the only use of ``silu`` is a product with a tensor of the same shape and dtype."""
    users = list(silu.users)
    if len(users) != 1 or users[0].target is not aten.mul.Tensor:
        return None
    product, gate = users[0], silu.args[0]
    others = [arg for arg in product.args if arg is not silu]
    if len(others) != 1 or not isinstance(gate, Node):
        return None
    up = others[0]
    if not isinstance(up, Node) or not meta.is_tensor(up) or not _alike(gate, up):
        return None
    if is_partial(meta.placements(up)):  # the product may be summed later, but silu and product as one op may not
        return None
    return product, gate, up


def _alike(gate: Node, up: Node) -> bool:
    a, b = meta.tensor(gate), meta.tensor(up)
    # sizes are compared as text: a size known at run time only equals itself
    return a.dtype == b.dtype and a.dim() >= 1 and str(tuple(a.shape)) == str(tuple(b.shape))


def halves_of(gate: Node, up: Node) -> Node | None:
    """The tensor [gate|up] of which the two are the halves along the last dim, in this order."""
    first, second = _part(gate), _part(up)
    if first is None or second is None or first[0] is not second[0]:
        return None
    whole, width = first[0], meta.tensor(first[0]).shape[-1]
    return whole if first[1:] == (0, width // 2) and second[1:] == (width // 2, width) and width % 2 == 0 else None


def _part(node: Node) -> tuple[Node, int, int] | None:
    """(source, start, stop) of a piece of a tensor along its last dim."""
    if node.target is operator.getitem:
        source: Any = node.args[0]
        if source.target not in (aten.split.Tensor, aten.chunk.default) or not _last_dim(source, 2):
            return None
        index, whole = int(node.args[1]), source.args[0]  # type: ignore[arg-type]
        sizes = [int(piece.shape[-1]) for piece in meta.value(source)]
        return whole, sum(sizes[:index]), sum(sizes[: index + 1])
    if node.target is aten.slice.Tensor and isinstance(node.args[0], Node) and _last_dim(node, 1):
        size = int(meta.tensor(node.args[0]).shape[-1])
        start = node.args[2] if len(node.args) > 2 and node.args[2] is not None else 0
        stop = node.args[3] if len(node.args) > 3 and node.args[3] is not None else size
        if len(node.args) <= 4 and isinstance(start, int) and isinstance(stop, int) and start >= 0:
            return node.args[0], start, min(stop, size)
    return None


def _last_dim(node: Node, place: int) -> bool:
    """Whether argument ``place``, a dim, names the last one."""
    source = node.args[0]
    assert isinstance(source, Node)
    dim = node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)
    return dim in (-1, meta.tensor(source).dim() - 1)
