"""Make one op of an expert's two products and the gated activation between them, forward and backward.

Before:  grouped_linear -> swiglu -> grouped_linear                                       (forward)
         grouped_linear -> swiglu_backward -> grouped_linear, and two grouped_linear_wgrad  (backward)
After:   moe_cpu.grouped_mlp                                                             (forward)
         moe_cpu.grouped_mlp_backward                                                    (backward)

What lies between the products then stays in the cache, and the activation is not kept for the backward. Comes after ``lower-ops``: it
is worth it on the CPU, whose ops it joins; a graph that was lowered to another backend is left as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from moecompile import graph as graphs
from moecompile import meta
from moecompile.ops import cpu
from moecompile.pass_base import Fact, Numerics, Pass, PassContext
from moecompile.program import Level

aten = torch.ops.aten


@dataclass(frozen=True)
class Experts:
    """The nodes of one layer's experts, and their operands."""

    # forward
    h: Node
    activated: Node
    y: Node
    # backward
    grad_activated: Node
    grad_h: Node
    grad_rows: Node
    grad_w_in: Node
    grad_w_out: Node

    @property
    def operands(self) -> tuple[Any, Any, Any, Any]:
        """rows, tokens_per_expert, w_in, w_out."""
        rows, counts, w_in = self.h.args
        return rows, counts, w_in, self.y.args[2]

    @property
    def backward(self) -> tuple[Node, ...]:
        return self.grad_activated, self.grad_h, self.grad_rows, self.grad_w_in, self.grad_w_out


@dataclass(frozen=True)
class FuseExperts(Pass):
    """Join grouped_linear, swiglu and grouped_linear, with their backward, where nothing else reads what is between."""

    name: ClassVar[str] = "fuse-experts"
    level: ClassVar[Level | None] = Level.STEP
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.LOWERED})
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATING  # a weight's gradient is summed block by block

    def run(self, graph: GraphModule, ctx: PassContext) -> int:
        order = {node: index for index, node in enumerate(graph.graph.nodes)}
        found = [experts for node in graphs.find(graph, cpu.swiglu) if (experts := match(node)) is not None]
        for experts in found:
            operands = experts.operands
            with graph.graph.inserting_before(experts.y):
                made = graphs.call(graph.graph, cpu.grouped_mlp, *operands, like=experts.y, mode=ctx.mode)
                y, h = graphs.unpack(graph.graph, made)
            if meta.has_placements(experts.y):
                meta.set_placements(y, meta.placements(experts.y))
            first = min(experts.backward, key=order.__getitem__)
            grad = experts.grad_activated.args[0]
            with graph.graph.inserting_before(first):
                made = graphs.call(
                    graph.graph, cpu.grouped_mlp_backward, grad, *operands, h, like=experts.grad_h, mode=ctx.mode
                )
                gradients = graphs.unpack(graph.graph, made)
            graphs.replace(experts.y, y)
            for old, new in zip((experts.grad_rows, experts.grad_w_in, experts.grad_w_out), gradients, strict=True):
                graphs.replace(old, new)
        if found:
            graphs.eliminate_dead(graph.graph)
        return len(found)


def match(activated: Node) -> Experts | None:
    """The experts around a swiglu, if the whole forward and backward is there and no inner value is read elsewhere."""
    h = activated.args[0]
    y, grad_w_out = _one(activated, cpu.grouped_linear), _one(activated, cpu.grouped_linear_wgrad)
    if not isinstance(h, Node) or h.target is not cpu.grouped_linear or y is None or grad_w_out is None:
        return None
    grad_h = _one(h, cpu.swiglu_backward)
    if grad_h is None or _has_bias(h) or _has_bias(y) or y.args[0] is not activated:
        return None
    grad_activated = grad_h.args[0]
    grad_rows, grad_w_in = _one(grad_h, cpu.grouped_linear), _one(grad_h, cpu.grouped_linear_wgrad)
    if not isinstance(grad_activated, Node) or grad_rows is None or grad_w_in is None:
        return None
    rows, counts, w_in = h.args
    grad = grad_activated.args[0]
    fits = (
        y.args[1] is counts
        and _is_transposed_linear(grad_activated, grad, counts, y.args[2])
        and _is_transposed_linear(grad_rows, grad_h, counts, w_in)
        and grad_w_out.args == (grad, activated, counts)
        and grad_w_in.args == (grad_h, rows, counts)
        and meta.tensor(h).dtype in (torch.float32, torch.float64)
        and _read_only_by(h, activated, grad_h)
        and _read_only_by(activated, y, grad_w_out)
        and _read_only_by(grad_activated, grad_h)
        and _read_only_by(grad_h, grad_rows, grad_w_in)
    )
    return Experts(h, activated, y, grad_activated, grad_h, grad_rows, grad_w_in, grad_w_out) if fits else None


def _one(node: Node, target: Any) -> Node | None:
    """The only user that calls ``target``."""
    found = [user for user in node.users if user.target is target]
    return found[0] if len(found) == 1 else None


def _has_bias(linear: Node) -> bool:
    return graphs.arguments(linear)["bias"] is not None


def _is_transposed_linear(node: Node, grad: Any, counts: Any, weight: Any) -> bool:
    """Whether ``node`` is the gradient of the rows of a linear with ``weight``."""
    if node.target is not cpu.grouped_linear or node.args[:2] != (grad, counts) or _has_bias(node):
        return False
    return _transposed(node.args[2]) is weight or node.args[2] is _transposed(weight)


def _transposed(weight: Any) -> Any:
    """What ``weight`` is the transpose of, in its last two dims."""
    if not isinstance(weight, Node) or weight.target is not aten.transpose.int:
        return None
    return weight.args[0] if sorted(int(dim) % 3 for dim in weight.args[1:]) == [1, 2] else None  # type: ignore[arg-type]


def _read_only_by(node: Node, *users: Node) -> bool:
    return set(node.users) == set(users)
