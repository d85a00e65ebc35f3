"""Place every value on the attention mesh and make the graph one rank's.

Before:  one process over the global batch, global shapes
After:   this rank's share of the batch; collectives where a placement must change; the loss is this rank's share of it

Batch inputs are cut along dim 0 over dp. Everything else follows from the rules in ``moecompile/placement``: only shape arguments
become local, a constant used as a value (the divisor of a mean) stays global. What no rule can place is gathered, runs whole on
every rank and is listed in ``program.gathers``, or is refused with ``Plan(strict=True)``. With ``Plan(balance_scope="local")`` balance
losses are the mean of those of each rank's own batch. Does nothing when dp == 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from moecompile import meta
from moecompile.pass_base import Fact, Numerics, Pass, PassContext
from moecompile.placement.local_scope import LocalBalance
from moecompile.placement.outputs import finish, note_rows, trained_values
from moecompile.placement.table import sharder
from moecompile.placement.types import REPLICATE, Placement
from moecompile.program import OutputKind


@dataclass(frozen=True)
class ShardDense(Pass):
    """Cut the batch over dp and propagate placements through the whole graph."""

    name: ClassVar[str] = "shard-dense"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.MOE_OPS})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.TOKENS_SHARDED, Fact.LOSS_SHARES})
    excludes: ClassVar[frozenset[Fact]] = frozenset({Fact.EXPERTS_SHARDED})  # local shapes need layers that still fit
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATING

    def run(self, graph: GraphModule, ctx: PassContext) -> int:
        ranks = ctx.mesh.size("dp")
        if ranks == 1 and not _joins_results(ctx):
            return 0
        walk = sharder(graph.graph, {"dp": ranks}, ctx.mode, strict=ctx.plan.strict and ranks > 1)
        walk.ledger.differentiated = trained_values(ctx.program)
        cut = 0
        for node, item in ctx.program.items():
            placed: Placement = dict(item.placements).get("dp", REPLICATE)
            walk.add_placeholder(node, {"dp": placed})
            cut += placed != REPLICATE
        local = LocalBalance(ctx.program, "dp", ranks) if ranks > 1 and ctx.plan.balance_scope == "local" else None
        for node in graph.graph.nodes:
            if local is not None and node in local.own:
                local.visit(walk, node)
            elif node.op == "call_function":
                walk.visit(node)
        if ranks == 1:  # results of microbatches are joined where the batch lies in them
            note_rows(ctx.program, walk, "dp")
            return 0
        finish(graph, ctx.program, walk, "dp")
        return cut


def _joins_results(ctx: PassContext) -> bool:
    """Whether results of several microbatches are to be put together."""
    results = [
        found
        for found, item in zip(ctx.program.output_nodes(), ctx.program.outputs, strict=True)
        if item.kind is OutputKind.USER and isinstance(found, Node)
    ]
    return ctx.plan.microbatches > 1 and any(meta.is_tensor(item) and meta.tensor(item).dim() for item in results)
