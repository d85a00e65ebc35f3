"""Composite network ops: norms, convolution, pooling, attention, dropout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from .. import meta, ops
from ..graph import arguments
from .call import Call, Decision, Emitter, Needs, NoRuleError, Rule, Walk, align, follow
from .types import REPLICATE, Partial, Placement, Shard

aten = torch.ops.aten


def _follow_first(call: Call) -> Decision:
    """The result goes with the first operand; the others are weights, the same for all ranks."""
    source = call.args[0]
    others = [item for item in call.tensors() if item is not source]
    call.whole(others, "weight")
    placed = call.placed(source)
    return call.decide(placed if isinstance(placed, Shard) else REPLICATE, call.reduced())


def norm(call: Call) -> Decision:
    """layer_norm, rms_norm: the normalised dims are whole."""
    source, dims = call.args[0], call.args[1]
    placed = call.placed(source)
    if isinstance(placed, Shard) and placed.dim >= len(call.shape(source)) - len(dims):
        raise NoRuleError("it normalises over the batch dim, which is spread over ranks.")
    return _follow_first(call)


def channels(call: Call) -> Decision:
    """group_norm, convolutions, pooling: the batch is dim 0 and nothing mixes along it."""
    placed = call.placed(call.args[0])
    if isinstance(placed, Shard) and placed.dim != 0:
        raise NoRuleError("only its batch dim may be spread over ranks.")
    return _follow_first(call)


def convolution(call: Call) -> Decision:
    """As ``channels``; an input without batch dim has its channels first."""
    source, weight = call.args[0], call.args[1]
    if isinstance(call.placed(source), Shard) and len(call.shape(source)) != len(call.shape(weight)):
        raise NoRuleError("its input has no batch dim, so its channels would be spread over ranks.")
    return channels(call)


def pooling(call: Call) -> Decision:
    """As ``channels``; the number of pooled dims tells whether there is a batch dim."""
    source = call.args[0]
    spatial = int(call.node.target._schema.name[-2])  # type: ignore[union-attr]  # avg_pool1d, max_pool2d
    if isinstance(call.placed(source), Shard) and len(call.shape(source)) != spatial + 2:
        raise NoRuleError("its input has no batch dim, so its channels would be spread over ranks.")
    return channels(call)


def attention(call: Call) -> Decision:
    """scaled_dot_product_attention: q, k, v and mask share the batch dims in front.

    Queries that are cut along the sequence read all keys and values, with their rows of the mask.
    """
    ndim = len(call.out_shape)
    operands = call.tensors()
    if is_along(call.placed(call.args[0]), ndim - 2):
        return _own_queries(call, ndim)
    if _has_few_keys(call, ndim):
        return _own_heads(call, ndim)
    cut, needs = align(call, operands, ndim)
    if cut is None:
        return Decision(REPLICATE, call.reduced())
    if cut.dim >= ndim - 2:
        raise NoRuleError("only its batch dim and its heads may be spread over ranks here.")
    if cut.dim == ndim - 3 and call.get("enable_gqa") and any(call.placed(item) != cut for item in call.args[:3]):
        raise NoRuleError("the heads of its keys and values must be spread over ranks as those of its queries.")
    return Decision(cut, needs)


def _has_few_keys(call: Call, ndim: int) -> bool:
    """Whether the heads of the queries are cut and those of keys and values, of which there are fewer, are whole."""
    if not call.get("enable_gqa") or call.placed(call.args[0]) != Shard(ndim - 3):
        return False
    return not any(isinstance(call.placed(item), Shard) for item in call.args[1:3])


def _own_heads(call: Call, ndim: int) -> Decision:
    """The emitter picks the keys and values that this rank's heads read."""
    queries, keys, values = call.args[:3]
    mask = call.get("attn_mask")
    needs = call.reduced([keys, values])
    if queries in needs:
        raise NoRuleError("its queries are its keys, and are needed both cut and whole; clone them.")
    if isinstance(mask, Node):
        follow(call, needs, mask, Shard(ndim - 3), len(call.shape(mask)) - 3)
    return Decision(Shard(ndim - 3), needs)


def _own_queries(call: Call, ndim: int) -> Decision:
    queries, keys, values = call.args[:3]
    mask, cut = call.get("attn_mask"), call.placed(queries)
    assert isinstance(cut, Shard)
    needs = Needs({keys: REPLICATE, values: REPLICATE})
    if isinstance(mask, Node):
        needs.update(call.reduced([mask]))
        placed, rows = call.placed(mask), len(call.shape(mask)) - 2
        if call.shape(mask)[rows] != 1:
            needs[mask] = replace(cut, dim=rows)
        elif isinstance(placed, Shard):
            needs[mask] = REPLICATE
    if queries in needs:
        raise NoRuleError("its queries are its keys, and are needed both cut and whole; clone them.")
    return Decision(cut, needs)


