"""Return what each MoE layer did: how many tokens each expert got.

Before:  the counts of permute stay inside the layer
After:   they are outputs of kind METRIC, as this rank's share; nothing is reduced until somebody asks
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import GraphModule, Node

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.pass_base import Fact, Pass, PassContext
from moecompile.program import Output, OutputKind

TOKENS_PER_EXPERT = "tokens_per_expert"


@dataclass(frozen=True)
class RecordMetrics(Pass):
    """Add the tokens per expert of every MoE layer to the outputs."""

    name: ClassVar[str] = "record-metrics"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.MOE_OPS})

    def run(self, graph: GraphModule, ctx: PassContext) -> int:
        program = ctx.program
        results: list[Any] = program.output_nodes()
        known = {found for found in results if isinstance(found, Node)}
        done = 0
        for permute in graphs.find(graph, ops.permute):
            counts = graphs.items(permute).get(1)
            if counts is None or counts in known:
                continue
            results.append(counts)
            placed = tuple(meta.placements(counts).items())
            program.outputs.append(
                Output(OutputKind.METRIC, meta.module_path(permute), what=TOKENS_PER_EXPERT, placements=placed)
            )
            done += 1
        graph.graph.output_node().args = (tuple(results),)
        return done
