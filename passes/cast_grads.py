"""Sum gradients in a type of their own.

Before:  a gradient in bf16 goes into a reduction
After:   it is cast to fp32 first; what is summed over ranks, and over the microbatches of a call, is fp32

The output stays in that type; the runtime casts it to the parameter's once, when it hands it out. Does nothing where gradients
have the type already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch.fx import GraphModule, Node

from moecompile import graph as graphs
from moecompile import meta
from moecompile.pass_base import Fact, Numerics, Pass, PassContext
from moecompile.program import Level, OutputKind

aten = torch.ops.aten
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class CastGrads(Pass):
    """Cast each gradient to ``dtype`` as soon as it is complete."""

    dtype: Literal["fp32", "fp64", "bf16"] = "fp32"

    name: ClassVar[str] = "cast-grads"
    level: ClassVar[Level] = Level.STEP
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.DIFFERENTIATED})
    excludes: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_SHARDED, Fact.GRADS_SYNCED})
    numerics: ClassVar[Numerics] = Numerics.LOSSY

    def run(self, graph: GraphModule, ctx: PassContext) -> int:
        wanted, results, done = DTYPES[self.dtype], ctx.program.output_nodes(), 0
        for at, (found, item) in enumerate(zip(results, ctx.program.outputs, strict=True)):
            if item.kind is not OutputKind.GRAD or not isinstance(found, Node) or meta.tensor(found).dtype == wanted:
                continue
            with graph.graph.inserting_before(found.next):
                cast = graphs.call(graph.graph, aten._to_copy.default, found, like=found, mode=ctx.mode, dtype=wanted)
            meta.set_direction(cast, meta.Direction.BACKWARD)
            results[at] = cast
            done += 1
        graph.graph.output_node().args = (tuple(results),)
        return done
