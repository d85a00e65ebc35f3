"""Place every value on the attention mesh and make the graph one rank's.

Before:  one process over the global batch, global shapes
After:   this rank's share of the batch; collectives where a placement must change; the loss is this rank's share of it

Batch inputs are cut along dim 0 over dp. Everything else follows from the rules in ``moecompile/placement``: only shape arguments
become local, a constant used as a value (the divisor of a mean) stays global. Does nothing when dp == 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from moecompile import meta
from moecompile.pass_base import Fact, Numerics, Pass, PassContext
from moecompile.placement.sharder import Sharder
from moecompile.placement.table import sharder
from moecompile.placement.types import PARTIAL, REPLICATE, Partial, Placement
from moecompile.program import Input, InputKind, Output, OutputKind


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
        if ranks == 1:
            return 0
        walk = sharder(graph.graph, {"dp": ranks}, ctx.mode)
        cut = 0
        for node, item in ctx.program.items():
            placed: Placement = dict(item.placements).get("dp", REPLICATE)
            walk.add_placeholder(node, {"dp": placed})
            cut += placed != REPLICATE
        for node in graph.graph.nodes:
            if node.op == "call_function":
                walk.visit(node)
        _finish(graph, ctx, walk)
        return cut


def _finish(graph: GraphModule, ctx: PassContext, walk: Sharder) -> None:
    """Convert the outputs, then exchange the graph and bring the interface up to date."""
    program = ctx.program
    results, outputs = [], []
    for found, item in zip(program.output_nodes(), program.outputs, strict=True):
        if not isinstance(found, Node):
            results.append(found)
            outputs.append(item)
            continue
        have = walk.place(found, "dp")
        want: Placement = have
        if item.kind is OutputKind.LOSS:
            want = PARTIAL
        elif isinstance(have, Partial) and item.kind is not OutputKind.METRIC:
            want = REPLICATE
        made = walk.convert(walk.env[found], found, "dp", have, want) if meta.is_tensor(found) else walk.env[found]
        results.append(made)
        outputs.append(Output(item.kind, item.name, item.leaf, item.what, (*item.placements, ("dp", want))))
    walk.graph.output(tuple(results))
    walk.drop_dead()
    offsets = [
        (node.name, Input(InputKind.OFFSET, node.name, axis=axis, stride=stride))
        for axis, stride, node in walk.new_offsets
    ]
    by_name = dict(offsets) | {node.name: item for node, item in program.items()}
    program.inputs[:] = [by_name[node.name] for node in walk.graph.nodes if node.op == "placeholder"]
    program.outputs[:] = outputs
    graph.graph = walk.graph
