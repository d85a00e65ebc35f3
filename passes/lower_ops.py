"""Replace moe:: compute ops by one backend's own.

Before:  moe.grouped_linear, moe.unpermute, ...
After:   moe_cpu.grouped_linear, moe_cpu.unpermute, ...

The backend's ops have the same meaning and no gradient, so this comes after ``differentiate``. Collectives stay as they are:
they are bound to process groups when a program is executed. Does nothing with backend=reference, and leaves values on other devices
than the CPU to the ``moe::`` ops, which run on any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch.fx import GraphModule, Node

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.pass_base import Fact, Numerics, Pass, PassContext
from moecompile.program import Level

_CPU: dict[Any, Any] = {
    torch.ops.aten.mm.default: ops.cpu.mm,
    ops.grouped_linear: ops.cpu.grouped_linear,
    ops.grouped_linear_wgrad: ops.cpu.grouped_linear_wgrad,
    ops.unpermute: ops.cpu.unpermute,
    ops.unpermute_backward: ops.cpu.unpermute_backward,
    ops.swiglu: ops.cpu.swiglu,
    ops.swiglu_backward: ops.cpu.swiglu_backward,
    ops.silu_mul: ops.cpu.silu_mul,
    ops.silu_mul_backward: ops.cpu.silu_mul_backward,
    ops.rms_norm: ops.cpu.rms_norm,
    ops.rms_norm_backward: ops.cpu.rms_norm_backward,
    ops.rotary: ops.cpu.rotary,
}


@dataclass(frozen=True)
class LowerOps(Pass):
    """Choose the implementation of every moe:: compute op. ``reference`` is the plain-torch meaning, for any device."""

    backend: Literal["cpu", "reference"] = "cpu"

    name: ClassVar[str] = "lower-ops"
    level: ClassVar[Level | None] = None
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.MOE_OPS})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.LOWERED})
    removes: ClassVar[frozenset[Fact]] = frozenset({Fact.MOE_OPS})
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATING

    def run(self, graph: GraphModule, ctx: PassContext) -> int:
        if self.backend == "reference":
            return 0
        calls = [node for node in graphs.find(graph, *_CPU) if _device(node) in ("cpu", "meta")]
        for node in calls:
            node.target = _CPU[node.target]
        return len(calls)


def _device(call: Node) -> str:
    """Where a call computes: all its operands are there."""
    return next((meta.tensor(source).device.type for source in call.all_input_nodes if meta.is_tensor(source)), "cpu")
