"""Ops that take parts of a dim, and gradients of parts."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from .call import Call, Rule, only
from .elementwise import words
from .readings import SAME, SUM, UNKNOWN, ConflictError, Kind, Options, Reading, cut, same
from .views import WITH_ROWS, is_backward, plain_view, reordered, source_of


def part(call: Call, reading: Reading, dim: int, start: int, stop: int) -> Reading:
    """Elements ``start`` to ``stop`` of a dim: of a cut one whole stripes only."""
    size = call.shape(source_of(call))[dim]
    if (start, stop) == (0, size) or reading.kind in (Kind.SUM, Kind.MEAN, Kind.ZERO, Kind.SAME):
        return reading
    if reading.kind is Kind.CUT and reading.dim == dim:
        inner = size // reading.outer
        if start % inner or stop % inner:
            raise ConflictError(f"takes a part of dim {dim}, which is {reading}")
        return reading._replace(outer=(stop - start) // inner)
    if reading.kind in (*WITH_ROWS, Kind.FRONT) and dim == 0:
        return UNKNOWN
    return reading


def _slice(call: Call) -> Options:
    source = source_of(call)
    dim = call.dim("dim", source)
    size = call.shape(source)[dim]
    bounds = [call.get("start", 0), call.get("end", size)]
    reading = plain_view(call.of(source))
    step = call.get("step", 1)
    if step != 1 and all(isinstance(item, int) for item in bounds):
        return only(_strided(reading, dim, size, bounds[0], step))
    if not all(isinstance(item, int) for item in bounds):
        return only(reading if reading.kind in (Kind.SUM, Kind.SAME, Kind.ZERO) else UNKNOWN)
    start, stop = (max(0, min(size, at + size if at < 0 else at)) for at in bounds)
    if _gives_a_shape(call.node):
        return only(UNKNOWN)
    return only(part(call, reading, dim, start, stop))


def _gives_a_shape(node: Node) -> bool:
    """Whether a value is read for its shape only, by draws of random numbers."""
    return bool(node.users) and all(
        str(user.target).startswith("moe.uniform")
        or (str(user.target).startswith("aten.expand") and _gives_a_shape(user))
        for user in node.users
    )


def _strided(reading: Reading, dim: int, size: int, start: int, step: int) -> Reading:
    """Every so many-th element: of a cut dim the same ones in every part."""
    inner = size // (reading.outer * (1 + reading.zigzag))
    if reading.kind is Kind.CUT and reading.dim == dim and (inner % step or not 0 <= start < step):
        raise ConflictError(f"takes every {step}th element of dim {dim}, which is {reading}")
    return UNKNOWN if reading.kind in (*WITH_ROWS, Kind.FRONT) and dim == 0 else reading


def _repeat_interleave(call: Call) -> Options:
    """Each element so many times in a row: a cut stays where it is."""
    reading, dim = plain_view(call.of(source_of(call))), call.get("dim")
    if not isinstance(call.get("repeats"), int) or dim is None:
        return only(SAME if reading.kind in (Kind.SAME, Kind.ZERO) else UNKNOWN)
    return only(UNKNOWN if reading.kind in (*WITH_ROWS, Kind.FRONT) else reading)


def _narrow(call: Call) -> Options:
    start = int(call["start"])
    return only(
        part(
            call,
            plain_view(call.of(source_of(call))),
            call.dim("dim", source_of(call)),
            start,
            start + int(call["length"]),
        )
    )


def _split(call: Call) -> list[Options]:
    """Also of values that were put into one to travel together."""
    source = source_of(call)
    dim, reading = call.dim("dim", source), plain_view(call.of(source))
    lengths = [call.shapes[call.node][at][dim] for at in range(call.outs)]
    if reading.kind is Kind.PACKED:
        if [length for length, _ in reading.tag] != lengths:
            raise ConflictError("takes values apart in other places than they were put together")
        return [options for _, options in reading.tag]
    found, start = [], 0
    for length in lengths:
        found.append(only(part(call, reading, dim, start, start + length)))
        start += length
    return found


def _select(call: Call) -> Options:
    source = source_of(call)
    dim = call.dim("dim", source)
    order = [at for at in range(len(call.shape(source))) if at != dim]
    return _without(call, order)


def _without(call: Call, order: Sequence[int]) -> Options:
    reading = plain_view(call.of(source_of(call)))
    if reading.kind in (Kind.SUM, Kind.MEAN):
        return only(reading)
    if reading.kind is Kind.CUT and reading.dim not in order:
        raise ConflictError(f"picks single elements of a dim that is {reading}")
    if reading.kind is Kind.FRONT:
        raise ConflictError("picks one rank's part of what was gathered")
    return reordered(call, reading, order)


def _unbind(call: Call) -> list[Options]:
    source = source_of(call)
    dim = call.dim("dim", source)
    return [_without(call, [at for at in range(len(call.shape(source))) if at != dim])] * call.outs


def _slice_backward(call: Call) -> Options:
    """The gradient of a part, among zeros: of a cut dim whole stripes only."""
    source, sizes = call["grad_output"], call.out_shape
    reading = plain_view(call.of(source))
    dim = int(call["dim"]) % max(len(sizes), 1)
    start, stop = ("start", "end") if "start" in call.args else ("index", "index")
    bounds = [at + sizes[dim] if isinstance(at, int) and at < 0 else at for at in (call[start], call[stop])]
    if call.shape(source) == sizes and call.get("step", 1) == 1:
        return only(reading)
    if reading.kind is Kind.SAME:
        order = [at - (at > dim and start == "index") for at in range(len(sizes))]
        return only(same(sum(1 << at for at, was in enumerate(order) if at != dim and reading.dim >> was & 1)))
    if reading.kind in (Kind.SUM, Kind.MEAN, Kind.ZERO):
        return only(reading)
    if start == "index":
        moved = reading.dim + (reading.dim >= dim)
        return only(reading._replace(dim=moved) if reading.kind is Kind.CUT else UNKNOWN)
    if reading.kind is not Kind.CUT or reading.dim != dim:
        return only(reading if dim or reading.kind is Kind.CUT else UNKNOWN)
    if call.get("step", 1) != 1:
        return only(reading if sizes[dim] // (reading.outer * (1 + reading.zigzag)) % call["step"] == 0 else UNKNOWN)
    inner = call.shape(source)[dim] // reading.outer
    if any(not isinstance(at, int) or at % inner for at in (bounds[0], min(bounds[1], sizes[dim]))):
        raise ConflictError(f"puts a part back into dim {dim}, which is {reading}")
    stripes = cut(dim, sizes[dim] // inner, reading.zigzag)
    # of one row autograd leaves the sum over what was broadcast out, as in `views._drops_one_row`
    return (stripes, SUM) if is_backward(call) and call.shape(source)[dim] == 1 else only(stripes)


RULES: dict[str, Rule] = {
    **dict.fromkeys(words("aten.slice_backward aten.select_backward"), _slice_backward),
    "aten.slice": _slice,
    "aten.narrow": _narrow,
    **dict.fromkeys(words("aten.split aten.split_with_sizes aten.chunk"), _split),
    "aten.select": _select,
    "aten.unbind": _unbind,
    "aten.repeat_interleave": _repeat_interleave,
}
