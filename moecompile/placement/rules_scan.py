"""Cumulative sums along the batch: each rank's own, plus the totals of all that stands before it in the global order."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from .. import meta, ops
from ..graph import arguments
from .call import Call, Decision, Emitter, NoRuleError, Rule, Walk
from .rules_reduce import along, reduced_dims
from .types import Shard

aten = torch.ops.aten


def cumsum(call: Call) -> Decision:
    """Along the cut dim too; the emitter adds what other ranks hold before."""
    source = call.args[0]
    placed = call.placed(source)
    if (
        not isinstance(placed, Shard)
        or placed.rows
        or placed.dim not in reduced_dims(len(call.shape(source)), call.get("dim"))
    ):
        return along(call)
    if placed.zigzag:
        raise NoRuleError(
            "it adds up along the sequence, of which order=zigzag gives a rank two pieces; take the sums of what every rank holds whole."
        )
    return Decision(placed)


def _emit_cumsum(walk: Walk, node: Node, decisions: dict[str, Decision]) -> Node | None:
    """Seen as ``[outer, ranks, inner]`` the dim is in the order of its blocks ``(outer, rank)``.

    The total of each block goes to all ranks; the sum of the blocks before one's own is added to the local sums. Where the ranks stand
    there is a dim of size 1 of their own, so that the totals are parts along it and not terms of a sum.
    """
    source = node.args[0]
    assert isinstance(source, Node)
    found = arguments(node)
    dim = int(found["dim"]) % len(Call.shape(source))
    cut = [(axis, item.out) for axis, item in decisions.items() if isinstance(item.out, Shard) and item.out.dim == dim]
    if not cut:
        return None
    assert len(cut) == 1, "one axis is placed at a time"
    (axis, placed), made = cut[0], walk.operand(source, decisions)
    ranks = walk.axes[axis]

    def call(target: Any, *args: Any, **kwargs: Any) -> Node:
        return walk.call(target, *args, like=node, **kwargs)

    wanted = meta.tensor(node).dtype
    before, size, behind = (
        meta.tensor(made).shape[:dim],
        meta.tensor(made).shape[dim],
        meta.tensor(made).shape[dim + 1 :],
    )
    made = call(aten._to_copy.default, made, dtype=wanted) if meta.tensor(made).dtype != wanted else made
    outer, lead = placed.outer, len(before)
    blocks = call(aten.reshape.default, made, [*before, outer, 1, size // outer, *behind])
    own = call(aten.cumsum.default, blocks, lead + 2, dtype=wanted)
    totals = call(
        aten.reshape.default,
        call(aten.sum.dim_IntList, blocks, [lead + 2], dtype=wanted),
        [1, *before, outer, *behind],
    )
    gathered = call(ops.all_gather, totals, ranks, axis)  # [ranks, ..., outer, ...]
    ordered = call(aten.movedim.int, gathered, 0, lead + 1)  # [..., outer, ranks, ...]
    flat = call(aten.reshape.default, ordered, [*before, outer * ranks, *behind])
    earlier = call(aten.sub.Tensor, call(aten.cumsum.default, flat, lead, dtype=wanted), flat)
    apart = call(aten.reshape.default, earlier, [*before, outer, ranks, 1, *behind])
    here = call(aten.reshape.default, walk.offset(axis), [1])
    mine = call(aten.index_select.default, apart, lead + 1, here)  # [..., outer, 1, 1, ...]
    return call(aten.reshape.default, call(aten.add.Tensor, own, mine), [*before, size, *behind])


RULES: dict[Any, Rule] = {aten.cumsum.default: cumsum}
EMITTERS: dict[Any, Emitter] = {aten.cumsum.default: _emit_cumsum}
ABSORBS: frozenset[Any] = frozenset()
