"""Where a routing decision meets experts: the values that enter each expert, and those that leave it.

Gathered: rows picked by the decision enter expert weights; each run of row-wise operators is one component.
Dense: every expert sees all tokens, and its result later meets a mask or a weight of the decision.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, Node

from moecompile import graph as ir
from moecompile import meta
from moecompile.recognition import rowwise
from moecompile.recognition.choices import Choice, dependents

aten = torch.ops.aten


@dataclass(frozen=True)
class Component:
    """One run of row-wise operators; ``nodes`` include the exit."""

    entry: Node | None
    exit: Node
    nodes: frozenset[Node]


@dataclass
class Proposal:
    """What may be the experts of one routing decision. ``trouble`` says why what looks like experts is none."""

    choice: Choice
    components: list[Component] = field(default_factory=list)
    dense: bool = False
    trouble: str = ""


class Region:
    """The part of a graph around one routing decision."""

    def __init__(
        self,
        graph: Graph,
        choice: Choice,
        static: frozenset[Node],
        done: tuple[Node, ...] = (),
        order: Mapping[Node, int] | None = None,
    ) -> None:
        """``done`` are results of the same decision that are known: values like any other for what comes behind them.

        ``order`` may be given where many regions of one graph are made.
        """
        self.graph = graph
        self.choice = choice
        self.static = static
        self.order = order or positions(graph)
        starts = choice.starts
        self.routed = dependents(starts, stop=done.__contains__) | set(starts)
        self.behind = self._leads_to(done)
        # The decision itself, before any weight is applied to what it picks.
        stops = {*done, *(node for node in self.routed if self._weighted_rows(node) is not None)}
        self.early = dependents(starts, stop=stops.__contains__) | set(starts)

    def _leads_to(self, ends: tuple[Node, ...]) -> set[Node]:
        """Routed values that known results were computed from."""
        seen: set[Node] = set()
        todo = list(ends)
        while todo:
            for source in todo.pop().all_input_nodes:
                if source in self.routed and source not in seen:
                    seen.add(source)
                    todo.append(source)
        return seen

    @cached_property
    def masks(self) -> set[Node]:
        """Routed values that say who was chosen and how much it counts, without features of tokens or of experts."""
        before, found = ir.ancestors(self.choice.node), set(self.choice.starts)
        for node in sorted(self.routed - found, key=self.order.__getitem__):
            outside = [
                item
                for item in node.all_input_nodes
                if item not in found and item not in self.static and meta.is_tensor(item)
            ]
            if any(item in self.routed for item in outside):
                continue
            if all(self._is_narrow(item, item in before) for item in outside):
                found.add(node)
        return found

    def _is_narrow(self, node: Node, before: bool) -> bool:
        """No features: an index, a number for each token, or one for each option; less, too, of what was there ``before``."""
        found, options = meta.tensor(node), self.choice.num_options
        if not found.is_floating_point() or found.dim() < 2 or str(found.shape[-1]) == "1":
            return True
        last = found.shape[-1]
        return isinstance(last, int) and (last == options or (before and last < options))

    def _users(self) -> list[Node]:
        """What reads a routed value, in graph order."""
        return sorted({user for node in self.routed for user in node.users}, key=self.order.__getitem__)

    def is_coefficient(self, node: Node) -> bool:
        """A factor per row: comes from the decision and has one feature."""
        if node not in self.routed or not meta.is_tensor(node):
            return False
        found = meta.tensor(node)
        return (found.is_floating_point() and (found.dim() == 0 or str(found.shape[-1]) == "1")) or (
            found.dtype == torch.bool and str(found.shape[-1]) == "1"
        )

    def scales(self, node: Node) -> bool:
        """Whether a node multiplies rows by a factor of the decision."""
        if node.target is not aten.mul.Tensor:
            return False
        given = rowwise.tensor_inputs(node)
        return len(given) == 2 and sum(self.is_coefficient(item) for item in given) == 1

    def propose(self) -> Proposal:
        """Gathered components if there are any, else dense ones."""
        gathered = self._gathered()
        if gathered.components:
            return gathered
        dense = self._dense()
        return dense if dense.components or not gathered.trouble else gathered

    # Gathered ----------------------------------------------------------------------------------------------------

    def _gathered(self) -> Proposal:
        found = Proposal(self.choice)
        entries = self._entries(found)
        merge_equal(entries)
        for entry in entries:
            if entry.users:
                found.components.append(self._grow(entry))
        for component in found.components:
            exits = self._exits(component.nodes)
            if len(exits) != 1:
                names = ", ".join(meta.where(item) for item in exits) or "nothing"
                found.trouble = (
                    found.trouble or f"an expert hands out {len(exits)} values ({names}), where one is expected"
                )
        return found

    def _entries(self, found: Proposal) -> list[Node]:
        """Where rows that experts compute on were picked, in graph order."""
        entries: dict[Node, None] = {}
        seen: set[Node] = set()
        for node in self._users():
            rows = self._weighted_rows(node)
            if rows is None or rows not in self.routed or node in self.behind:
                continue
            for origin in self._origins(rows, seen):
                if not self._comes_from_outside(origin):
                    continue
                if origin.target in _PICKS or self.scales(origin):
                    entries[origin] = None
                else:
                    found.trouble = f"{meta.where(origin)} ({origin.target}) does not treat each row for itself"
        return sorted(entries, key=self.order.__getitem__)

    def _weighted_rows(self, node: Node) -> Node | None:
        """The rows that a node multiplies by a weight."""
        if not rowwise.is_linear(node):
            return None
        operands = [item for item in rowwise.tensor_inputs(node) if item not in self.static]
        return operands[0] if len(operands) == 1 and len(rowwise.tensor_inputs(node)) > 1 else None

    def _origins(self, node: Node, seen: set[Node]) -> list[Node]:
        """Where rows come from when one walks back over row-wise operators, except over those in ``seen``."""
        found: dict[Node, None] = {}
        todo = [node]
        while todo:
            here = todo.pop()
            if here in seen:
                continue
            seen.add(here)
            if here.op != "call_function" or here not in self.routed or not rowwise.may_be_rowwise(here):
                found[here] = None
                continue
            sources = [
                item
                for item in rowwise.tensor_inputs(here)
                if item not in self.static and not (here.target is aten.mul.Tensor and self.is_coefficient(item))
            ]
            if any(item not in self.routed for item in sources):
                found[here] = None  # routed and other values meet here
            else:
                todo += sources
        return list(found)

    def _comes_from_outside(self, node: Node) -> bool:
        """Whether it holds rows of a tensor that does not depend on the decision."""
        if node not in self.early or node in self.choice.starts:
            return False
        if any(item in self.routed and item not in self.early for item in node.all_input_nodes):
            return False  # a later layer's decision
        if node.target in _PRODUCTS and self.masks.isdisjoint(node.all_input_nodes):
            return False  # an attention behind the experts
        return any(meta.tensor(item).dim() > 1 for item in self.outer_sources(node))

    def outer_sources(self, node: Node) -> list[Node]:
        """Floating values from before the decision that a routed value is made of, passing over no accumulator."""
        found: dict[Node, None] = {}
        seen, todo = {node}, [node]
        while todo:
            here = todo.pop()
            if here.target in _ACCUMULATORS or (rowwise.is_linear(here) and self._weighted_rows(here) is not None):
                return []
            for item in here.all_input_nodes:
                if item in seen or item in self.choice.starts or item in self.static:
                    continue
                seen.add(item)
                if item in self.routed:
                    todo.append(item)
                elif meta.is_tensor(item) and meta.tensor(item).is_floating_point():
                    found[item] = None
        return list(found)

    def _grow(self, entry: Node) -> Component:
        """Everything that is row-wise in the entry's rows and reads nothing else but weights."""
        inside, waiting = {entry}, [(self.order[user], user) for user in entry.users]
        seen = set(entry.users)
        heapq.heapify(waiting)
        while waiting:  # in graph order: what a node reads is decided before the node
            _, node = heapq.heappop(waiting)
            if not rowwise.may_be_rowwise(node):
                continue
            sources = [item for item in rowwise.tensor_inputs(node) if item not in self.static]
            others = [item for item in sources if item not in inside]
            scaled = node.target is aten.mul.Tensor and len(others) == 1 and self.is_coefficient(others[0])
            if len(others) < len(sources) and (not others or scaled):
                inside.add(node)
                for user in node.users:
                    if user not in seen:
                        seen.add(user)
                        heapq.heappush(waiting, (self.order[user], user))
        nodes = frozenset(inside - {entry})
        exits = self._exits(nodes)
        return Component(entry, exits[0] if exits else entry, nodes)

    def _exits(self, nodes: frozenset[Node]) -> list[Node]:
        return [
            node
            for node in sorted(nodes, key=self.order.__getitem__)
            if any(user not in nodes and user.target not in rowwise.SIZES for user in node.users)
        ]

    # Dense -------------------------------------------------------------------------------------------------------

    def _dense(self) -> Proposal:
        found = Proposal(self.choice, dense=True)
        metas = self._meetings()
        cones = {node: self._cone(node) for node in metas}
        reached: dict[Node, int] = {}
        for cone in cones.values():
            for node in cone:
                reached[node] = reached.get(node, 0) + 1
        for node, cone in cones.items():
            # What several results share is what goes into the experts; a batched product shares nothing with others.
            own = frozenset(item for item in cone if reached[item] == 1)
            if metas[node] and node in own and any(self._weighted_rows(item) is not None for item in own):
                fringe = {
                    source
                    for item in own
                    for source in rowwise.tensor_inputs(item)
                    if source not in own and source not in self.static
                }
                entry = next(iter(fringe)) if len(fringe) == 1 else None
                found.components.append(Component(entry, node, own))
        return found

    def _meetings(self) -> dict[Node, bool]:
        """Values from before the decision that meet it, seen through stacking, and whether each may be an expert's.

        What the decision was made from is no expert, and neither is what is only added to their sum.
        """
        found: dict[Node, bool] = {}
        before = ir.ancestors(self.choice.node)
        for node in sorted(self.routed, key=self.order.__getitem__):
            if node is self.choice.node or node in self.behind or node.op == "output":
                continue
            if self.masks.isdisjoint(node.all_input_nodes):
                continue
            added = node.target in (aten.add.Tensor, aten.sub.Tensor)
            for item in rowwise.tensor_inputs(node):
                if item not in self.routed and item not in self.static and meta.is_tensor(item):
                    for part in _unstacked(item):
                        found[part] = found.get(part, False) or not (added or part in before)
        return {node: may_be for node, may_be in found.items() if meta.tensor(node).is_floating_point()}

    def _cone(self, node: Node) -> set[Node]:
        """Row-wise operators that lead to ``node`` from before the decision."""
        seen: set[Node] = set()
        todo = [node]
        while todo:
            here = todo.pop()
            if here in seen or here.op != "call_function" or not rowwise.may_be_rowwise(here):
                continue
            seen.add(here)
            todo += [item for item in rowwise.tensor_inputs(here) if item not in self.static]
        return seen

    # The result --------------------------------------------------------------------------------------------------

    def results(self, exits: list[Node], limit: int = 8) -> list[Node]:
        """Values through which alone the experts reach the rest of the graph, first ones first."""
        reached, open_nodes, found = set(exits), set(exits), []
        last_use: dict[Node, int] = {}
        final = max(self.order[item] for item in exits)
        node = min(exits, key=self.order.__getitem__)
        while node.op != "output":
            here, node = node, node.next
            at = self.order[here]
            if here not in reached:
                if at > final and self._weighted_rows(here) in reached:
                    break  # the rest of the model
                if not any(item in reached for item in here.all_input_nodes) or here.target in rowwise.SIZES:
                    continue
                reached.add(here)
                open_nodes.add(here)
            last_use[here] = max((self.order[user] for user in here.users), default=-1)
            open_nodes = {item for item in open_nodes if last_use.get(item, at + 1) > at}
            if at >= final and open_nodes == {here} and meta.is_tensor(here):
                found.append(here)
                if len(found) == limit:
                    break
        return found


