"""Composite network ops: embedding, norms, attention, convolution, dropout and the losses."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from .. import graph as graphs
from .. import ops
from . import sharder as sharders
from .sharder import Call, Decision, Emitter, NoRule, Rule
from .types import PARTIAL, REPLICATE, Partial, Placement, Shard

aten = torch.ops.aten


def embedding(call: Call) -> Decision:
    """The result is cut as the ids are; the table is whole."""
    table, ids = call.args[0], call.args[1]
    if isinstance(call.placed(table), Shard):
        raise NoRule("the embedding table is cut, which only tensor parallelism may do.")
    need: dict[Node, Placement] = {table: REPLICATE} if isinstance(call.placed(table), Partial) else {}
    return Decision(call.placed(ids), need)


def norm(call: Call) -> Decision:
    """layer_norm, rms_norm: the normalised dims are whole."""
    source = call.args[0]
    placed = call.placed(source)
    count = len(call.node.meta["val"]) if isinstance(call.node.meta["val"], (tuple, list)) else 0
    if isinstance(placed, Shard) and placed.dim >= len(call.shape(source)) - len(call.args[1]):
        raise NoRule("it normalises over the batch dim, which is spread over ranks.")
    out: Placement = placed if isinstance(placed, Shard) else REPLICATE
    need: dict[Node, Placement] = {item: REPLICATE for item in call.tensors() if isinstance(call.placed(item), Partial)}
    return Decision([out] * count if count else out, need)


def channels(call: Call) -> Decision:
    """group_norm, convolutions: the batch is dim 0 and nothing mixes along it."""
    placed = call.placed(call.args[0])
    if isinstance(placed, Shard) and (
        placed.dim != 0 or any(isinstance(call.placed(item), Shard) for item in call.tensors()[1:])
    ):
        raise NoRule("only its batch dim may be spread over ranks.")
    need: dict[Node, Placement] = {item: REPLICATE for item in call.tensors() if isinstance(call.placed(item), Partial)}
    return Decision(placed if isinstance(placed, Shard) else REPLICATE, need)


def attention(call: Call) -> Decision:
    """scaled_dot_product_attention: q, k, v and mask share the batch dim."""
    ndim = len(call.out_shape)
    cuts = {}
    for item in call.tensors():
        placed = call.placed(item)
        if isinstance(placed, Shard):
            cuts[item] = placed.dim + ndim - len(call.shape(item))
    dims = set(cuts.values())
    if not dims:
        return Decision(
            REPLICATE, {item: REPLICATE for item in call.tensors() if isinstance(call.placed(item), Partial)}
        )
    if len(dims) > 1 or dims.pop() >= ndim - 2:
        raise NoRule("only its batch dim may be spread over ranks here.")
    cut = call.placed(next(iter(cuts)))
    assert isinstance(cut, Shard)
    need: dict[Node, Placement] = {}
    for item in call.tensors():
        at = cut.dim - (ndim - len(call.shape(item)))
        if item in cuts:
            continue
        if at >= 0 and call.shape(item)[at] != 1:
            need[item] = Shard(at, cut.outer)
    return Decision(cut, need)


def loss(call: Call) -> Decision:
    """cross_entropy_loss, nll_loss: rows are cut; the emitter divides the local sum by the global count of valid rows."""
    source, target = call.args[0], call.args[1]
    placed = call.placed(source)
    if not isinstance(placed, Shard):
        if isinstance(call.placed(target), Shard):
            raise NoRule("the targets are cut but the predictions are whole; give both the batch dim.")
        return Decision(
            REPLICATE, {item: REPLICATE for item in call.tensors() if isinstance(call.placed(item), Partial)}
        )
    if len(call.shape(source)) > 1 and placed.dim == 1:
        raise NoRule("its class dim is cut, which only vocabulary parallelism may do.")
    wanted = Shard(placed.dim if placed.dim == 0 else placed.dim - 1, placed.outer)
    need: dict[Node, Placement] = {} if call.placed(target) == wanted else {target: wanted}
    kept = _reduction(call.node) == 0
    return Decision(wanted if kept else PARTIAL, need)


def _reduction(node: Node) -> int:
    """0 none, 1 mean, 2 sum, as torch numbers them."""
    return int(node.args[3]) if len(node.args) > 3 else int(node.kwargs.get("reduction", 1))  # type: ignore[arg-type]


def valid_count(walk: sharders.Sharder, node: Node, target: Node, decisions: dict[str, Decision]) -> Node:
    """How many rows (or how much class weight) the mean divides by: a global number, from the local targets."""
    ignored = node.args[4] if len(node.args) > 4 else node.kwargs.get("ignore_index", -100)
    weight = node.args[2] if len(node.args) > 2 else node.kwargs.get("weight")
    dtype = node.meta["val"].dtype

    def make(op: Any, *args: Any, **kwargs: Any) -> Node:
        return graphs.call(walk.graph, op, *args, like=node, mode=walk.mode, **kwargs)

    mask = make(aten.ne.Scalar, target, ignored)
    if isinstance(weight, Node):
        picked = make(aten.index.Tensor, walk.operand(weight, decisions), [make(aten.mul.Tensor, target, mask)])
        share = make(aten.sum.default, make(aten.mul.Tensor, picked, mask))
    else:
        share = make(aten.sum.default, mask)
    for axis, decision in decisions.items():
        if isinstance(decision.out, Partial):
            share = make(ops.all_reduce, share, "sum", axis)
    return make(aten._to_copy.default, share, dtype=dtype)


def _emit_loss(walk: sharders.Sharder, node: Node, decisions: dict[str, Decision]) -> Node | None:
    """A mean over cut rows: local sum over global count, whose shares add up to the mean of one process."""
    if _reduction(node) != 1 or not any(isinstance(item.out, Partial) for item in decisions.values()):
        return None
    target = node.args[1]
    assert isinstance(target, Node)
    if target.meta["val"].is_floating_point():
        raise NoRule("targets that are probabilities have no rule; use class indices.")
    args = list(node.args)
    kwargs = dict(node.kwargs)
    if len(args) > 3:
        args[3] = 2
    else:
        kwargs["reduction"] = 2
    summed = walk.emit(node, tuple(args), kwargs, decisions)
    count = valid_count(walk, node, walk.operand(target, decisions), decisions)
    return graphs.call(walk.graph, aten.div.Tensor, summed, count, like=node, mode=walk.mode)


def mean_loss(call: Call) -> Decision:
    """mse_loss, l1_loss and other elementwise losses."""
    placed = [call.placed(item) for item in call.tensors()]
    cuts = {item for item in placed if isinstance(item, Shard)}
    if len(cuts) != 1 or len(call.tensors()) != 2:
        raise NoRule("predictions and targets must be cut alike.")
    cut = cuts.pop()
    need: dict[Node, Placement] = {item: cut for item in call.tensors() if not isinstance(call.placed(item), Shard)}
    kind = call.arg(2, "reduction", 1)
    return Decision(cut if kind == 0 else PARTIAL, need)


def _emit_mean_loss(walk: sharders.Sharder, node: Node, decisions: dict[str, Decision]) -> Node | None:
    kind = node.args[2] if len(node.args) > 2 else node.kwargs.get("reduction", 1)
    if kind != 1 or not any(isinstance(item.out, Partial) for item in decisions.values()):
        return None
    summed = walk.emit(node, (node.args[0], node.args[1], 2), {}, decisions)
    total = node.args[0].meta["val"].numel()  # type: ignore[union-attr]
    return graphs.call(walk.graph, aten.div.Tensor, summed, total, like=node, mode=walk.mode)


def dropout(call: Call) -> Decision:
    """Only an inactive dropout keeps its meaning without a generator that counts globally."""
    probability, active = call.args[1], call.args[2]
    if active and probability:
        raise NoRule(
            "an active dropout must be made layout-invariant first; run the pass that seeds it by global index."
        )
    return Decision(call.placed(call.args[0]))


RULES: dict[Any, Rule] = {
    aten.embedding.default: embedding,
    **dict.fromkeys(
        [
            aten.layer_norm.default,
            aten.rms_norm.default,
            aten.native_layer_norm.default,
            aten._fused_rms_norm.default,
        ],
        norm,
    ),
    **dict.fromkeys(
        [
            aten.conv1d.default,
            aten.conv2d.default,
            aten.conv1d.padding,
            aten.convolution.default,
            aten.instance_norm.default,
        ],
        channels,
    ),
    aten.scaled_dot_product_attention.default: attention,
    aten.cross_entropy_loss.default: loss,
    aten.nll_loss.default: loss,
    aten.nll_loss_nd.default: loss,
    **dict.fromkeys([aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default], mean_loss),
    aten.dropout.default: dropout,
}
EMITTERS: dict[Any, Emitter] = {
    aten.cross_entropy_loss.default: _emit_loss,
    aten.nll_loss.default: _emit_loss,
    aten.nll_loss_nd.default: _emit_loss,
    aten.mse_loss.default: _emit_mean_loss,
    aten.l1_loss.default: _emit_mean_loss,
}
