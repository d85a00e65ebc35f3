"""Add up the ranks' shares of the loss, so that every rank reports the loss of the whole batch.

Before:  the loss output is this rank's share
After:   the loss output is all_reduce(share) over the data axes; shares in a narrow type are added in float32 and rounded once

Comes after ``differentiate``: the gradients are those of the share. Does nothing on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.mesh import joined
from moecompile.pass_base import Fact, Numerics, Pass, PassContext
from moecompile.placement.types import REPLICATE, Partial
from moecompile.program import Level, OutputKind

aten = torch.ops.aten


@dataclass(frozen=True)
class SyncLoss(Pass):
    """All-reduce the loss output over the axes on which it is a share."""

    name: ClassVar[str] = "sync-loss"
    level: ClassVar[Level | None] = None
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.LOSS_SHARES})
    removes: ClassVar[frozenset[Fact]] = frozenset({Fact.LOSS_SHARES})
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATING

    def run(self, graph: GraphModule, ctx: PassContext) -> int:
        program = ctx.program
        results, done = program.output_nodes(), 0
        for at, (found, item) in enumerate(zip(results, program.outputs, strict=True)):
            if item.kind is not OutputKind.LOSS or not isinstance(found, Node):
                continue
            shared = [axis for axis, placed in item.placements if isinstance(placed, Partial)]
            if not shared:
                continue
            with graph.graph.inserting_before(graph.graph.output_node()):
                results[at] = _total(graph.graph, found, joined(shared), ctx)
            placements = tuple((axis, REPLICATE if axis in shared else placed) for axis, placed in item.placements)
            program.outputs[at] = replace(item, placements=placements)
            done += 1
        graph.graph.output_node().args = (tuple(results),)
        return done


def _total(graph: Graph, share: Node, axis: str, ctx: PassContext) -> Node:
    """The sum over ranks, in the type of the share; what was only cast to a narrow type is read before the cast."""

    def make(target: Any, *args: Any, **kwargs: Any) -> Node:
        return graphs.call(graph, target, *args, like=share, mode=ctx.mode, **kwargs)

    dtype = meta.tensor(share).dtype
    wide = torch.promote_types(dtype, torch.float32)
    if wide == dtype:
        return make(ops.all_reduce, share, "sum", axis)
    source = share.args[0] if share.target is aten._to_copy.default else None
    if not isinstance(source, Node) or meta.tensor(source).dtype != wide:
        source = make(aten._to_copy.default, share, dtype=wide)
    return make(aten._to_copy.default, make(ops.all_reduce, source, "sum", axis), dtype=dtype)
