"""Reductions and ops along one dim. Sums over the cut dim become partial; means divide by the global count, which is a constant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from .. import meta, ops
from ..graph import arguments
from .call import Call, Decision, Emitter, NoRuleError, Rule, Walk
from .rules_elementwise import keeps_sum
from .types import PARTIAL, REPLICATE, Partial, Replicate, Shard

aten = torch.ops.aten


def reduced_dims(ndim: int, dims: Any) -> list[int]:
    """The dims a reduction names, counted from the front; none named means all."""
    if dims is None or (isinstance(dims, Sequence) and not dims):
        return list(range(ndim))
    return [dim % max(ndim, 1) for dim in (dims if isinstance(dims, Sequence) else [dims])]


def _after(placed: Shard, dims: Sequence[int], keepdim: bool) -> Shard:
    """The cut once other dims are gone."""
    return placed if keepdim else placed.moved(placed.dim - sum(dim < placed.dim for dim in dims))


def _read(node: Node) -> tuple[list[int], bool]:
    """Reduced dims and keepdim of a reduction, by its schema."""
    found = arguments(node)
    ndim = len(Call.shape(node.args[0]))
    return reduced_dims(ndim, found.get("dim")), bool(found.get("keepdim", False))


def additive(call: Call) -> Decision:
    """sum, mean, nansum, count_nonzero."""
    source = call.args[0]
    placed = call.placed(source)
    dims, keepdim = _read(call.node)
    if isinstance(placed, Shard):
        if placed.rows and placed.dim in dims and call.node.target in _MEANS:
            raise NoRuleError("a mean over the rows of an expert region would weigh ranks by their rows; use a sum.")
        return Decision(PARTIAL if placed.dim in dims else _after(placed, dims, keepdim))
    linear = call.node.target in _LINEAR and keeps_sum(meta.tensor(source).dtype, meta.tensor(call.node).dtype)
    return Decision(PARTIAL) if linear else Decision(REPLICATE, call.reduced())


def order_statistic(call: Call) -> Decision:
    """max, min, amax, any, argmax, logsumexp, kthvalue ...: along whole dims; across ranks only where an emitter exists."""
    placed = call.placed(call.args[0])
    if not isinstance(placed, Shard):
        return call.decide(REPLICATE, call.reduced())
    dims, keepdim = _read(call.node)
    if placed.dim not in dims:
        return call.decide(_after(placed, dims, keepdim))
    if call.node.target in _ACROSS and not meta.tensor(call.node).is_floating_point():
        return Decision(REPLICATE)
    raise NoRuleError(
        "it reduces over the batch, which is spread over ranks; use a sum or a mean, or reduce a whole dim."
    )


def along(call: Call) -> Decision:
    """softmax, cumsum, topk, sort ...: the dim must be whole, everything else passes."""
    source = call.args[0]
    placed = call.placed(source)
    if not isinstance(placed, Shard):
        return call.decide(REPLICATE, call.reduced())
    found = arguments(call.node)
    if placed.dim in reduced_dims(len(call.shape(source)), found["dim"] if "dim" in found else found["dims"]):
        raise NoRuleError("it runs along the batch, which is spread over ranks; run it along another dim.")
    return call.decide(placed)


def bincount(call: Call) -> Decision:
    """How many bins there are depends on the ids, and so would differ between ranks."""
    if any(isinstance(call.placed(item), Shard) for item in call.tensors()):
        raise NoRuleError("how many bins it makes depends on the ids; use one_hot(ids, n).sum(0).")
    return Decision(REPLICATE, call.reduced())


def histc(call: Call) -> Decision:
    """Counts within fixed limits; without limits they are those of the whole batch."""
    if call.get("min") == call.get("max"):
        raise NoRuleError("its limits depend on the batch; give min and max.")
    return Decision(PARTIAL) if isinstance(call.placed(call.args[0]), Shard) else Decision(REPLICATE, call.reduced())


def item(call: Call) -> Decision:
    """A number for the host: every rank must read the same one."""
    if isinstance(call.placed(call.args[0]), Shard):
        raise NoRuleError("a number is read out of the batch, which is spread over ranks; keep it a tensor.")
    return Decision(REPLICATE, call.reduced())


def _emit_mean(walk: Walk, node: Node, decisions: dict[str, Decision]) -> Node | None:
    """A mean over a cut dim: each rank's mean of its equal part, divided by the number of parts."""
    source, parts = node.args[0], 1
    assert isinstance(source, Node)
    for axis, decision in decisions.items():
        if isinstance(walk.given(source, axis, decisions), Shard) and isinstance(decision.out, Partial):
            parts *= walk.axes[axis]
    if parts == 1:
        return None
    return walk.call(aten.div.Tensor, walk.emit(node, node.args, node.kwargs, decisions), parts, like=node)


