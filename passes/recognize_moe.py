"""Rewrite every plain MoE layer in ``moe::`` ops.

Before:  topk -> a loop over experts, masks, one-hot products, ... -> weighted sum
After:   topk -> permute -> grouped_linear -> activation -> grouped_linear -> unpermute

The weights of E separate experts become one input ``[E, ...]`` that names the E parameters.  A layer that is in
``moe::`` ops already is only recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.errors import CaptureError
from moecompile.pass_base import Fact, Numerics, Pass, PassContext
from moecompile.program import Input, OutputKind, Program
from moecompile.recognition import ACCEPTED, find_layers
from moecompile.recognition.choices import find_choices
from moecompile.recognition.convolutions import as_products
from moecompile.recognition.describe import describe
from moecompile.recognition.flat_products import unflatten_products
from moecompile.recognition.rowwise import is_linear
from moecompile.recognition.scaled_gathers import scale_before_gathers
from moecompile.recognition.several_factors import as_pairs
from moecompile.recognition.summed_experts import weigh_behind
from moecompile.recognition.unjoin import unjoin
from moecompile.recognition.unrouted import Unrouted, find_lookups, find_parallel
from moecompile.recognition.write import Writer

aten = torch.ops.aten


@dataclass(frozen=True)
class RecognizeMoe(Pass):
    """Find MoE layers by what they compute and write them in ``moe::`` ops."""

    name: ClassVar[str] = "recognize-moe"
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.MOE_OPS})
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATING

    def run(self, graph: GraphModule, ctx: PassContext) -> int:
        program = ctx.program
        known = {record["permute"] for record in program.layers}
        for permute in graphs.find(graph, ops.permute):
            if permute.name not in known:
                program.layers.append(_canonical_record(permute, dict(program.items())))
        as_products(graph.graph, ctx.mode)
        as_pairs(graph.graph, ctx.mode)
        unflatten_products(graph.graph, ctx.mode)
        weigh_behind(graph.graph, ctx.mode)
        scale_before_gathers(graph.graph, ctx.mode)
        unjoin(graph.graph, ctx.mode)
        unrouted: list[Unrouted] = []
        layers = find_layers(graph.graph, dict(program.items()), program.constants, unrouted)
        replaced: list[Node] = []
        moved: dict[Node, Node] = {}  # results of layers written so far: a later layer may read them directly
        for layer in layers:
            writer = Writer(graph.graph, layer, ctx, moved)
            program.layers.append(writer.write())
            replaced += writer.replaced
        if layers:
            graphs.eliminate_dead(graph.graph)
            _drop_inputs(replaced, ctx)
        _refuse_unread_experts(graph.graph)
        _refuse_rows_in_buffers(program)
        owned = [name for record in program.layers for name in record["params"]]
        unrouted += find_parallel(graph.graph, dict(program.items()), owned)
        lookups = find_lookups(graph.graph, dict(program.items()))
        unrouted += lookups
        program.unrouted = [item.record() for item in unrouted]
        _describe_all(graph, ctx)
        degrees = [f"{axis}={ctx.mesh.size(axis)}" for axis in ("ep", "etp") if ctx.mesh.size(axis) > 1]
        if degrees and (not (program.layers or lookups) or (unrouted and program.plan.strict)):
            named = [(item.node, item.reason) for item in unrouted] or [
                (choice.node, f"this choice among {choice.num_options} leads to no experts")
                for choice in find_choices(graph.graph)
            ]
            said = "".join(f"; {meta.where(node)}: {reason}" for node, reason in named)
            found = f"{len(unrouted)} layers that are none" if program.layers else "no MoE layer"
            raise CaptureError(
                f"recognize-moe: the model has {found}, and {degrees[0]} needs one{said}; use {degrees[0].partition('=')[0]}=1"
                f"{' or strict=False' if program.layers else ''}; {ACCEPTED}."
            )
        return len(layers)


def _describe_all(graph: GraphModule, ctx: PassContext) -> None:
    """Add to each layer's record what its router is and which experts it shares."""
    inputs = dict(ctx.program.items())
    permutes = {node.name: node for node in graphs.find(graph, ops.permute)}
    for record in ctx.program.layers:
        if record["permute"] in permutes:
            record.update(describe(permutes[record["permute"]], inputs))


def _drop_inputs(replaced: list[Node], ctx: PassContext) -> None:
    """Take the separate expert parameters out of the interface; each must have served its expert alone."""
    program = ctx.program
    items = dict(program.items())
    for node in dict.fromkeys(replaced):
        if node.users:
            user = next(iter(node.users))
            raise CaptureError(
                f"recognize-moe: the expert parameter {items[node].fqns[0]} is also used at {meta.where(user)}, so it "
                "cannot live on one rank only; give that place a parameter of its own, or compute it after the step."
            )
        del items[node]
        program.graph.erase_node(node)
    program.inputs[:] = list(items.values())


def _refuse_unread_experts(graph: Graph) -> None:
    """A weight applied to rows whose number depends on values is part of some routing that was not recognised."""
    for node in graph.nodes:
        if not is_linear(node) or node.target is aten.einsum.default:
            continue
        if any(isinstance(size, torch.SymInt) for size in graphs.symbolic_sizes(node.meta.get("val"))):
            raise CaptureError(
                f"recognize-moe: {meta.where(node)} computes on rows picked by their values, and is not recognised "
                f"as an MoE layer; {ACCEPTED}."
            )


def _refuse_rows_in_buffers(program: Program) -> None:
    """A buffer cannot hold what is computed from the rows of an expert, of which no rank knows how many there are."""
    for node, item in zip(program.output_nodes(), program.outputs, strict=True):
        if item.kind is not OutputKind.BUFFER or not isinstance(node, Node):
            continue
        if any(found.target is aten.where.default and len(found.args) == 1 for found in graphs.ancestors(node)):
            raise CaptureError(
                f"recognize-moe: {meta.where(node)} writes into buffer {item.name!r} what is computed from an expert's own rows, which "
                f"has no form on ranks that share experts out; sum over all tokens by a mask (ids == e), or update it outside forward."
            )


def _canonical_record(permute: Node, inputs: dict[Node, Input]) -> dict[str, Any]:
    """The record of a layer that is in ``moe::`` ops already."""
    own = [node for node in graphs.descendants(permute, stop=(ops.unpermute,)) if node.target is ops.grouped_linear]
    weights = [arg for node in own for arg in node.args[2:4] if isinstance(arg, Node)]
    read = {*weights, *graphs.ancestors(*weights)}
    names = [name for node in inputs if node in read for name in inputs[node].fqns]
    ids: Any = permute.args[1]
    return {
        "module": meta.module_path(permute),
        "source": meta.source(permute),
        "how": "moe ops",
        "num_experts": permute.args[2],
        "top_k": int(meta.tensor(ids).shape[-1]),
        "params": names,
        "permute": permute.name,
    }
