"""Composite network ops: norms, convolution, pooling, attention, dropout."""

from __future__ import annotations

from typing import Any

import torch

from .call import Call, Decision, Needs, NoRuleError, Rule, align
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
    """scaled_dot_product_attention: q, k, v and mask share the batch dims in front."""
    ndim = len(call.out_shape)
    operands = call.tensors()
    cut, needs = align(call, operands, ndim)
    if cut is None:
        return Decision(REPLICATE, call.reduced())
    if cut.dim >= ndim - 2 or (cut.dim == ndim - 3 and cut.dim > 0 and call.get("enable_gqa")):
        raise NoRuleError("only its batch dim may be spread over ranks here.")
    return Decision(cut, needs)


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
