"""Reductions and ops along one dim. Sums over the cut dim become partial; means divide by the global count, which is a constant."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from .. import graph as graphs
from .. import ops
from . import sharder as sharders
from .sharder import Call, Decision, Emitter, NoRule, Rule
from .types import PARTIAL, REPLICATE, Partial, Shard

aten = torch.ops.aten


def _reduced(ndim: int, dims: Any) -> list[int]:
    if dims is None or (isinstance(dims, Sequence) and not dims):
        return list(range(ndim))
    return [dim % max(ndim, 1) for dim in (dims if isinstance(dims, Sequence) else [dims])]


def _after(placed: Shard, dims: Sequence[int], keepdim: bool) -> Shard:
    """The cut once other dims are gone."""
    return placed if keepdim else Shard(placed.dim - sum(dim < placed.dim for dim in dims), placed.outer, placed.rows)


def _read(node: Node, dim_at: int = 1) -> tuple[list[int], bool]:
    """Reduced dims and keepdim of a reduction, by its schema."""
    schema = node.target._schema  # type: ignore[union-attr]
    values = {}
    for index, argument in enumerate(schema.arguments):
        given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
        values[argument.name] = given
    ndim = node.args[0].meta["val"].dim()  # type: ignore[union-attr]
    return _reduced(ndim, values.get("dim")), bool(values.get("keepdim", False))


def additive(call: Call) -> Decision:
    """sum, mean, count_nonzero."""
    placed = call.placed(call.args[0])
    dims, keepdim = _read(call.node)
    if isinstance(placed, Partial):
        linear = call.node.target is not aten.count_nonzero.default
        return Decision(PARTIAL) if linear else Decision(REPLICATE, {call.args[0]: REPLICATE})
    assert isinstance(placed, Shard)
    return Decision(PARTIAL if placed.dim in dims else _after(placed, dims, keepdim))


def order_statistic(call: Call) -> Decision:
    """max, min, amax, any, argmax, logsumexp ...: fine along whole dims; across ranks only where an emitter exists."""
    placed = call.placed(call.args[0])
    count = len(call.node.meta["val"]) if isinstance(call.node.meta["val"], (tuple, list)) else 0
    if isinstance(placed, Partial):
        return Decision([REPLICATE] * count if count else REPLICATE, {call.args[0]: REPLICATE})
    assert isinstance(placed, Shard)
    dims, keepdim = _read(call.node)
    if placed.dim in dims:
        if call.node.target in _ACROSS:
            return Decision(REPLICATE)
        raise NoRule(
            "it reduces over the batch, which is spread over ranks; use a sum or a mean, or reduce a whole dim."
        )
    after = _after(placed, dims, keepdim)
    return Decision([after] * count if count else after)


def along(call: Call) -> Decision:
    """softmax, cumsum, topk, sort ...: the dim must be whole, everything else passes."""
    source = call.args[0]
    placed = call.placed(source)
    count = len(call.node.meta["val"]) if isinstance(call.node.meta["val"], (tuple, list)) else 0
    if isinstance(placed, Partial):
        return Decision([REPLICATE] * count if count else REPLICATE, {source: REPLICATE})
    assert isinstance(placed, Shard)
    schema = call.node.target._schema  # type: ignore[union-attr]
    names = [argument.name for argument in schema.arguments]
    name = "dim" if "dim" in names else "dims"
    index = names.index(name)
    dims = _reduced(len(call.shape(source)), call.arg(index, name, schema.arguments[index].default_value))
    if placed.dim in dims:
        raise NoRule("it runs along the batch, which is spread over ranks; run it along another dim.")
    return Decision([placed] * count if count else placed)


def bincount(call: Call) -> Decision:
    """Counts over cut ids are partial sums."""
    return Decision(PARTIAL)


def _emit_mean(walk: sharders.Sharder, node: Node, decisions: dict[str, Decision]) -> Node | None:
    """A mean over a cut dim: the local sum over the global count."""
    source = node.args[0]
    cut = [
        axis
        for axis in decisions
        if isinstance(walk.place(source, axis), Shard) and isinstance(decisions[axis].out, type(PARTIAL))
    ]  # type: ignore[arg-type]
    if not cut:
        return None
    dims, keepdim = _read(node)
    shape = source.meta["val"].shape  # type: ignore[union-attr]
    total = math.prod(shape[dim] for dim in dims)
    kwargs = {key: found for key, found in node.kwargs.items() if key == "dtype"}
    summed = walk.emit(node, (source, dims, keepdim), kwargs, decisions, target=aten.sum.dim_IntList)
    return graphs.call(walk.graph, aten.div.Tensor, summed, total, like=node, mode=walk.mode)


def _emit_across(walk: sharders.Sharder, node: Node, decisions: dict[str, Decision]) -> Node | None:
    """any / all / max / min over the batch, as a local reduction and an all-reduce of kind max or min."""
    source = node.args[0]
    cut = [
        axis for axis in decisions if isinstance(walk.place(source, axis), Shard) and decisions[axis].out == REPLICATE
    ]  # type: ignore[arg-type]
    made = walk.emit(node, node.args, node.kwargs, decisions)
    if not cut:
        return made
    boolean = made.meta["val"].dtype == torch.bool
    kind = _ACROSS[node.target]
    if boolean:
        made = graphs.call(walk.graph, aten._to_copy.default, made, like=node, mode=walk.mode, dtype=torch.int64)
    for axis in cut:
        made = graphs.call(walk.graph, ops.all_reduce, made, kind, axis, like=node, mode=walk.mode)
    if boolean:
        made = graphs.call(walk.graph, aten._to_copy.default, made, like=node, mode=walk.mode, dtype=torch.bool)
    return made


_ACROSS: dict[Any, str] = {aten.any.default: "max", aten.all.default: "min"}

RULES: dict[Any, Rule] = {
    **dict.fromkeys(
        [aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.count_nonzero.default, aten.count_nonzero.dim_IntList],
        additive,
    ),
    **dict.fromkeys(
        [
            aten.max.dim, aten.min.dim, aten.amax.default, aten.amin.default, aten.any.default, aten.any.dim, aten.all.default, aten.all.dim,
            aten.argmax.default, aten.argmin.default, aten.logsumexp.default, aten.var.correction, aten.std.correction, aten.var.dim, aten.prod.dim_int,
            aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim, aten.max.default, aten.min.default, aten.var_mean.correction,
        ],
        order_statistic,
    ),
    **dict.fromkeys(
        [
            aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten._log_softmax.default, aten.cumsum.default, aten.topk.default, aten.sort.default,
            aten.sort.stable, aten.argsort.default, aten.argsort.stable, aten.cumprod.default, aten.flip.default, aten.roll.default, aten.logcumsumexp.default,
            aten.kthvalue.default, aten.glu.default, aten.cummax.default,
        ],
        along,
    ),
    aten.bincount.default: bincount,
    aten.histc.default: bincount,
}  # fmt: skip

EMITTERS: dict[Any, Emitter] = {
    aten.mean.default: _emit_mean,
    aten.mean.dim: _emit_mean,
    aten.any.default: _emit_across,
    aten.all.default: _emit_across,
}
