"""Routing decisions: where a graph chooses among scores, and what depends on the choice."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from moecompile import meta
from moecompile.graph import ancestors

aten = torch.ops.aten

# Ops that return chosen values and their positions, and the argument that holds the axis.
_PAIRS: dict[Any, int] = {aten.topk.default: 2, aten.max.dim: 1, aten.sort.default: 1, aten.sort.stable: 2}
_POSITIONS: dict[Any, int] = {aten.argmax.default: 1, aten.argsort.default: 1, aten.argsort.stable: 2}


@dataclass(frozen=True)
class Choice:
    """One routing decision: ``ids`` holds, for each of T tokens, which K of E options were chosen.

    ``node`` makes the choice; ``chosen`` are the scores it returns beside the ids, where it does.  ``parts``: the ids of
    each of K decisions made one after the other, where they stay apart; ``ids`` is then the last of them.
    """

    node: Node
    ids: Node
    chosen: Node | None
    num_options: int
    top_k: int
    num_tokens: int
    parts: tuple[Node, ...] = ()

    @property
    def starts(self) -> list[Node]:
        """The values that hold the decision."""
        if self.parts:
            return list(self.parts)
        return [node for node in dict.fromkeys((self.node, self.ids, self.chosen)) if node is not None]


def find_choices(graph: Graph) -> list[Choice]:
    """Every decision over the last axis of floating scores, in graph order."""
    found: list[Choice] = []
    for node in graph.nodes:
        scores = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        if scores is None or not meta.is_tensor(scores) or not meta.tensor(scores).is_floating_point():
            continue
        if node.target in _PAIRS and _over_last_axis(node, scores, _PAIRS[node.target]):
            parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
            if 1 in parts:
                found += _choices(node, parts[1], parts.get(0), scores)
        elif node.target in _POSITIONS and _over_last_axis(node, scores, _POSITIONS[node.target]):
            found += _choices(node, node, None, scores)
    return found


def joined(choices: list[Choice]) -> list[tuple[Choice, tuple[Choice, ...]]]:
    """Decisions made one expert at a time (the best, then the best of the others), each with its parts.

    Ids that are put side by side are one decision; so are those of which each masks the scores of the next.
    """
    single = {choice.ids: choice for choice in choices if choice.top_k == 1}
    found: list[tuple[Choice, tuple[Choice, ...]]] = []
    for node in next(iter(single)).graph.nodes if single else ():
        if node.target in _JOINS and meta.is_tensor(node) and not meta.tensor(node).is_floating_point():
            parts = tuple(single.get(_through_views(item)) for item in node.args[0])
            known = tuple(part for part in parts if part is not None)
            dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
            last = isinstance(dim, int) and dim % meta.tensor(node).dim() == meta.tensor(node).dim() - 1
            if last and len(known) == len(parts) > 1 and _alike(known):
                first = known[0]
                made = Choice(node, node, None, first.num_options, len(parts), first.num_tokens)
                found.append((made, known))
    by_layer: dict[str | None, list[Choice]] = {}  # decisions of several layers are several decisions
    for choice in single.values():
        by_layer.setdefault(meta.layer(choice.node), []).append(choice)
    for choice in single.values():
        others = by_layer[meta.layer(choice.node)]
        before = ancestors(choice.node) if len(others) > 1 else set()
        chain = (*(other for other in others if other.ids in before), choice)
        if len(chain) > 1 and _alike(chain):
            ids = tuple(part.ids for part in chain)
            made = Choice(choice.node, choice.ids, None, choice.num_options, len(chain), choice.num_tokens, ids)
            found.append((made, chain))
    return found


def _alike(parts: tuple[Choice, ...]) -> bool:
    """Different decisions among as many options for as many tokens."""
    sizes = {(part.num_options, part.num_tokens) for part in parts}
    return len(sizes) == 1 and len({part.ids for part in parts}) == len(parts)


def _through_views(node: Any) -> Any:
    while isinstance(node, Node) and node.target in _VIEWS:
        node = node.args[0]
    return node


_JOINS = frozenset({aten.cat.default, aten.concat.default, aten.stack.default})
_VIEWS = frozenset(
    {aten.unsqueeze.default, aten.squeeze.dim, aten.reshape.default, aten.view.default, aten.detach.default}
)


def _over_last_axis(node: Node, scores: Node, position: int) -> bool:
    default = None if node.target is aten.argmax.default else -1
    dim = node.args[position] if len(node.args) > position else node.kwargs.get("dim", default)
    return (
        isinstance(dim, int)
        and meta.tensor(scores).dim() > 1
        and dim % meta.tensor(scores).dim() == meta.tensor(scores).dim() - 1
    )


def _choices(node: Node, ids: Node, chosen: Node | None, scores: Node) -> list[Choice]:
    """A sort chooses where its first K positions are taken."""
    options = int(meta.tensor(scores).shape[-1]) if isinstance(meta.tensor(scores).shape[-1], int) else 0
    if not all(isinstance(size, int) for size in meta.tensor(scores).shape):
        return []  # a router inside an expert: of rows that another decision picked
    if node.target in (aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable):
        cuts = [user for user in ids.users if _takes_first(user, meta.tensor(ids).dim() - 1)]
        return [_choice(node, cut, None, options, int(meta.tensor(cut).shape[-1])) for cut in cuts]
    one_each = meta.tensor(ids).dim() == meta.tensor(scores).dim()
    return [_choice(node, ids, chosen, options, int(meta.tensor(ids).shape[-1]) if one_each else 1)]


def _choice(node: Node, ids: Node, chosen: Node | None, options: int, top_k: int) -> Choice:
    return Choice(node, ids, chosen, options, top_k, int(meta.tensor(ids).numel()) // max(top_k, 1))


def _takes_first(node: Node, last: int) -> bool:
    if node.target not in (aten.slice.Tensor, aten.narrow.default):
        return False
    dim, start = cast(tuple[Any, ...], node.args)[1:3]
    return dim in (last, -1) and start in (0, None)


def dependents(starts: Iterable[Node], stop: Callable[[Node], bool] = lambda node: False) -> set[Node]:
    """Everything computed from ``starts``, without themselves and not by way of nodes that ``stop`` names."""
    first = list(starts)
    seen: set[Node] = set()
    todo = list(first)
    while todo:
        for user in todo.pop().users:
            if user not in seen and not stop(user):
                seen.add(user)
                todo.append(user)
    return seen - set(first)


def static_nodes(graph: Graph, weights: set[Node]) -> frozenset[Node]:
    """Values computed from ``weights`` (parameters, buffers, constants) and literals alone."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node in weights or (node.op == "call_function" and all(source in found for source in node.all_input_nodes)):
            found.add(node)
    return frozenset(found)
