"""Parts of tensors: slices, splits, padding, and writing into a part. Along the cut dim only what keeps the ranks' parts whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from .. import meta
from ..graph import arguments
from .call import Call, Decision, Emitter, Needs, NoRuleError, Rule, Walk, changed, follow
from .types import PARTIAL, REPLICATE, Partial, Replicate, Shard

aten = torch.ops.aten

_SPLITS = [
    aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes, aten.chunk.default, aten.tensor_split.sections,
    aten.unsafe_split.Tensor, aten.unsafe_chunk.default,
]  # fmt: skip
_WINDOWS = [aten.slice.Tensor, aten.narrow.default]


def window(call: Call) -> Decision:
    """slice, narrow: free along other dims; along the cut dim only whole blocks of it, or every so-manieth element."""
    source = call.args[0]
    placed = call.placed(source)
    if not isinstance(placed, Shard):
        return Decision(placed)
    dim = call.get("dim") % len(call.shape(source))
    if dim != placed.dim or call.out_shape == call.shape(source):
        return Decision(placed)
    start, step = _start(call.node, call.shape(source)[dim])
    if step > 1 and _every(placed, call, start, step, dim):
        return Decision(placed)
    blocks = _blocks(placed, call.shape(source)[dim], start, call.out_shape[dim]) if step == 1 else None
    if blocks is None:
        raise NoRuleError("it takes a part of the batch, which is spread over ranks; select along another dim.")
    return Decision(replace(placed, outer=blocks))


def _every(placed: Shard, call: Call, start: int, step: int, dim: int) -> bool:
    """Whether a window takes one element of each ``step`` of a whole cut dim, and no rank's part ends within such a group."""
    size = call.shape(call.args[0])[dim]
    grouped = size % (placed.outer * placed.pieces(call.ranks) * step) == 0 and not placed.rows
    return grouped and start < step and call.out_shape[dim] == size // step


def _blocks(placed: Shard, size: int, start: int, length: int) -> int | None:
    """How many whole blocks of a cut dim a window covers, each of which every rank has a part of."""
    block = size // placed.outer
    if start % block or length % block or not length:
        return None
    return length // block


def _start(node: Node, size: int) -> tuple[int, int]:
    """First index, counted from the front, and step of a window."""
    found = arguments(node)
    start, step = found.get("start") or 0, found.get("step", 1)
    if not isinstance(start, int) or not isinstance(step, int):
        raise NoRuleError("where it starts is known at run time only; use a constant.")
    return (max(start + size, 0) if start < 0 else start), step


