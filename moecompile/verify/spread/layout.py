"""Where the digit of a rank stands in the flat order of a value's elements.

A dim that is cut as ``[outer, ranks, inner]`` has the ranks behind ``before`` elements of the flat order, and a reshape leaves that
number alone. So a cut is followed through any reshape without knowing the whole shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch.fx import Node

from ... import meta
from ...placement.types import Shard
from ...program import Program
from .readings import ALL_DIMS, ConflictError, Kind, Options, Reading, cut

Shape = Sequence[int]


def before(shape: Shape, reading: Reading) -> int:
    """Elements in front of the ranks, of the local shape."""
    return math.prod(shape[: reading.dim]) * reading.outer


def locate(shape: Shape, front: int, inner: int = 0, zigzag: bool = False, later: int = 1) -> Options:
    """The cuts of ``shape`` whose ranks stand behind ``front`` elements. More than one where dims of size 1 leave it open.

    ``inner``: elements of the cut dim behind the ranks before a reshape, 0 where not known. Both pieces of a ``zigzag`` are in one dim; of
    each, ranks that cut it ``later`` may have parts.
    """
    found: list[Reading] = []
    held = 1
    for dim, size in enumerate(shape):
        if held <= front <= held * size and front % held == 0 and (held * size) % front == 0:
            outer = front // held
            # at the very end of a dim only where nothing of the cut dim stands behind the ranks
            halves = not zigzag or size // outer * later % 2 == 0
            if halves and (outer < size or size == 1 or inner <= 1):
                found.append(cut(dim, outer, zigzag))
        held *= size
    if not found:
        raise ConflictError("splits a dim at a place where the ranks' parts do not end")
    return tuple(sorted(found, key=lambda reading: reading.outer == shape[reading.dim]))


def reshaped(old: Shape, new: Shape, reading: Reading, later: int = 1, *, one_row: bool = False) -> Options:
    """Readings of a value after a reshape; ``later``: see `locate`. ``one_row``: a dim of size 1 may be this rank's one of more,
    as in a gradient."""
    if reading.kind is Kind.SAME:
        return (
            reading._replace(dim=_equal_dims(old, new, reading.dim)),
            *_equal_parts(old, new, reading.dim, 1 if one_row else 2),
        )
    if reading.kind is not Kind.CUT:
        return (reading,)
    found = locate(new, before(old, reading), old[reading.dim] // reading.outer, reading.zigzag, later)
    if len(found) > 1 and reading in found and tuple(old[: reading.dim + 1]) == tuple(new[: reading.dim + 1]):
        return (reading, *(other for other in found if other != reading))
    return found


def ends_with_ranks(shape: Shape, reading: Reading) -> bool:
    """Whether nothing of the dim that is cut stands behind the ranks."""
    return reading.kind is Kind.CUT and reading.dim < len(shape) and reading.outer == shape[reading.dim] > 1


def _equal_parts(old: Shape, new: Shape, bits: int, least: int) -> Options:
    """Equal elements along a dim are this rank's part of more of them, wherever that dim goes."""
    if bits in (0, ALL_DIMS):
        return ()
    found: list[Reading] = []
    for dim, size in enumerate(old):
        if bits >> dim & 1 and size >= least:
            with suppress(ConflictError):
                found += locate(new, math.prod(old[:dim]), size)
    kept = _equal_dims(old, new, bits)
    return tuple(dict.fromkeys(part for part in found if not kept >> part.dim & 1))


def _equal_dims(old: Shape, new: Shape, bits: int) -> int:
    """Dims of the new shape that are made of dims of equal elements only."""
    if bits in (0, ALL_DIMS):
        return bits
    equal, i, j = 0, 0, 0
    while j < len(new):
        held, made, first, start = 1, new[j], i, j
        j += 1
        while held != made and i < len(old):
            if held < made:
                held *= old[i]
                i += 1
            elif j < len(new):
                made *= new[j]
                j += 1
            else:
                break
        while held < made and j < len(new):
            made *= new[j]
            j += 1
        while i < len(old) and old[i] == 1:
            i += 1
        if all(old[dim] == 1 or bits >> dim & 1 for dim in range(first, i)):
            equal |= sum(1 << dim for dim in range(start, j))
    return equal


# ---- shapes ------------------------------------------------------------------------------------------------------------


def shapes_of(program: Program) -> dict[Node, Any]:
    """Shapes as numbers: every size that is known only at run time is a large prime of its own."""
    symbols: dict[Any, int] = {}

    def number(size: Any) -> int:
        if isinstance(size, int):
            return size
        expression = size.node.expr
        if expression.is_Symbol:
            return symbols.setdefault(expression, _prime(len(symbols)))
        for symbol in expression.free_symbols:
            symbols.setdefault(symbol, _prime(len(symbols)))
        return int(expression.subs(symbols))

    def shape(found: Any) -> Any:
        if isinstance(found, torch.Tensor):
            return tuple(map(number, found.shape))
        return [shape(item) for item in found] if isinstance(found, (tuple, list)) else ()

    return {node: shape(meta.value(node)) for node in program.graph.nodes if "val" in node.meta}


def noted_ends(program: Program, shapes: dict[Node, Any]) -> dict[tuple[str, Shape], set[tuple[str, Shard]]]:
    """Axes and placements that were noted for values of a line and of a shape, of cuts with the ranks at the very end of a dim."""
    found: dict[tuple[str, Shape], set[tuple[str, Shard]]] = {}
    for node in program.graph.nodes:
        for axis, placed in meta.placements(node).items():
            is_cut = isinstance(placed, Shard) and not placed.rows and isinstance(shapes.get(node), tuple)
            if is_cut and ends_with_ranks(shapes[node], cut(placed.dim, placed.outer)):
                found.setdefault((meta.source(node), shapes[node]), set()).add((axis, placed))
    return found


@cache
def _prime(index: int) -> int:
    """One of the primes above a million, which no product of a model's sizes is likely to hold."""
    number = 1_000_000 if index == 0 else _prime(index - 1)
    while True:
        number += 1
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            return number
