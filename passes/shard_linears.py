"""Tensor parallelism: cut chains of linears over tp, columns then rows, and give every tp rank tokens of its own for the experts.

Before:  linear(x, w1) -> activation or attention heads -> linear(., w2)
After:   linear(x, w1[rows of this rank]) -> ... -> linear(., w2[columns of this rank]) -> all_reduce

Which linears form a chain is found from the graph (``moecompile/placement/chains.py``); the collectives follow from the placements. With
``sequence-parallel`` what lies between chains is cut along the sequence: the all-reduce becomes a reduce-scatter, and an
all-gather before the next chain. An MoE layer routes tokens that no other rank of the stage routes: without sequence parallelism
they are cut here and their results gathered. Does nothing when tp == 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.errors import PassError
from moecompile.pass_base import Fact, Numerics, Pass, PassContext
from moecompile.placement.chains import Chain, Trial, find_chains, linears
from moecompile.placement.heads import TABLE, Head, find_heads
from moecompile.placement.outputs import finish, is_placed, trained_values
from moecompile.placement.sharder import Sharder
from moecompile.placement.table import sharder
from moecompile.placement.types import REPLICATE, Placement, Shard
from moecompile.program import InputKind

AXIS = "tp"


@dataclass(frozen=True)
class ShardLinears(Pass):
    """Cut linears over tp and what lies between them along the sequence, if the plan says so.

    ``vocab``: cut the head, too, by the vocabulary, with the cross entropy over it and a table of embeddings that is the same parameter.
    """

    vocab: bool = False

    name: ClassVar[str] = "shard-linears"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.MOE_OPS, Fact.TOKENS_SHARDED})
    excludes: ClassVar[frozenset[Fact]] = frozenset({Fact.EXPERTS_SHARDED})
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATING

    def run(self, graph: GraphModule, ctx: PassContext) -> int:
        ranks = ctx.mesh.size(AXIS)
        if ranks == 1 or is_placed(ctx.program, AXIS):
            return 0
        inputs = dict(ctx.program.items())
        params = {
            node
            for node, item in inputs.items()
            if item.kind is InputKind.PARAM and not item.stacked and not item.placements
        }
        trained = trained_values(ctx.program)
        chains = find_chains(graph.graph, params, trained, AXIS, ranks, ctx.mode)
        heads = (
            find_heads(graph.graph, params, Trial(graph.graph, trained, AXIS, ranks, ctx.mode)) if self.vocab else []
        )
        _report(graph.graph, chains, heads, params, ctx)
        walk = sharder(graph.graph, {AXIS: ranks}, ctx.mode, strict=ctx.plan.strict)
        walk.ledger.differentiated = trained
        walk.wants = {chain.last.node: {AXIS: REPLICATE} for chain in chains}
        if ctx.plan.sequence_parallel:
            _cut_sequence(graph.graph, walk, chains, ranks)
        _read_whole(heads, walk, ctx.plan.sequence_parallel)
        _share_tokens(graph.graph, walk, ranks, ctx.plan.sequence_parallel)
        cuts: dict[Node, Placement] = {node: placed for chain in chains for node, placed in chain.placements()}
        cuts |= {node: placed for head in heads for node, placed in head.placements()}
        for node in inputs:
            walk.add_placeholder(node, {AXIS: cuts.get(node, REPLICATE)})
        for node in graph.graph.nodes:
            if node.op == "call_function":
                walk.visit(node)
        ctx.program.inputs[:] = [
            item.placed(AXIS, cuts[node]) if node in cuts else item for node, item in inputs.items()
        ]
        finish(graph, ctx.program, walk, AXIS)
        return len(chains) + len(heads) + 1  # at least the loss has become this rank's share


def _report(graph: Graph, chains: list[Chain], heads: list[Head], params: set[Node], ctx: PassContext) -> None:
    """Say which linears stay whole on every rank, and why that is so."""
    cut = {chain.last.node for chain in chains} | {one.node for chain in chains for one, _ in chain.first}
    cut |= {head.linear.node for head in heads}
    reason = f"no chain of linears that {ctx.mesh.size(AXIS)} ranks can cut begins or ends here, so it is whole on each"
    for node in linears(graph, params, also=(TABLE,)):
        if node not in cut:
            ctx.decline(ShardLinears.name, f"{meta.where(node)}: {reason}")


def _cut_sequence(graph: Graph, walk: Sharder, chains: list[Chain], ranks: int) -> None:
    """Embeddings and results of chains are cut along the sequence, what enters a chain is whole."""
    batches: dict[int, int] = {}  # tokens -> sequences they are of
    for node in graphs.find(graph, torch.ops.aten.embedding.default):
        ids = node.args[1]
        assert isinstance(ids, Node)
        shape = meta.tensor(ids).shape
        if len(shape) == 2 and shape[1] > 1:
            _check_sequence(node, int(shape[1]), ranks)
            batches[shape[0] * shape[1]] = shape[0]
            walk.reads[node] = {ids: {AXIS: Shard(1)}}
    for node in (chain.last.node for chain in chains):
        shape = meta.tensor(node).shape
        if len(shape) == 3:
            _check_sequence(node, int(shape[1]), ranks)
            batches[shape[0] * shape[1]] = shape[0]
            walk.wants[node] = {AXIS: Shard(1)}
        elif len(shape) == 2 and shape[0] in batches:  # tokens of all sequences in a row
            walk.wants[node] = {AXIS: Shard(0, outer=batches[shape[0]])}
    for chain in chains:
        for reader, value in chain.entries():
            walk.reads.setdefault(reader, {})[value] = {AXIS: REPLICATE}


def _read_whole(heads: list[Head], walk: Sharder, sequence_parallel: bool) -> None:
    """Heads and tables that are cut see all tokens; what a table gives is a sum over the ranks, along the sequence if that is cut."""
    for head in heads:
        walk.reads[head.linear.node] = {head.linear.source: {AXIS: REPLICATE}}
        for table in head.tables:
            asked = walk.reads.pop(table, None)
            walk.wants[table] = {AXIS: Shard(1) if asked and sequence_parallel else REPLICATE}


def _check_sequence(node: Node, length: int, ranks: int) -> None:
    if length % ranks:
        near = length // ranks * ranks
        raise PassError(
            f"shard-linears: {meta.where(node)} has a sequence of {length}, which sequence_parallel cuts into tp={ranks} equal "
            f"parts; pad or cut it to a multiple of {ranks}, such as {near or ranks} or {near + ranks}."
        )


def _share_tokens(graph: Graph, walk: Sharder, ranks: int, sequence_parallel: bool) -> None:
    """Every MoE layer routes each token on one rank of the axis."""
    walk.shares_whole = True
    for permute in graphs.find(graph, ops.permute):
        ids = permute.args[1]
        assert isinstance(ids, Node)
        number = meta.tensor(ids).shape[0]
        if number % ranks:
            raise PassError(
                f"shard-linears: {meta.where(permute)} routes {number} tokens, which are shared out over tp={ranks} ranks; choose a "
                f"batch whose tokens on a data rank are a multiple of {ranks}."
            )
        for node in graphs.find(graph, ops.unpermute):
            if node.args[1] in permute.users and not sequence_parallel:
                walk.wants[node] = {AXIS: REPLICATE}