def _emit_across(walk: Walk, node: Node, decisions: dict[str, Decision]) -> Node | None:
    """any, all, and max, min of integers over the batch: a local reduction and an all-reduce of kind max or min."""
    source = node.args[0]
    assert isinstance(source, Node)
    cut = [
        axis
        for axis, decision in decisions.items()
        if isinstance(walk.given(source, axis, decisions), Shard) and isinstance(decision.out, Replicate)
    ]
    made = walk.emit(node, node.args, node.kwargs, decisions)
    boolean = bool(cut) and meta.tensor(made).dtype == torch.bool
    if boolean:
        made = walk.call(aten._to_copy.default, made, like=node, dtype=torch.int64)
    for axis in cut:
        made = walk.call(ops.all_reduce, made, _ACROSS[node.target], axis, like=node)
    if boolean:
        made = walk.call(aten._to_copy.default, made, like=node, dtype=torch.bool)
    return made


_MEANS = {aten.mean.default, aten.mean.dim}
_LINEAR = {aten.sum.default, aten.sum.dim_IntList, *_MEANS}
_ACROSS: dict[Any, str] = {
    **dict.fromkeys([aten.any.default, aten.any.dim, aten.any.dims, aten.max.default, aten.amax.default], "max"),
    **dict.fromkeys([aten.all.default, aten.all.dim, aten.all.dims, aten.min.default, aten.amin.default], "min"),
}

RULES: dict[Any, Rule] = {
    **dict.fromkeys(
        [*_LINEAR, aten.nansum.default, aten.count_nonzero.default, aten.count_nonzero.dim_IntList], additive
    ),
    **dict.fromkeys(
        [
            *_ACROSS, aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default, aten.logsumexp.default,
            aten.var.default, aten.var.dim, aten.var.correction, aten.std.default, aten.std.dim, aten.std.correction,
            aten.var_mean.default, aten.var_mean.dim, aten.var_mean.correction, aten.std_mean.correction,
            aten.prod.default, aten.prod.dim_int, aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.aminmax.default,
            aten.linalg_vector_norm.default, aten.kthvalue.default, aten.median.default, aten.median.dim, aten.nanmean.default,
        ],
        order_statistic,
    ),
    **dict.fromkeys(
        [
            aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten._log_softmax.default, aten.cumsum.default,
            aten.cumprod.default, aten.logcumsumexp.default, aten.cummax.default, aten.cummin.default, aten.topk.default,
            aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable, aten.flip.default,
            aten.roll.default, aten.glu.default,
        ],
        along,
    ),
    aten.bincount.default: bincount,
    aten.histc.default: histc,
    aten.item.default: item,
    aten._local_scalar_dense.default: item,
}  # fmt: skip

EMITTERS: dict[Any, Emitter] = {
    **dict.fromkeys(_MEANS, _emit_mean),
    **dict.fromkeys(_ACROSS, _emit_across),
}

ABSORBS = frozenset(_ACROSS)
