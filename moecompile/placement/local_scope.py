"""Balance terms of each rank's own batch: ``Plan(balance_scope="local")``.

The values that only a balance term reads are computed on this rank's part of what the router gave, with the numbers of one rank's
batch in place of the global ones; the term itself, divided by the number of ranks, is this rank's share of their mean.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from .. import graph as graphs
from .. import meta
from ..compat import tree_flatten, tree_unflatten
from ..errors import PassError
from ..program import AUX, InputKind, OutputKind, Program
from .sharder import Sharder
from .types import PARTIAL, Partial, Shard

aten = torch.ops.aten
_TIMES = {aten.mul.Tensor, aten.mul.Scalar}
_OVER = {aten.div.Tensor, aten.div.Scalar}


class LocalBalance:
    """The balance terms of ``program`` and what they alone are made of."""

    def __init__(self, program: Program, axis: str, ranks: int) -> None:
        self.axis, self.ranks = axis, ranks
        self._metrics = set[Node]()  # what record-metrics made of the terms
        self.terms = set(self._find_terms(program))
        self.own = _only_for(program, self.terms)
        self._batch = set[Node]()  # what depends on the batch
        for node, item in program.items():
            if item.kind is InputKind.BATCH:
                self._batch |= {node}
        for node in program.graph.nodes:
            if not self._batch.isdisjoint(node.all_input_nodes):
                self._batch.add(node)
        nested = [node for node in self.terms if graphs.ancestors(node) & self.terms]
        if nested:
            raise PassError(
                f"shard-dense: {meta.where(nested[0])}: one balance term is made of another, so it is not known which of them "
                "balance_scope='local' means; add them up in the loss, or leave balance_scope out."
            )

    def visit(self, walk: Sharder, node: Node) -> None:
        """Compute one of ``own`` on this rank's part."""
        for item in node.all_input_nodes:
            if item not in self.own:
                self._check(walk, item, node)
        leaves, spec = tree_flatten((node.args, node.kwargs))
        numbers = meta.local_numbers(node)
        args, kwargs = tree_unflatten([numbers.get(at, leaf) for at, leaf in enumerate(leaves)], spec)
        args, kwargs = map_arg((args, kwargs), walk.env.__getitem__)
        if node.target is operator.getitem:
            made = walk.graph.call_function(operator.getitem, args)
            made.meta = meta.copy_meta(node)
            made.meta["val"] = meta.value(args[0])[args[1]]
        else:
            made = walk.call(node.target, *args, like=node, **kwargs)
        if node in self.terms:
            (factor,) = self._factors(node, 1.0)
            made = walk.call(aten.div.Tensor, made, self.ranks / factor, like=node)
        walk.place_as(node, made, {self.axis: PARTIAL} if node in self.terms else {})

    def _check(self, walk: Sharder, item: Node, reader: Node) -> None:
        """What comes from outside has to be this rank's part, or the same for any batch."""
        placed = walk.place(item, self.axis)
        if isinstance(placed, Partial) or (not isinstance(placed, Shard) and item in self._batch):
            raise PassError(
                f"shard-dense: {meta.where(reader)}: a balance loss reads {item.name} ({meta.where(item)}), which is a statistic of "
                "the global batch that something else reads, too; compute it apart for the loss, or leave balance_scope out."
            )

    def _factors(self, node: Node, factor: float) -> set[float]:
        """How much more a term would count in a loss whose numbers are those of one rank's batch; one factor, or a PassError."""
        found = set[float]()
        for user in node.users:
            if user.op == "output" or user in self._metrics:
                continue
            scaled, numbers = factor, dict(meta.local_numbers(user))
            if 1 in numbers and user.target in _TIMES | _OVER:
                ratio = numbers.pop(1) / user.args[1]
                scaled = factor / ratio if user.target in _OVER else factor * ratio
            found |= self._factors(user, scaled)
            if numbers or len(found) > 1:
                raise PassError(
                    f"shard-dense: {meta.where(user)} combines a balance loss with numbers that depend on the batch in a way that "
                    "balance_scope='local' cannot follow; scale the term before it is added, or leave balance_scope out."
                )
        return found or {factor}

    def _find_terms(self, program: Program) -> Iterable[Node]:
        """The balance terms in the loss: what record-metrics adds up, each times its factor."""
        if not any(entry.pass_text.startswith("record-metrics") for entry in program.history):
            raise PassError(
                "shard-dense: balance_scope='local' needs to know the balance terms of the loss; put record-metrics in front of it."
            )
        for found, item in zip(program.output_nodes(), program.outputs, strict=True):
            todo = [found] if item.kind is OutputKind.METRIC and item.what == AUX else []
            while todo:
                node = todo.pop()
                self._metrics.add(node)
                if node.target is aten.add.Tensor:
                    todo += node.args[:2]
                else:
                    yield node.args[0]


def _only_for(program: Program, terms: set[Node]) -> set[Node]:
    """The terms and all values that nothing but them reads."""
    own = {node for node in {*terms, *graphs.ancestors(*terms)} if node.op == "call_function"} if terms else set()
    for node in reversed(list(program.graph.nodes)):
        if node in own and node not in terms and not own.issuperset(node.users):
            own.discard(node)
    return own
