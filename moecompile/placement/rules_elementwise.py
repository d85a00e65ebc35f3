"""Elementwise ops: operands are aligned from the right; a cut operand cuts the result, a partial one passes only through linear ops."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..compat import OpOverload
from .sharder import Call, Decision, NoRule, Rule
from .types import PARTIAL, REPLICATE, Partial, Placement, Replicate, Shard

aten = torch.ops.aten

# f(sum of parts) = sum of f(parts): a partial value may pass
_ADDITIVE = {aten.add.Tensor, aten.sub.Tensor}
_SCALES_FIRST = {aten.div.Tensor, aten.div.Scalar, aten.mul.Scalar}
_LINEAR_UNARY = {
    aten.neg.default, aten.clone.default, aten.detach.default, aten.alias.default, aten.contiguous.default,
    aten.lift_fresh_copy.default, aten.lift_fresh.default,
}  # fmt: skip
_CASTS = {
    aten.to.dtype,
    aten._to_copy.default,
    aten.to.dtype_layout,
    aten.to.device,
    aten.type_as.default,
    aten.to.other,
}
_LIKE = {
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default,
}  # fmt: skip
_EXTRA = {
    *_LINEAR_UNARY, *_CASTS, aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar,
    aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.gelu.default, aten.silu.default, aten.relu.default,
    aten.sigmoid.default, aten.tanh.default, aten.softplus.default, aten.relu6.default, aten.hardtanh.default,
    aten.leaky_relu.default, aten.elu.default, aten.selu.default, aten.mish.default, aten.square.default, aten.rsub.Scalar,
    aten.rsub.Tensor, aten.float_power.Tensor_Scalar, aten.nan_to_num.default, aten.__and__.Tensor, aten.__or__.Tensor,
    aten.true_divide.Tensor, aten.clip.default, aten.hardsigmoid.default, aten.hardswish.default, aten.log_sigmoid.default,
    aten.logical_not.default, aten.logical_and.default, aten.logical_or.default, aten.floor_divide.default,
    aten.masked_fill_.Scalar, aten.isin.Tensor_Tensor, aten.lerp.Scalar, aten.addcmul.default, aten.nan_to_num.default,
}  # fmt: skip


def aligned(placed: Shard, ndim: int, out_ndim: int) -> Shard:
    """The cut seen from the broadcast result."""
    return Shard(placed.dim + out_ndim - ndim, placed.outer, placed.rows)


def unify(call: Call, operands: list[Node], out_ndim: int) -> tuple[Shard | None, dict[Node, Placement]]:
    """One cut for all operands of a broadcast; whole operands that span the cut dim are sliced."""
    cut: Shard | None = None
    for item in operands:
        placed = call.placed(item)
        if isinstance(placed, Shard):
            seen = aligned(placed, len(call.shape(item)), out_ndim)
            if cut is not None and seen != cut:
                raise NoRule(f"its operands are cut differently ({cut} and {seen}); keep the batch dim in one place.")
            cut = seen
    need: dict[Node, Placement] = {}
    if cut is None:
        return None, need
    for item in operands:
        placed = call.placed(item)
        dim = cut.dim - (out_ndim - len(call.shape(item)))
        spans = dim >= 0 and call.shape(item)[dim] != 1
        if isinstance(placed, Shard):
            continue
        if spans and cut.rows:
            raise NoRule("rows of an expert region meet a whole tensor of as many rows, whose order is another.")
        if spans:
            need[item] = Shard(dim, cut.outer)
        elif isinstance(placed, Partial):
            need[item] = REPLICATE
    return cut, need


def pointwise(call: Call) -> Decision:
    """Any elementwise op, including casts and ``where``."""
    target, operands = call.node.target, call.tensors()
    partial = [item for item in operands if isinstance(call.placed(item), Partial)]
    out = call.node.meta["val"]
    out_ndim = out.dim() if isinstance(out, torch.Tensor) else 0
    cut, need = unify(call, operands, out_ndim)
    if cut is not None:
        return Decision(cut, need)
    if not partial:
        return Decision(REPLICATE)
    if target in _LINEAR_UNARY or (target in _CASTS and _widens(call)):
        return Decision(PARTIAL)
    if target in _ADDITIVE and out.is_floating_point() and isinstance(call.args[1], Node):
        return Decision(PARTIAL, {item: PARTIAL for item in operands if isinstance(call.placed(item), Replicate)})
    if target in _SCALES_FIRST and call.args[0] in partial and call.args[1] not in partial:
        return Decision(PARTIAL)
    if target is aten.mul.Tensor and len(partial) == 1 and call.args[0] is not call.args[1]:
        return Decision(PARTIAL)
    return Decision(REPLICATE, dict.fromkeys(partial, REPLICATE))


def _widens(call: Call) -> bool:
    """A cast that keeps every bit may be taken before the sum."""
    source, out = call.args[0], call.node.meta["val"]
    found = source.meta["val"].dtype if isinstance(source, Node) else out.dtype
    return bool(torch.promote_types(found, out.dtype) == out.dtype)


def filled_like(call: Call) -> Decision:
    """``zeros_like`` and relatives: only the shape of the operand counts."""
    placed = call.placed(call.args[0])
    return Decision(REPLICATE if isinstance(placed, Partial) else placed)


def fallback(target: Any) -> Rule | None:
    """Ops that torch itself tags as elementwise need no entry in the table."""
    if isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags and not target._schema.is_mutable:
        return pointwise
    return None


RULES: dict[Any, Rule] = {**dict.fromkeys(_EXTRA, pointwise), **dict.fromkeys(_LIKE, filled_like)}
