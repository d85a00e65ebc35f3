"""Compute the router in a wider type than the rest of the model.

Before:  linear(x in bf16, gate weight in bf16) -> softmax -> topk
After:   linear(x in fp32, gate weight in fp32) -> softmax -> topk, all in fp32; what leaves the router is cast back

A cast that narrowed the router's operands (autocast puts one there) is undone, not followed by a second one: casting only the
result would be too late, near ties are decided by the product. Balance losses over the router's values stay wide as well.
Does nothing where the router is that wide already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch.fx import GraphModule, Node

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.errors import PassError
from moecompile.pass_base import Fact, Numerics, Pass, PassContext

aten = torch.ops.aten
_PRODUCTS = {
    aten.linear.default, aten.matmul.default, aten.mm.default, aten.addmm.default, aten.einsum.default, aten.bmm.default,
}  # fmt: skip
_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
_CASTS = {aten._to_copy.default, aten.to.dtype}


@dataclass(frozen=True)
class CastRouter(Pass):
    """Compute gate, scores, top-k and balance losses in ``dtype``."""

    dtype: Literal["fp32", "fp64"] = "fp32"

    name: ClassVar[str] = "cast-router"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.MOE_OPS})
    numerics: ClassVar[Numerics] = Numerics.LOSSY

    def run(self, graph: GraphModule, ctx: PassContext) -> int:
        wide = _DTYPES[self.dtype]
        done = 0
        for gate in dict.fromkeys(gate for permute in graphs.find(graph, ops.permute) for gate in find_gates(permute)):
            if _is_narrower(meta.tensor(gate).dtype, wide):
                _widen(graph, gate, wide, ctx)
                done += 1
        graphs.eliminate_dead(graph.graph)
        return done


def find_gates(permute: Node) -> list[Node]:
    """The products nearest above the expert ids of a layer."""
    ids = permute.args[1]
    assert isinstance(ids, Node)
    found, seen, todo = [], set[Node](), [ids]
    while todo:
        for source in todo.pop().all_input_nodes:
            if source in seen:
                continue
            seen.add(source)
            if source.target in _PRODUCTS and meta.tensor(source).is_floating_point():
                found.append(source)
            else:
                todo.append(source)
    if not found:
        raise PassError(
            f"cast-router: {meta.where(permute)} has expert ids that come from no matrix product, so there is no router to compute in a "
            f"wider type; leave router_dtype out for this model."
        )
    return found


def _is_narrower(found: torch.dtype, wide: torch.dtype) -> bool:
    return found.is_floating_point and torch.finfo(found).bits < torch.finfo(wide).bits


def _widen(graph: GraphModule, gate: Node, wide: torch.dtype, ctx: PassContext) -> None:
    """Recompute the values that depend on the gate alone in the wide type; mixed readers get the old type back."""
    narrow = meta.tensor(gate).dtype
    with graph.graph.inserting_before(gate):
        gate.args = tuple(graphs.map_nodes(gate.args, lambda arg: _wide_operand(graph, gate, arg, wide, ctx)))
    graphs.refresh(gate, ctx.mode)
    region = {gate}
    for node in graph.graph.nodes:
        if node.op != "call_function" or node in region or not any(source in region for source in node.all_input_nodes):
            continue
        if node.target in (ops.permute, ops.unpermute):
            continue  # ids are integers, and unpermute takes wider probs
        if _is_closed(node, region):
            region.add(node)
            _keep_wide(node, narrow, wide)
            graphs.refresh(node, ctx.mode)
        else:
            _cast_back(graph, node, region, narrow, ctx)


def _wide_operand(graph: GraphModule, gate: Node, arg: Node, wide: torch.dtype, ctx: PassContext) -> Node:
    if not meta.is_tensor(arg) or not meta.tensor(arg).is_floating_point():
        return arg
    source = arg
    while (before := _narrowed_from(source)) is not None:
        source = before
    if meta.tensor(source).dtype == wide:
        return source
    return graphs.call(graph.graph, aten._to_copy.default, source, like=gate, mode=ctx.mode, dtype=wide)


def _narrowed_from(node: Node) -> Node | None:
    """What a cast to a narrower type was made from."""
    source = node.args[0] if node.target in _CASTS else None
    if isinstance(source, Node) and _is_narrower(meta.tensor(node).dtype, meta.tensor(source).dtype):
        return source
    return None


def _is_closed(node: Node, region: set[Node]) -> bool:
    """Whether every floating tensor the node reads is the router's own, or a weight."""
    floats = [
        source for source in node.all_input_nodes if meta.is_tensor(source) and meta.tensor(source).is_floating_point()
    ]
    return all(source in region or source.op == "placeholder" for source in floats)


def _keep_wide(node: Node, narrow: torch.dtype, wide: torch.dtype) -> None:
    """A cast or dtype argument that would narrow inside the router widens instead."""
    if node.kwargs.get("dtype") == narrow:
        node.kwargs = {**node.kwargs, "dtype": wide}
    node.args = tuple(wide if arg == narrow else arg for arg in node.args)


def _cast_back(graph: GraphModule, node: Node, region: set[Node], narrow: torch.dtype, ctx: PassContext) -> None:
    for source in node.all_input_nodes:
        if source in region and meta.is_tensor(source) and meta.tensor(source).is_floating_point():
            with graph.graph.inserting_before(node):
                back = graphs.call(graph.graph, aten._to_copy.default, source, like=source, mode=ctx.mode, dtype=narrow)
            node.replace_input_with(source, back)
