"""Add up the ranks' shares of the loss, so that every rank reports the loss of the whole batch.

Before:  the loss output is this rank's share
After:   the loss output is all_reduce(share) over dp

Comes after ``differentiate``: the gradients are those of the share. Does nothing when dp == 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch.fx import GraphModule, Node

from moecompile import graph as graphs
from moecompile import ops
from moecompile.pass_base import Fact, Numerics, Pass, PassContext
from moecompile.placement.types import REPLICATE
from moecompile.program import Level, OutputKind


@dataclass(frozen=True)
class SyncLoss(Pass):
    """All-reduce the loss output over dp."""

    name: ClassVar[str] = "sync-loss"
    level: ClassVar[Level | None] = None
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.LOSS_SHARES})
    removes: ClassVar[frozenset[Fact]] = frozenset({Fact.LOSS_SHARES})
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATING

    def run(self, graph: GraphModule, ctx: PassContext) -> int:
        program = ctx.program
        if ctx.mesh.size("dp") == 1:
            return 0
        results, done = program.output_nodes(), 0
        for at, (found, item) in enumerate(zip(results, program.outputs, strict=True)):
            if item.kind is not OutputKind.LOSS or not isinstance(found, Node):
                continue
            with graph.graph.inserting_before(graph.graph.output_node()):
                results[at] = graphs.call(graph.graph, ops.all_reduce, found, "sum", "dp", like=found, mode=ctx.mode)
            rest = tuple((axis, placed) for axis, placed in item.placements if axis != "dp")
            program.outputs[at] = replace(item, placements=(*rest, ("dp", REPLICATE)))
            done += 1
        graph.graph.output_node().args = (tuple(results),)
        return done
