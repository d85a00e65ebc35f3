"""Which divisions by a number of ranks are the compiler's own, and which stand in the model.

A value divided by 2 may be half of it, as the model says, or this rank's share of two. Before any pass cuts the model, every
number that it multiplies or divides by is written down with its line; afterwards what is more than that was put in, and has to be a
share.
"""

from __future__ import annotations

import enum
from collections import Counter
from typing import Any

from torch.fx import Node

from ... import meta
from ...pass_base import Fact
from ...program import Level, Program
from ..report import fault
from .table import name_of

_KEY = "moe_model_factors"
_FACTORS = ("aten.mul", "aten.multiply", "aten.div", "aten.true_divide", "aten.divide")


class Origin(enum.Enum):
    """Where a division comes from."""

    MODEL = "it stands in the model"
    ADDED = "a pass put it in"
    OPEN = "one of several on its line, of which some were put in, or nothing is known of the model"


def remember(program: Program) -> None:
    """Write the model's factors down, as long as no pass has cut it."""
    if program.level is Level.MODEL and not program.facts & {Fact.TOKENS_SHARDED, Fact.EXPERTS_SHARDED}:
        program.graph_module.meta[_KEY] = _count(program)


def factor(node: Node) -> Any:
    """The number that a node multiplies or divides a float by; None for any other node."""
    if name_of(node.target) not in _FACTORS or not meta.is_tensor(node) or not meta.tensor(node).is_floating_point():
        return None
    found = node.args[1] if len(node.args) > 1 else None
    return found if isinstance(found, (int, float)) else None


def _key(node: Node) -> tuple[str, bool, float]:
    return meta.source(node), name_of(node.target) in _FACTORS[2:], float(factor(node))


def _count(program: Program) -> Counter[tuple[str, bool, float]]:
    forward = (node for node in program.graph.nodes if meta.direction(node) is meta.Direction.FORWARD)
    return Counter(_key(node) for node in forward if node.op == "call_function" and factor(node) is not None)


class Scales:
    """The factors of one program against those of its model."""

    def __init__(self, program: Program) -> None:
        self._model: Counter[Any] | None = program.graph_module.meta.get(_KEY)
        self._cut = Fact.TOKENS_SHARDED in program.facts
        self._exact = program.level is Level.MODEL  # later, ops are taken apart into others with numbers of their own
        self._now = _count(program) if self._model is not None else Counter()

    def origin(self, node: Node) -> Origin:
        """Where a division by a whole number comes from."""
        if self._model is None or meta.direction(node) is meta.Direction.BACKWARD:
            return Origin.OPEN
        key = _key(node)
        if self._now[key] <= self._model[key]:
            return Origin.MODEL
        return Origin.ADDED if self._exact and not self._model[key] else Origin.OPEN

    def check(self, node: Node) -> None:
        """A factor that no pass has reason to put in: shares are made by dividing by a whole number."""
        if self._model is None or not self._exact or not self._cut or factor(node) is None:
            return
        if isinstance(factor(node), int) and name_of(node.target) in _FACTORS[2:]:
            return
        key = _key(node)
        if self._now[key] > self._model[key]:
            raise fault(
                node,
                f"has the factor {factor(node)}, which the model does not have in that line; leave the scale as it is",
            )
