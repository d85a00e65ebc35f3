"""What looks like an MoE layer and is none: no token chooses among experts there.

Soft mixtures, experts that choose tokens, several gates over shared experts: every expert sees every token, or which
tokens it sees depends on the whole batch.  Such a layer cannot be cut over ``ep``; it runs data-parallel, which is
exact, and is named, so that nobody believes its experts to be spread over the ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from moecompile import meta, ops
from moecompile.program import Input, InputKind
from moecompile.recognition import rowwise
from moecompile.recognition.choices import Choice

aten = torch.ops.aten
_NUMBER = re.compile(r"\d+")
_CHOICES = frozenset({aten.topk.default, aten.sort.default, aten.argmax.default})
_LOOKUPS = frozenset({aten.embedding.default, aten.index.Tensor, aten.index_select.default})
_BATCHED = frozenset({aten.bmm.default, aten.baddbmm.default, aten.einsum.default, aten.matmul.default})


@dataclass(frozen=True)
class Unrouted:
    """One such layer: the first node of it, why it is no MoE layer, the names of its parameters."""

    node: Node
    reason: str
    params: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        return {
            "module": meta.module_path(self.node),
            "source": meta.source(self.node),
            "reason": self.reason,
            "params": list(self.params),
        }


def only_weighs(choice: Choice) -> bool:
    """Whether the choice reaches experts only by way of the weights of layers that are in ``moe::`` ops.

    Such a choice makes a mask or a factor for a routing weight, and picks no rows itself.
    """
    weighs = False
    seen: set[Node] = {choice.node}
    todo = [choice.node]
    while todo:
        here = todo.pop()
        for user in here.users:
            if user.target is ops.unpermute and here is not user.args[0] and here is not user.args[1]:
                weighs = True
            elif user.target is ops.permute or rowwise.is_linear(user):
                return False
            elif user not in seen:
                seen.add(user)
                todo.append(user)
    return weighs


def why_no_layer(choice: Choice, static: frozenset[Node]) -> str:
    """Why the choice is not a token's choice among experts; '' where it may be."""
    if _is_over_tokens(choice, static):
        return (
            f"experts choose {choice.top_k} of {choice.num_options} tokens there, so that which tokens an expert gets "
            "depends on the whole batch"
        )
    return ""


def _is_over_tokens(choice: Choice, static: frozenset[Node]) -> bool:
    """Whether the axis that is chosen from counts tokens: it comes from the rows of an activation, not from a weight."""
    scores: Any = choice.node.args[0]
    node, dim = scores, meta.tensor(scores).dim() - 1
    while isinstance(node, Node) and node.op == "call_function" and meta.is_tensor(node):
        if rowwise.is_linear(node):
            return _row_of_product(node, dim, static)
        step = _back(node, dim)
        if step is None:
            return False
        node, dim = step
    return False


def _row_of_product(node: Node, dim: int, static: frozenset[Node]) -> bool:
    """Whether an axis of a product comes from its activation rather than from its weight."""
    last = meta.tensor(node).dim() - 1
    first, second = node.args[0], node.args[1] if len(node.args) > 1 else None
    if node.target is aten.linear.default:
        return dim != last
    if node.target in (aten.mm.default, aten.matmul.default):
        if second in static and first not in static:
            return dim != last
        return first in static and second not in static and dim == last
    return False


def _back(node: Node, dim: int) -> tuple[Any, int] | None:
    """The operand that an axis comes from, and its place there; None where that is not clear."""
    source, last = node.args[0] if node.args else None, meta.tensor(node).dim() - 1
    if not isinstance(source, Node) or not meta.is_tensor(source):
        return None
    before, after = meta.tensor(source).shape, meta.tensor(node).shape
    if node.target in (aten.t.default, aten.numpy_T.default, aten.mT.default):
        return source, (last - dim if node.target is aten.numpy_T.default or last == 1 else dim)
    if node.target is aten.transpose.int:
        one, other = (int(item) % (last + 1) for item in node.args[1:3])  # type: ignore[arg-type]
        return source, {one: other, other: one}.get(dim, dim)
    if node.target is aten.permute.default:
        return source, [int(item) % (last + 1) for item in node.args[1]][dim]  # type: ignore[arg-type, union-attr]
    if node.target in rowwise.RESHAPES:
        # Rows of several leading axes in one, or the other way round: the last axis stays what it is.
        if before[-1] == after[-1] and dim == last:
            return source, len(before) - 1
        return (source, 0) if dim == 0 and last > 0 and before[-1] == after[-1] else None
    pointwise = rowwise.is_pointwise(node.target) or node.target in rowwise.OVER_FEATURES
    return (source, dim) if pointwise and before == after else None


