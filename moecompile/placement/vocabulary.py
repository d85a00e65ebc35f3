"""Cross entropy and look-ups whose classes, or rows of the table, are cut over ranks: vocabulary parallelism (arXiv 1909.08053).

The result of either is a sum over the ranks: a rank gives what it has of it and zeros for the rest. Of the classes' exponentials only
their maximum and their sum travel, one number a row each.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch.fx import Node

from .. import meta, ops
from ..graph import arguments
from .call import Decision, Walk
from .types import PARTIAL, REPLICATE

aten = torch.ops.aten
_NONE, _MEAN = 0, 1  # reductions, as torch numbers them


def emit_over_classes(walk: Walk, node: Node, decisions: Mapping[str, Decision], axis: str, dim: int) -> Node:
    """This rank's share of the cross entropy of indices, at least in float32.

    A row's loss is lse - x[target] - s (mean x - x[target]) with label smoothing s; ignored rows have none.
    """
    found = arguments(node)
    dtype = meta.tensor(node).dtype
    scores, target = (walk.operand(found[name], dict(decisions)) for name in ("self", "target"))
    scores = _cast(walk, node, scores, torch.promote_types(dtype, torch.float32))
    smoothing = float(found["label_smoothing"])

    def call(target: object, *args: object, **kwargs: object) -> Node:
        return walk.call(target, *args, like=node, **kwargs)

    highest = call(ops.all_reduce, call(aten.amax.default, call(aten.detach.default, scores), [dim], True), "max", axis)
    powers = call(aten.sum.dim_IntList, call(aten.exp.default, call(aten.sub.Tensor, scores, highest)), [dim], True)
    total = call(aten.add.Tensor, call(aten.log.default, call(ops.all_reduce, powers, "sum", axis)), highest)

    def share(target: object, *args: object, **kwargs: object) -> Node:
        return _as_share(call(target, *args, **kwargs), axis)

    rows = call(aten.squeeze.dim, total, dim)
    picked = _picked(walk, node, scores, target, axis, dim)
    losses = share(aten.sub.Tensor, walk.convert(rows, rows, axis, REPLICATE, PARTIAL), picked)
    if smoothing:  # mean x - x[target] more; of the mean, a rank has that of its own classes by the number of ranks
        mean = share(aten.div.Tensor, call(aten.mean.dim, scores, [dim]), walk.axes[axis])
        losses = share(aten.sub.Tensor, losses, share(aten.sub.Tensor, mean, picked), alpha=smoothing)
    ignored = call(aten.eq.Scalar, target, found["ignore_index"])
    losses = share(aten.masked_fill.Scalar, losses, ignored, 0.0)
    if found["reduction"] == _NONE:
        return _as_share(_cast(walk, node, losses, dtype), axis)
    result = share(aten.sum.default, losses)
    if found["reduction"] == _MEAN:
        count = _cast(
            walk, node, call(aten.sum.default, call(aten.logical_not.default, ignored)), meta.tensor(result).dtype
        )
        result = share(aten.div.Tensor, result, count)
    return _as_share(_cast(walk, node, result, dtype), axis)


def _as_share(node: Node, axis: str) -> Node:
    """Note that a value is a sum still to be taken over the ranks."""
    meta.set_placements(node, {**meta.placements(node), axis: PARTIAL})
    return node


def _picked(walk: Walk, node: Node, scores: Node, target: Node, axis: str, dim: int) -> Node:
    """The targets' scores where they are this rank's, 0 elsewhere."""
    held = int(meta.tensor(scores).shape[dim])
    safe, own = _local(walk, node, target, axis, held, int(arguments(node)["ignore_index"]))
    found = walk.call(
        aten.gather.default, scores, dim, walk.call(aten.unsqueeze.default, safe, dim, like=node), like=node
    )
    rows = walk.call(aten.squeeze.dim, found, dim, like=node)
    others = walk.call(aten.logical_not.default, own, like=node)
    return _as_share(
        walk.call(aten.masked_fill.Scalar, rows, others, 0.0, like=node), axis
    )  # no product: 0 * -inf is NaN


def emit_lookup(walk: Walk, node: Node, decisions: Mapping[str, Decision], axis: str) -> Node:
    """Rows of the table that are this rank's, zeros elsewhere."""
    table, ids = (walk.operand(item, dict(decisions)) for item in node.args[:2])  # type: ignore[arg-type]
    safe, own = _local(walk, node, ids, axis, int(meta.tensor(table).shape[0]), -1)
    rows = walk.call(aten.embedding.default, table, safe, like=node)
    return walk.call(aten.mul.Tensor, rows, walk.call(aten.unsqueeze.default, own, -1, like=node), like=node)


def _local(walk: Walk, node: Node, index: Node, axis: str, held: int, ignore: int) -> tuple[Node, Node]:
    """An index counted from this rank's first row, 0 for those of others, and which are its own."""
    made = walk.call(ops.own_index, index, walk.offset(axis, held), held, held * walk.axes[axis], ignore, like=node)
    safe, own = (walk.call(operator.getitem, made, at, like=node) for at in (0, 1))
    return safe, own


def _cast(walk: Walk, node: Node, value: Node, dtype: torch.dtype) -> Node:
    return (
        value if meta.tensor(value).dtype == dtype else walk.call(aten._to_copy.default, value, like=node, dtype=dtype)
    )
