"""Make the loss of a microbatch its part of the whole step's loss.

Before:  loss = sum over valid tokens / number of valid tokens of this microbatch + other terms
After:   loss = (sum over valid tokens / num_valid + other terms) / microbatches, with num_valid an input: the step's valid
         tokens over the number of microbatches. The count of this microbatch becomes an output.

The microbatches' losses then add up to the loss over all valid tokens of the step, and balance terms to their average. Does
nothing for a plan with one microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from moecompile import graph as graphs
from moecompile import meta
from moecompile.pass_base import Fact, Numerics, Pass, PassContext
from moecompile.program import NUM_VALID as NUM_VALID
from moecompile.program import Input, InputKind, Output, OutputKind

aten = torch.ops.aten
_LOSSES = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default)
_DIVISIONS = (aten.div.Tensor, aten.true_divide.Tensor)
_MEAN, _SUM = 1, 2


@dataclass(frozen=True)
class NormalizeLoss(Pass):
    """Divide by the valid tokens of the step instead of those of the microbatch."""

    name: ClassVar[str] = "normalize-loss"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.MOE_OPS})
    excludes: ClassVar[frozenset[Fact]] = frozenset({Fact.TOKENS_SHARDED})  # it counts the tokens of the whole batch
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATING

    def run(self, graph: GraphModule, ctx: PassContext) -> int:
        parts = ctx.plan.microbatches
        if parts == 1:
            return 0
        program = ctx.program
        at = next((i for i, item in enumerate(program.outputs) if item.kind is OutputKind.LOSS), None)
        results: list[Any] = program.output_nodes()
        if at is None or not isinstance(results[at], Node):
            return 0
        loss: Node = results[at]
        trained = [node for node, item in program.items() if item.kind is InputKind.PARAM]
        means = _means(graph.graph, loss, set(trained))
        dtype = meta.tensor(loss).dtype
        for mean in means:
            count = _count(graph.graph, mean, ctx)
            scale = ctx.add_input(Input(InputKind.SCALE, f"{NUM_VALID}_{len(_scales(ctx))}"), dtype)
            _divide_by(graph.graph, mean, scale, ctx)
            results.append(count)
            program.outputs.append(Output(OutputKind.METRIC, program.inputs[-1].name, what=NUM_VALID))
        loss = graph.graph.output_node().args[0][at]  # type: ignore[index, assignment]
        with graph.graph.inserting_before(graph.graph.output_node()):
            results[at] = graphs.call(graph.graph, aten.div.Tensor, loss, parts, like=loss, mode=ctx.mode)
        graph.graph.output_node().args = (tuple(results),)
        return len(means) + 1


def _scales(ctx: PassContext) -> list[Input]:
    return [item for item in ctx.program.inputs if item.kind is InputKind.SCALE]


def _means(graph: Graph, loss: Node, trained: set[Node]) -> list[Node]:
    """Losses that are means over valid tokens: mean reductions with ignored targets, and divisions by a count of the batch."""
    reach = graphs.ancestors(loss) | {loss}
    found = []
    for node in graph.nodes:
        if node not in reach or node.op != "call_function":
            continue
        if node.target in _LOSSES and _reduction(node) == _MEAN:
            found.append(node)
        elif node.target in _DIVISIONS and meta.tensor(node).dim() == 0 and isinstance(node.args[1], Node):
            below = graphs.ancestors(node.args[1]) | {node.args[1]}
            above = graphs.ancestors(node.args[0]) if isinstance(node.args[0], Node) else set()
            if not below & trained and above & trained:
                found.append(node)
    return found


def _reduction(node: Node) -> int:
    """0 none, 1 mean, 2 sum, as torch numbers them."""
    found: Any = node.args[3] if len(node.args) > 3 else node.kwargs.get("reduction", _MEAN)
    return int(found)


def _count(graph: Graph, mean: Node, ctx: PassContext) -> Node:
    """What the mean divides by."""
    if mean.target in _DIVISIONS:
        assert isinstance(mean.args[1], Node)
        return mean.args[1]
    target = mean.args[1]
    ignored = mean.args[4] if len(mean.args) > 4 else mean.kwargs.get("ignore_index", -100)
    weight = mean.args[2] if len(mean.args) > 2 else mean.kwargs.get("weight")

    def make(op: Any, *args: Any) -> Node:
        return graphs.call(graph, op, *args, like=mean, mode=ctx.mode)

    with graph.inserting_before(mean):
        mask = make(aten.ne.Scalar, target, ignored)
        if not isinstance(weight, Node):
            return make(aten.sum.default, mask)
        picked = make(aten.index.Tensor, weight, [make(aten.mul.Tensor, target, mask)])
        return make(aten.sum.default, make(aten.mul.Tensor, picked, mask))


def _divide_by(graph: Graph, mean: Node, scale: Node, ctx: PassContext) -> None:
    """Replace the mean by the sum over the step's count."""
    if mean.target in _DIVISIONS:
        mean.args = (mean.args[0], scale)
        return
    if len(mean.args) > 3:
        mean.args = (*mean.args[:3], _SUM, *mean.args[4:])
    else:
        mean.kwargs = {**mean.kwargs, "reduction": _SUM}
    with graph.inserting_after(mean):
        divided = graphs.call(graph, aten.div.Tensor, mean, scale, like=mean, mode=ctx.mode)
    mean.replace_all_uses_with(divided, delete_user_cb=lambda user: user is not divided)
