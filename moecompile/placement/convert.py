"""Conversions between placements on one axis: the only place where shard-dense moves data or drops any."""

from __future__ import annotations

import torch
from torch.fx import Node

from .. import meta, ops
from ..errors import PassError
from .call import Walk
from .slicing import sliced
from .types import REPLICATE, Partial, Placement, Replicate, Shard

aten = torch.ops.aten


def convert(walk: Walk, made: Node, like: Node, axis: str, have: Placement, want: Placement) -> Node:
    """The local value ``made`` of the global value ``like``, from placement ``have`` to ``want``.

    A PassError where a cut value would have to be gathered or cut along another dim.
    """
    if isinstance(have, Partial) and isinstance(want, Shard):
        whole = walk.convert(made, like, axis, have, REPLICATE)
        return walk.convert(whole, like, axis, REPLICATE, want)
    if isinstance(have, Partial) and isinstance(want, Replicate):
        new = _add_up(walk, made, like, axis)
    elif isinstance(have, Replicate) and isinstance(want, Partial):
        new = _share(walk, made, like, axis)
    elif isinstance(have, Replicate) and isinstance(want, Shard) and not want.rows:
        part = sliced(walk, like, axis, want) if made is walk.env.get(like) else None
        new = part if part is not None else _slice(walk, made, like, axis, want)
    else:
        raise PassError(
            f"shard-dense: {meta.where(like)} is {have} on {axis} and {want} is needed there, which this version does not "
            f"convert; rewrite the line so that its batch dim stays first."
        )
    placed = {**meta.placements(made), axis: want}
    meta.set_placements(new, {key: item for key, item in placed.items() if not isinstance(item, Replicate)})
    return new


def _add_up(walk: Walk, made: Node, like: Node, axis: str) -> Node:
    """An all-reduce; parts in a narrow type are added in float32, so that many ranks cost one rounding and not one each."""
    dtype = meta.tensor(made).dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return walk.call(ops.all_reduce, made, "sum", axis, like=like)
    wide = walk.call(aten._to_copy.default, made, like=like, dtype=torch.float32)
    total = walk.call(ops.all_reduce, wide, "sum", axis, like=like)
    return walk.call(aten._to_copy.default, total, like=like, dtype=dtype)


def _slice(walk: Walk, made: Node, like: Node, axis: str, want: Shard) -> Node:
    return walk.call(ops.local_slice, made, walk.offset(axis), want.dim, want.outer, walk.axes[axis], like=like)


def _share(walk: Walk, made: Node, like: Node, axis: str) -> Node:
    """Parts that add up to a whole value: equal ones of a float; all of an integer on the first rank, none elsewhere."""
    found = meta.tensor(made)
    if found.is_floating_point() or found.is_complex():
        return walk.call(aten.div.Tensor, made, walk.axes[axis], like=like)
    first = walk.call(aten.eq.Scalar, walk.offset(axis), 0, like=like)
    return walk.call(aten.mul.Tensor, made, first, like=like)
