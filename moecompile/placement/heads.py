"""Heads that tensor parallelism can cut over the vocabulary: a linear, and the cross entropy of its outputs as classes.

Found from the graph, as chains are: the linear before a cross entropy is cut by its outputs if the placement rules say that this leads to
classes that are cut, without moving anything in between. A table of embeddings that is the same parameter is cut with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from .. import meta
from .chains import Linear, Trial, before, linears
from .types import Shard

aten = torch.ops.aten
LOSS = aten.cross_entropy_loss.default
TABLE = aten.embedding.default


@dataclass(frozen=True)
class Head:
    """``losses`` read what ``linear`` gives; ``tables`` look up rows of the same weight."""

    linear: Linear
    losses: tuple[Node, ...]
    tables: tuple[Node, ...]

    def placements(self) -> list[tuple[Node, Shard]]:
        """How the parameters are cut."""
        found = [(self.linear.weight, Shard(self.linear.out_dim))]
        return found if self.linear.bias is None else [*found, (self.linear.bias, Shard(0))]


def find_heads(graph: Graph, params: set[Node], trial: Trial) -> list[Head]:
    """Every linear that leads to a cross entropy and whose outputs the ranks divide; its weight may be a table of embeddings as well."""
    known = linears(graph, params, also=(TABLE,))
    losses: dict[Node, list[Node]] = {}
    between: dict[Node, set[Node]] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node.target is not LOSS:
            continue
        source = node.args[0]
        assert isinstance(source, Node)
        inner, sources = before(source, known)
        if len(sources) == 1:
            losses.setdefault(sources[0], []).append(node)
            between.setdefault(sources[0], set()).update(inner)
    found = []
    for node, ends in losses.items():
        linear = known[node]
        head = Head(linear, tuple(ends), tuple(user for user in linear.weight.users if user is not node))
        if meta.tensor(linear.weight).shape[linear.out_dim] % trial.ranks == 0 and _leads(head, between[node], trial):
            found.append(head)
    return found


def _leads(head: Head, between: set[Node], trial: Trial) -> bool:
    """Whether the rules take the cut through to every loss, and to the look-ups."""
    region = frozenset({head.linear.node, *between, *head.losses, *head.tables})
    walk = trial.walk(region, dict(head.placements()))
    return walk is not None and all(
        walk.place(loss.args[0], trial.axis) == Shard(min(1, meta.tensor(loss.args[0]).dim() - 1))  # type: ignore[arg-type]
        for loss in head.losses
    )
