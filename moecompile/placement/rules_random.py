"""Random numbers by global index: each rank draws its own part of the global tensor."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from .. import meta, ops
from ..graph import arguments
from .call import Call, Decision, Emitter, NoRuleError, Rule, Walk
from .types import REPLICATE, Shard


def uniform(call: Call) -> Decision:
    """Only the shape and place of ``like`` count; indices of other axes are the same on all ranks of this one."""
    for item in call.args[2]:
        call.placed(item)
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
    for item in call.args[1]:
        call.placed(item)
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
    assert len(cut) == 1, "one axis is placed at a time"
    axis, row_map = cut[0], node.args[0]
    source: Any = row_map.args[0]  # type: ignore[union-attr]
    # none: whole tokens were shared out
    cuts = (walk.place(item, axis) for item in source.args[:2])
    tokens = next((found for found in cuts if isinstance(found, Shard)), Shard(0))
    choices = meta.tensor(row_map).shape[0] // walk.axes[axis]  # type: ignore[arg-type]
    return _with_cut(walk, node, decisions, axis, choices, tokens)


def _emit_uniform(walk: Walk, node: Node, decisions: dict[str, Decision]) -> Node | None:
    cut = [(axis, item.out) for axis, item in decisions.items() if isinstance(item.out, Shard)]
    if not cut:
        return None
    assert len(cut) == 1, "one axis is placed at a time"
    axis, placed = cut[0]
    return _with_cut(walk, node, decisions, axis, placed.dim, placed)


def _with_cut(walk: Walk, node: Node, decisions: dict[str, Decision], axis: str, what: int, cut: Shard) -> Node:
    """The call with one more cut behind those that it has: index, what is cut and how, number of ranks, whether in zigzag."""
    given = arguments(node)
    operands = [item for item in node.args if isinstance(item, Node)]
    index, ranks, zigzag = given["index"], given["ranks"], given["zigzag"]
    names = ("dim" if "dim" in given else "choices", "outer")
    lists = [[*given[name], one] for name, one in zip(names, (what, cut.outer), strict=True)]
    order = [*(zigzag or [False] * len(ranks)), cut.zigzag]
    offsets = [*(walk.env[item] for item in index if isinstance(item, Node)), walk.offset(axis)]
    made = [walk.operand(item, decisions) for item in operands]
    more = [order] if any(order) else []
    return walk.call(node.target, *made, offsets, *lists, [*ranks, walk.axes[axis]], *more, like=node)


RULES: dict[Any, Rule] = {ops.uniform: uniform, ops.global_rows: global_rows, ops.uniform_rows: uniform_rows}
EMITTERS: dict[Any, Emitter] = {ops.uniform: _emit_uniform, ops.global_rows: _emit_global_rows}

# only the shape of its operand counts
ABSORBS = frozenset({ops.uniform, ops.uniform_rows})
