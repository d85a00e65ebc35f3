"""Gathering: what no rule can place runs whole on every rank of the axis, and that is reported.

Right by the reading of placements in ``types``: the all-gather's adjoint is a reduce-scatter, and a whole value that several
ranks read gets the sum of their shares' gradients. It costs bytes and repeated work, so every such line is named, and its
result is cut again at once where it still has the dim that was cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from .. import meta, ops
from .call import Call, Decision, NoRuleError
from .types import REPLICATE, Placement, Replicate, Shard

aten = torch.ops.aten

# no gradient passes these
_STOPS = {
    aten.detach.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default,
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default,
}  # fmt: skip


@dataclass(frozen=True)
class Gather:
    """One line of the user's code that runs whole on every rank of ``axis``, because of ``reason``.

    ``bytes`` is what one rank hands to collectives for it in the forward of a step, ``grad_bytes`` in the backward; both are
    0 where an earlier line has gathered the same values.
    """

    op: str
    module: str
    source: str
    axis: str
    bytes: int
    grad_bytes: int
    reason: str

    @property
    def step_bytes(self) -> int:
        """What one rank hands to collectives in a whole step."""
        return self.bytes + self.grad_bytes

    def times(self, runs: int) -> Gather:
        """The same line in a step that runs the program several times."""
        return replace(self, bytes=self.bytes * runs, grad_bytes=self.grad_bytes * runs)

    def forward_only(self) -> Gather:
        """The same line in a call without backward."""
        return replace(self, grad_bytes=0)

    def __str__(self) -> str:
        place = " ".join(filter(None, (self.module and f"in {self.module}", self.source and f"({self.source})")))
        return f"{self.op} {place}".rstrip() + f": {self.step_bytes:,} B per step over {self.axis}"


def whole(call: Call, operands: Mapping[Node, Placement], reason: str) -> Decision:
    """The decision to run a call whole on every rank; NoRuleError with the same reason where that would not be right."""
    rows = [item for item, placed in operands.items() if isinstance(placed, Shard) and placed.rows]
    if rows:
        raise NoRuleError(reason)
    wanted = {item: REPLICATE for item, placed in operands.items() if not isinstance(placed, Replicate)}
    decision = call.decide(REPLICATE, wanted)
    found = meta.value(call.node)
    outs = found if isinstance(found, (tuple, list)) else [found]
    decision.gathered, decision.cuts = reason, [_cut_again(call, item, operands) for item in outs]
    return decision


def _cut_again(call: Call, out: Any, operands: Mapping[Node, Placement]) -> Shard | None:
    """How an output is cut as one of the operands was: where both agree in all dims up to the one that was cut."""
    shape = [size if isinstance(size, int) else -1 for size in out.shape] if isinstance(out, torch.Tensor) else []
    for item, placed in operands.items():
        if isinstance(placed, Shard) and shape[: placed.dim + 1] == list(call.shape(item)[: placed.dim + 1]):
            return placed
    return None


def gathered_bytes(operands: Iterable[tuple[Node, Placement]], ranks: int) -> int:
    """What one rank would hand to collectives to make these global values whole, each of which it has a part of."""
    found = 0
    for item, placed in operands:
        value = meta.tensor(item)
        size = value.numel() * value.element_size()
        if not isinstance(placed, Replicate) and isinstance(size, int):
            found += size // ranks if isinstance(placed, Shard) else size
    return found


def differentiated(graph: Graph, trained: Iterable[Node], results: Iterable[Node]) -> set[Node]:
    """Values through which a gradient flows from ``results`` to ``trained``, read off types alone."""
    reached = set(trained)
    for node in graph.nodes:
        passes = node.op == "call_function" and node.target not in _STOPS and _carries(node)
        if passes and not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    wanted = {node for node in results if node in reached}
    for node in reversed(graph.nodes):
        if node in wanted:
            wanted.update(source for source in node.all_input_nodes if source in reached)
    return wanted


def _carries(node: Node) -> bool:
    """Whether a value can have a gradient: a float, or a tuple that may hold one."""
    found = node.meta.get("val")
    if isinstance(found, torch.Tensor):
        return found.is_floating_point() or found.is_complex()
    return isinstance(found, (tuple, list))


class Ledger:
    """Which collectives a walk inserted for which line."""

    def __init__(self) -> None:
        self.differentiated: set[Node] = set()
        self._collectives: list[tuple[Node, Node]] = []
        self._lines: list[tuple[Node, Node, str, str, list[tuple[Node, Node]]]] = []

    def note(self, made: Node, like: Node) -> None:
        """A collective was inserted for the global value ``like``."""
        self._collectives.append((made, like))

    def mark(self) -> int:
        return len(self._collectives)

    def record(self, node: Node, made: Node, decisions: Mapping[str, Decision], since: int) -> None:
        """``node`` has become ``made``; where a decision was to run it whole, the collectives inserted meanwhile are its own."""
        for axis, decision in decisions.items():
            if decision.gathered:
                inserted = [(one, like) for one, like in self._collectives[since:] if _axis(one) == axis]
                self._lines.append((node, made, axis, decision.gathered, inserted))

    def gathers(self, graph: Graph) -> list[Gather]:
        """One record for each line, op and axis, in the order of the graph; what was dropped as dead does not count."""
        alive, found = set(graph.nodes), dict[tuple[str, ...], Gather]()
        for node, made, axis, reason, inserted in self._lines:
            if made not in alive:
                continue
            one = Gather(str(node.target), meta.module_path(node), meta.source(node), axis, 0, 0, reason)
            key = (one.op, one.module, one.source, axis)
            one = found.get(key, one)
            for moved, like in inserted:
                if moved in alive:
                    one = self._add(one, moved, like)
            found[key] = one
        return list(found.values())

    def _add(self, one: Gather, moved: Node, like: Node) -> Gather:
        """Count a collective, and its adjoint where a gradient comes back."""
        source: Any = moved.args[0]
        value, result = meta.tensor(source), meta.tensor(moved)
        back = result.numel() * result.element_size()
        grads = back if like in self.differentiated and value.is_floating_point() else 0
        return replace(one, bytes=one.bytes + value.numel() * value.element_size(), grad_bytes=one.grad_bytes + grads)


def _axis(node: Node) -> str:
    return str(node.args[ops.AXIS_ARGUMENT[node.target]])  # type: ignore[index]