def find_lookups(graph: Graph, inputs: Mapping[Node, Input]) -> list[Unrouted]:
    """Parameters of which each token picks rows by a top-k (product keys): the rows are small experts, held whole on every rank."""
    params = {node: item for node, item in inputs.items() if item.kind is InputKind.PARAM}
    chosen: set[Node] = set()
    found: dict[Node, Unrouted] = {}
    for node in graph.nodes:
        if node.target in _CHOICES:
            chosen.add(node)
        elif not chosen.isdisjoint(node.all_input_nodes):
            table = node.args[0] if node.target in _LOOKUPS else None
            if isinstance(table, Node) and table in params:
                item = params[table]
                reason = f"tokens pick rows of {item.fqns[0]} {list(item.shape)} there, which are no experts that ranks could own"
                found.setdefault(table, Unrouted(node, reason, item.fqns))
            elif not meta.is_tensor(node) or not meta.tensor(node).is_floating_point():
                chosen.add(node)
    return list(found.values())


def find_parallel(graph: Graph, inputs: Mapping[Node, Input], used: Iterable[str]) -> list[Unrouted]:
    """Groups of alike modules side by side, and weights of several experts in one, that no layer in ``used`` owns."""
    taken = set(used)
    groups: dict[str, dict[int, list[Node]]] = {}
    found: list[Unrouted] = []
    for node, item in inputs.items():
        if item.kind is not InputKind.PARAM or not item.fqns or taken.intersection(item.fqns):
            continue
        if len(item.shape) == 3 and any(user.target in _BATCHED for user in _readers(node)):
            first = next(user for user in _readers(node) if user.target in _BATCHED)
            found.append(Unrouted(first, _side_by_side(item.shape[0], item.fqns[0]), item.fqns))
        for container, index in _places(item.fqns[0]) if len(item.shape) > 1 else ():
            groups.setdefault(container, {}).setdefault(index, []).append(node)
    for container, members in groups.items():
        if len(members) > 1 and _alike(members, inputs):
            first_reader = _first_reader_if_parallel(members)
            if first_reader is not None:
                names = tuple(name for nodes in members.values() for node in nodes for name in inputs[node].fqns)
                found.append(Unrouted(first_reader, _side_by_side(len(members), container), names))
    return _largest(found)


def _side_by_side(count: int, name: str) -> str:
    return f"the {count} parts of {name} stand side by side, and no top-k picks some of them for each token"


def _places(name: str) -> list[tuple[str, int]]:
    """``a.0.b.c_1.weight`` -> ``(a.*, 0), (a.0.b.c_*, 1)``: the numbered modules that hold a parameter."""
    parts = name.split(".")
    found = []
    for at, part in enumerate(parts):
        number = _NUMBER.search(part)
        if number is not None:
            pattern = f"{part[: number.start()]}*{part[number.end() :]}"
            found.append((".".join([*parts[:at], pattern]), int(number.group())))
    return found


def _alike(members: dict[int, list[Node]], inputs: Mapping[Node, Input]) -> bool:
    """Whether all modules of a container have parameters of the same shapes."""
    shapes = {tuple(inputs[node].shape for node in nodes) for nodes in members.values()}
    return len(shapes) == 1


def _readers(node: Node) -> list[Node]:
    """Calls that use a weight, through casts and views of it."""
    found: list[Node] = []
    todo = list(node.users)
    while todo:
        user = todo.pop()
        passes = user.target in rowwise.RESHAPES | rowwise.AXES or user.target in (aten.to.dtype, aten._to_copy.default)
        if passes:
            todo += user.users
        else:
            found.append(user)
    return found


def _first_reader_if_parallel(members: dict[int, list[Node]]) -> Node | None:
    """The first use of any member's weight, None if one member's result enters another member."""
    owner: dict[Node, int] = {}
    for index, nodes in members.items():
        for node in nodes:
            for reader in _readers(node):
                if owner.setdefault(reader, index) != index:
                    return None  # one call that reads several members: no modules side by side
    if not owner:
        return None
    places = _order(owner)
    first = places[0]
    descends: dict[Node, set[int]] = {}
    node, last = first, places[-1]
    while True:
        from_members: set[int] = set()
        for source in node.all_input_nodes:
            from_members |= descends.get(source, set())
        if node in owner:
            if from_members - {owner[node]}:
                return None
            from_members = from_members | {owner[node]}
        if from_members:
            descends[node] = from_members
        if node is last:
            return first
        node = node.next


def _order(nodes: Iterable[Node]) -> list[Node]:
    return sorted(nodes)


def _largest(found: list[Unrouted]) -> list[Unrouted]:
    """One entry a module: parts of parts are not named again."""
    kept: list[Unrouted] = []
    covered: set[str] = set()
    key: Callable[[Unrouted], int] = lambda item: -len(item.params)  # noqa: E731
    for item in sorted(found, key=key):
        if not covered.intersection(item.params):
            kept.append(item)
            covered.update(item.params)
    return kept
