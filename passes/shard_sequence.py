"""Context parallelism: cut the sequence over cp.

Before:  embedding(ids) -> ... -> attention(q, k, v) -> ...
After:   embedding(this rank's part of ids) -> ... -> attention(q, all_gather(k), all_gather(v)) with this rank's rows of the mask -> ...

With attention=alltoall (Ulysses, arXiv 2309.14509):
         ... -> all_to_all(attention(all_to_all(q), all_to_all(k), all_to_all(v))) -> ...: the whole sequence for 1 / cp of the heads
With attention=ring (arXiv 2310.01889), cp times:
         kv = rotate(kv); out, lse = merge_attention(out, lse, *attention_part(q, kv)): keys and values of one rank after the other
With attention=ring,order=zigzag each rank has an early and a late piece, and all have as much to do of a causal mask.

Ranks of one cp group pass the same tensors; each embeds its part of the sequence. What follows is decided by the rules of
``moecompile/placement``: attention reads all keys and values, positions, masks and labels are cut as the activations are, and ops along
the sequence that no rule can cut (scans, convolutions) are gathered and listed in ``program.gathers``, or refused with
``Plan(strict=True)``. Does nothing when cp == 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch.fx import GraphModule, Node

from moecompile import graph as graphs
from moecompile import meta
from moecompile.errors import PassError
from moecompile.pass_base import Fact, Numerics, Pass, PassContext
from moecompile.placement.call import Call, Decision, Walk
from moecompile.placement.outputs import finish, is_placed, trained_values
from moecompile.placement.rules_nn import is_along
from moecompile.placement.rules_ring import emit_ring, ring, why_not
from moecompile.placement.sharder import Sharder
from moecompile.placement.table import sharder
from moecompile.placement.types import REPLICATE, Placement, Shard

AXIS = "cp"
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_LOOKUPS = (torch.ops.aten.embedding.default,)


@dataclass(frozen=True)
class ShardSequence(Pass):
    """Cut the sequence over cp, beginning at the embedding of the tokens.

    ``attention``: gather keys and values, or turn the cut from the sequence to the heads and back, which sends less with many ranks and
    gives all of them equal shares of a causal mask, or let keys and values go round the ranks, each of which sees one part at a time.
    ``order``: of a ring, whether a rank has consecutive tokens, or pieces r and 2 * cp - 1 - r of 2 * cp: equal shares of a causal mask.
    """

    attention: Literal["allgather", "alltoall", "ring"] = "allgather"
    order: Literal["plain", "zigzag"] = "plain"

    name: ClassVar[str] = "shard-sequence"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.MOE_OPS, Fact.TOKENS_SHARDED})
    excludes: ClassVar[frozenset[Fact]] = frozenset({Fact.EXPERTS_SHARDED})
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATING

    def run(self, graph: GraphModule, ctx: PassContext) -> int:
        ranks = ctx.mesh.size(AXIS)
        if ranks == 1 or is_placed(ctx.program, AXIS):
            return 0
        zigzag = self._in_zigzag()
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
            _check_length(node, ranks, zigzag)
            ids = node.args[1]
            assert isinstance(ids, Node)
            walk.reads[node] = {ids: {AXIS: Shard(1, zigzag=zigzag)}}
        if self.attention == "alltoall":
            _turn_to_heads(graph, ctx, walk)
        elif self.attention == "ring":
            _go_round(graph, ctx, walk, zigzag)
        for node, _ in ctx.program.items():
            walk.add_placeholder(node, {AXIS: REPLICATE})
        for node in graph.graph.nodes:
            if node.op == "call_function":
                walk.visit(node)
        finish(graph, ctx.program, walk, AXIS)
        return len(lookups)

    def _in_zigzag(self) -> bool:
        """A PassError where the order would balance nothing."""
        if self.order == "zigzag" and self.attention != "ring":
            balanced = "gives all ranks equal shares of a causal mask already"
            reason = balanced if self.attention == "alltoall" else "computes all of a causal mask's scores in any order"
            raise PassError(
                f"shard-sequence: order=zigzag balances the hops of a ring, but attention={self.attention} {reason}; write "
                f"attention=ring,order=zigzag, or leave order out."
            )
        return self.order == "zigzag"


def _turn_to_heads(graph: GraphModule, ctx: PassContext, walk: Sharder) -> None:
    """Ask for attention over the heads of a rank, and for its result along the sequence again."""
    ranks = ctx.mesh.size(AXIS)
    if ctx.mesh.size("tp") > 1:
        raise PassError(
            f"shard-sequence: attention=alltoall cuts the heads over cp={ranks}, and tp={ctx.mesh.size('tp')} cuts them, too; use "
            f"attention=allgather with tp, or tp=1."
        )
    for node in graphs.find(graph, _ATTENTION):
        queries, keys, values = node.args[:3]
        heads = meta.tensor(node).dim() - 3
        counts = [int(meta.tensor(item).shape[heads]) if heads > 0 else 1 for item in (queries, keys, values)]  # type: ignore[arg-type]
        if any(count % ranks for count in counts):
            ctx.decline(
                node.name, f"its {min(counts)} heads are not divided by cp={ranks}; its keys and values are gathered"
            )
            continue
        asked: dict[Node, dict[str, Placement]] = {item: {AXIS: Shard(heads)} for item in (queries, keys, values)}  # type: ignore[misc]
        mask = graphs.arguments(node)["attn_mask"]
        if isinstance(mask, Node):
            shape = meta.tensor(mask).shape
            wide = len(shape) > 2 and shape[-3] != 1
            asked[mask] = {AXIS: Shard(len(shape) - 3) if wide else REPLICATE}
        walk.reads[node] = asked
        walk.wants[node] = {AXIS: Shard(heads + 1)}


def _go_round(graph: GraphModule, ctx: PassContext, walk: Sharder, zigzag: bool) -> None:
    """Let keys and values of attention go round the ranks, where its operands allow it."""
    ranks, trained = ctx.mesh.size(AXIS), walk.differentiated
    rings = set()
    for node in graphs.find(graph, _ATTENTION):
        reason = why_not(node, ranks, trained, zigzag)
        if reason:
            ctx.decline(node.name, f"{meta.where(node)}: {reason}; its keys and values are gathered")
        else:
            rings.add(node)
    usual_rule, usual_emitter = walk.rules[_ATTENTION], walk.emitters[_ATTENTION]

    def rule(call: Call) -> Decision:
        return (
            ring(call) if call.node in rings and _is_along(call.node, call.placed(call.args[0])) else usual_rule(call)
        )

    def emitter(walk: Walk, node: Node, decisions: dict[str, Decision]) -> Node | None:
        along = node in rings and _is_along(node, decisions[AXIS].out)
        return emit_ring(walk, node, AXIS, decisions) if along else usual_emitter(walk, node, decisions)

    walk.rules = {**walk.rules, _ATTENTION: rule}
    walk.emitters = {**walk.emitters, _ATTENTION: emitter}


def _is_along(node: Node, placed: object) -> bool:
    """Whether queries, and so the result, are cut along the sequence."""
    return is_along(placed, meta.tensor(node).dim() - 2)


def _is_of_tokens(node: Node) -> bool:
    """Whether an embedding looks up one vector for each [batch, sequence] of integers that a gradient will flow back to."""
    ids = node.args[1]
    return isinstance(ids, Node) and meta.tensor(ids).dim() == 2 and meta.tensor(ids).shape[1] > 1


def _check_length(node: Node, ranks: int, zigzag: bool) -> None:
    length, pieces = int(meta.tensor(node).shape[1]), 2 * ranks if zigzag else ranks
    if length % pieces:
        near, order = length // pieces * pieces, f" with order=zigzag cuts into {pieces}" if zigzag else " cuts into"
        raise PassError(
            f"shard-sequence: {meta.where(node)} embeds a sequence of {length}, which cp={ranks}{order} equal parts; pad or cut it "
            f"to a multiple of {pieces}, such as {near or pieces} or {near + pieces}."
        )
