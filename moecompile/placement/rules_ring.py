"""Attention round a ring: where `scaled_dot_product_attention` becomes hops over one axis, and what another axis makes of the hops."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from .. import meta, ops
from ..graph import arguments, unpack
from .call import Call, Decision, Needs, NoRuleError, Rule, Walk, align, follow
from .rules_nn import is_along
from .types import REPLICATE, Placement, Shard

aten = torch.ops.aten


def why_not(node: Node, ranks: int, trained: set[Node], zigzag: bool) -> str:
    """What keeps a call of attention from going round a ring of ``ranks``, '' where nothing does."""
    pieces = Shard(0, zigzag=zigzag).pieces(ranks)
    given = arguments(node)
    query, key, value = (meta.tensor(given[name]).shape for name in ("query", "key", "value"))
    if given["attn_mask"] in trained:
        return "its mask has a gradient"
    if len(query) < 3 or any(len(item) != len(query) or item[:-3] != query[:-3] for item in (key, value)):
        return "its queries, keys and values have no batch dims in common"
    if key[-3] != value[-3] or query[-3] % key[-3]:
        return (
            f"its {query[-3]} heads of queries are no multiple of its {key[-3]} heads of keys and {value[-3]} of values"
        )
    if key[-2] % pieces:
        return f"its {key[-2]} keys are not divided by {ranks} ranks" + (", in two pieces each" if zigzag else "")
    if given["is_causal"] and key[-2] != query[-2]:
        return f"it is causal over {query[-2]} queries and {key[-2]} keys"
    return ""


def ring(call: Call) -> Decision:
    """Queries, keys and values are all cut along the sequence, a mask along its rows."""
    ndim = len(call.out_shape)
    queries, keys, values = call.args[:3]
    mask = call.get("attn_mask")
    own = call.placed(queries)
    if not isinstance(own, Shard) or not is_along(own, ndim - 2):
        raise NoRuleError("its queries are not cut along the sequence.")
    needs = Needs()
    for item in (keys, values):
        if isinstance(call.placed(item), Shard) and call.placed(item) != own:
            raise NoRuleError("its keys and values are cut along another dim than its queries.")
        needs.want(item, own)
    if isinstance(mask, Node):
        needs.update(call.reduced([mask]))
        placed, rows = call.placed(mask), len(call.shape(mask)) - 2
        if rows >= 0 and call.shape(mask)[rows] != 1:
            needs[mask] = own.moved(rows)
        elif isinstance(placed, Shard):
            needs[mask] = REPLICATE
    return Decision(own, needs)


def emit_ring(walk: Walk, node: Node, axis: str, decisions: dict[str, Decision]) -> Node:
    """A hop for every rank of the axis: the first looks at this rank's own keys and values, which then go round."""
    placed = decisions[axis].out
    order = [True] if isinstance(placed, Shard) and placed.zigzag else []
    given, ranks = arguments(node), walk.axes[axis]
    query, key, value = (walk.operand(given[name], decisions) for name in ("query", "key", "value"))
    mask = walk.operand(given["attn_mask"], decisions) if isinstance(given["attn_mask"], Node) else None
    scale = given["scale"] if given["scale"] is not None else 1.0 / math.sqrt(meta.tensor(query).shape[-1])
    index, kv = walk.offset(axis), walk.call(aten.cat.default, [key, value], -1, like=node)
    out: list[Node] = []
    for hop in range(ranks):
        if hop:
            kv = walk.call(ops.rotate, kv, ranks, 1, axis, like=node)
        options = (index, hop, ranks, bool(given["is_causal"]), scale, *order)
        part = _both(walk.call(ops.attention_part, query, kv, mask, *options, like=node))
        out = _both(walk.call(ops.merge_attention, *out, *part, like=node)) if out else part
    made, wanted = out[0], meta.tensor(node).dtype
    return (
        made if meta.tensor(made).dtype == wanted else walk.call(aten._to_copy.default, made, like=node, dtype=wanted)
    )


def _both(made: Node) -> list[Node]:
    return unpack(made.graph, made)


# ---- the hops, seen from another axis ----------------------------------------------------------------------------------


def rotate(call: Call) -> Decision:
    """Whatever this axis cuts goes round as a part."""
    return Decision(call.placed(call.args[0]))


def attention_part(call: Call) -> Decision:
    """As attention over keys of its own: batch dims and heads may be cut."""
    query, kv, mask = call.args[:3]
    ndim = len(call.shape(query))
    call.placed(call.get("index"))
    operands = [query, kv, *([mask] if isinstance(mask, Node) else [])]
    cut, needs = align(call, operands, ndim)
    if cut is None:
        return call.decide(REPLICATE, call.reduced(operands))
    if cut.dim >= ndim - 2:
        raise NoRuleError("only its batch dim and its heads may be spread over ranks here.")
    if call.shape(query)[cut.dim] != call.shape(kv)[cut.dim] and call.placed(query) != call.placed(kv):
        raise NoRuleError("the heads of its keys and values must be spread over ranks as those of its queries.")
    return call.decide(cut, needs)


def merge_attention(call: Call) -> Decision:
    """Results and their logarithms lie alike."""
    cuts: dict[Placement, None] = {call.placed(item): None for item in call.tensors()}
    found = [placed for placed in cuts if isinstance(placed, Shard)]
    if not found:
        return call.decide(REPLICATE, call.reduced())
    needs = Needs()
    for item in call.tensors():
        follow(call, needs, item, found[0], found[0].dim)
    return call.decide(found[0], needs)


RULES: dict[Any, Rule] = {
    ops.rotate: rotate,
    ops.attention_part: attention_part,
    ops.merge_attention: merge_attention,
}
