"""Cut the expert weights: each rank keeps E / ep experts, and of each of them 1 / etp of its width.

Before:  grouped_linear(rows, tokens_per_expert, w) with w [E, out, in]
After:   the same call with w [E / ep, out, in], whose parameter is this rank's share; under etp the first linears of an expert have
         w [E / ep, out / etp, in] and the last ones w [E / ep, out, in / etp], whose results are sums over etp still to be taken

Which linears are first and last is found from the expert's graph (``moecompile/placement/expert_width.py``), and so is where gate and
up lie side by side in one weight, each of which is then cut. The bias of a last linear counts once, in equal parts.

A weight that is computed (a low-rank adapter added to a frozen weight) is followed back to its parameters: those stacked along
the expert dim are cut, smaller ones stay whole and their product is sliced. Does nothing when ep == etp == 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import Graph, GraphModule, Node

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.errors import PassError
from moecompile.pass_base import Fact, Pass, PassContext
from moecompile.placement.expert_width import Experts, WidthSearch, find_experts, moved, width_sharder
from moecompile.placement.sharder import Sharder
from moecompile.placement.table import sharder
from moecompile.placement.types import REPLICATE, Partial, Placement, Shard
from moecompile.program import Input, InputKind


@dataclass(frozen=True)
class ShardExperts(Pass):
    """Place every expert weight as S(0) on ep, and as S(1) or S(2) on etp."""

    name: ClassVar[str] = "shard-experts"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.MOE_OPS})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.EXPERTS_SHARDED})

    def run(self, graph: GraphModule, ctx: PassContext) -> int:
        done = _cut_width(graph, ctx) if ctx.mesh.size("etp") > 1 else 0
        ranks = ctx.mesh.size("ep")
        calls = graphs.find(graph, ops.grouped_linear)
        if ranks == 1 or not calls:
            return done
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
        return done + len(cut)


# ---- over etp ----------------------------------------------------------------------------------------------------------


def _cut_width(graph: GraphModule, ctx: PassContext) -> int:
    """Cut every expert's linears over etp, while the graph still has the experts of all ranks."""
    inputs, ranks = dict(ctx.program.items()), ctx.mesh.size("etp")
    weights = [node for node, item in inputs.items() if item.kind in (InputKind.PARAM, InputKind.BUFFER)]
    search, layers = WidthSearch(graph.graph, ranks, ctx.mode), find_experts(graph.graph)
    cuts: dict[Node, Placement] = {}
    for experts in layers:
        found = search.cuts(experts)
        if not found:
            raise _refused(experts, search, ctx)
        for weight, placed in found.items():
            cuts |= search.parameters(weight, placed, weights)
    if not layers:
        return 0
    walk = width_sharder(graph.graph, ranks, ctx.mode)
    _rebuild_width(graph.graph, walk, layers, cuts)
    by_name = {node.name: item.placed("etp", cuts[node]) if node in cuts else item for node, item in inputs.items()}
    for axis, stride, node in walk.new_offsets:
        by_name[node.name] = Input(InputKind.OFFSET, node.name, axis=axis, stride=stride)
    ctx.program.inputs[:] = [by_name[node.name] for node in walk.graph.nodes if node.op == "placeholder"]
    graph.graph = walk.graph
    return len(cuts)


def _refused(experts: Experts, search: WidthSearch, ctx: PassContext) -> PassError:
    """Why these experts cannot be cut: their width does not divide, or no linear of theirs leads to a sum over ranks."""
    where = meta.where(experts.linears[0] if experts.linears else experts.result)
    width = math.gcd(*search.widths(experts))
    if width:
        ctx.plan.check_model(expert_width=width, name=where)
    return PassError(
        f"shard-experts: {where} belongs to experts in which no linear whose columns are cut leads to one whose rows are cut, through "
        f"ops that work on each feature alone; rewrite the experts so, or use etp=1."
    )


def _not_cut(node: Node) -> PassError:
    return PassError(
        f"shard-experts: {meta.where(node)}: the weights of these experts do not lead to linears that are cut by columns and then by "
        f"rows; store them as [num_experts, ...] or as one module per expert, or use etp=1."
    )


def _rebuild_width(graph: Graph, walk: Sharder, layers: list[Experts], cuts: dict[Node, Placement]) -> None:
    """Copy the graph with the experts, and what their weights are computed from, on this rank's part of their width."""
    body = {node for experts in layers for node in experts.body}
    results = {experts.result for experts in layers}
    read = {arg for experts in layers for call in experts.linears for arg in call.args[2:4] if isinstance(arg, Node)}
    region = body | read | graphs.ancestors(*read)
    for node in graph.nodes:
        if node.op == "placeholder":
            walk.add_placeholder(node, {"etp": cuts.get(node, REPLICATE)})
        elif node.op == "call_function" and (node in body or (node in region and _reached(walk, node, "etp"))):
            try:
                walk.visit(node)
            except PassError as error:
                raise _not_cut(node) from error
        elif node.op == "call_function":
            if _reached(walk, node, "etp"):
                raise _read_outside(node, "etp")
            walk.keep(node, walk.env.__getitem__)
    whole = next((node for node in results if not isinstance(walk.place(node, "etp"), Partial)), None)
    if whole is not None or moved(walk.graph):
        raise _not_cut(whole or next(iter(results)))
    found: Any = graph.output_node().args[0]
    walk.graph.output(tuple(walk.env[item] if isinstance(item, Node) else item for item in found))


# ---- over ep -----------------------------------------------------------------------------------------------------------


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
                raise _read_outside(node, "ep")
            walk.keep(node, walk.env.__getitem__)
    results: Any = graph.output_node().args[0]
    walk.graph.output(tuple(walk.env[found] if isinstance(found, Node) else found for found in results))


def _reached(walk: Sharder, node: Node, axis: str = "ep") -> bool:
    return any(isinstance(walk.place(source, axis), Shard) for source in node.all_input_nodes)


def _read_outside(node: Node, axis: str) -> PassError:
    return PassError(
        f"shard-experts: {meta.where(node)} reads an expert weight outside the expert's own linear, which has no rule while "
        f"{axis} > 1; compute it from the model's parameters after the step, or use {axis}=1."
    )


def _expert_share(walk: Sharder, weight: Node) -> Node:
    """The local weight of a grouped linear."""
    return walk.convert(walk.env[weight], weight, "ep", walk.place(weight, "ep"), Shard(0))