def is_along(placed: object, dim: int) -> bool:
    """Whether all of a dim is cut once, in the order of its elements or in zigzag."""
    return placed in (Shard(dim), Shard(dim, zigzag=True))


def _emit_attention(walk: Walk, node: Node, decisions: dict[str, Decision]) -> Node | None:
    """What a rank needs of its own: a causal mask that begins in the middle of the sequence, or the keys of its heads."""
    dim = meta.tensor(node).dim() - 2
    for axis, found in decisions.items():
        keys = node.args[1]
        assert isinstance(keys, Node)
        few = arguments(node)["enable_gqa"] and not isinstance(walk.given(keys, axis, decisions), Shard)
        if few and found.out == Shard(dim - 1):
            return _emit_own_heads(walk, node, decisions, axis)
    along = next((axis for axis, found in decisions.items() if is_along(found.out, dim)), None)
    given = arguments(node)
    if along is None or not given["is_causal"]:
        return None
    query, key, value = (walk.operand(given[name], decisions) for name in ("query", "key", "value"))
    length, device = meta.tensor(query).shape[dim], meta.tensor(query).device
    if decisions[along].out == Shard(dim):
        own = walk.call(aten.arange.default, length, like=node, device=device)
        rows = walk.call(aten.add.Tensor, own, walk.offset(along, length), like=node)
    else:
        everything = walk.call(aten.arange.default, length * walk.axes[along], like=node, device=device)
        rows = walk.call(ops.zigzag_slice, everything, walk.offset(along), 0, 1, walk.axes[along], like=node)
    columns = walk.call(aten.arange.default, meta.tensor(key).shape[dim], like=node, device=device)
    mask = walk.call(aten.ge.Tensor, walk.call(aten.unsqueeze.default, rows, 1, like=node), columns, like=node)
    options = {name: given[name] for name in ("scale", "enable_gqa")}
    return walk.call(node.target, query, key, value, mask, 0.0, False, like=node, **options)


def _emit_own_heads(walk: Walk, node: Node, decisions: dict[str, Decision], axis: str) -> Node:
    """Query head h of all H reads the keys and values of head h * K // H; those of this rank's heads are picked."""
    given = arguments(node)
    query, key, value = (walk.operand(given[name], decisions) for name in ("query", "key", "value"))
    dim = meta.tensor(query).dim() - 3
    heads, keys = meta.tensor(query).shape[dim], meta.tensor(key).shape[dim]
    group = heads * walk.axes[axis] // keys  # query heads that read one head of keys
    own = walk.call(aten.arange.default, heads, like=node, device=meta.tensor(query).device)
    if group % heads == 0:  # all of this rank's heads read the same
        own = walk.call(aten.zeros.default, [1], like=node, dtype=torch.int64, device=meta.tensor(query).device)
    heads_of = walk.call(aten.add.Tensor, own, walk.offset(axis, heads), like=node)
    picked = walk.call(aten.floor_divide.default, heads_of, group, like=node)
    key, value = (walk.call(aten.index_select.default, item, dim, picked, like=node) for item in (key, value))
    mask = given["attn_mask"]
    mask = walk.operand(mask, decisions) if isinstance(mask, Node) else mask
    options = {name: given[name] for name in ("scale", "enable_gqa")}
    return walk.call(node.target, query, key, value, mask, given["dropout_p"], given["is_causal"], like=node, **options)


def dropout(call: Call) -> Decision:
    """Reached only where it draws nothing: then it is the identity."""
    placed: Placement = call.placed(call.args[0])
    if isinstance(placed, Partial):
        return Decision(REPLICATE, Needs({call.args[0]: REPLICATE}))
    return Decision(placed)


def batch_norm(call: Call) -> Decision:
    """Statistics over the batch would need all of it."""
    if call.get("training") and isinstance(call.placed(call.args[0]), Shard):
        raise NoRuleError(
            "its statistics are those of the whole batch; use layer_norm or rms_norm, or put the norm in eval mode."
        )
    return channels(call)


RULES: dict[Any, Rule] = {
    **dict.fromkeys(
        [aten.layer_norm.default, aten.rms_norm.default, aten.native_layer_norm.default, aten._fused_rms_norm.default],
        norm,
    ),
    **dict.fromkeys(
        [
            aten.conv1d.default, aten.conv1d.padding, aten.conv2d.default, aten.conv2d.padding, aten.convolution.default,
            aten._convolution.default,
        ],
        convolution,
    ),
    aten.group_norm.default: channels,
    aten.batch_norm.default: batch_norm,
    **dict.fromkeys([aten.avg_pool1d.default, aten.max_pool1d.default, aten.avg_pool2d.default, aten.max_pool2d.default], pooling),
    aten.scaled_dot_product_attention.default: attention,
    aten.dropout.default: dropout,
}  # fmt: skip

EMITTERS: dict[Any, Emitter] = {aten.scaled_dot_product_attention.default: _emit_attention}
