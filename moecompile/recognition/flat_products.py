"""Products over experts and their features flattened into one dim, as products over both.

Before:  (hidden * scores[..., None]).flatten(-2) @ wo.flatten(0, 1), or a linear whose weight ``[H, E * F]`` is all experts' side by side
After:   einsum("tef,efh->th", hidden * scores[..., None], wo), plus the bias

Before:  gelu(linear(x, wi, bias)).view(..., E, F), where that leads to such rows
After:   gelu(einsum("th,efh->tef", x, wi.view(E, F, H)) + bias.view(E, F))

Only where the rows have been multiplied by one number of a routing decision for each token and expert: heads of an attention, flattened in
front of its last linear, stay so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from moecompile import graph as ir
from moecompile import meta
from moecompile.compat import FakeTensorMode
from moecompile.recognition.choices import Choice, dependents, find_choices
from moecompile.recognition.rowwise import RESHAPES, is_pointwise

aten = torch.ops.aten
_PRODUCTS = (aten.matmul.default, aten.mm.default, aten.linear.default)


@dataclass(frozen=True)
class Flat:
    """``node`` multiplies ``rows`` ``[..., E, F]``, flattened, with a weight ``[E * F, H]``, or ``[H, E * F]`` of a linear."""

    node: Node
    rows: Node
    weight: Node

    @property
    def is_linear(self) -> bool:
        return self.node.target is aten.linear.default


def unflatten_products(graph: Graph, mode: FakeTensorMode) -> int:
    """Rewrite them; returns how many there were."""
    products = [found for node in ir.find(graph, *_PRODUCTS) if (found := flat_product(node)) is not None]
    done = 0
    for choice in find_choices(graph) if products else []:
        routed = dependents(choice.starts)
        for found in products:
            if found.node.users and _is_weighted(found.rows, choice, routed):
                ir.replace(found.node, _written(graph, found, mode))
                done += 1
                for apart in _taken_apart(found.rows):
                    with graph.inserting_before(apart):
                        ir.replace(apart, _Lifted(graph, apart, mode)(apart.args[0]))  # type: ignore[arg-type]
    if done:
        ir.eliminate_dead(graph)
    return done


def flat_product(node: Node) -> Flat | None:
    """The product with the rows as they were before they were flattened; None where they were not."""
    first, second = node.args[:2]
    if not (isinstance(first, Node) and isinstance(second, Node)) or first.target not in RESHAPES:
        return None
    rows = first.args[0]
    if not isinstance(rows, Node) or meta.tensor(second).dim() != 2 or meta.tensor(rows).dim() < 3:
        return None
    shape, joined = meta.tensor(rows).shape, meta.tensor(first).shape[-1]
    if not all(isinstance(size, int) for size in (*shape, joined)) or shape[-2] * shape[-1] != joined:
        return None
    return Flat(node, rows, second)


def _is_weighted(rows: Node, choice: Choice, routed: set[Node]) -> bool:
    """Whether they are values times one routed number for each token and expert."""
    if rows.target is not aten.mul.Tensor or meta.tensor(rows).shape[-2] != choice.num_options:
        return False
    wanted = (*meta.tensor(rows).shape[:-1], 1)
    return any(
        isinstance(item, Node) and item in routed and meta.is_tensor(item) and tuple(meta.tensor(item).shape) == wanted
        for item in rows.args[:2]
    )


def _written(graph: Graph, found: Flat, mode: FakeTensorMode) -> Node:
    node = found.node
    shape = meta.tensor(found.rows).shape
    letters = "abcd"[: len(shape) - 2]
    with graph.inserting_before(node):

        def make(target: Any, *args: Any) -> Node:
            return ir.call(graph, target, *args, like=node, mode=mode)

        sizes = [*([-1] if found.is_linear else []), *shape[-2:], *([] if found.is_linear else [-1])]
        weight = make(aten.reshape.default, found.weight, sizes)
        text = f"{letters}ef,{'hef' if found.is_linear else 'efh'}->{letters}h"
        made = make(aten.einsum.default, text, [found.rows, weight])
        if meta.tensor(made).shape != meta.tensor(node).shape:
            made = make(aten.reshape.default, made, list(meta.tensor(node).shape))
        bias = ir.arguments(node).get("bias") if found.is_linear else None
        return made if bias is None else make(aten.add.Tensor, made, bias)


def _taken_apart(rows: Node) -> list[Node]:
    """Reshapes that take experts and features apart again, with no product between them and ``rows``."""
    experts = meta.tensor(rows).shape[-2]
    found: list[Node] = []
    seen, ahead = {rows}, [rows]
    while ahead:
        for source in ahead.pop().all_input_nodes:
            if source in seen or source.op != "call_function" or source.target in _PRODUCTS:
                continue
            seen.add(source)
            given: Any = source.args[0] if source.target in RESHAPES else None
            shape = () if given is None else tuple(meta.tensor(source).shape)
            if given is not None and shape == (*meta.tensor(given).shape[:-1], experts, *shape[-1:]):
                found.append(source)
            else:
                ahead.append(source)
    return found


class _Lifted:
    """Values ``[..., E * F]`` made again as ``[..., E, F]``, from the linears on that give them."""

    def __init__(self, graph: Graph, apart: Node, mode: FakeTensorMode) -> None:
        self._graph = graph
        self._mode = mode
        self._sizes = list(meta.tensor(apart).shape[-2:])
        self._lead = list(meta.tensor(apart).shape[:-2])
        self._made: dict[Node, Node] = {}

    def __call__(self, value: Node) -> Node:
        if value not in self._made:
            self._made[value] = self._again(value)
        return self._made[value]

    def _again(self, value: Node) -> Node:
        if value.target is aten.linear.default:
            return self._product(value)
        if is_pointwise(value.target) and all(_same_shape(item, value) for item in value.all_input_nodes):
            args, kwargs = map_arg((value.args, value.kwargs), self)
            return self._make(value, value.target, *args, **kwargs)
        return self._make(value, aten.reshape.default, value, [*self._lead, *self._sizes])

    def _product(self, linear: Node) -> Node:
        given = ir.arguments(linear)
        letters = "abcd"[: len(self._lead)]
        weight = self._make(linear, aten.reshape.default, given["weight"], [*self._sizes, -1])
        made = self._make(linear, aten.einsum.default, f"{letters}h,efh->{letters}ef", [given["input"], weight])
        if given.get("bias") is None:
            return made
        bias = self._make(linear, aten.reshape.default, given["bias"], self._sizes)
        return self._make(linear, aten.add.Tensor, made, bias)

    def _make(self, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        return ir.call(self._graph, target, *args, like=like, mode=self._mode, **kwargs)


def _same_shape(item: Node, other: Node) -> bool:
    return meta.is_tensor(item) and tuple(meta.tensor(item).shape) == tuple(meta.tensor(other).shape)
