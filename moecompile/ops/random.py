"""Random numbers that depend on the seed and on an element's place in the global tensor, never on which rank draws them.

A counter-based generator: element i of the stream with seed s is a bijective mix of s and i (the finaliser of SplitMix64, Steele,
Lea and Flood 2014), so any part of a tensor can be drawn alone and every layout sees the same numbers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moecompile.ops.registry import define, require

# Constants of SplitMix64 as signed 64-bit integers; torch's int64 multiplication wraps around.
_GOLDEN = -7046029254386353131
_FIRST = -4658895280553007687
_SECOND = -7723592293110705685
_BITS = 24  # of a float32 in [0, 1)


def _mix(z: Tensor) -> Tensor:
    """Shifts are logical: the sign bits that an arithmetic shift drags in are masked off."""
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _FIRST
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _SECOND
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def _check_seed(where: str, seed: Tensor) -> None:
    require(
        seed.dtype == torch.int64 and seed.dim() == 0,
        f"moe::{where}: seed is {seed.dtype}{list(seed.shape)}, but a 0-d int64 tensor is needed; use torch.tensor(number).",
    )


def _fold_seed(seed: Tensor, stream: int) -> Tensor:
    _check_seed("fold_seed", seed)
    return _mix(_mix(seed + _GOLDEN) + stream + 1)


def _fold_seed_fake(seed: Tensor, stream: int) -> Tensor:
    _check_seed("fold_seed", seed)
    return torch.empty_like(seed)


def _check_lists(where: str, *lists: Sequence[Any]) -> None:
    require(
        len({len(item) for item in lists}) == 1,
        f"moe::{where}: its lists have {', '.join(str(len(item)) for item in lists)} entries, but each cut has one in every list; pass "
        f"lists of one length.",
    )


# this rank's index, the dim, and how it is cut: as [outer, ranks, inner], or in zigzag (`moecompile.ops.zigzag`)
Cut = tuple[int, int, int, int, bool]


def global_index(shape: list[int], cuts: list[Cut], device: torch.device) -> Tensor:
    """Place of each element of a rank's part in the flattened global tensor; each cut takes its part of what those before left."""
    place = torch.zeros((), dtype=torch.int64, device=device)
    for at, size in enumerate(shape):
        coordinate, whole = torch.arange(size, device=device), size
        for index, dim, outer, ranks, zigzag in reversed(cuts):
            if dim == at:
                coordinate = _before_cut(coordinate, index, whole // outer, ranks, zigzag)
                whole *= ranks
        place = (place * whole).unsqueeze(-1) + coordinate
    return place.reshape(shape)


def _before_cut(place: Tensor, index: int | Tensor, inner: int, ranks: int, zigzag: bool) -> Tensor:
    """Where a rank's elements stand in what was cut, of which it has blocks of ``inner``."""
    inner = max(inner, 1)
    if zigzag:
        piece = max(inner // 2, 1)
        chunk = torch.where(place // piece % 2 == 0, index, 2 * ranks - 1 - index)
        return place // inner * (inner * ranks) + chunk * piece + place % piece
    return place // inner * (inner * ranks) + index * inner + place % inner


def _uniform(
    like: Tensor, seed: Tensor, index: list[Tensor], dim: list[int], outer: list[int], ranks: list[int], zigzag: Sequence[bool] = (),
) -> Tensor:  # fmt: skip
    _check_seed("uniform", seed)
    _check_lists("uniform", index, dim, outer, ranks, zigzag or ranks)
    order = zigzag or [False] * len(ranks)
    cuts = list(zip([int(item) for item in index], dim, outer, ranks, order, strict=True))
    place = global_index(list(like.shape), cuts, like.device)
    bits = (_mix(seed.to(like.device) + (place + 1) * _GOLDEN) >> (64 - _BITS)) & ((1 << _BITS) - 1)
    return bits.to(torch.float32) * (1.0 / (1 << _BITS))


def _uniform_fake(
    like: Tensor, seed: Tensor, index: list[Tensor], dim: list[int], outer: list[int], ranks: list[int], zigzag: Sequence[bool] = (),
) -> Tensor:  # fmt: skip
    _check_seed("uniform", seed)
    _check_lists("uniform", index, dim, outer, ranks, zigzag or ranks)
    return like.new_empty(like.shape, dtype=torch.float32)


def _no_gradient(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    numbers: list[int] | None = None if ctx.cuts else []  # autograd takes an empty list for one of tensors
    found = (None, None, [None] * ctx.cuts, numbers, numbers, numbers)
    return (*found, None) if ctx.orders else found  # of an argument left at its default autograd takes none


def _count_cuts(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.cuts, ctx.orders = len(inputs[2]), len(inputs[6])


fold_seed = define("fold_seed(Tensor seed, int stream) -> Tensor", _fold_seed, _fold_seed_fake)

uniform = define(
    "uniform(Tensor like, Tensor seed, Tensor[] index, int[] dim, int[] outer, int[] ranks, bool[] zigzag=[]) -> Tensor",
    _uniform,
    _uniform_fake,
    setup=_count_cuts,
    backward=_no_gradient,
)

# ---- numbers for rows of experts -------------------------------------------------------------------------------------


def _global_rows(
    row_map: Tensor,
    index: list[Tensor],
    choices: list[int],
    outer: list[int],
    ranks: list[int],
    zigzag: Sequence[bool] = (),
) -> Tensor:
    """Places in the whole batch of the choices that a rank's row map names; each cut leaves ``choices`` of what those before left."""
    _check_lists("global_rows", index, choices, outer, ranks, zigzag or ranks)
    place, order = row_map, zigzag or [False] * len(ranks)
    for at, of, stripes, parts, mirrored in reversed(list(zip(index, choices, outer, ranks, order, strict=True))):
        place = _before_cut(place, at.to(row_map.device), of // stripes, parts, mirrored)
    return torch.where(row_map < 0, row_map, place)


def _global_rows_fake(
    row_map: Tensor,
    index: list[Tensor],
    choices: list[int],
    outer: list[int],
    ranks: list[int],
    zigzag: Sequence[bool] = (),
) -> Tensor:
    require(
        row_map.dtype == torch.int64 and row_map.dim() == 1,
        f"moe::global_rows: row_map is {row_map.dtype}{list(row_map.shape)}, but int64 [R] is needed; pass permute's.",
    )
    _check_lists("global_rows", index, choices, outer, ranks, zigzag or ranks)
    return torch.empty_like(row_map)


global_rows = define(
    "global_rows(Tensor row_map, Tensor[] index, int[] choices, int[] outer, int[] ranks, bool[] zigzag=[]) -> Tensor",
    _global_rows,
    _global_rows_fake,
)


def _uniform_rows(like: Tensor, seed: Tensor, places: Tensor) -> Tensor:
    """As `uniform`, for rows whose places in the global tensor are given: the same numbers in whatever order rows stand."""
    _check_seed("uniform_rows", seed)
    width = like[0].numel() if like.shape[0] else 0
    place = places.to(like.device)[:, None] * width + torch.arange(width, device=like.device)
    bits = (_mix(seed.to(like.device) + (place + 1) * _GOLDEN) >> (64 - _BITS)) & ((1 << _BITS) - 1)
    return (bits.to(torch.float32) * (1.0 / (1 << _BITS))).reshape(like.shape)


def _uniform_rows_fake(like: Tensor, seed: Tensor, places: Tensor) -> Tensor:
    _check_seed("uniform_rows", seed)
    require(
        like.dim() > 1 and places.dim() == 1 and places.dtype == torch.int64,
        f"moe::uniform_rows: places is {places.dtype}{list(places.shape)} for rows of {list(like.shape)}, but int64 [R] is needed; "
        f"pass what global_rows returned.",
    )
    return like.new_empty(like.shape, dtype=torch.float32)


uniform_rows = define(
    "uniform_rows(Tensor like, Tensor seed, Tensor places) -> Tensor",
    _uniform_rows,
    _uniform_rows_fake,
    setup=lambda ctx, inputs, output: None,
    backward=lambda ctx, *grads: (None, None, None),
)
