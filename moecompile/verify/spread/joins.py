"""Ops that put values together, or one into another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .call import Call, Rule, only
from .elementwise import words
from .readings import ALL_DIMS, SAME, SUM, UNKNOWN, ConflictError, Kind, Options, Reading, cut, moved_bits, same
from .views import WITH_ROWS, plain_view


def _cat(call: Call) -> Options:
    items = [
        item for item in call["tensors"] if 0 not in call.shape(item)
    ]  # empty ones, such as a new cache, add nothing
    if not items:
        return only(SAME)
    dim = call.dim("dim", items[0])
    readings = [plain_view(call.of(item)) for item in items]
    kinds = {reading.kind for reading in readings}
    if kinds <= {Kind.SAME, Kind.ZERO}:
        bits = ALL_DIMS
        for reading in readings:
            bits &= reading.dim if reading.kind is Kind.SAME else ALL_DIMS
        return only(same(bits & ~(1 << dim) if len(items) > 1 else bits))
    if len(set(readings)) == 1 and not (readings[0].kind is Kind.CUT and readings[0].dim == dim):
        return only(readings[0] if readings[0].kind not in WITH_ROWS or dim else UNKNOWN)
    if Kind.UNKNOWN in kinds:
        return only(UNKNOWN)
    if kinds == {Kind.CUT} and {reading.dim for reading in readings} == {dim}:
        stripes = {call.shape(item)[dim] // reading.outer for item, reading in zip(items, readings, strict=True)}
        if len(stripes) == len({reading.zigzag for reading in readings}) == 1:
            return only(cut(dim, sum(reading.outer for reading in readings), readings[0].zigzag))
    if len(call.out_shape) == 1:
        return only(packed([(call.shape(item)[0], (reading,)) for item, reading in zip(items, readings, strict=True)]))
    return only(_one_of(call, items, readings, dim))


def packed(parts: Sequence[tuple[int, Options]]) -> Reading:
    """Flat values that travel together, each with its length and its own ways of being read."""
    alike = {options for _, options in parts}
    if alike in ({(SUM,)}, {(SAME,)}):
        return next(iter(alike))[0]
    return Reading(Kind.PACKED, tag=tuple(parts))


def _one_of(call: Call, items: Sequence[Any], readings: Sequence[Reading], dim: int) -> Reading:
    """Pieces that are zero, or equal along the dim, go with one that is cut."""
    parts = {reading for reading in readings if reading.kind not in (Kind.SAME, Kind.ZERO)}
    found = parts.pop()
    at = found.dim if found.kind is Kind.CUT else 0
    fits = all(
        reading == found
        or reading.kind is Kind.ZERO
        or (reading.kind is Kind.SAME and found.kind is not Kind.SUM and reading.dim >> at & 1)
        for reading in readings
    )
    if parts or not fits or (found.kind is not Kind.SUM and at == dim):
        raise ConflictError("puts values together that do not lie alike (" + ", ".join(map(str, readings)) + ")")
    return found


def _stack(call: Call) -> Options:
    items = call["tensors"]
    dim = int(call.get("dim", 0)) % (len(call.shape(items[0])) + 1)
    readings = [plain_view(call.of(item)) for item in items]
    if all(reading.kind in (Kind.SAME, Kind.ZERO) for reading in readings):
        return only(SAME)
    found = _one_of(call, items, readings, -1)
    if found.kind is Kind.CUT:
        return only(found._replace(dim=found.dim + (dim <= found.dim)))
    return only(found if found.kind not in WITH_ROWS or dim else UNKNOWN)


def _slice_scatter(call: Call) -> Options:
    """A tensor with a part of it exchanged, along a dim that is not cut."""
    items = [call["self"], call["src"]]
    readings = [plain_view(call.of(item)) for item in items]
    if all(reading.kind in (Kind.SAME, Kind.ZERO) for reading in readings):
        return only(SAME)
    return only(_one_of(call, items, readings, call.dim("dim", items[0])))


def _select_scatter(call: Call) -> Options:
    """A tensor with one element of a dim exchanged; the dim is not cut, and what comes in lacks it."""
    target, part_in = call["self"], call["src"]
    dim, readings = call.dim("dim", target), [plain_view(call.of(target)), plain_view(call.of(part_in))]
    if all(reading.kind in (Kind.SAME, Kind.ZERO) for reading in readings):
        return only(SAME)
    if any(reading.kind in WITH_ROWS for reading in readings):
        return only(UNKNOWN)
    if readings[1].kind is Kind.CUT:
        readings[1] = readings[1]._replace(dim=readings[1].dim + (dim <= readings[1].dim))
    elif readings[1].kind is Kind.SAME:
        order = [at if at < dim else at - 1 for at in range(len(call.shape(target)))]
        readings[1] = same(moved_bits(readings[1].dim, [None if at == dim else old for at, old in enumerate(order)]))
    return only(_one_of(call, [target, part_in], readings, dim))


def _pad(call: Call) -> Options:
    source = call["self"]
    reading, pad, ndim = plain_view(call.of(source)), list(call["pad"]), len(call.shape(source))
    padded = {ndim - 1 - at // 2 for at, width in enumerate(pad) if width}
    if reading.kind is Kind.CUT and reading.dim in padded:
        raise ConflictError(f"pads a dim that is {reading}")
    if reading.kind is Kind.SUM and call.get("value", 0):
        raise ConflictError("pads a sum still to be taken with a number, which every rank would add")
    if reading.kind is Kind.SAME and reading.dim != ALL_DIMS:
        return only(same(reading.dim & ~sum(1 << dim for dim in padded)))
    return only(SAME if reading.kind is Kind.SAME else reading)


RULES: dict[str, Rule] = {
    **dict.fromkeys(words("aten.cat aten.concat"), _cat),
    "aten.stack": _stack,
    "aten.slice_scatter": _slice_scatter,
    "aten.select_scatter": _select_scatter,
    **dict.fromkeys(words("aten.constant_pad_nd aten.pad"), _pad),
}
