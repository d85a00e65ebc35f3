"""What the experts' results are added to: `Base`."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from moecompile import meta
from moecompile.recognition import rowwise
from moecompile.recognition.choices import dependents

aten = torch.ops.aten


class MismatchError(Exception):
    """The region is something else than a weighted sum of experts; the text says what was found."""


class Base:
    """What a result is when every expert returns zero: a value of the graph, or None for zero.

    ``lone``: values that only options without an expert give; they count as zero, and so does what they overwrite.
    """

    def __init__(self, exits: set[Node], lone: frozenset[Node] = frozenset()) -> None:
        self.exits = exits
        self.lone = lone
        self._affected = dependents(exits) | exits
        self._known: dict[Node, Node | None] = {}

    def of(self, node: Node) -> Node | None:
        """None for zero; a MismatchError where it is neither zero nor a value that the graph holds."""
        todo = [node]
        while todo:
            here = todo[-1]
            if here in self._known:
                todo.pop()
                continue
            waiting = [item for item in self._looks_at(here) if item not in self._known]
            if waiting:
                todo += waiting
            else:
                self._known[here] = self._reduce(here)
                todo.pop()
        return self._known[node]

    def _looks_at(self, node: Node) -> list[Node]:
        if node in self.exits or node not in self._affected:
            return []
        return [item for item in rowwise.tensor_inputs(node) if item in self._affected]

    def _value(self, item: object) -> Node | None:
        """None for zero."""
        if not isinstance(item, Node):
            if isinstance(item, (int, float)) and item == 0:
                return None
            raise MismatchError("the experts' sum is shifted by a number")
        if item in self._known:
            return self._known[item]
        return None if self._counts_zero(item) else item

    def _counts_zero(self, node: Node) -> bool:
        return _is_zero(node) or (node in self.lone and node not in self._affected and _is_floating(node))

    def _reduce(self, node: Node) -> Node | None:
        if node in self.exits:
            return None
        if node not in self._affected or _is_zero(node):  # zeros may take their shape from the experts' results
            return None if self._counts_zero(node) else node
        target, args = node.target, node.args
        if target in (aten.index_add.default, aten.scatter_add.default) and self._value(args[3]) is None:
            return self._value(args[0])
        if target is aten.scatter_reduce.two and _adds(node) and self._value(args[3]) is None:
            return self._value(args[0])
        if target is aten.where.self and args[0] in self.lone:
            served = [item for item in args[1:3] if isinstance(item, Node) and item in self._affected]
            if len(served) == 1:
                return self._value(served[0])
        if target in (aten.index_put.default, aten._unsafe_index_put.default):
            return self._reduce_put(node)
        if target in (aten.add.Tensor, aten.sub.Tensor):
            parts = [self._value(item) for item in args[:2]]
            if parts[1] is None or (parts[0] is None and target is aten.add.Tensor):
                return parts[0] if parts[1] is None else parts[1]
        if target in _ZERO_IF_ONE_IS and any(self._value(item) is None for item in rowwise.tensor_inputs(node)):
            return None
        floating = [item for item in rowwise.tensor_inputs(node) if _is_floating(item)]
        if target in _KEEPS_ZERO and all(self._value(item) is None for item in floating):
            return None
        if target is aten.index.Tensor:
            return node  # part of a base that is no zero: what `_reduce_put` looks for
        raise MismatchError(f"{meta.where(node)} does more with the experts' results than to add them up")

    def _reduce_put(self, node: Node) -> Node | None:
        """``y[m] = y[m] + ...`` leaves y as it was, and so does putting zeros where there are zeros."""
        into, where, values = node.args[:3]
        base = self._value(into)
        accumulate = len(node.args) > 3 and bool(node.args[3])
        put = self._value(values)
        if put is None and (base is None or accumulate):
            return base
        if put is None and self.lone:
            return None
        same = put is not None and put.target is aten.index.Tensor and list(put.args[1]) == list(where)  # type: ignore[arg-type]
        if same and put is not None and self._value(put.args[0]) is base and not accumulate:
            return base
        raise MismatchError(f"{meta.where(node)} overwrites a value with the experts' results")


# Zero operands give a zero result.
_KEEPS_ZERO = (
    rowwise.RESHAPES
    | rowwise.AXES
    | rowwise.PIECES
    | rowwise.SLICES
    | {
        operator.getitem,
        aten.mul.Tensor,
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.div.Tensor,
        aten.neg.default,
        aten.clone.default,
        aten.alias.default,
        aten.contiguous.default,
        aten.detach.default,
        aten.to.dtype,
        aten.to.dtype_layout,
        aten._to_copy.default,
        aten.type_as.default,
        aten.where.self,
        aten.masked_fill.Scalar,
        aten.nan_to_num.default,
        aten.cat.default,
        aten.stack.default,
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.index.Tensor,
        aten.index_select.default,
        aten.gather.default,
        aten.scatter.src,
        aten.scatter_add.default,
        aten.index_copy.default,
        aten.select_scatter.default,
        aten.slice_scatter.default,
        aten.flip.default,
    }
)
_ZERO_IF_ONE_IS = frozenset(
    {aten.mul.Tensor, aten.einsum.default, aten.bmm.default, aten.matmul.default, aten.mm.default}
)
_ZEROS = frozenset(
    {
        aten.zeros.default,
        aten.zeros_like.default,
        aten.new_zeros.default,
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.new_empty.default,
    }
)


def _is_floating(node: Node) -> bool:
    found = node.meta.get("val")
    first = found[0] if isinstance(found, (tuple, list)) and found else found
    return isinstance(first, torch.Tensor) and first.is_floating_point()


def _adds(node: Node) -> bool:
    """Whether a scatter_reduce adds to what it finds."""
    return node.args[4] == "sum" and bool(node.kwargs.get("include_self", True))


def _is_zero(node: Node) -> bool:
    if node.target in _ZEROS:
        return True
    if node.target in (aten.full.default, aten.full_like.default, aten.new_full.default):
        fill = node.args[1] if node.target is not aten.new_full.default else node.args[2]
        return isinstance(fill, (int, float)) and fill == 0
    return node.target in rowwise.RESHAPES | rowwise.AXES and isinstance(node.args[0], Node) and _is_zero(node.args[0])
