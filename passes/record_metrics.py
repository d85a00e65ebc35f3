"""Return what each MoE layer did: the tokens that each expert got, those it dropped, and what the loss holds for its router.

Before:  the counts of permute stay inside the layer, and balance terms inside the loss
After:   both are outputs of kind METRIC, as this rank's share; nothing is reduced until somebody asks

The loss is taken apart into the terms that it adds up. A term that reads a layer's routing other than through the layer's
experts is a balance (or z) term of that layer; one that reads several layers at once counts for each in equal parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.pass_base import Fact, Pass, PassContext
from moecompile.placement.types import PARTIAL, Placement
from moecompile.program import AUX, Output, OutputKind, Program

aten = torch.ops.aten
TOKENS_PER_EXPERT = "tokens_per_expert"
DROPPED = "dropped"

# the same number in another type or shape
_COPIES = {
    aten._to_copy.default, aten.to.dtype, aten.clone.default, aten.contiguous.default, aten.reshape.default, aten.view.default,
    aten.squeeze.default, aten.squeeze.dim, aten.alias.default,
}  # fmt: skip
_TIMES = {aten.mul.Tensor, aten.mul.Scalar}
_OVER = {aten.div.Tensor, aten.div.Scalar}
_TOTALS = {aten.sum.default, aten.mean.default}


@dataclass(frozen=True)
class RecordMetrics(Pass):
    """Add the tokens per expert of every MoE layer, and its part of the loss, to the outputs."""

    name: ClassVar[str] = "record-metrics"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.MOE_OPS})

    def run(self, graph: GraphModule, ctx: PassContext) -> int:
        program = ctx.program
        results: list[Any] = program.output_nodes()
        known = {found for found in results if isinstance(found, Node)}
        new = [(node, item) for node, item in _counts(program, ctx) if node not in known]
        if not any(item.what == AUX for item in program.outputs):
            new += _balance(program, ctx)
        results += [node for node, _ in new]
        program.outputs.extend(item for _, item in new)
        graph.graph.output_node().args = (tuple(results),)
        return len(new)


def _counts(program: Program, ctx: PassContext) -> Iterator[tuple[Node, Output]]:
    """What permute counts in each layer, without the rows of choices that no expert serves, and how many of them were dropped."""
    layers = {record["permute"]: record for record in program.layers if record.get("partly_served")}
    for permute in graphs.find(program.graph, ops.permute):
        counts = graphs.items(permute).get(1)
        if counts is None:
            continue
        placed = tuple(meta.placements(counts).items())
        name, record = meta.module_path(permute), layers.get(permute.name)
        if record is not None:
            mask = _served_mask(permute)
            if record.get("drops"):
                dropped = _dropped(permute, mask, bool(record.get("lone_options")), ctx)
                yield dropped, Output(OutputKind.METRIC, name, what=DROPPED, placements=placed)
            counts = _served(permute, mask, ctx)
        yield counts, Output(OutputKind.METRIC, name, what=TOKENS_PER_EXPERT, placements=placed)


def _served_mask(permute: Node) -> Node:
    """Which choices an expert serves, bool ``[T, K]``: those whose weight recognize-moe did not mask."""
    row_map = graphs.items(permute)[2]
    probs: Any = next(user.args[4] for user in row_map.users if user.target is ops.unpermute)
    while probs.target is aten.reshape.default:
        probs = probs.args[0]
    mask: Node = probs.args[1].args[0] if probs.target is aten.masked_fill.Scalar else probs.args[0]
    return mask


def _dropped(permute: Node, served: Node, lone_options: bool, ctx: PassContext) -> Node:
    """How many choices of experts were dropped. Choices of an option without expert are none; the mask of those stands first."""
    wanted = served.args[0] if lone_options else None
    kept = served.args[1] if lone_options else served
    assert isinstance(kept, Node)
    with permute.graph.inserting_before(permute.graph.output_node()):
        lost = graphs.call(permute.graph, aten.logical_not.default, kept, like=permute, mode=ctx.mode)
        if wanted is not None:
            lost = graphs.call(permute.graph, aten.logical_and.default, wanted, lost, like=permute, mode=ctx.mode)
        return graphs.call(permute.graph, aten.sum.default, lost, like=permute, mode=ctx.mode)


def _served(permute: Node, mask: Node, ctx: PassContext) -> Node:
    """Tokens per expert without choices outside ``mask``."""

    def make(target: Any, *args: Any) -> Node:
        return graphs.call(permute.graph, target, *args, like=permute, mode=ctx.mode)

    flat = next((user for user in mask.users if user.target is aten.reshape.default and user.args[1] == [-1, 1]), None)
    if flat is not None:
        counted: Node = next(iter(next(iter(flat.users)).users))
        return counted
    ids: Any = permute.args[1]
    with permute.graph.inserting_before(permute.graph.output_node()):
        each = make(aten.one_hot.default, make(aten.reshape.default, ids, [-1]), permute.args[2])
        flat = make(aten.reshape.default, mask, [-1, 1])
        return make(aten.sum.dim_IntList, make(aten.mul.Tensor, each, flat), [0])


# ---- balance terms -------------------------------------------------------------------------------------------------


def _balance(program: Program, ctx: PassContext) -> list[tuple[Node, Output]]:
    """One value a layer that has balance terms: what the loss holds for it."""
    outputs = zip(program.output_nodes(), program.outputs, strict=True)
    losses = [found for found, item in outputs if item.kind is OutputKind.LOSS and isinstance(found, Node)]
    layers = list(_layers(program.graph))
    if not losses or not layers:
        return []
    parts: dict[str, list[tuple[Node, float]]] = {}
    for term, scale in _terms(losses[0], 1.0):
        read = _layers_read(term, layers)
        for name in read:
            parts.setdefault(name, []).append((term, scale / len(read)))
    # behind shard-dense, where the loss is this rank's share, so is each of its terms
    share: tuple[tuple[str, Placement], ...] = (("dp", PARTIAL),) if Fact.LOSS_SHARES in program.facts else ()
    with program.graph.inserting_before(program.graph.output_node()):
        return [
            (_total(program.graph, terms, losses[0], ctx), Output(OutputKind.METRIC, name, what=AUX, placements=share))
            for name, terms in parts.items()
        ]


def _total(graph: Graph, terms: list[tuple[Node, float]], loss: Node, ctx: PassContext) -> Node:
    """The sum of terms times their factors, made where the loss is made, so that layers stay alike."""
    scaled = [graphs.call(graph, aten.mul.Scalar, term, scale, like=loss, mode=ctx.mode) for term, scale in terms]
    total: Node = scaled[0]
    for other in scaled[1:]:
        total = graphs.call(graph, aten.add.Tensor, total, other, like=loss, mode=ctx.mode)
    return total


def _terms(node: Node, scale: float) -> Iterator[tuple[Node, float]]:
    """The numbers that make up ``scale * node`` when each is multiplied by its factor and all are added; constants left out."""
    args: Any = node.args
    if node.target in _COPIES and _is_number(args[0]):
        yield from _terms(args[0], scale)
    elif node.target is aten.neg.default and _is_number(args[0]):
        yield from _terms(args[0], -scale)
    elif node.target in (aten.add.Tensor, aten.sub.Tensor) and all(_is_number(arg) for arg in args[:2]):
        alpha: Any = node.kwargs.get("alpha", 1)
        for arg, factor in zip(args[:2], (1, -alpha if node.target is aten.sub.Tensor else alpha), strict=True):
            if isinstance(arg, Node):
                yield from _terms(arg, scale * factor)
    elif node.target in _TIMES | _OVER and _is_number(args[0]) and isinstance(args[1], (int, float)):
        yield from _terms(args[0], scale / args[1] if node.target in _OVER else scale * args[1])
    elif node.target in _TOTALS and args[0].target is aten.stack.default and meta.tensor(args[0]).dim() == 1:
        items = args[0].args[0]
        for item in items:
            yield from _terms(item, scale / len(items) if node.target is aten.mean.default else scale)
    else:
        yield node, scale


def _is_number(arg: Any) -> bool:
    return isinstance(arg, (int, float)) or (
        isinstance(arg, Node) and meta.is_tensor(arg) and meta.tensor(arg).numel() == 1
    )


@dataclass(frozen=True)
class _Layer:
    """One MoE layer: its ``routing`` are the values on the way from its tokens to its choice, ``out`` is what it gives."""

    name: str
    routing: set[Node]
    out: set[Node]


def _layers(graph: Graph) -> Iterator[_Layer]:
    """In graph order."""
    for permute in graphs.find(graph, ops.permute):
        tokens, ids = permute.args[:2]
        assert isinstance(tokens, Node) and isinstance(ids, Node)
        routing = {node for node in graphs.ancestors_beyond(ids, tokens) if node.op == "call_function"}
        rows = graphs.items(permute).get(2)
        out = {user for user in rows.users if user.target is ops.unpermute} if rows is not None else set()
        yield _Layer(meta.module_path(permute), routing, out)


def _layers_read(term: Node, layers: list[_Layer]) -> list[str]:
    """Names of the layers whose routing a term reads other than through their experts."""
    ends = {node for layer in layers for node in layer.out}
    reached = {term, *graphs.ancestors(term, stop=ends)}
    read = [layer for layer in layers if not reached.isdisjoint(layer.routing)]
    if read and not reached.isdisjoint(read[-1].out):
        return []  # it reads what comes out of the layer as well: it is no statement about the router
    return list(dict.fromkeys(layer.name for layer in read))
