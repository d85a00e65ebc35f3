"""Drop what does nothing, and compute once what is computed twice.

Before:  detach(x), view(view(x)), reshape to the same shape, t(t(x)), expand to the same shape, x + 0, x * 1.0; the same
         call in several places
After:   x; one call; a reshape stays where it changes which dim of the whole is cut, though no size on a rank

Every value keeps its bits, its shape and its place in memory order. Values that the program returns are left alone, so that no
two outputs become one tensor, and so are parameters that are kept; calls of the forward and of the backward are not merged, since a
backward may repeat a forward call on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from moecompile import graph as graphs
from moecompile import meta
from moecompile.compat import OpOverload
from moecompile.pass_base import Numerics, Pass, PassContext
from moecompile.program import Level

aten = torch.ops.aten
_ALIASES = {aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default}
_SHAPES = {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default}
_CHAINED = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
_FLIPS = {aten.t.default, aten.transpose.int}


@dataclass(frozen=True)
class Canonicalize(Pass):
    """Remove calls that return their operand and merge equal calls; returns how many went."""

    name: ClassVar[str] = "canonicalize"
    level: ClassVar[Level] = Level.STEP  # before, a detach still says where gradients end
    numerics: ClassVar[Numerics] = Numerics.BITWISE

    def run(self, graph: GraphModule, ctx: PassContext) -> int:
        returned = set(graph.graph.output_node().all_input_nodes)
        seen: dict[Any, Node] = {}
        lines = {meta.source(node) for node in graph.graph.nodes if _moves_the_cut(node)}
        done = 0
        for node in list(graph.graph.nodes):
            if node.op != "call_function" or node in returned or meta.whole(node) is not None:
                continue
            kept = node.target in _CHAINED and meta.source(node) in lines
            same = operand_of(node) if not kept else None
            if same is None:
                same = _earlier(node, seen)
            if same is not None:
                graphs.replace(node, same)
                done += 1
            else:
                done += _shorten(node)
        if done:
            graphs.eliminate_dead(graph.graph, keep=lambda node: not _is_pure(node))
        return done


def operand_of(node: Node) -> Node | None:
    """The node whose value this one repeats, alias or copy; None if it does something."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or not meta.is_tensor(source) or not meta.is_tensor(node):
        return None
    before, after = meta.tensor(source), meta.tensor(node)
    if before.dtype != after.dtype or before.dim() != after.dim() or before.device != after.device:
        return None
    if node.target in _ALIASES:
        return source
    if node.target in _SHAPES and _same_sizes(before, after):
        return source
    if node.target in _FLIPS and source.target is node.target and source.args[1:] == node.args[1:]:
        return source.args[0] if isinstance(source.args[0], Node) else None
    neutral = {aten.add.Tensor: 0, aten.sub.Tensor: 0, aten.mul.Tensor: 1, aten.div.Tensor: 1}.get(node.target)  # type: ignore[call-overload]
    is_number = len(node.args) == 2 and not node.kwargs and isinstance(node.args[1], (int, float))
    # x + 0 turns -0.0 into 0.0: only integers are left alone by it
    exact = neutral == 1 or not before.is_floating_point()
    if neutral is not None and is_number and node.args[1] == neutral and exact and _same_layout(before, after):
        return source
    return None


def _moves_the_cut(node: Node) -> bool:
    """Whether a reshape that changes nothing on a rank makes a cut of one dim one of another, as heads that come beside the batch where
    a rank has one of them. Without it, and without those of its line in the backward, the text would not say how values lie.
    """
    source = node.args[0] if node.args else None
    return (
        node.target in _CHAINED
        and isinstance(source, Node)
        and meta.has_placements(source)
        and meta.placements(node) not in ({}, meta.placements(source))
    )


def _shorten(node: Node) -> int:
    """Let a view of a contiguous tensor's view read the tensor itself."""
    source = node.args[0] if node.args else None
    if node.target not in _CHAINED or not isinstance(source, Node) or source.target not in _CHAINED:
        return 0
    base = source.args[0]
    if not isinstance(base, Node) or not _is_contiguous(meta.tensor(base)) or not _is_contiguous(meta.tensor(source)):
        return 0
    node.replace_input_with(source, base)
    return 1


def _earlier(node: Node, seen: dict[Any, Node]) -> Node | None:
    """An equal call before this one; else this one is remembered."""
    if not _is_pure(node):
        return None
    try:
        key = (node.target, _frozen(node.args), _frozen(node.kwargs), meta.direction(node), meta.stage(node))
        first = seen.setdefault(key, node)
    except TypeError:  # an argument that cannot be a key
        return None
    return None if first is node else first


def _frozen(found: Any) -> Any:
    """A key that tells 1 from 1.0 and from True."""
    if isinstance(found, (list, tuple)):
        return tuple(_frozen(item) for item in found)
    if isinstance(found, dict):
        return tuple((key, _frozen(found[key])) for key in sorted(found))
    if isinstance(found, slice):
        raise TypeError("a slice is no key")
    return type(found), found


def _is_pure(node: Node) -> bool:
    """An ATen call that always returns the same, or part of a tuple; collectives and reads on the host are neither."""
    target = node.target
    if not isinstance(target, OpOverload):
        return getattr(target, "__name__", "") == "getitem"
    if target.namespace != "aten" or target._schema.is_mutable or target is aten._local_scalar_dense.default:
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags and "empty" not in str(target)


def _same_sizes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return [str(size) for size in a.shape] == [str(size) for size in b.shape]


def _same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    return _same_sizes(a, b) and [str(step) for step in a.stride()] == [str(step) for step in b.stride()]


def _is_contiguous(found: torch.Tensor) -> bool:
    """Contiguous for every value of a run-time size."""
    expected: Any = 1
    for size, step in zip(reversed(found.shape), reversed(found.stride()), strict=True):
        if str(size) != "1" and str(step) != str(expected):
            return False
        expected = expected * size
    return True
