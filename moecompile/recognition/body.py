"""What one expert computes, as data: a list of steps on rows ``[N, features...]`` and the weights they use.

Axes of a value are named by one letter each: E (expert), R (row), F (feature).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from moecompile import meta
from moecompile.recognition import rowwise

aten = torch.ops.aten
PRODUCT = "product"  # step target: rows times a weight [out, in], plus a bias or None


class NotRowwiseError(Exception):
    """A node is not a function of each row alone; ``why`` says so in words that follow the node's place."""

    def __init__(self, node: Node, why: str) -> None:
        super().__init__(f"{meta.where(node)} {why}")
        self.node, self.why = node, why


@dataclass(frozen=True)
class Value:
    """Result of a step; -1 is the rows that come in."""

    index: int


@dataclass(frozen=True)
class Leaf:
    """A weight: position in ``Body.leaves``."""

    index: int


@dataclass(frozen=True)
class Source:
    """Where a weight of the body comes from.

    own: the whole of ``node``.  slice: ``node[index]``.  block: rows ``index * size`` on of ``node``.  stacked:
    ``node``, whose axis ``index`` counts experts.
    """

    kind: str
    node: Node
    index: int = 0
    size: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one expert's part."""
        shape = tuple(int(size) for size in meta.tensor(self.node).shape)
        if self.kind == "own":
            return shape
        if self.kind == "block":
            return (self.size, *shape[1:])
        return shape[: self.index] + shape[self.index + 1 :] if self.kind == "stacked" else shape[1:]


@dataclass
class Step:
    """One call; ``args`` hold `Value`, `Leaf` and constants.  ``node`` is where it stood."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    node: Node
    on_rows: bool
    degree: int = 0  # how often the routing weight is a factor of the result

    def refers(self) -> list[Any]:
        found: list[Any] = []
        for item in (*self.args, *self.kwargs.values()):
            parts = item if isinstance(item, (list, tuple)) else (item,)
            found.extend(part for part in parts if isinstance(part, (Value, Leaf)))
        return found


@dataclass
class Body:
    """Steps from rows to rows.  ``entry`` and ``exit`` are the values in the graph that are the rows, with axis names.

    ``coefficients``: factors per row that the body multiplies in and that the steps leave out, with their axis names.
    """

    exit: Node
    exit_axes: str
    entry: Node
    entry_axes: str
    steps: list[Step] = field(default_factory=list)
    leaves: list[Source] = field(default_factory=list)
    coefficients: list[tuple[Node, str]] = field(default_factory=list)
    result: Any = None

    @property
    def batched(self) -> bool:
        return "E" in self.exit_axes

    def is_linear(self) -> bool:
        """Whether ``f(c * x) == c * f(x)`` for the whole body."""
        degrees: dict[Any, int] = {-1: 1}
        try:
            for index, step in enumerate(self.steps):
                degrees[index] = degree_of(step, lambda ref: degrees[ref.index]) if step.on_rows else 0
        except NotRowwiseError:
            return False
        return isinstance(self.result, Value) and degrees[self.result.index] == 1

    def keeps_zero(self) -> bool:
        """Whether rows of zeros give zeros whatever the weights are; such rows then give no weight a gradient either."""
        zero = {-1}
        for index, step in enumerate(self.steps):
            if step.on_rows and _gives_zero(step, zero):
                zero.add(index)
        return isinstance(self.result, Value) and self.result.index in zero


@dataclass(frozen=True)
class Setting:
    """What the tracer knows about the region: weight-side values, those that all experts read, where rows come in."""

    static: frozenset[Node]
    shared: frozenset[Node]
    stops: frozenset[Node]
    num_experts: int
    is_coefficient: Callable[[Node], bool]
    constant: Callable[[Node], torch.Tensor | None]
    one: Callable[[Node], Node]  # stands for all equal weight-side values


def degree_of(step: Step, degree: Callable[[Value], int]) -> int:
    """How often a factor of the operands is one of the result; only what is linear in it lets it pass."""
    degrees = [degree(ref) for ref in step.refers() if isinstance(ref, Value)]
    if not any(degrees):
        return 0
    target, args = step.target, step.args
    if target is aten.mul.Tensor and sum(degrees) == 1:
        return 1
    if (
        target in (aten.div.Tensor, aten.true_divide.Tensor)
        and sum(degrees) == 1
        and isinstance(args[0], Value)
        and degree(args[0])
    ):
        return 1
    if (
        target in (aten.add.Tensor, aten.sub.Tensor)
        and all(degrees)
        and all(isinstance(arg, Value) for arg in args[:2])
    ):
        return 1
    if target is aten.cat.default and all(degrees):
        return 1
    if target in _LINEAR_STEPS or (target is PRODUCT and args[2] is None):
        return 1
    raise NotRowwiseError(
        step.node, f"({target}) applies a nonlinear function to rows already scaled by the routing weight"
    )


def _gives_zero(step: Step, zero: set[int]) -> bool:
    """Whether a step gives zeros where the values in ``zero`` are zeros."""
    target, args = step.target, step.args
    if target is aten.cat.default:
        return all(isinstance(item, Value) and item.index in zero for item in args[0])
    known = [isinstance(item, Value) and item.index in zero for item in args]
    if target is aten.mul.Tensor:
        return any(known[:2])
    if target in (aten.add.Tensor, aten.sub.Tensor):
        return all(known[:2])
    if not known[0] or any(isinstance(ref, Leaf) for ref in step.refers() if target is not PRODUCT):
        return False
    if target in _LINEAR_STEPS or target is aten.glu.default or (target is PRODUCT and args[2] is None):
        return True
    if not rowwise.is_pointwise(target) or len(step.refers()) > 1:
        return False
    return not bool(target(torch.zeros(1), *args[1:], **step.kwargs).any())


_LINEAR_STEPS = frozenset(
    {
        aten.clone.default,
        aten.contiguous.default,
        aten.detach.default,
        aten.alias.default,
        aten.to.dtype,
        aten.to.dtype_layout,
        aten._to_copy.default,
        aten.dropout.default,
        aten.neg.default,
        aten.reshape.default,
        aten.expand.default,
        aten.sum.dim_IntList,
        aten.mean.dim,
        operator.getitem,
        *rowwise.PIECES,
        *rowwise.SLICES,
    }
)
