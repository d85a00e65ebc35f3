"""Reduce each gradient once, over the axes that hold its parameter whole.

Before:  every gradient is what this rank's share of the loss contributes
After:   dense gradients are summed over dp (and tp, where tp does not cut them), expert gradients over edp, each group in one flat
         bucket

Which axes: a parameter's gradient is a partial sum over every axis on which the parameter is replicated. No axis is named by
hand and nothing is scaled, because the ranks' shares of the loss add up to the loss. Does nothing on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.mesh import ATTENTION_AXES, EXPERT_AXES, Mesh, joined
from moecompile.pass_base import Fact, Numerics, Pass, PassContext
from moecompile.placement.types import Shard
from moecompile.program import Input, Level, OutputKind

aten = torch.ops.aten


@dataclass(frozen=True)
class SyncGrads(Pass):
    """All-reduce gradients in flat buckets of at most ``bucket_mb`` MiB (0: one bucket a group and dtype)."""

    bucket_mb: int = 0

    name: ClassVar[str] = "sync-grads"
    level: ClassVar[Level] = Level.STEP
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.DIFFERENTIATED, Fact.TOKENS_SHARDED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.GRADS_SYNCED})
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATING

    def run(self, graph: GraphModule, ctx: PassContext) -> int:
        program, done = ctx.program, 0
        by_name = {item.name: item for item in program.inputs}
        results = program.output_nodes()
        buckets: dict[tuple[str, torch.dtype], list[int]] = {}
        for at, (found, output) in enumerate(zip(results, program.outputs, strict=True)):
            if not isinstance(found, Node):
                continue
            if output.kind is OutputKind.GRAD:
                axis = reduce_axis(by_name[output.name], ctx.mesh)
                if axis and ctx.mesh.size(axis) > 1:
                    buckets.setdefault((axis, meta.tensor(found).dtype), []).append(at)
        for (axis, _), members in buckets.items():
            for part in self._split(members, results):
                _reduce_bucket(graph.graph, results, part, axis, ctx)
                done += len(part)
        graph.graph.output_node().args = (tuple(results),)
        return done

    def _split(self, members: list[int], results: list[Node]) -> list[list[int]]:
        """Buckets by size, in the order in which the backward produces the gradients."""
        if not self.bucket_mb:
            return [members]
        parts: list[list[int]] = [[]]
        filled = 0
        for at in reversed(members):
            size = meta.tensor(results[at]).numel() * meta.tensor(results[at]).element_size()
            if parts[-1] and filled + size > self.bucket_mb << 20:
                parts.append([])
                filled = 0
            parts[-1].append(at)
            filled += size
        return parts


def reduce_axis(item: Input, mesh: Mesh) -> str:
    """The axis over which a parameter is replicated: what its own mesh has beside the axes that cut it.

    For one that is cut over ep the mesh is that of the experts, for every other that of attention. Empty where all axes cut it.
    """
    cut = {part for axis, placed in item.placements if isinstance(placed, Shard) for part in axis.split("+")}
    axes = EXPERT_AXES if cut & {"ep", "etp"} else ATTENTION_AXES
    whole = [axis for axis in axes[1:] if axis not in cut]
    return joined([axis for axis in whole if mesh.size(axis) > 1] or whole[:1])


def _reduce_bucket(graph: Graph, results: list[Node], members: list[int], axis: str, ctx: PassContext) -> None:
    """One flat all-reduce; each gradient becomes a view of the bucket."""
    grads = [results[at] for at in members]

    def make(target: object, *args: object, like: Node) -> Node:
        made = graphs.call(graph, target, *args, like=like, mode=ctx.mode)  # type: ignore[arg-type]
        meta.set_direction(made, meta.Direction.BACKWARD)
        return made

    with graph.inserting_before(graph.output_node()):
        if len(grads) == 1:
            results[members[0]] = make(ops.all_reduce, grads[0], "sum", axis, like=grads[0])
            return
        flat = make(
            aten.cat.default,
            [make(aten.reshape.default, grad, [-1], like=grad) for grad in grads],
            like=grads[0],
        )
        total = make(ops.all_reduce, flat, "sum", axis, like=grads[0])
        sizes = [meta.tensor(grad).numel() for grad in grads]
        parts = make(aten.split_with_sizes.default, total, sizes, like=grads[0])
        for at, grad, part in zip(members, grads, graphs.unpack(graph, parts), strict=True):
            results[at] = make(aten.reshape.default, part, list(meta.tensor(grad).shape), like=grad)