def _emit_window(walk: Walk, node: Node, decisions: dict[str, Decision]) -> Node | None:
    """Along the cut dim all indices shrink by the number of ranks."""
    source = node.args[0]
    assert isinstance(source, Node)
    dim = arguments(node)["dim"] % meta.tensor(source).dim()
    ranks = _ranks_along(walk, source, dim, decisions)
    if ranks == 1:
        return None
    start, step = _start(node, meta.tensor(source).shape[dim])
    if step > 1:
        return walk.emit(node, (source, dim, start, meta.tensor(walk.env[source]).shape[dim], step), {}, decisions)
    length = meta.tensor(node).shape[dim]
    args = (source, dim, start // ranks, (start + length) // ranks)
    return walk.emit(node, args, {}, decisions, target=aten.slice.Tensor)


def _ranks_along(walk: Walk, source: Node, dim: int, decisions: dict[str, Decision]) -> int:
    """Into how many parts ``dim`` of a value is cut."""
    ranks = 1
    for axis, size in walk.axes.items():
        placed = walk.given(source, axis, decisions)
        ranks *= size if isinstance(placed, Shard) and placed.dim == dim else 1
    return ranks


def split(call: Call) -> Decision:
    """split, chunk: free along other dims; along the cut dim only into whole blocks of it."""
    source = call.args[0]
    placed = call.placed(source)
    if not isinstance(placed, Shard):
        return call.decide(placed)
    dim = call.get("dim") % len(call.shape(source))
    if dim != placed.dim:
        return call.decide(placed)
    outs, start = [], 0
    for part in meta.value(call.node):
        blocks = _blocks(placed, call.shape(source)[dim], start, part.shape[dim])
        if blocks is None:
            raise NoRuleError("it takes parts of the batch, which is spread over ranks; split along another dim.")
        outs.append(replace(placed, outer=blocks))
        start += part.shape[dim]
    return Decision(outs)


def _emit_split(walk: Walk, node: Node, decisions: dict[str, Decision]) -> Node | None:
    source = node.args[0]
    assert isinstance(source, Node)
    dim = arguments(node)["dim"] % meta.tensor(source).dim()
    ranks = _ranks_along(walk, source, dim, decisions)
    if ranks == 1:
        return None
    sizes = [part.shape[dim] // ranks for part in meta.value(node)]
    return walk.emit(node, (source, sizes, dim), {}, decisions, target=aten.split_with_sizes.default)


def select(call: Call) -> Decision:
    """select, unbind."""
    source = call.args[0]
    placed = call.placed(source)
    if not isinstance(placed, Shard):
        return call.decide(placed)
    dim = call.get("dim") % len(call.shape(source))
    if dim == placed.dim:
        raise NoRuleError("it picks one element of the batch, which is spread over ranks; select along another dim.")
    return call.decide(placed.moved(placed.dim - (dim < placed.dim)))


def unfold(call: Call) -> Decision:
    """Windows along one dim; a new last dim runs inside them."""
    source = call.args[0]
    placed = call.placed(source)
    if isinstance(placed, Shard) and placed.dim == call.get("dimension") % len(call.shape(source)):
        raise NoRuleError("its windows run along the batch, which is spread over ranks; run them along another dim.")
    return Decision(placed)


def write(call: Call) -> Decision:
    """slice_scatter, select_scatter: the part that is written is cut as the whole is, along another dim."""
    source, part = call.args[0], call.args[1]
    ndim = len(call.shape(source))
    dim = call.get("dim") % ndim
    narrower = len(call.shape(part)) < ndim  # select_scatter: the part lacks the dim
    cut: Shard | None = None
    for item in (source, part):
        placed = call.placed(item)
        if isinstance(placed, Shard):
            seen = placed.moved(placed.dim + (narrower and item is part and placed.dim >= dim))
            if cut is not None and seen != cut:
                raise NoRuleError("what is written is cut differently from what it is written into.")
            cut = seen
    if cut is None:
        if all(isinstance(call.placed(item), Partial) for item in (source, part)):
            return Decision(PARTIAL)
        return Decision(REPLICATE, call.reduced())
    if cut.dim == dim:
        raise NoRuleError("it writes into a part of the batch, which is spread over ranks; write along another dim.")
    needs = Needs()
    follow(call, needs, source, cut, cut.dim)
    follow(call, needs, part, cut, cut.dim - (narrower and dim < cut.dim))
    return Decision(cut, needs)


def difference(call: Call) -> Decision:
    """diff, with what is put before and after; along whole dims."""
    operands = [item for item in (call.args[0], call.get("prepend"), call.get("append")) if item is not None]
    dim = call.get("dim") % len(call.out_shape)
    cuts = {placed for item in operands if isinstance(placed := call.placed(item), Shard)}
    if not cuts:
        return Decision(REPLICATE, call.reduced())
    cut = cuts.pop()
    if cuts or cut.dim == dim:
        raise NoRuleError(
            "it subtracts along the batch, which is spread over ranks; take differences along another dim."
        )
    needs = Needs()
    for item in operands:
        follow(call, needs, item, cut, cut.dim)
    return Decision(cut, needs)


def pad(call: Call) -> Decision:
    source, widths = call.args[0], call.args[1]
    placed = call.placed(source)
    if not isinstance(placed, Shard):
        return Decision(REPLICATE, call.reduced())
    padded = {len(call.shape(source)) - 1 - index // 2 for index, width in enumerate(widths) if width}
    if placed.dim in padded:
        raise NoRuleError("it pads the batch dim, which is spread over ranks; pad another dim.")
    return Decision(placed)


def triangle(call: Call) -> Decision:
    source = call.args[0]
    placed = call.placed(source)
    if isinstance(placed, Shard) and placed.dim >= len(call.shape(source)) - 2:
        raise NoRuleError("it cuts a triangle out of the batch dim, which is spread over ranks.")
    return Decision(placed)


def repeat_interleave(call: Call) -> Decision:
    """Every element several times in place: also along the cut dim."""
    source, dim = call.args[0], call.get("dim")
    placed = call.placed(source)
    if not isinstance(placed, Shard):
        return Decision(placed)
    if dim is None and len(call.shape(source)) > 1:
        raise NoRuleError("repeat_interleave without dim flattens the batch; give it a dim.")
    if placed.rows and (dim or 0) % len(call.shape(source)) == placed.dim:
        raise NoRuleError("rows of an expert region are repeated; repeat the tokens before they are routed.")
    return Decision(placed)


def _emit_repeat_interleave(walk: Walk, node: Node, decisions: dict[str, Decision]) -> Node | None:
    """Without the size of the result, which would be the global one."""
    if all(isinstance(item.out, Replicate) for item in decisions.values()):
        return None
    args, kwargs = changed(node, output_size=None)
    return walk.emit(node, args, kwargs, decisions)


def _table(rule: Rule, targets: Sequence[Any]) -> dict[Any, Rule]:
    return dict.fromkeys(targets, rule)


RULES: dict[Any, Rule] = {
    **_table(window, _WINDOWS),
    **_table(split, _SPLITS),
    **_table(select, [aten.select.int, aten.unbind.int]),
    aten.unfold.default: unfold,
    **_table(write, [aten.slice_scatter.default, aten.select_scatter.default]),
    aten.diff.default: difference,
    **_table(pad, [aten.constant_pad_nd.default, aten.pad.default]),
    **_table(triangle, [aten.tril.default, aten.triu.default]),
    aten.repeat_interleave.self_int: repeat_interleave,
}

EMITTERS: dict[Any, Emitter] = {
    **dict.fromkeys(_WINDOWS, _emit_window),
    **dict.fromkeys(_SPLITS, _emit_split),
    aten.repeat_interleave.self_int: _emit_repeat_interleave,
}
