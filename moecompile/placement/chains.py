"""Chains of linears that tensor parallelism can cut: columns first, then rows, with whatever lies between.

A chain ends in one linear whose input is cut along its features, so that its result is a partial sum, and begins in the linears
whose outputs are cut to that end: gate and up before down, query, key and value before the attention's output. Nothing is told by
name: every linear is taken for the end of a chain once, and the placement rules say whether cutting those before it leads there
without moving anything in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch.fx import Graph, Node

from .. import meta, ops
from ..compat import FakeTensorMode
from ..errors import PassError
from ..plan import COLUMN, ROW
from .sharder import Sharder
from .table import sharder
from .types import REPLICATE, Shard

aten = torch.ops.aten

_MOST_BETWEEN = 400  # ops between the ends of a chain
_STRIPES = (1, 2, 3)  # projections that one weight may hold side by side: gate and up; query, key and value


@dataclass(frozen=True)
class Linear:
    """A product with a weight that is a parameter: dims of the weight that run over outputs and inputs."""

    node: Node
    source: Node
    weight: Node
    bias: Node | None
    out_dim: int
    in_dim: int


@dataclass(frozen=True)
class Chain:
    """``first`` are cut by columns, each in so many stripes, ``last`` by rows; ``between`` are the ops between them."""

    first: tuple[tuple[Linear, int], ...]
    last: Linear
    between: frozenset[Node]

    def entries(self) -> Iterator[tuple[Node, Node]]:
        """Activations that enter the chain: (reader, value)."""
        for linear, _ in self.first:
            yield linear.node, linear.source
        own = self.between | {linear.node for linear, _ in self.first}
        for node in self.between:
            for source in node.all_input_nodes:
                if source.op == "call_function" and source not in own and meta.is_tensor(source):
                    yield node, source

    def placements(self) -> Iterator[tuple[Node, Shard]]:
        """How each parameter of the chain is cut."""
        for linear, stripes in self.first:
            yield linear.weight, Shard(linear.out_dim, stripes)
            if linear.bias is not None:
                yield linear.bias, Shard(0, stripes)
        yield self.last.weight, Shard(self.last.in_dim)


def products(graph: Graph, params: set[Node]) -> list[Linear]:
    """Every product with a weight that is one of ``params``, whoever else reads it."""
    found = map(_linear, graph.nodes)
    return [linear for linear in found if linear is not None and linear.weight in params]


def linears(graph: Graph, params: set[Node], also: tuple[Any, ...] = ()) -> dict[Node, Linear]:
    """Every linear of the graph whose weight is one of ``params``, read by it alone, or else by calls of ``also``."""
    found: dict[Node, Linear] = {}
    for linear in products(graph, params):
        if any(user is not linear.node and user.target not in also for user in linear.weight.users):
            continue
        if linear.bias is None or (linear.bias in params and len(linear.bias.users) == 1):
            found[linear.node] = linear
    return found


def _linear(node: Node) -> Linear | None:
    args: Sequence[Any] = node.args
    parts: tuple[Any, Any, Any]
    if node.target is aten.linear.default:
        bias = args[2] if len(args) > 2 else node.kwargs.get("bias")
        parts, dims = (args[0], args[1], bias), (0, 1)
    elif node.target is aten.addmm.default and not node.kwargs:
        parts, dims = (args[1], args[2], args[0]), (1, 0)
    elif node.target in (aten.mm.default, aten.matmul.default):
        parts, dims = (args[0], args[1], None), (1, 0)
    else:
        return None
    source, weight, bias = parts
    plain = isinstance(weight, Node) and meta.is_tensor(weight) and meta.tensor(weight).dim() == 2
    return Linear(node, source, weight, bias, *dims) if plain and isinstance(source, Node) else None


def find_chains(trial: Trial, params: set[Node], roles: Mapping[Node, str]) -> list[Chain]:
    """Chains that the ranks can cut; no linear is in two of them, and none has another part in one than ``roles`` say.

    From the end of the graph to its beginning: where three linears follow one another (low-rank projections before attention) the
    last two make the chain, which is the one with the heads.
    """
    known = linears(trial.graph, params)
    used: set[Node] = set()
    found = []
    for node, linear in reversed(known.items()):
        if node in used or roles.get(node, ROW) != ROW or meta.tensor(linear.weight).shape[linear.in_dim] % trial.ranks:
            continue
        between, sources = before(linear.source, known)
        free = [known[source] for source in sources if source not in used and roles.get(source, COLUMN) == COLUMN]
        if not free or len(between) > _MOST_BETWEEN:
            continue
        chain = _try(linear, free, between, trial)
        if chain is not None:
            found.append(chain)
            used |= {node, *(one.node for one, _ in chain.first)}
    return found[::-1]


def before(start: Node, known: dict[Node, Linear]) -> tuple[set[Node], list[Node]]:
    """Ops between ``start`` and the nearest linears before it, and those linears."""
    between: set[Node] = set()
    sources: dict[Node, None] = {}
    todo = [start]
    while todo and len(between) <= _MOST_BETWEEN:
        node = todo.pop()
        if node in known:
            sources[node] = None
        elif node.op == "call_function" and node not in between:
            between.add(node)
            todo.extend(node.all_input_nodes)
    return between, list(sources)


def _try(last: Linear, free: list[Linear], between: set[Node], trial: Trial) -> Chain | None:
    """The first way to cut the linears before ``last`` that the rules accept: all of them, or those nobody else passes through."""
    for chosen in _choices(free):
        if _is_read_elsewhere(chosen, between, last.node):
            continue
        widths = [meta.tensor(linear.weight).shape[linear.out_dim] for linear in chosen]
        # stripes are tried one by one for a single projection; several projections are not striped
        for stripes in product(_STRIPES if len(chosen) == 1 else (1,), repeat=len(chosen)):
            if any(width % (trial.ranks * count) for width, count in zip(widths, stripes, strict=True)):
                continue
            chain = Chain(tuple(zip(chosen, stripes, strict=True)), last, frozenset(between))
            if trial.leads(chain):
                return chain
    return None


def _is_read_elsewhere(chosen: list[Linear], between: set[Node], last: Node) -> bool:
    """Whether somebody beside the chain reads what is computed from the linears that would be cut: it would have to be gathered."""
    inside = between | {last}
    todo = [linear.node for linear in chosen]
    seen = set(todo)
    while todo:
        for user in todo.pop().users:
            if user not in inside:
                return True
            if user is not last and user not in seen:
                seen.add(user)
                todo.append(user)
    return False


def _choices(free: list[Linear]) -> Iterator[list[Linear]]:
    yield free
    inner = [one for one in free if not any(one is not other and _passes(one.node, other.source) for other in free)]
    if len(inner) != len(free):
        yield inner
        free = inner
    widest = max(meta.tensor(one.weight).shape[one.out_dim] for one in free)
    wide = [one for one in free if meta.tensor(one.weight).shape[one.out_dim] == widest]
    if len(wide) != len(free):  # few key-value heads stay whole beside the query's
        yield wide


def _passes(node: Node, target: Node) -> bool:
    """Whether ``target`` is computed from ``node``."""
    seen, todo = {target}, [target]
    order = {item: at for at, item in enumerate(node.graph.nodes)}
    while todo:
        here = todo.pop()
        if here is node:
            return True
        for source in here.all_input_nodes:
            if source not in seen and order[source] >= order[node]:
                seen.add(source)
                todo.append(source)
    return False


@dataclass(frozen=True)
class Trial:
    """Runs the rules over a part of the graph, to see where a cut of parameters leads.

    ``differentiated``: values that gradients flow through.
    """

    graph: Graph
    differentiated: set[Node]
    axis: str
    ranks: int
    mode: FakeTensorMode

    def leads(self, chain: Chain) -> bool:
        """Whether the last linear reads a plain cut of its features, and nothing was gathered or cut on the way.

        An activation from outside that would have to be cut is the residual stream: the chain then is none.
        """
        region = chain.between | {linear.node for linear, _ in chain.first}
        walk = self.walk(region, dict(chain.placements()))
        if walk is None:
            return False
        outside = walk.env.keys() - region
        stream = {walk.env[node] for node in outside if node.op == "call_function" and node in self.differentiated}
        if any(node.target is ops.local_slice and node.args[0] in stream for node in walk.graph.nodes):
            return False
        source = chain.last.source
        return walk.place(source, self.axis) == Shard(meta.tensor(source).dim() - 1)

    def walk(self, region: frozenset[Node], cuts: Mapping[Node, Shard]) -> Sharder | None:
        """The region as one rank computes it; None where something would be gathered. What it reads is whole, or cut as said."""
        walk = sharder(self.graph, {self.axis: self.ranks}, self.mode, strict=True)
        try:
            for node in self._ordered(region):
                if node in region:
                    walk.visit(node)
                else:
                    walk.add_placeholder(node, {self.axis: cuts.get(node, REPLICATE)})
        except PassError:
            return None
        return walk

    def _ordered(self, region: frozenset[Node]) -> list[Node]:
        """The region and what it reads, in graph order."""
        wanted = region | {source for node in region for source in node.all_input_nodes}
        return [node for node in self.graph.nodes if node in wanted]
