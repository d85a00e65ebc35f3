"""Picking and placing elements: slices, splits, gathers, indexing, padding. The cut dim must stay whole in each of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from .rules_elementwise import unify
from .sharder import Call, Decision, Emitter, NoRule, Rule
from .types import REPLICATE, Partial, Placement, Shard

aten = torch.ops.aten


def _outputs(call: Call, placed: Placement) -> Decision:
    found = call.node.meta["val"]
    return Decision([placed] * len(found) if isinstance(found, (tuple, list)) else placed)


def window(call: Call) -> Decision:
    """slice, narrow, split, chunk: free along other dims; along the cut dim only where nothing is cut away."""
    source = call.args[0]
    placed = call.placed(source)
    if not isinstance(placed, Shard):
        return _outputs(call, placed)
    names = [argument.name for argument in call.node.target._schema.arguments]  # type: ignore[union-attr]
    dim = call.arg(names.index("dim"), "dim", 0) % len(call.shape(source))
    if dim != placed.dim:
        return _outputs(call, placed)
    found = call.node.meta["val"]
    if isinstance(found, (tuple, list)):
        count, size = len(found), call.shape(source)[dim]
        if all(item.shape[dim] * count == size for item in found) and placed.outer % count == 0:
            return Decision([Shard(dim, placed.outer // count, placed.rows)] * count)
    elif tuple(found.shape) == call.shape(source):
        return Decision(placed)
    raise NoRule("it takes a part of the batch, which is spread over ranks; select along another dim.")


def select(call: Call) -> Decision:
    source = call.args[0]
    placed = call.placed(source)
    if not isinstance(placed, Shard):
        return _outputs(call, placed)
    dim = call.arg(1, "dim", 0) % len(call.shape(source))
    if dim == placed.dim:
        raise NoRule("it picks one element of the batch, which is spread over ranks; select along another dim.")
    after = Shard(placed.dim - (dim < placed.dim), placed.outer, placed.rows)
    return _outputs(call, after)


def gather(call: Call) -> Decision:
    """gather, scatter, scatter_add, take_along_dim, index_put-like ops with a dim: every operand cut in the same other dim."""
    source = call.args[0]
    names = [argument.name for argument in call.node.target._schema.arguments]  # type: ignore[union-attr]
    dim = call.arg(names.index("dim"), "dim") % len(call.shape(source))
    operands = call.tensors()
    cuts = {call.placed(item) for item in operands if isinstance(call.placed(item), Shard)}
    if not cuts:
        return Decision(REPLICATE, {item: REPLICATE for item in operands if isinstance(call.placed(item), Partial)})
    if len(cuts) > 1:
        raise NoRule("its operands are cut differently; keep the batch dim in one place.")
    cut = cuts.pop()
    assert isinstance(cut, Shard)
    if cut.dim == dim:
        raise NoRule("it gathers or scatters along the batch, which is spread over ranks; do it along another dim.")
    need: dict[Node, Placement] = {
        item: cut for item in operands if not isinstance(call.placed(item), Shard) and call.shape(item)
    }
    return Decision(cut, need)


def index(call: Call) -> Decision:
    """``x[i, j]``: either the indexed tensor is cut along a dim that is not indexed, or the indices are cut."""
    source, indices = call.args[0], call.args[1]
    placed = call.placed(source)
    used = [item for item in indices if item is not None]
    cut_used = [item for item in used if isinstance(call.placed(item), Shard)]
    if any(item.meta["val"].dtype == torch.bool for item in used):
        raise NoRule(
            "a boolean mask picks a data-dependent number of batch elements; use torch.where or multiply by the mask."
        )
    at = [dim for dim, item in enumerate(indices) if item is not None]
    adjacent = at == list(range(at[0], at[-1] + 1))
    width = max(item.meta["val"].dim() for item in used)
    need: dict[Node, Placement] = {
        item: REPLICATE for item in [source, *used] if isinstance(call.placed(item), Partial)
    }
    if cut_used and isinstance(placed, Shard):
        raise NoRule("both the indexed tensor and the indices carry the batch; use gather along the indexed dim.")
    if cut_used:
        cut, more = unify(call, used, width)
        assert cut is not None
        start = at[0] if adjacent else 0
        return Decision(Shard(cut.dim + start, cut.outer, cut.rows), {**need, **more})
    if not isinstance(placed, Shard):
        return Decision(REPLICATE, need)
    if placed.dim in at:
        raise NoRule("it indexes along the batch, which is spread over ranks; index along another dim.")
    gone = sum(dim < placed.dim for dim in at)
    shift = width if (not adjacent or at[0] < placed.dim) else 0
    return Decision(Shard(placed.dim - gone + shift, placed.outer, placed.rows), need)


def index_select(call: Call) -> Decision:
    source, dim, ids = call.args[0], call.args[1] % max(len(call.shape(call.args[0])), 1), call.args[2]
    placed, found = call.placed(source), call.placed(ids)
    if isinstance(found, Shard) and not isinstance(placed, Shard):
        return Decision(Shard(dim, found.outer, found.rows), {source: REPLICATE} if isinstance(placed, Partial) else {})
    if isinstance(placed, Shard) and placed.dim != dim and not isinstance(found, Shard):
        return Decision(placed)
    raise NoRule("it selects along the batch, which is spread over ranks; select along another dim.")


def pad(call: Call) -> Decision:
    source, widths = call.args[0], call.args[1]
    placed = call.placed(source)
    if not isinstance(placed, Shard):
        return Decision(REPLICATE, {source: REPLICATE} if isinstance(placed, Partial) else {})
    padded = {len(call.shape(source)) - 1 - index // 2 for index, width in enumerate(widths) if width}
    if placed.dim in padded:
        raise NoRule("it pads the batch dim, which is spread over ranks; pad another dim.")
    return Decision(placed)


def triangle(call: Call) -> Decision:
    source = call.args[0]
    placed = call.placed(source)
    if isinstance(placed, Shard) and placed.dim >= len(call.shape(source)) - 2:
        raise NoRule("it cuts a triangle out of the batch dim, which is spread over ranks.")
    return Decision(placed)


def one_hot(call: Call) -> Decision:
    return Decision(call.placed(call.args[0]))


def repeat_interleave(call: Call) -> Decision:
    source = call.args[0]
    placed = call.placed(source)
    if isinstance(placed, Shard) and call.arg(2, "dim") is None:
        raise NoRule("repeat_interleave without dim flattens the batch; give it a dim.")
    return Decision(placed)


RULES: dict[Any, Rule] = {
    **dict.fromkeys(
        [aten.slice.Tensor, aten.narrow.default, aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.split.sizes, aten.unfold.default,
         aten.tensor_split.sections, aten.diff.default],
        window,
    ),
    **dict.fromkeys([aten.select.int, aten.unbind.int], select),
    **dict.fromkeys(
        [aten.gather.default, aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.take_along_dim.default, aten.scatter.value_reduce,
         aten.scatter_reduce.two],
        gather,
    ),
    aten.index.Tensor: index,
    aten.index_select.default: index_select,
    **dict.fromkeys([aten.constant_pad_nd.default, aten.pad.default], pad),
    **dict.fromkeys([aten.tril.default, aten.triu.default], triangle),
    aten.one_hot.default: one_hot,
    aten.repeat_interleave.self_int: repeat_interleave,
}  # fmt: skip

EMITTERS: dict[Any, Emitter] = {}
