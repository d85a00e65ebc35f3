"""Elementwise ops: operands are aligned from the right; a cut operand cuts the result, a partial one passes only through linear ops."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from .. import meta
from ..compat import OpOverload
from .call import Call, Decision, Needs, NoRuleError, Rule, align
from .types import PARTIAL, REPLICATE, Partial, Placement, Replicate, Shard

aten = torch.ops.aten

# f(sum of parts) = sum of f(parts): a partial value may pass
_ADDITIVE = {aten.add.Tensor, aten.sub.Tensor}
_SCALES_FIRST = {aten.div.Tensor, aten.true_divide.Tensor, aten.div.Scalar, aten.mul.Scalar}
_LINEAR_UNARY = {
    aten.neg.default, aten.positive.default, aten.clone.default, aten.detach.default, aten.alias.default, aten.contiguous.default,
    aten.lift_fresh_copy.default, aten.lift_fresh.default, aten.real.default, aten.imag.default, aten.conj.default,
    aten._conj.default, aten.resolve_conj.default, aten.resolve_neg.default,
}  # fmt: skip
_CASTS = [
    aten.to.dtype, aten._to_copy.default, aten.to.dtype_layout, aten.to.device, aten.type_as.default, aten.to.other,
    aten._autocast_to_reduced_precision.default, aten._autocast_to_full_precision.default,
]  # fmt: skip
_LIKE = [
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default, aten.fill.Scalar,
]  # fmt: skip
# elementwise ops that torch does not tag as such
_EXTRA = {
    *_LINEAR_UNARY, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar, aten.masked_fill.Tensor, aten.rsub.Tensor,
    aten.__and__.Tensor, aten.__or__.Tensor, aten.__and__.Scalar, aten.__or__.Scalar, aten.hardswish.default, aten.square.default,
    aten.log_sigmoid.default, aten.floor_divide.default, aten.floor_divide.Scalar, aten.isreal.default, aten.bitwise_not.default,
    aten.special_expit.default, aten.special_log1p.default, aten.special_expm1.default, aten.absolute.default, aten.negative.default,
    aten.divide.Tensor, aten.multiply.Tensor, aten.subtract.Tensor, aten.greater.Tensor, aten.less.Tensor, aten.not_equal.Tensor,
    aten.greater_equal.Tensor, aten.less_equal.Tensor, aten.complex.default, aten.copy.default, aten.polar.default,
}  # fmt: skip
_NOT_ELEMENTWISE = {aten.equal.default, aten.frexp.Tensor, aten.rrelu.default}


def pointwise(call: Call) -> Decision:
    """Any elementwise op, ``where`` and ``masked_fill`` included."""
    target, operands = call.node.target, call.tensors()
    cut, needs = align(call, operands, len(call.out_shape))
    if cut is not None:
        return Decision(cut, needs)
    partial = call.partial()
    if target in _LINEAR_UNARY:
        return Decision(PARTIAL)
    if target in _ADDITIVE and _adds_up(call, partial):
        shares = [item for item in operands if isinstance(call.placed(item), Replicate)]
        return Decision(PARTIAL, dict.fromkeys(shares, PARTIAL))
    if target in _SCALES_FIRST and call.args[0] in partial and call.args[1] not in partial:
        return Decision(PARTIAL)
    if target is aten.mul.Tensor and len(partial) == 1 and call.args[0] is not call.args[1]:
        return Decision(PARTIAL)
    return Decision(REPLICATE, dict.fromkeys(partial, REPLICATE))


def _adds_up(call: Call, partial: list[Node]) -> bool:
    """Whether each term is a tensor whose parts may be added in the type of the result."""
    terms, out = call.args[:2], meta.tensor(call.node)
    if not all(isinstance(term, Node) and meta.is_tensor(term) for term in terms):
        return False  # a number would be added once per rank
    return out.is_floating_point() and all(meta.tensor(term).dtype == out.dtype for term in terms)


def cast(call: Call) -> Decision:
    """Only the first operand counts; another one names the type."""
    source = call.args[0]
    for item in call.tensors():
        call.placed(item)
    placed = call.placed(source)
    if isinstance(placed, Partial) and not keeps_sum(meta.tensor(source).dtype, meta.tensor(call.node).dtype):
        return Decision(REPLICATE, {source: REPLICATE})
    return Decision(placed)


def keeps_sum(source: torch.dtype, out: torch.dtype) -> bool:
    """Whether a cast may be taken before the sum: it keeps every bit of a float. Integers are summed as integers."""
    return source == out or (source.is_floating_point and torch.promote_types(source, out) == out)


def filled_like(call: Call) -> Decision:
    """``zeros_like`` and relatives: only the shape of the operand counts."""
    placed = call.placed(call.args[0])
    return Decision(REPLICATE if isinstance(placed, Partial) else placed)


def first_operand(call: Call) -> Decision:
    """isin, bucketize: elementwise in one operand, all of the others are looked at for each element."""
    schema = call.node.target._schema  # type: ignore[union-attr]
    source = call.get("elements" if schema.arguments[0].name == "elements" else "self")
    others = [item for item in call.tensors() if item is not source]
    call.whole(others, "second operand")
    if source in others or not isinstance(source, Node):
        return Decision(REPLICATE, call.reduced())
    placed = call.placed(source)
    return Decision(placed if isinstance(placed, Shard) else REPLICATE, call.reduced())


def prelu(call: Call) -> Decision:
    """One weight per channel, which is dim 1."""
    source, weight = call.args[:2]
    call.whole([weight], "weight")
    placed = call.placed(source)
    if isinstance(placed, Shard) and placed.dim == 1 and call.shape(weight) != (1,):
        raise NoRuleError("its channel dim carries the batch; keep the batch dim first.")
    return Decision(placed if isinstance(placed, Shard) else REPLICATE, call.reduced())


def complex_view(call: Call) -> Decision:
    """view_as_complex and view_as_real: the last dim of two appears or goes."""
    source = call.args[0]
    placed: Placement = call.placed(source)
    if isinstance(placed, Shard) and placed.dim >= len(call.out_shape):
        raise NoRuleError("real and imaginary part are on different ranks; keep the batch dim first.")
    return Decision(placed, Needs())


def fallback(target: Any) -> Rule | None:
    """Ops that torch itself tags as elementwise need no entry in the table."""
    if isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags and target not in _NOT_ELEMENTWISE:
        return pointwise
    return None


RULES: dict[Any, Rule] = {
    **dict.fromkeys(_EXTRA, pointwise),
    **dict.fromkeys(_CASTS, cast),
    **dict.fromkeys(_LIKE, filled_like),
    **dict.fromkeys([aten.isin.Tensor_Tensor, aten.bucketize.Tensor], first_operand),
    aten.prelu.default: prelu,
    **dict.fromkeys([aten.view_as_complex.default, aten.view_as_real.default], complex_view),
}

# these read nothing but the shape of their operand, or the type of their second one
ABSORBS = frozenset([*_LIKE, aten.type_as.default, aten.to.other])
