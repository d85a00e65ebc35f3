"""Conversions between placements on one axis: the only place where shard-dense moves data or drops any."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Node

from .. import meta, ops
from ..errors import PassError
from .call import Walk
from .slicing import sliced
from .types import REPLICATE, Partial, Placement, Replicate, Shard

aten = torch.ops.aten
_MOST_STEPS = 8  # calls that one conversion makes, one behind the other

# values that every rank can make whole without hearing of the others
_FILLED_LIKE = {
    aten.zeros_like.default: aten.new_zeros.default,
    aten.ones_like.default: aten.new_ones.default,
    aten.full_like.default: aten.new_full.default,
}


def convert(walk: Walk, made: Node, like: Node, axis: str, have: Placement, want: Placement) -> Node:
    """The local value ``made`` of the global value ``like``, from placement ``have`` to ``want``.

    A PassError where a cut value would have to be cut along another dim, or has rows in an order of its own.
    """
    if _in_zigzag(have) or _in_zigzag(want):
        return _reordered(walk, made, like, axis, have, want)
    if isinstance(have, Partial) and isinstance(want, Shard) and (scattered := _scatter(walk, made, like, axis, want)):
        new = scattered
    elif isinstance(have, Partial) and isinstance(want, Shard):
        whole = walk.convert(made, like, axis, have, REPLICATE)
        return walk.convert(whole, like, axis, REPLICATE, want)
    elif isinstance(have, Partial) and isinstance(want, Replicate):
        new = _add_up(walk, made, like, axis)
    elif isinstance(have, Replicate) and isinstance(want, Partial):
        new = _share(walk, made, like, axis)
    elif isinstance(have, Replicate) and isinstance(want, Shard) and not want.rows:
        part = sliced(walk, like, axis, want) if made is walk.env.get(like) else None
        new = part if part is not None else _slice(walk, made, like, axis, want)
    elif isinstance(have, Shard) and isinstance(want, Shard) and _can_turn(like, have, want, walk.axes[axis]):
        new = walk.call(ops.all_to_all, made, walk.axes[axis], want.dim, have.dim, axis, like=like)
    elif isinstance(have, Shard) and isinstance(want, Replicate) and not have.rows:
        new = _gather(walk, made, like, axis, have)
    else:
        raise PassError(
            f"shard-dense: {meta.where(like)} is {have} on {axis} and {want} is needed there, which this version does not "
            f"convert; rewrite the line so that its batch dim stays first."
        )
    placed = {**meta.placements(made), axis: want}
    meta.set_placements(new, {key: item for key, item in placed.items() if not isinstance(item, Replicate)})
    _note_sums(made, new)
    return new


def _in_zigzag(placed: Placement) -> bool:
    return isinstance(placed, Shard) and placed.zigzag


def _reordered(walk: Walk, made: Node, like: Node, axis: str, have: Placement, want: Placement) -> Node:
    """To or from zigzag: a whole value is cut in that order, parts go to the ranks that have them in the other."""
    cut = have if _in_zigzag(have) else want
    assert isinstance(cut, Shard)
    plain, arguments = replace(cut, zigzag=False), (cut.dim, cut.outer, walk.axes[axis])
    if isinstance(have, Replicate):
        new = sliced(walk, like, axis, cut) if made is walk.env.get(like) else None
        new = new or walk.call(ops.zigzag_slice, made, walk.offset(axis), *arguments, like=like)
    elif want not in (plain, cut):  # by the order of the elements
        return walk.convert(walk.convert(made, like, axis, have, plain), like, axis, plain, want)
    elif have not in (plain, cut):
        return walk.convert(walk.convert(made, like, axis, have, plain), like, axis, plain, cut)
    else:
        ranks, (dim, outer, _) = walk.axes[axis], arguments
        new = walk.call(ops.zigzag_exchange, made, ranks, dim, outer, want == cut, axis, like=like)
    placed = {**meta.placements(made), axis: want}
    meta.set_placements(new, {key: item for key, item in placed.items() if not isinstance(item, Replicate)})
    _note_sums(made, new)
    return new


def _can_turn(like: Node, have: Shard, want: Shard, ranks: int) -> bool:
    """Whether a value can go from one cut dim to another by exchanging equal parts."""
    plain = not (have.rows or want.rows or have.zigzag) and have.outer == want.outer == 1
    return plain and have.dim != want.dim and meta.tensor(like).shape[want.dim] % ranks == 0


def _note_sums(made: Node, new: Node) -> None:
    """What stands between a value and its conversion is a sum over the same ranks, until it is taken."""
    between: list[Node] = []
    node = _source(new)
    while node is not None and node is not made and len(between) < _MOST_STEPS:
        between.append(node)
        node = _source(node)
    if node is not made:
        return
    sums = {axis: placed for axis, placed in meta.placements(made).items() if isinstance(placed, Partial)}
    for node in reversed(between):
        if node.target in (ops.all_reduce, ops.reduce_scatter):
            sums.pop(str(node.args[ops.AXIS_ARGUMENT[node.target]]), None)
        if sums:
            meta.set_placements(node, sums)


def _source(node: Node) -> Node | None:
    """The value that a call of a conversion works on."""
    found = node.args[0] if node.args else None
    return found if isinstance(found, Node) else None


def _add_up(walk: Walk, made: Node, like: Node, axis: str) -> Node:
    """An all-reduce; parts in a narrow type are added in float32, so that many ranks cost one rounding and not one each."""
    dtype = meta.tensor(made).dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return walk.call(ops.all_reduce, made, "sum", axis, like=like)
    wide = walk.call(aten._to_copy.default, made, like=like, dtype=torch.float32)
    total = walk.call(ops.all_reduce, wide, "sum", axis, like=like)
    return walk.call(aten._to_copy.default, total, like=like, dtype=dtype)


def _scatter(walk: Walk, made: Node, like: Node, axis: str, want: Shard) -> Node | None:
    """A reduce-scatter, half an all-reduce; None for rows of experts and for integers. Narrow types are added in float32."""
    found, ranks = meta.tensor(made), walk.axes[axis]
    if want.rows or not found.is_floating_point():
        return None
    if found.dtype in (torch.bfloat16, torch.float16):
        wide = _scatter(walk, walk.call(aten._to_copy.default, made, like=like, dtype=torch.float32), like, axis, want)
        return walk.call(aten._to_copy.default, wide, like=like, dtype=found.dtype)
    if want.dim == 0 and want.outer == 1:
        return walk.call(ops.reduce_scatter, made, ranks, axis, like=like)
    shape = list(found.shape)
    before, size, after = shape[: want.dim], shape[want.dim] // want.outer, shape[want.dim + 1 :]
    blocks = walk.call(aten.reshape.default, made, [*before, want.outer, size, *after], like=like)
    moved = walk.call(aten.movedim.int, blocks, want.dim + 1, 0, like=like)
    part = walk.call(ops.reduce_scatter, walk.call(aten.contiguous.default, moved, like=like), ranks, axis, like=like)
    back = walk.call(aten.movedim.int, part, 0, want.dim + 1, like=like)
    local = [*before, shape[want.dim] // ranks, *after]
    return walk.call(aten.reshape.default, walk.call(aten.contiguous.default, back, like=like), local, like=like)


def _gather(walk: Walk, made: Node, like: Node, axis: str, have: Shard) -> Node:
    """All parts of the cut dim on every rank. They arrive one behind the other, which dim 0 wants; else dims are moved."""
    found, ranks, dim = meta.tensor(made), walk.axes[axis], have.dim
    shape = list(found.shape)
    whole = [*shape[:dim], shape[dim] * ranks, *shape[dim + 1 :]]
    if like.target in _FILLED_LIKE:
        fill = like.args[1:] if like.target is aten.full_like.default else ()
        return walk.call(_FILLED_LIKE[like.target], made, whole, *fill, like=like)
    if found.is_complex():
        parts = walk.call(aten.view_as_real.default, walk.call(aten.resolve_conj.default, made, like=like), like=like)
        return walk.call(aten.view_as_complex.default, _gather(walk, parts, like, axis, have), like=like)
    if dim == 0 and have.outer == 1:
        return walk.call(ops.all_gather, made, ranks, axis, like=like)
    stacked = walk.call(aten.unsqueeze.default, made, 0, like=like)
    stacked = walk.call(ops.all_gather, stacked, ranks, axis, like=like)
    blocks = [ranks, *shape[:dim], have.outer, shape[dim] // have.outer, *shape[dim + 1 :]]
    split = walk.call(aten.reshape.default, stacked, blocks, like=like)
    moved = walk.call(aten.movedim.int, split, 0, dim + 1, like=like)
    return walk.call(aten.reshape.default, walk.call(aten.contiguous.default, moved, like=like), whole, like=like)


def _slice(walk: Walk, made: Node, like: Node, axis: str, want: Shard) -> Node:
    return walk.call(ops.local_slice, made, walk.offset(axis), want.dim, want.outer, walk.axes[axis], like=like)


def _share(walk: Walk, made: Node, like: Node, axis: str) -> Node:
    """Parts that add up to a whole value: equal ones of a float; all of an integer on the first rank, none elsewhere."""
    found = meta.tensor(made)
    if found.is_floating_point() or found.is_complex():
        return walk.call(aten.div.Tensor, made, walk.axes[axis], like=like)
    first = walk.call(aten.eq.Scalar, walk.offset(axis), 0, like=like)
    return walk.call(aten.mul.Tensor, made, first, like=like)
