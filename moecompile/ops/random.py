"""Random numbers that depend on the seed and on an element's place in the global tensor, never on which rank draws them.

A counter-based generator: element i of the stream with seed s is a bijective mix of s and i (the finaliser of SplitMix64, Steele,
Lea and Flood 2014), so any part of a tensor can be drawn alone and every layout sees the same numbers.
"""

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


def global_index(shape: list[int], index: int, dim: int, outer: int, ranks: int, device: torch.device) -> Tensor:
    """Place of each element of a rank's part in the flattened global tensor; ``ranks == 1``: the tensor is whole."""
    place = torch.zeros((), dtype=torch.int64, device=device)
    for at, size in enumerate(shape):
        coordinate = torch.arange(size, device=device)
        whole = size
        if ranks > 1 and at == dim:
            inner = size // outer
            coordinate = coordinate // max(inner, 1) * (inner * ranks) + index * inner + coordinate % max(inner, 1)
            whole = size * ranks
        place = (place * whole).unsqueeze(-1) + coordinate
    return place.reshape(shape)


def _uniform(like: Tensor, seed: Tensor, index: Tensor, dim: int, outer: int, ranks: int) -> Tensor:
    _check_seed("uniform", seed)
    place = global_index(list(like.shape), int(index), dim, outer, ranks, like.device)
    bits = (_mix(seed.to(like.device) + (place + 1) * _GOLDEN) >> (64 - _BITS)) & ((1 << _BITS) - 1)
    return bits.to(torch.float32) * (1.0 / (1 << _BITS))


def _uniform_fake(like: Tensor, seed: Tensor, index: Tensor, dim: int, outer: int, ranks: int) -> Tensor:
    _check_seed("uniform", seed)
    return like.new_empty(like.shape, dtype=torch.float32)


def _no_gradient(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None, None, None]:
    return None, None, None, None, None, None


fold_seed = define("fold_seed(Tensor seed, int stream) -> Tensor", _fold_seed, _fold_seed_fake)

uniform = define(
    "uniform(Tensor like, Tensor seed, Tensor index, int dim, int outer, int ranks) -> Tensor",
    _uniform,
    _uniform_fake,
    setup=lambda ctx, inputs, output: None,
    backward=_no_gradient,
)

# ---- numbers for rows of experts -------------------------------------------------------------------------------------


def _global_rows(row_map: Tensor, index: Tensor, choices: int, outer: int, ranks: int) -> Tensor:
    """Places in the whole batch of the choices that a rank's row map names: of ``choices``, cut as ``[outer, ranks, inner]``."""
    inner = choices // outer
    before = row_map // max(inner, 1) * (inner * ranks) + index.to(row_map.device) * inner
    return torch.where(row_map < 0, row_map, before + row_map % max(inner, 1))


def _global_rows_fake(row_map: Tensor, index: Tensor, choices: int, outer: int, ranks: int) -> Tensor:
    require(
        row_map.dtype == torch.int64 and row_map.dim() == 1,
        f"moe::global_rows: row_map is {row_map.dtype}{list(row_map.shape)}, but int64 [R] is needed; pass permute's.",
    )
    return torch.empty_like(row_map)


global_rows = define(
    "global_rows(Tensor row_map, Tensor index, int choices, int outer, int ranks) -> Tensor",
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
