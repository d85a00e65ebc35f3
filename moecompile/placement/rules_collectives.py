"""moe:: collectives over one axis, seen from another: they act on every rank's part as they act on the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .. import ops
from .call import Call, Decision, NoRuleError, Rule
from .types import REPLICATE, Partial, Shard


def all_reduce(call: Call) -> Decision:
    """Element by element: a cut stays, and sums over two axes can be taken in any order."""
    source, kind = call.args[0], call.args[1]
    placed = call.placed(source)
    if isinstance(placed, Partial) and kind != "sum":
        return Decision(REPLICATE, call.reduced())
    return Decision(placed)


def all_gather(call: Call) -> Decision:
    """The parts of the other axis come one behind the other along dim 0, each cut as before."""
    placed = call.placed(call.args[0])
    if isinstance(placed, Shard) and placed.dim == 0:
        return Decision(replace(placed, outer=placed.outer * call.args[1]))
    return Decision(placed)


def reduce_scatter(call: Call) -> Decision:
    """Along dim 0 the other axis takes whole blocks, or the two cuts cross."""
    placed = call.placed(call.args[0])
    if isinstance(placed, Shard) and placed.dim == 0:
        if placed.outer % call.args[1]:
            raise NoRuleError("it cuts a dim across the parts in which this axis holds it.")
        return Decision(replace(placed, outer=placed.outer // call.args[1]))
    return Decision(placed)


def all_to_all(call: Call) -> Decision:
    """From one dim to another on the other axis; a cut of a third stays."""
    placed = call.placed(call.args[0])
    if isinstance(placed, Shard) and placed.dim in (call.get("split_dim"), call.get("concat_dim")):
        raise NoRuleError("it turns a dim that this axis has cut already.")
    return Decision(placed)


def zigzag_exchange(call: Call) -> Decision:
    """Another order along a dim, on the other axis; of a dim that this axis cuts, too, all of it is needed."""
    source = call.args[0]
    placed = call.placed(source)
    if isinstance(placed, Shard) and placed.dim == call.get("dim"):
        return Decision(REPLICATE, {source: REPLICATE})
    return Decision(placed)


def local_slice(call: Call) -> Decision:
    """A part along one dim, of a value that is cut along another."""
    placed, dim = call.placed(call.args[0]), call.get("dim")
    call.placed(call.args[1])
    if isinstance(placed, Shard) and placed.dim == dim:
        raise NoRuleError("it cuts a dim that this axis has cut already.")
    return Decision(placed)


RULES: dict[Any, Rule] = {
    ops.all_reduce: all_reduce,
    ops.all_gather: all_gather,
    ops.reduce_scatter: reduce_scatter,
    ops.all_to_all: all_to_all,
    ops.zigzag_exchange: zigzag_exchange,
    ops.local_slice: local_slice,
    ops.zigzag_slice: local_slice,
}
