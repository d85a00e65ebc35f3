"""From the model level to the step level: forward, loss and backward as one joint graph.

The graph is cut into segments, one a layer and what stands between. Segments of the same structure are traced once (a template)
and stitched: forward bodies in order, backward bodies in reverse, each copy with its own parameters and unbacked sizes.
The chain rule between segments is plain: the gradient of a value is the sum over the segments that read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.errors import PassError
from moecompile.pass_base import Fact, Numerics, Pass, PassContext
from moecompile.program import InputKind, Output, OutputKind
from moecompile.tracing.segments import split_segments
from moecompile.tracing.stitch import stitch

aten = torch.ops.aten


@dataclass(frozen=True)
class Differentiate(Pass):
    """Trace the gradients of the loss for every parameter that asks for one.

    ``templates``: trace layers of equal structure once; ``false`` traces the whole graph as one piece.
    """

    templates: bool = True

    name: ClassVar[str] = "differentiate"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.MOE_OPS, Fact.LOSS_SHARES})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.DIFFERENTIATED})
    excludes: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_SHARDED})  # the backward gathers parameters itself
    numerics: ClassVar[Numerics] = Numerics.BITWISE

    def run(self, graph: GraphModule, ctx: PassContext) -> int:
        program = ctx.program
        losses = [
            node
            for node, item in zip(program.output_nodes(), program.outputs, strict=True)
            if item.kind is OutputKind.LOSS
        ]
        if len(losses) != 1 or not isinstance(losses[0], Node):
            raise PassError(
                "differentiate: the model returns no loss; return one (a field 'loss', a scalar, or pass loss_fn to parallelize)."
            )
        trained = {
            node: item
            for node, item in program.items()
            if item.kind is InputKind.PARAM and item.requires_grad and meta.tensor(node).is_floating_point()
        }
        segments = split_segments(graph.graph, layered=self.templates)
        graph.graph, gradients = stitch(graph.graph, segments, losses[0], set(trained), ctx.mode)
        for node in graphs.find(graph, ops.graft):  # its gradient is taken: the value is what remains
            if meta.direction(node) is meta.Direction.FORWARD:
                graphs.replace(node, node.args[0])  # type: ignore[arg-type]
        # Kernels may lay out a result otherwise than its fake; a view of such a result fails, and reshape is one wherever it can be.
        for node in graphs.find(graph, aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
        graphs.eliminate_dead(graph.graph, keep=lambda node: node.target in ops.COLLECTIVES)
        program.outputs.extend(Output(OutputKind.GRAD, trained[node].name) for node in gradients)
        return len(gradients)
