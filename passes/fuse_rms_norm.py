"""Make one op of an RMS norm written by hand.

Before:  [to float32 ->] pow 2 -> mean -> add eps -> rsqrt -> mul [-> back to x's dtype] -> mul weight
After:   moe.rms_norm

Also takes ``aten.rms_norm`` over the last dimension where its rounding is the same. The op keeps x and one number a row for the
backward instead of every step between. Comes before ``differentiate``, which derives the backward as one op, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.pass_base import Fact, Numerics, Pass, PassContext

aten = torch.ops.aten
_CASTS = (aten._to_copy.default, aten.to.dtype, aten.to.dtype_layout)


@dataclass(frozen=True)
class Norm:
    """A found norm: ``result`` is weight * x / sqrt(mean(x^2) + eps)."""

    result: Node
    x: Node
    weight: Node
    eps: float


@dataclass(frozen=True)
class FuseRmsNorm(Pass):
    """Replace each RMS norm over the last dimension by moe.rms_norm."""

    name: ClassVar[str] = "fuse-rms-norm"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TOKENS_SHARDED})
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATING

    def run(self, graph: GraphModule, ctx: PassContext) -> int:
        found = [norm for node in graphs.find(graph, aten.rsqrt.default) if (norm := match(node)) is not None]
        found += [
            norm for node in graphs.find(graph, aten.rms_norm.default) if (norm := match_composite(node)) is not None
        ]
        for norm in found:
            with graph.graph.inserting_before(norm.result):
                made = graphs.call(
                    graph.graph, ops.rms_norm, norm.x, norm.weight, norm.eps, like=norm.result, mode=ctx.mode
                )
                fused, _ = graphs.unpack(graph.graph, made)
            if meta.has_placements(norm.result):
                meta.set_placements(fused, meta.placements(norm.result))
            graphs.replace(norm.result, fused)
        if found:
            graphs.eliminate_dead(graph.graph)
        return len(found)


def match(rsqrt: Node) -> Norm | None:
    """The norm around an ``rsqrt``, read upwards to x and downwards to the weight."""
    shifted = rsqrt.args[0]
    if not isinstance(shifted, Node) or shifted.target is not aten.add.Tensor or shifted.kwargs:
        return None
    mean, eps = shifted.args
    if not isinstance(mean, Node) or mean.target is not aten.mean.dim or not isinstance(eps, (int, float)):
        return None
    wide = _squared(mean)
    if wide is None:
        return None
    x = wide.args[0] if wide.target in _CASTS and _widens(wide) else wide
    scaled = _only_product(rsqrt, wide)
    if scaled is None or not isinstance(x, Node):
        return None
    last = _only_user(scaled)
    if last is not None and last.target in _CASTS:
        if meta.tensor(last).dtype != meta.tensor(x).dtype:
            return None
        scaled, last = last, _only_user(last)
    if last is None or last.target is not aten.mul.Tensor:
        return None
    weight = _other(last, scaled)
    if weight is None or not _fits(x, scaled, weight) or meta.tensor(last).dtype != meta.tensor(x).dtype:
        return None
    return Norm(last, x, weight, float(eps))


def match_composite(node: Node) -> Norm | None:
    """``aten.rms_norm`` over the last dim with a weight; in half precision it rounds once, ours twice, so it stays."""
    x, shape, weight, eps = (*node.args, None, None)[:4]
    if not isinstance(x, Node) or not isinstance(weight, Node) or len(shape) != 1:  # type: ignore[arg-type]
        return None
    dtype = meta.tensor(x).dtype
    if dtype not in (torch.float32, torch.float64) or not _fits(x, x, weight):
        return None
    return Norm(node, x, weight, torch.finfo(dtype).eps if eps is None else float(eps))  # type: ignore[arg-type]


def _squared(mean: Node) -> Node | None:
    """x of mean(x^2, last dim, keepdim)."""
    square, dims, keep = (*mean.args, False)[:3]
    if not isinstance(square, Node) or mean.kwargs or keep is not True:
        return None
    last = meta.tensor(square).dim() - 1
    if list(dims) not in ([-1], [last]):  # type: ignore[arg-type]
        return None
    base = square.args[0] if square.args else None
    if not isinstance(base, Node) or square.kwargs:
        return None
    is_power = square.target is aten.pow.Tensor_Scalar and square.args[1] == 2
    is_product = square.target is aten.mul.Tensor and square.args[1] is base
    return base if is_power or is_product or square.target is aten.square.default else None


def _widens(cast: Node) -> bool:
    """Whether a cast goes to the dtype in which the fused op takes its statistics; a narrowing one has to stay."""
    source = cast.args[0]
    if not isinstance(source, Node):
        return False
    before, after = meta.tensor(source).dtype, meta.tensor(cast).dtype
    return after == torch.promote_types(before, torch.float32)


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _only_product(rsqrt: Node, wide: Node) -> Node | None:
    """wide * rsqrt, the only use of ``rsqrt``."""
    product = _only_user(rsqrt)
    if product is None or product.target is not aten.mul.Tensor or _other(product, rsqrt) is not wide:
        return None
    return product


def _other(product: Node, factor: Node) -> Node | None:
    others = [arg for arg in product.args if arg is not factor]
    return others[0] if len(others) == 1 and isinstance(others[0], Node) else None


def _fits(x: Node, scaled: Node, weight: Node) -> bool:
    """Whether the weight is one vector along the last dim, and nothing but the op's own rounding lies between."""
    a, b = meta.tensor(x), meta.tensor(weight)
    same = a.dtype == b.dtype == meta.tensor(scaled).dtype
    return same and a.is_floating_point() and tuple(b.shape) == (a.shape[-1],)
