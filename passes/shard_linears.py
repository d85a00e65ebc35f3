"""Tensor parallelism: cut chains of linears over tp, columns then rows, and give every tp rank tokens of its own for the experts.

Before:  linear(x, w1) -> activation or attention heads -> linear(., w2)
After:   linear(x, w1[rows of this rank]) -> ... -> linear(., w2[columns of this rank]) -> all_reduce

Which linears form a chain is found from the graph (``moecompile/placement/chains.py``); the collectives follow from the placements. With
``sequence-parallel`` what lies between chains is cut along the sequence: the all-reduce becomes a reduce-scatter, and an
all-gather before the next chain. ``Plan(overrides=...)`` keeps linears whole, or cuts them where no chain is found: then what they
give, or read, is moved for them alone. An MoE layer routes tokens that no other rank of the stage routes: without sequence parallelism
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
from moecompile.placement.chains import Chain, Linear, Trial, find_chains, linears
from moecompile.placement.heads import TABLE, Head, find_heads
from moecompile.placement.outputs import finish, is_placed, trained_values
from moecompile.placement.overrides import Single, find_roles
from moecompile.placement.sharder import Sharder
from moecompile.placement.table import sharder
from moecompile.placement.types import REPLICATE, Placement, Shard
from moecompile.plan import COLUMN, REPLICATED, ROW
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
        names = {node: item.fqns for node, item in inputs.items() if item.kind is InputKind.PARAM}
        roles = find_roles(graph.graph, ctx.plan, params, names, ranks)
        trial = Trial(graph.graph, trained, AXIS, ranks, ctx.mode)
        chains = find_chains(trial, params, roles)
        heads = find_heads(graph.graph, params, trial) if self.vocab else []
        heads = [head for head in heads if roles.get(head.linear.node, COLUMN) == COLUMN]
        singles = _singles(graph.graph, chains, heads, params, roles)
        _report(graph.graph, chains, heads, params, roles, ctx)
        walk = sharder(graph.graph, {AXIS: ranks}, ctx.mode, strict=ctx.plan.strict)
        walk.ledger.differentiated = trained
        walk.wants = {node: {AXIS: REPLICATE} for node in _ends(chains, singles)}
        if ctx.plan.sequence_parallel:
            _cut_sequence(graph.graph, walk, chains, singles, ranks)
        _read_whole(heads, walk, ctx.plan.sequence_parallel)
        _read_alone(singles, walk)
        _share_tokens(graph.graph, walk, ranks, ctx.plan.sequence_parallel)
        cut_ones: list[Chain | Head | Single] = [*chains, *heads, *singles]
        cuts: dict[Node, Placement] = {node: placed for one in cut_ones for node, placed in one.placements()}
        for node in inputs:
            walk.add_placeholder(node, {AXIS: cuts.get(node, REPLICATE)})
        rows = {single.linear.node: single.linear for single in singles if single.role == ROW}
        for node in graph.graph.nodes:
            if node.op == "call_function":
                if node in rows:
                    _check_rows(rows[node], walk.place(rows[node].source, AXIS))
                walk.visit(node)
        ctx.program.inputs[:] = [
            item.placed(AXIS, cuts[node]) if node in cuts else item for node, item in inputs.items()
        ]
        finish(graph, ctx.program, walk, AXIS)
        return len(chains) + len(heads) + len(singles) + 1  # at least the loss has become this rank's share


def _singles(
    graph: Graph, chains: list[Chain], heads: list[Head], params: set[Node], roles: dict[Node, str]
) -> list[Single]:
    """Linears that the plan cuts although they are in no chain and lead to no loss."""
    cut, known = _in_chains(chains, heads), linears(graph, params)
    return [Single(known[node], role) for node, role in roles.items() if role != REPLICATED and node not in cut]


def _in_chains(chains: list[Chain], heads: list[Head]) -> set[Node]:
    """The linears that are cut because the graph says that they can be."""
    cut = {chain.last.node for chain in chains} | {one.node for chain in chains for one, _ in chain.first}
    return cut | {head.linear.node for head in heads}


def _ends(chains: list[Chain], singles: list[Single]) -> list[Node]:
    """What gives a value that ranks have to put together."""
    return [*(chain.last.node for chain in chains), *(single.linear.node for single in singles)]


def _report(
    graph: Graph, chains: list[Chain], heads: list[Head], params: set[Node], roles: dict[Node, str], ctx: PassContext
) -> None:
    """Say which linears stay whole on every rank, and why that is so."""
    cut = _in_chains(chains, heads)
    reason = f"no chain of linears that {ctx.mesh.size(AXIS)} ranks can cut begins or ends here, so it is whole on each"
    for node in linears(graph, params, also=(TABLE,)):
        if roles.get(node) == REPLICATED:
            ctx.decline(ShardLinears.name, f"{meta.where(node)}: the plan's overrides keep it whole on each rank")
        elif node not in cut and node not in roles:
            ctx.decline(ShardLinears.name, f"{meta.where(node)}: {reason}")


def _cut_sequence(graph: Graph, walk: Sharder, chains: list[Chain], singles: list[Single], ranks: int) -> None:
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
    alone = {
        single.linear.node for single in singles if single.role == COLUMN
    }  # a cut of features turns to a plain one only
    for node in _ends(chains, singles):
        shape = meta.tensor(node).shape
        if len(shape) == 3:
            _check_sequence(node, int(shape[1]), ranks)
            batches[shape[0] * shape[1]] = shape[0]
            walk.wants[node] = {AXIS: Shard(1)}
        elif len(shape) == 2 and shape[0] in batches and node not in alone:  # tokens of all sequences in a row
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


def _read_alone(singles: list[Single], walk: Sharder) -> None:
    """A linear cut by columns alone reads all features of all tokens; one cut by rows reads this rank's features of all tokens."""
    for single in singles:
        source = single.linear.source
        features = Shard(meta.tensor(source).dim() - 1)
        walk.reads[single.linear.node] = {source: {AXIS: features if single.role == ROW else REPLICATE}}


def _check_rows(linear: Linear, placed: Placement) -> None:
    if isinstance(placed, Shard) and placed.outer > 1:
        raise PassError(
            f"shard-linears: {meta.where(linear.node)} is to be cut by rows as Plan(overrides=...) says, but it reads the tokens of "
            f"several sequences in a row, of which sequence_parallel gives each rank a part; write column or replicate for it."
        )


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
