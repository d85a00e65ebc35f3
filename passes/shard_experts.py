"""Cut the expert weights over ep: each rank keeps E / ep experts.

Before:  grouped_linear(rows, tokens_per_expert, w) with w [E, out, in]
After:   the same call with w [E / ep, out, in], whose parameter is this rank's share

A weight that is computed (a low-rank adapter added to a frozen weight) is followed back to its parameters: those stacked along
the expert dim are cut, smaller ones stay whole and their product is sliced. Does nothing when ep == 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import Graph, GraphModule, Node

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.errors import PassError
from moecompile.pass_base import Fact, Pass, PassContext
from moecompile.placement.sharder import Sharder
from moecompile.placement.table import sharder
from moecompile.placement.types import REPLICATE, Shard
from moecompile.program import Input, InputKind


@dataclass(frozen=True)
class ShardExperts(Pass):
    """Place every expert weight as S(0) on ep."""

    name: ClassVar[str] = "shard-experts"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.MOE_OPS})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.EXPERTS_SHARDED})

    def run(self, graph: GraphModule, ctx: PassContext) -> int:
        ranks = ctx.mesh.size("ep")
        calls = graphs.find(graph, ops.grouped_linear)
        if ranks == 1 or not calls:
            return 0
        weights = list(dict.fromkeys(arg for call in calls for arg in call.args[2:4] if isinstance(arg, Node)))
        for weight in weights:
            _check_divides(weight, ranks)
        inputs = dict(ctx.program.items())
        cut = _cut_parameters(graph.graph, weights, inputs, ctx)
        walk = sharder(graph.graph, {"ep": ranks}, ctx.mode)
        _rebuild(graph.graph, walk, set(weights), set(cut))
        by_name = {node.name: item.placed("ep", Shard(0)) if node in cut else item for node, item in inputs.items()}
        for axis, stride, node in walk.new_offsets:
            by_name[node.name] = Input(InputKind.OFFSET, node.name, axis=axis, stride=stride)
        ctx.program.inputs[:] = [by_name[node.name] for node in walk.graph.nodes if node.op == "placeholder"]
        graph.graph = walk.graph
        return len(cut)


def _check_divides(weight: Node, ranks: int) -> None:
    experts = meta.tensor(weight).shape[0]
    if experts % ranks:
        near = [size for size in range(1, experts + 1) if experts % size == 0]
        raise PassError(
            f"shard-experts: {meta.where(weight)} holds {experts} experts, which ep={ranks} does not divide; choose ep from {near}."
        )


def _cut_parameters(graph: Graph, weights: list[Node], inputs: dict[Node, Input], ctx: PassContext) -> list[Node]:
    """Parameters whose cut along dim 0 is a cut along the expert dim of every weight they reach."""
    found: dict[Node, None] = {}
    for weight in weights:
        experts = meta.tensor(weight).shape[0]
        for node in [weight, *graphs.ancestors(weight)]:
            item = inputs.get(node)
            if item is None or item.kind not in (InputKind.PARAM, InputKind.BUFFER) or node in found:
                continue
            if node is weight or (
                item.shape and item.shape[0] % experts == 0 and _cuts_experts(graph, weight, node, ctx)
            ):
                found[node] = None
    if not found:
        raise PassError(
            f"shard-experts: {meta.where(weights[0])} is computed from parameters that have no expert dim first; store expert "
            f"weights as [num_experts, ...] or as one module per expert."
        )
    return list(found)


def _cuts_experts(graph: Graph, weight: Node, parameter: Node, ctx: PassContext) -> bool:
    """Try it: with only this parameter cut, the weight that depends on it is S(0)."""
    walk = sharder(graph, {"ep": ctx.mesh.size("ep")}, ctx.mode)
    region = graphs.ancestors(weight) | {weight}
    try:
        for node in (node for node in graph.nodes if node in region):
            if node.op == "placeholder":
                walk.add_placeholder(node, {"ep": Shard(0) if node is parameter else REPLICATE})
            else:
                walk.visit(node)
    except PassError:
        return False
    return walk.place(weight, "ep") == Shard(0)


def _rebuild(graph: Graph, walk: Sharder, weights: set[Node], cut: set[Node]) -> None:
    """Copy the graph; what a weight is computed from is re-emitted on this rank's share."""
    region = weights | graphs.ancestors(*weights)
    for node in graph.nodes:
        if node.op == "placeholder":
            walk.add_placeholder(node, {"ep": Shard(0) if node in cut else REPLICATE})
        elif node.op == "call_function" and node in region and _reached(walk, node):
            walk.visit(node)
        elif node.op == "call_function" and node.target is ops.grouped_linear:
            walk.keep(node, lambda arg: _expert_share(walk, arg) if arg in weights else walk.env[arg])
        elif node.op == "call_function":
            if _reached(walk, node):
                raise PassError(
                    f"shard-experts: {meta.where(node)} reads an expert weight outside the expert's own linear, which has no rule while "
                    f"ep > 1; compute it from the model's parameters after the step, or use ep=1."
                )
            walk.keep(node, walk.env.__getitem__)
    results: Any = graph.output_node().args[0]
    walk.graph.output(tuple(walk.env[found] if isinstance(found, Node) else found for found in results))


def _reached(walk: Sharder, node: Node) -> bool:
    return any(isinstance(walk.place(source, "ep"), Shard) for source in node.all_input_nodes)


def _expert_share(walk: Sharder, weight: Node) -> Node:
    """The local weight of a grouped linear."""
    return walk.convert(walk.env[weight], weight, "ep", walk.place(weight, "ep"), Shard(0))
