"""Losses. A mean over cut rows is the local sum over the global count: the ranks' shares add up to the mean of one process."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from .. import meta, ops
from ..graph import arguments
from .call import Call, Decision, Emitter, Needs, NoRuleError, Rule, Walk, align, changed
from .types import PARTIAL, REPLICATE, Partial, Shard
from .vocabulary import emit_over_classes

aten = torch.ops.aten

_NONE, _MEAN, _SUM = 0, 1, 2  # reductions, as torch numbers them


def classes(call: Call) -> Decision:
    """cross_entropy_loss, nll_loss: predictions [C], [N, C] or [N, C, ...], targets without C (or, as probabilities, with it)."""
    source, target, weight = call.args[0], call.args[1], call.get("weight")
    call.whole([weight], "class weight")
    ndim = len(call.shape(source))
    class_dim = 0 if ndim == 1 else 1
    same = len(call.shape(target)) == ndim and meta.tensor(target).is_floating_point()  # targets are probabilities
    cut = _rows_cut(call, class_dim, same)
    if cut is None:
        return Decision(REPLICATE, call.reduced())
    if cut.dim == class_dim:
        return _over_classes(call, cut, same)
    after = cut.moved(cut.dim - (cut.dim > class_dim))
    needs = Needs()
    for item, wanted in ((source, cut), (target, cut if same else after)):
        if call.placed(item) != wanted:
            needs.want(item, wanted)
    if isinstance(weight, Node) and isinstance(call.placed(weight), Partial):
        needs.want(weight, REPLICATE)
    return Decision(after if call.get("reduction") == _NONE else PARTIAL, needs)


def _over_classes(call: Call, cut: Shard, same: bool) -> Decision:
    """Classes that are cut: each rank picks the targets among its own, and shares the logarithm of the sum that all have."""
    source, target, weight = call.args[0], call.args[1], call.get("weight")
    if (
        call.node.target is not aten.cross_entropy_loss.default
        or same
        or weight is not None
        or cut.outer > 1
        or cut.rows
        or cut.zigzag
    ):
        raise NoRuleError("its class dim is cut, which only a cross entropy of indices without class weights may have.")
    needs = Needs() if call.placed(target) == REPLICATE else Needs({target: REPLICATE})
    if call.placed(source) != cut:
        needs.want(source, cut)
    return Decision(PARTIAL, needs)


def _rows_cut(call: Call, class_dim: int, same: bool) -> Shard | None:
    """The cut of the rows, seen from the predictions."""
    placed, target = call.placed(call.args[0]), call.placed(call.args[1])
    cuts = {placed} if isinstance(placed, Shard) else set()
    if isinstance(target, Shard):
        cuts.add(target if same else target.moved(target.dim + (target.dim >= class_dim)))
    if len(cuts) > 1:
        raise NoRuleError("predictions and targets are cut differently; keep the batch dim in one place.")
    return cuts.pop() if cuts else None


def _emit_classes(walk: Walk, node: Node, decisions: dict[str, Decision]) -> Node | None:
    """A mean: local sum over global count. Narrow types are summed as float32, in which no sum overflows."""
    found = arguments(node)
    axes = [axis for axis, decision in decisions.items() if isinstance(decision.out, Partial)]
    source = found["self"]
    class_dim = min(1, meta.tensor(source).dim() - 1)
    for axis in axes:
        if walk.given(source, axis, decisions) == Shard(class_dim):
            return emit_over_classes(walk, node, decisions, axis, class_dim)
    if found["reduction"] == _NONE or not axes or _linear_only(walk, node, decisions):
        return None
    dtype = meta.tensor(node).dtype
    wide = torch.promote_types(dtype, torch.float32)
    if wide == dtype:
        args, kwargs = changed(node, reduction=_SUM)
        total = walk.emit(node, args, kwargs, decisions)
    else:
        args, kwargs = changed(node, reduction=_NONE)
        rows = walk.emit(node, args, kwargs, decisions)
        total = walk.call(aten.sum.default, rows, like=node, dtype=wide)
    if found["reduction"] == _MEAN:
        total = walk.call(aten.div.Tensor, total, _count(walk, node, decisions, axes, wide), like=node)
    return total if wide == dtype else walk.call(aten._to_copy.default, total, like=node, dtype=dtype)


def _linear_only(walk: Walk, node: Node, decisions: dict[str, Decision]) -> bool:
    """Nothing is cut: the call stays as it is."""
    return not any(
        isinstance(walk.given(item, axis, decisions), Shard) for axis in decisions for item in node.all_input_nodes
    )


def _count(walk: Walk, node: Node, decisions: dict[str, Decision], axes: list[str], dtype: torch.dtype) -> Any:
    """How many rows (or how much class weight) the mean divides by: a global number."""
    found = arguments(node)
    target, weight = found["target"], found["weight"]
    local = walk.operand(target, decisions)
    if meta.tensor(target).is_floating_point():  # probabilities, of which none are left out
        one = walk.call(aten.select.int, local, min(1, meta.tensor(target).dim() - 1), 0, like=node)
        rows = walk.call(aten.ones_like.default, one, like=node, dtype=torch.int64)
        share = walk.call(aten.sum.default, rows, like=node)
    elif isinstance(weight, Node):
        mask = walk.call(aten.ne.Scalar, local, found["ignore_index"], like=node)
        safe = walk.call(aten.mul.Tensor, local, mask, like=node)
        picked = walk.call(aten.index.Tensor, walk.operand(weight, decisions), [safe], like=node)
        share = walk.call(aten.sum.default, walk.call(aten.mul.Tensor, picked, mask, like=node), like=node, dtype=dtype)
    else:
        mask = walk.call(aten.ne.Scalar, local, found["ignore_index"], like=node)
        share = walk.call(aten.sum.default, mask, like=node)
    for axis in axes:
        share = walk.call(ops.all_reduce, share, "sum", axis, like=node)
    return walk.call(aten._to_copy.default, share, like=node, dtype=dtype)


def elements(call: Call) -> Decision:
    """mse_loss, l1_loss and the like: elementwise in all operands, then reduced."""
    shapes = [call.shape(item) for item in call.tensors()]
    cut, needs = align(call, call.tensors(), max(map(len, shapes)))
    if cut is None:
        return Decision(REPLICATE, call.reduced())
    if cut.rows and call.get("reduction") == _MEAN:
        raise NoRuleError(
            "a mean over the rows of an expert region would weigh ranks by their rows; use reduction='sum'."
        )
    return Decision(cut if call.get("reduction") == _NONE else PARTIAL, needs)


def _emit_elements(walk: Walk, node: Node, decisions: dict[str, Decision]) -> Node | None:
    """A mean: this rank's mean of its equal part, divided by the number of parts."""
    parts = 1
    for axis, decision in decisions.items():
        parts *= walk.axes[axis] if isinstance(decision.out, Partial) else 1
    if parts == 1 or arguments(node)["reduction"] != _MEAN:
        return None
    return walk.call(aten.div.Tensor, walk.emit(node, node.args, node.kwargs, decisions), parts, like=node)


_CLASSES = [aten.cross_entropy_loss.default, aten.nll_loss.default, aten.nll_loss_nd.default, aten.nll_loss2d.default]
_ELEMENTS = [
    aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default, aten.kl_div.default,
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default, aten.soft_margin_loss.default,
]  # fmt: skip

RULES: dict[Any, Rule] = {**dict.fromkeys(_CLASSES, classes), **dict.fromkeys(_ELEMENTS, elements)}
EMITTERS: dict[Any, Emitter] = {
    **dict.fromkeys(_CLASSES, _emit_classes),
    **dict.fromkeys(_ELEMENTS, _emit_elements),
}
