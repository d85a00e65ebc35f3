"""Context parallelism: cut the sequence over cp.

Before:  embedding(ids) -> ... -> attention(q, k, v) -> ...
After:   embedding(this rank's part of ids) -> ... -> attention(q, all_gather(k), all_gather(v)) with this rank's rows of the mask -> ...

Ranks of one cp group pass the same tensors; each embeds its part of the sequence. What follows is decided by the rules of
``moecompile/placement``: attention reads all keys and values, positions, masks and labels are cut as the activations are, and ops along
the sequence that no rule can cut (scans, convolutions) are gathered and listed in ``program.gathers``, or refused with
``Plan(strict=True)``. Does nothing when cp == 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from moecompile import graph as graphs
from moecompile import meta
from moecompile.errors import PassError
from moecompile.pass_base import Fact, Numerics, Pass, PassContext
from moecompile.placement.outputs import finish, is_placed, trained_values
from moecompile.placement.table import sharder
from moecompile.placement.types import REPLICATE, Shard

AXIS = "cp"
_LOOKUPS = (torch.ops.aten.embedding.default,)


@dataclass(frozen=True)
class ShardSequence(Pass):
    """Cut the sequence over cp, beginning at the embedding of the tokens."""

    name: ClassVar[str] = "shard-sequence"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.MOE_OPS, Fact.TOKENS_SHARDED})
    excludes: ClassVar[frozenset[Fact]] = frozenset({Fact.EXPERTS_SHARDED})
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATING

    def run(self, graph: GraphModule, ctx: PassContext) -> int:
        ranks = ctx.mesh.size(AXIS)
        if ranks == 1 or is_placed(ctx.program, AXIS):
            return 0
        walk = sharder(graph.graph, {AXIS: ranks}, ctx.mode, strict=ctx.plan.strict)
        walk.ledger.differentiated = trained_values(ctx.program)
        walk.shares_whole = True
        lookups = [node for node in graphs.find(graph, *_LOOKUPS) if _is_of_tokens(node)]
        if not lookups:
            raise PassError(
                f"shard-sequence: the model embeds no [batch, sequence] of tokens, which is where cp={ranks} begins to cut; use cp=1 for "
                f"this model."
            )
        for node in lookups:
            _check_length(node, ranks)
            ids = node.args[1]
            assert isinstance(ids, Node)
            walk.reads[node] = {ids: {AXIS: Shard(1)}}
        for node, _ in ctx.program.items():
            walk.add_placeholder(node, {AXIS: REPLICATE})
        for node in graph.graph.nodes:
            if node.op == "call_function":
                walk.visit(node)
        finish(graph, ctx.program, walk, AXIS)
        return len(lookups)


def _is_of_tokens(node: Node) -> bool:
    """Whether an embedding looks up one vector for each [batch, sequence] of integers that a gradient will flow back to."""
    ids = node.args[1]
    return isinstance(ids, Node) and meta.tensor(ids).dim() == 2 and meta.tensor(ids).shape[1] > 1


def _check_length(node: Node, ranks: int) -> None:
    length = int(meta.tensor(node).shape[1])
    if length % ranks:
        near = length // ranks * ranks
        raise PassError(
            f"shard-sequence: {meta.where(node)} embeds a sequence of {length}, which cp={ranks} cuts into equal parts; pad or cut it "
            f"to a multiple of {ranks}, such as {near or ranks} or {near + ranks}."
        )
