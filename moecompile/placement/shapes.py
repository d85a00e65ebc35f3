"""Where a cut dimension goes when a tensor is reshaped: pure arithmetic on sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from .types import Shard


def reshape_shard(placed: Shard, old: Sequence[int], new: Sequence[int], ranks: int) -> Shard | None:
    """Placement after reshaping global shape ``old`` to ``new``; None when the ranks' parts would not be slices of one dim.

    In flat order the cut tensor is ``[before, pieces, after]``. The new dim that holds the whole span of the pieces takes the
    cut, with what precedes it inside that dim as its ``outer``.
    """
    pieces = placed.pieces(ranks)
    before = math.prod(old[: placed.dim]) * placed.outer
    prefix = 1
    for dim, size in enumerate(new):
        if size > 1 and prefix <= before and prefix * size >= before * pieces:
            outer, rest = divmod(before, prefix)
            if rest or size % (outer * pieces):
                return None
            if placed.rows and (outer != 1 or size != old[placed.dim]):
                return None  # neighbours among a rank's rows are not neighbours in the plain program
            return replace(placed, dim=dim, outer=outer)
        prefix *= size
    return None


def local_shape(shape: Sequence[int], placed: Sequence[tuple[Shard, int]]) -> list[int]:
    """One rank's shape: each cut dim divided by its number of ranks."""
    found = list(shape)
    for shard, ranks in placed:
        if found[shard.dim] % (shard.pieces(ranks) * shard.outer):
            raise ValueError(
                f"dim {shard.dim} of size {found[shard.dim]} cannot be cut into {shard.pieces(ranks)} equal parts"
                + (f" in {shard.outer} blocks" if shard.outer > 1 else "")
            )
        found[shard.dim] //= ranks
    return found