_PRODUCTS = frozenset({aten.einsum.default, aten.bmm.default, aten.matmul.default, aten.mm.default})
# Rows picked by the decision: by an index, a split, or a product with a dispatch mask.
_PICKS = _PRODUCTS | frozenset(
    {
        aten.index.Tensor,
        aten.index_select.default,
        aten.gather.default,
        aten.masked_select.default,
        aten.narrow.default,
        aten.slice.Tensor,
        aten.select.int,
        operator.getitem,
    }
)
_ACCUMULATORS = frozenset(
    {
        aten.index_add.default,
        aten.index_put.default,
        aten.index_copy.default,
        aten.scatter_add.default,
        aten.scatter_reduce.two,
    }
)


def _unstacked(node: Node) -> list[Node]:
    """The parts of a stack or a concatenation, else the value itself."""
    if node.target in (aten.stack.default, aten.cat.default):
        return [item for item in node.args[0] if isinstance(item, Node)]  # type: ignore[union-attr]
    if node.target in rowwise.RESHAPES | rowwise.AXES and isinstance(node.args[0], Node):
        parts = _unstacked(node.args[0])
        return parts if parts != [node.args[0]] else [node]
    return [node]


def positions(graph: Graph) -> dict[Node, int]:
    """Each node's place in the graph."""
    return {node: index for index, node in enumerate(graph.nodes)}


def merge_equal(nodes: list[Node]) -> None:
    """Let equal calls among ``nodes`` be one: rows picked twice are picked once."""
    known: dict[Any, Node] = {}
    for node in nodes:
        key = (node.target, hashable(node.args), hashable(node.kwargs))
        if known.setdefault(key, node) is not node:
            node.replace_all_uses_with(known[key])


def hashable(item: Any) -> Any:
    if isinstance(item, (list, tuple)):
        return tuple(hashable(part) for part in item)
    return tuple((key, hashable(part)) for key, part in item.items()) if isinstance(item, dict) else item
