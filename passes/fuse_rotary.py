"""Make one op of a rotary position embedding.

Before:  slice, slice -> neg -> cat -> mul sin; mul cos -> add
After:   moe.rotary

The two halves of the last dimension turn against each other. Declines where cos or sin is trained: the op has no gradient for
them. Comes before ``differentiate``; the backward is a rotation by the opposite angle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.pass_base import Fact, Numerics, Pass, PassContext
from moecompile.placement.types import is_partial
from moecompile.program import InputKind

aten = torch.ops.aten


@dataclass(frozen=True)
class FuseRotary(Pass):
    """Replace x * cos + rotate_half(x) * sin by moe.rotary."""

    name: ClassVar[str] = "fuse-rotary"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TOKENS_SHARDED})
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATING

    def run(self, graph: GraphModule, ctx: PassContext) -> int:
        trained = {node for node, item in ctx.program.items() if item.kind is InputKind.PARAM and item.requires_grad}
        done = 0
        for turned in graphs.find(graph, aten.cat.default):
            found = match(turned)
            if found is None:
                continue
            result, x, cos, sin = found
            if trained & graphs.ancestors(cos, sin):
                ctx.decline(
                    self.name, f"{meta.where(result)}: its angles are trained, and moe.rotary has no gradient for them"
                )
                continue
            with graph.graph.inserting_before(result):
                fused = graphs.call(graph.graph, ops.rotary, x, cos, sin, like=result, mode=ctx.mode)
            if meta.has_placements(result):
                meta.set_placements(fused, meta.placements(result))
            graphs.replace(result, fused)
            done += 1
        if done:
            graphs.eliminate_dead(graph.graph)
        return done


def match(turned: Node) -> tuple[Node, Node, Node, Node] | None:
    """(result, x, cos, sin) around ``turned`` = cat([-x2, x1], -1)."""
    x = rotated(turned)
    if x is None:
        return None
    for by_sin in turned.users:
        sin = _factor(by_sin, turned)
        for result in by_sin.users if sin is not None else ():
            if result.target is not aten.add.Tensor or result.kwargs:
                continue
            by_cos = next((arg for arg in result.args if arg is not by_sin), None)
            cos = _factor(by_cos, x) if isinstance(by_cos, Node) else None
            if sin is not None and cos is not None and _fit(x, cos, sin):
                return result, x, cos, sin
    return None


def rotated(turned: Node) -> Node | None:
    """x, if ``turned`` is cat([-x2, x1]) of its halves along the last dim."""
    parts = turned.args[0]
    if not isinstance(parts, (list, tuple)) or len(parts) != 2:
        return None
    negated, first = parts
    if not isinstance(negated, Node) or not isinstance(first, Node) or negated.target is not aten.neg.default:
        return None
    second = negated.args[0]
    last = meta.tensor(turned).dim() - 1
    dim = turned.args[1] if len(turned.args) > 1 else 0
    if dim not in (-1, last) or not isinstance(second, Node):
        return None
    half = int(meta.tensor(turned).shape[-1]) // 2
    is_first, is_second = _slice(first, 0, half), _slice(second, half, 2 * half)
    x = first.args[0]
    return x if is_first and is_second and isinstance(x, Node) and second.args[0] is x else None


def _slice(node: Node, start: int, stop: int) -> bool:
    """Whether ``node`` is x[..., start:stop]."""
    if node.target is not aten.slice.Tensor or len(node.args) != 4 or not isinstance(node.args[0], Node):
        return False
    shape = meta.tensor(node.args[0]).shape
    dim, begin, end = node.args[1:]
    last = dim in (-1, len(shape) - 1)
    return bool(last) and bool(begin == start) and isinstance(end, int) and min(end, int(shape[-1])) == stop


def _factor(product: Node | None, known: Node) -> Node | None:
    """What ``known`` is multiplied with."""
    if product is None or product.target is not aten.mul.Tensor:
        return None
    others = [arg for arg in product.args if arg is not known]
    return others[0] if len(others) == 1 and isinstance(others[0], Node) else None


def _fit(x: Node, cos: Node, sin: Node) -> bool:
    """Whether cos and sin have the shape, up to broadcasting, and the dtype of x, and none is still to be summed over ranks."""
    a, b, c = (meta.tensor(node) for node in (x, cos, sin))
    if a.dtype != b.dtype or b.dtype != c.dtype or not a.dim() == b.dim() == c.dim() >= 2:
        return False
    # each of the products may be summed later, the one op may not
    if any(is_partial(meta.placements(node)) for node in (x, cos, sin)):
        return False
    sizes = zip(a.shape, b.shape, c.shape, strict=True)
    return bool(a.shape[-1] == b.shape[-1]) and all(m in (1, n) and m == k for n, m, k in sizes)
