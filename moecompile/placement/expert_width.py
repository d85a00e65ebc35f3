"""Cuts of experts along their width: the first linears of an expert by columns, the last by rows, found from the expert's own graph.

As for chains of dense linears nothing is told by name: each linear of an expert is taken for the last one, and the placement rules
say whether cutting those before it leads there without moving anything in between, and to a sum over ranks at the expert's end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch.fx import Graph, Node

from .. import graph as graphs
from .. import meta, ops
from ..compat import FakeTensorMode
from ..errors import PassError
from .call import Call, Decision, Needs, NoRuleError, Walk
from .sharder import Sharder
from .table import sharder
from .types import PARTIAL, REPLICATE, Partial, Placement, Shard

aten = torch.ops.aten
AXIS = "etp"

_STRIPES = (1, 2, 3)  # projections that one weight may hold side by side: gate and up
_MOST_SOURCES = 2  # linears side by side whose stripes are tried one by one; more are striped alike


@dataclass(frozen=True)
class Experts:
    """What stands between a permute and the unpermute that brings its rows back; ``result`` are the rows that go back."""

    body: tuple[Node, ...]
    result: Node

    @property
    def linears(self) -> list[Node]:
        return [node for node in self.body if node.target is ops.grouped_linear]


def find_experts(graph: Graph) -> list[Experts]:
    """The experts of every MoE layer."""
    found = []
    for permute in graphs.find(graph, ops.permute):
        parts = graphs.items(permute)
        for node in graphs.find(graph, ops.unpermute):
            if 0 in parts and node.args[1] is parts.get(2):
                result: Any = node.args[0]
                found.append(Experts(tuple(graphs.between([parts[0]], node)), result))
    return found


def grouped_linear(call: Call) -> Decision:
    """Columns of whole rows, a sum of rows that are cut along their features, or any part of a sum."""
    rows, counts, weight, bias = call.args[0], call.args[1], call.args[2], call.get("bias")
    call.placed(counts)
    have, cut, added = call.placed(rows), call.placed(weight), call.placed(bias)
    needs = Needs()
    if isinstance(have, Shard) and have.dim == 1:
        if isinstance(cut, Shard) and cut != have.moved(2):
            raise NoRuleError(f"its rows are {have} and its weight {cut}, which do not meet.")
        needs.want(weight, have.moved(2))
    elif isinstance(have, Partial):
        if isinstance(cut, Shard) or isinstance(added, Shard):
            raise NoRuleError("a sum over ranks is multiplied with a part of a weight.")
    elif isinstance(cut, Shard) and cut.dim == 1:
        if bias is not None:
            needs.want(bias, cut)
        return Decision(cut.moved(1), needs)
    elif isinstance(cut, Shard) or isinstance(have, Shard) or isinstance(added, Shard):
        raise NoRuleError(f"its rows are {have} and its weight {cut}, which is no linear of a cut expert.")
    else:
        return Decision(REPLICATE, call.reduced())
    if bias is not None:
        needs.want(bias, PARTIAL)  # in equal parts, so that it counts once
    return Decision(PARTIAL, needs)


def uniform_rows(call: Call) -> Decision:
    """Numbers for features that are cut; the emitter draws those of all features, by which they are numbered."""
    like, places = call.placed(call.args[0]), call.placed(call.args[2])
    return Decision(like if isinstance(like, Shard) and places == REPLICATE else REPLICATE)


def _emit_uniform_rows(walk: Walk, node: Node, decisions: dict[str, Decision]) -> Node | None:
    cut = decisions[AXIS].out
    if not isinstance(cut, Shard):
        return None
    like, *others = (walk.env[item] for item in node.args if isinstance(item, Node))
    column = walk.call(aten.slice.Tensor, like, 1, 0, 1, like=node)
    wide = walk.call(aten.expand.default, column, list(meta.tensor(node).shape), like=node)
    drawn = walk.call(node.target, wide, *others, like=node)
    return walk.call(ops.local_slice, drawn, walk.offset(AXIS), cut.dim, cut.outer, walk.axes[AXIS], like=node)


def width_sharder(graph: Graph, ranks: int, mode: FakeTensorMode) -> Sharder:
    """A sharder over ``etp`` that refuses to gather."""
    walk = sharder(graph, {AXIS: ranks}, mode, strict=True)
    walk.rules = {**walk.rules, ops.grouped_linear: grouped_linear, ops.uniform_rows: uniform_rows}
    walk.emitters = {**walk.emitters, ops.uniform_rows: _emit_uniform_rows}
    return walk


@dataclass(frozen=True)
class WidthSearch:
    """Finds how the linears of experts are cut into ``ranks`` parts."""

    graph: Graph
    ranks: int
    mode: FakeTensorMode

    def cuts(self, experts: Experts) -> dict[Node, Placement]:
        """Weights and biases, as the linears read them, and their cuts; empty where the experts cannot be cut."""
        found: dict[Node, Placement] = {}
        for last in reversed(experts.linears):
            if any(node.args[2] in found for node in [last, *self._before(experts, last)]):
                continue
            for chosen in self._choices(experts, last):
                if self._leads(experts, found | chosen):
                    found |= chosen
                    break
        return found

    def widths(self, experts: Experts) -> list[int]:
        """The number of features that each linear reads from another one: what would have to be divided."""
        return [meta.tensor(last.args[2]).shape[2] for last in experts.linears if self._before(experts, last)]  # type: ignore[arg-type]

    def _choices(self, experts: Experts, last: Node) -> Iterator[dict[Node, Placement]]:
        """Cuts to try with ``last`` as the last linear; others that read the same rows are cut with it."""
        first = self._before(experts, last)
        if not first or meta.tensor(last.args[2]).shape[2] % self.ranks:  # type: ignore[arg-type]
            return
        rows: dict[Any, Placement] = {
            node.args[2]: Shard(2) for node in experts.linears if node.args[0] is last.args[0]
        }
        alike = [(count,) * len(first) for count in _STRIPES]
        for stripes in product(_STRIPES, repeat=len(first)) if len(first) <= _MOST_SOURCES else alike:
            columns: dict[Any, Placement] = {}
            for node, count in zip(first, stripes, strict=True):
                columns[node.args[2]] = Shard(1, count)
                if len(node.args) > 3 and node.args[3] is not None:
                    columns[node.args[3]] = Shard(1, count)
            widths = [meta.tensor(node.args[2]).shape[1] for node in first]  # type: ignore[arg-type]
            if all(width % (count * self.ranks) == 0 for width, count in zip(widths, stripes, strict=True)):
                yield columns | rows

    @staticmethod
    def _before(experts: Experts, last: Node) -> list[Node]:
        """The nearest linears that ``last`` reads from."""
        body, found, seen = set(experts.body), dict[Node, None](), set[Node]()
        todo: list[Any] = [last.args[0]]
        while todo:
            node = todo.pop()
            if node in seen or node not in body:
                continue
            seen.add(node)
            if node.target is ops.grouped_linear:
                found[node] = None
            else:
                todo.extend(node.all_input_nodes)
        return [node for node in experts.linears if node in found]

    def _leads(self, experts: Experts, cuts: Mapping[Node, Placement]) -> bool:
        """Whether the rules lead from whole rows to a sum over ranks, moving nothing."""
        walk = self.walk(experts.body, cuts)
        return walk is not None and walk.place(experts.result, AXIS) == PARTIAL

    def walk(self, nodes: Iterable[Node], cuts: Mapping[Node, Placement]) -> Sharder | None:
        """The rules over some nodes, with values from outside cut as said; None where a rule refuses or would move something."""
        walk = width_sharder(self.graph, self.ranks, self.mode)
        region = set(nodes)
        wanted = region | {source for node in region for source in node.all_input_nodes}
        try:
            for node in (node for node in self.graph.nodes if node in wanted):
                if node not in region:
                    walk.add_placeholder(node, {AXIS: cuts.get(node, REPLICATE)})
                else:
                    walk.visit(node)
        except PassError:
            return None
        return None if moved(walk.graph) else walk

    def parameters(self, weight: Node, want: Placement, inputs: Iterable[Node]) -> dict[Node, Placement]:
        """How the inputs that a weight is computed from are cut, so that it is ``want``; what stays whole is left out."""
        assert isinstance(want, Shard)
        known = set(inputs)
        if weight in known:
            return {weight: want}
        region = {weight, *graphs.ancestors(weight)} - known
        region = {node for node in region if node.op == "call_function"}
        experts, found = meta.tensor(weight).shape[0], dict[Node, Placement]()
        for node in graphs.ancestors(weight) & known:
            shape = meta.tensor(node).shape
            for dim, outer in product(range(len(shape)), (want.outer, want.outer * experts)):
                cut = Shard(dim, outer)
                if shape[dim] % (outer * self.ranks) == 0 and self._makes(region, weight, want, {node: cut}):
                    found[node] = cut
                    break
        return found

    def _makes(self, region: Iterable[Node], weight: Node, want: Placement, cuts: Mapping[Node, Placement]) -> bool:
        walk = self.walk(region, cuts)
        return walk is not None and walk.place(weight, AXIS) == want


def moved(graph: Graph) -> bool:
    """Whether a graph sends anything over the axis."""
    return any(
        node.target in ops.COLLECTIVES and node.args[ops.AXIS_ARGUMENT[node.target]] == AXIS for node in graph.nodes
    )
