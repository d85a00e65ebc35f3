"""Random numbers by global index: each rank draws its own part of the global tensor."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from .. import ops
from .call import Call, Decision, Emitter, NoRuleError, Rule, Walk
from .types import REPLICATE, Shard


def uniform(call: Call) -> Decision:
    """Only the shape and place of ``like`` count."""
    placed = call.placed(call.args[0])
    if not isinstance(placed, Shard):
        return Decision(REPLICATE)
    if placed.rows:
        raise NoRuleError(
            "random numbers inside an expert would depend on the order of its rows; draw them with moe.uniform_rows."
        )
    return Decision(placed)


def global_rows(call: Call) -> Decision:
    """Rows of this rank get their places in the whole batch; the emitter says how the batch is cut."""
    placed = call.placed(call.args[0])
    if not isinstance(placed, Shard):
        return Decision(REPLICATE, call.reduced())
    if not placed.rows:
        raise NoRuleError("its row map does not come from permute.")
    return Decision(placed)


def uniform_rows(call: Call) -> Decision:
    """Numbers go with the rows they are for."""
    like, places = call.placed(call.args[0]), call.placed(call.args[2])
    if like != places:
        raise NoRuleError("its rows and their places do not come from one permute.")
    return Decision(like if isinstance(like, Shard) else REPLICATE)


def _emit_global_rows(walk: Walk, node: Node, decisions: dict[str, Decision]) -> Node | None:
    cut = [axis for axis, item in decisions.items() if isinstance(item.out, Shard)]
    if not cut:
        return None
    axis, row_map = cut[0], node.args[0]
    source: Any = row_map.args[0]  # type: ignore[union-attr]
    tokens = next(found for item in source.args[:2] if isinstance(found := walk.place(item, axis), Shard))
    ranks = walk.axes[axis]
    choices = int(node.args[2]) // ranks  # type: ignore[arg-type]
    return walk.call(node.target, walk.env[row_map], walk.offset(axis), choices, tokens.outer, ranks, like=node)  # type: ignore[index]


def _emit_uniform(walk: Walk, node: Node, decisions: dict[str, Decision]) -> Node | None:
    cut = [(axis, item.out) for axis, item in decisions.items() if isinstance(item.out, Shard)]
    if not cut:
        return None
    axis, placed = cut[0]
    like, seed = (walk.env[arg] for arg in node.args[:2] if isinstance(arg, Node))
    where = (walk.offset(axis), placed.dim, placed.outer, walk.axes[axis])
    return walk.call(node.target, like, seed, *where, like=node)


RULES: dict[Any, Rule] = {ops.uniform: uniform, ops.global_rows: global_rows, ops.uniform_rows: uniform_rows}
EMITTERS: dict[Any, Emitter] = {ops.uniform: _emit_uniform, ops.global_rows: _emit_global_rows}

# only the shape of its operand counts
ABSORBS = frozenset({ops.uniform, ops.uniform_rows})
