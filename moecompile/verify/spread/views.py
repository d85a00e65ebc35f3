"""Ops that only move elements: shapes and the order of dims."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch.fx import Node

from ... import meta
from ...placement.types import Partial, Shard
from .call import Call, Rule, only
from .elementwise import words
from .layout import before, ends_with_ranks, reshaped
from .readings import SAME, SUM, UNKNOWN, ConflictError, Kind, Options, Reading, cut, moved_bits, same

WITH_ROWS = (Kind.ROWS, Kind.AWAY)


def source_of(call: Call) -> Any:
    return call.args.get("self", next(iter(call.args.values())))


def _reshape(call: Call) -> Options:
    source = source_of(call)
    reading, old, new = plain_view(call.of(source)), call.shape(source), call.out_shape
    if reading.kind in WITH_ROWS and (not new or old[0] != new[0]):
        return only(UNKNOWN)
    if reading.kind is Kind.CUT and any(
        isinstance(placed, Partial) and call.within(axis) for axis, placed in meta.placements(call.node).items()
    ):
        raise ConflictError(f"is a sum still to be taken by its note, but {reading}")
    ends = tuple(end for end in _noted(call) if reading.kind is Kind.CUT and before(new, end) == before(old, reading))
    gradient = is_backward(call)
    found = reshaped(old, new, reading, call.later, one_row=gradient) if not ends or gradient else ()
    found = tuple(dict.fromkeys((*found, *ends, *_of_batches(call, reading, old, new))))
    return (*found, SUM) if _drops_one_row(call, reading, old, new) else found


def _noted(call: Call) -> Options:
    """Cuts of the result that have the ranks at the end of a dim: ``[.., heads * width] -> [.. * heads, width]`` with one head a rank
    changes no local shape, so that only a note of the pass that cut it tells it from a reshape of nothing. It counts where the order
    of the elements allows it. A gradient has no note, and may lie as a value of its line does.
    """
    found: Iterable[tuple[str, Any]] = meta.placements(call.node).items()
    if not found and is_backward(call):
        found = call.noted.get((meta.source(call.node), call.out_shape), set())
    cuts = [(axis, placed) for axis, placed in found if isinstance(placed, Shard) and not placed.rows]
    ways = (cut(placed.dim, placed.outer, placed.zigzag) for axis, placed in cuts if call.within(axis))
    return tuple(way for way in ways if ends_with_ranks(call.out_shape, way))


def _of_batches(call: Call, reading: Reading, old: Sequence[int], new: Sequence[int]) -> Options:
    """``einsum`` leaves out a dim of which this rank has one element, wherever it stands, and puts it back where it belongs: between, what
    other ranks have are other matrices of a batch. Reshapes of the model itself have notes, and mean what they say.
    """
    if reading.kind is not Kind.CUT or meta.has_placements(call.node):
        return ()
    if len(new) == 3 and old[reading.dim] == 1 and _read_by_products(call.node):
        return only(cut(0, new[0]))
    if len(old) == 3 and reading.dim == _batch_dim(source_of(call)) and reading == cut(reading.dim, old[reading.dim]):
        return tuple(cut(dim) for dim, size in enumerate(new) if size == 1)
    return ()


def _read_by_products(node: Node) -> bool:
    """Whether only products of batches read a value, turned or as it is."""
    return bool(node.users) and all(
        _is(user, "aten.bmm") or (_order(user) is not None and _read_by_products(user)) for user in node.users
    )


def _batch_dim(node: Node) -> int | None:
    """Where a product of batches that was turned has its batch; None for any other value."""
    order = _order(node)
    if order is None:
        return 0 if _is(node, "aten.bmm") else None
    inner = _batch_dim(node.args[0])  # type: ignore[arg-type]
    return None if inner is None else order.index(inner)


def _order(node: Node) -> list[int] | None:
    """``order[new]`` is the old dim of a value of three dims that is turned; None for other calls."""
    if not isinstance(node, Node) or not node.args or not isinstance(node.args[0], Node) or meta.has_placements(node):
        return None
    dims: Any = node.args[1:]
    if _is(node, "aten.permute") and len(dims[0]) == 3:
        return [int(dim) % 3 for dim in dims[0]]
    if _is(node, "aten.transpose") and meta.is_tensor(node) and meta.tensor(node).dim() == 3:
        order = [0, 1, 2]
        one, other = (int(dim) % 3 for dim in dims[:2])
        order[one], order[other] = order[other], order[one]
        return order
    return None


def _is(node: Node, name: str) -> bool:
    return str(node.target).startswith(name)


def is_backward(call: Call) -> bool:
    return meta.direction(call.node) is meta.Direction.BACKWARD


def _drops_one_row(call: Call, reading: Reading, old: Sequence[int], new: Sequence[int]) -> bool:
    """Whether a gradient loses the dim of which this rank has one element: autograd, which sums over what was broadcast, leaves a sum
    of one element out, so that this may be the rank's part of that sum.
    """
    return is_backward(call) and reading.kind is Kind.CUT and old[reading.dim] == 1 and len(new) < len(old)


def plain_view(reading: Reading) -> Reading:
    """Counts keep what they are only where an op asks for them as they come."""
    return SUM if reading.kind is Kind.COUNTS else reading


def reordered(call: Call, reading: Reading, order: Sequence[int | None]) -> Options:
    """``order[new]`` is the old dim, or None for a new one of size 1 or of equal elements."""
    if reading.kind is Kind.CUT:
        if reading.dim not in order:
            raise ConflictError("drops the dim that is cut")
        return only(reading._replace(dim=order.index(reading.dim)))
    if reading.kind is Kind.SAME:
        return only(same(moved_bits(reading.dim, order)))
    if reading.kind is Kind.FRONT or (reading.kind is Kind.SUM and (reading.outer > 1 or reading.zigzag)):
        return _ranks_moved(call, reading, order)
    if reading.kind in WITH_ROWS:
        return only(reading if order and order[0] == 0 else UNKNOWN)
    if reading.kind is Kind.SUM and order and order[0] not in (0, None):
        return (reading, *_ranks_to_front(call, order))
    return only(reading)


def _ranks_moved(call: Call, reading: Reading, order: Sequence[int | None]) -> Options:
    """The ranks in front go to where they belong; the other dims keep their order."""
    kept = [dim for dim in order if dim]
    if 0 not in order or kept != sorted(kept):
        raise ConflictError("puts the gathered parts into another order")
    at = order.index(0)
    if not any(dim is not None for dim in order[:at]):
        return only(reading)
    call.front = at
    if reading.zigzag or math.prod(call.out_shape[:at]) != reading.outer:
        raise ConflictError("puts the gathered parts into a wrong place")
    return only(SAME if reading.kind is Kind.FRONT else SUM)


def _ranks_to_front(call: Call, order: Sequence[int | None]) -> Options:
    """A dim as long as there are ranks comes to the front, where a reduce-scatter takes it apart."""
    old = call.shape(source_of(call))
    first, rest = order[0], [dim for dim in order[1:] if dim is not None]
    if first is None or rest != sorted(rest) or old[first] not in call.group_sizes:
        return ()
    front = math.prod(old[:first])
    call.front = first
    return (SUM._replace(outer=front),) if front > 1 else ()


def _permute(call: Call) -> Options:
    source = source_of(call)
    ndim = len(call.shape(source))
    dims = [int(dim) % ndim for dim in call["dims"]]
    reading = plain_view(call.of(source))
    return tuple(
        dict.fromkeys(
            (*reordered(call, reading, dims), *_of_batches(call, reading, call.shape(source), call.out_shape))
        )
    )


def _transpose(call: Call) -> Options:
    source = source_of(call)
    order = list(range(len(call.shape(source))))
    if len(order) > 1:
        first, second = int(call.get("dim0", 0)) % len(order), int(call.get("dim1", 1)) % len(order)
        order[first], order[second] = order[second], order[first]
    return reordered(call, plain_view(call.of(source)), order)


def _movedim(call: Call) -> Options:
    source = source_of(call)
    order = list(range(len(call.shape(source))))
    old, new = call["source"], call["destination"]
    if not isinstance(old, int) or not isinstance(new, int):
        return only(UNKNOWN)
    moved = order.pop(old % (len(order)))
    order.insert(new % (len(order) + 1), moved)
    return reordered(call, plain_view(call.of(source)), order)


def _unsqueeze(call: Call) -> Options:
    source = source_of(call)
    order: list[int | None] = list(range(len(call.shape(source))))
    order.insert(int(call["dim"]) % (len(order) + 1), None)
    reading = plain_view(call.of(source))
    if call.of(source).kind is Kind.COUNTS:  # as those that an exchange with this rank alone would give
        return only(call.of(source))
    if reading.kind in WITH_ROWS or reading.kind is not Kind.SUM:
        return reordered(call, reading, order)
    return only(reading)


def _squeeze(call: Call) -> Options:
    source = source_of(call)
    shape = call.shape(source)
    dims = call.args.get("dim", list(range(len(shape))))
    gone = {int(dim) % max(len(shape), 1) for dim in (dims if isinstance(dims, (list, tuple)) else [dims])}
    gone = {dim for dim in gone if shape and shape[dim] == 1}
    reading = plain_view(call.of(source))
    if reading.kind is Kind.SUM:
        return only(reading)
    if is_backward(call) and reading.kind is Kind.CUT and reading.dim in gone:
        return only(SUM)  # the one row of this rank, as in _drops_one_row
    return reordered(call, reading, [dim for dim in range(len(shape)) if dim not in gone])


def _expand(call: Call) -> Options:
    """New dims, and dims of size 1 made longer, have equal elements."""
    source, out = source_of(call), call.out_shape
    shape, reading = call.shape(source), plain_view(call.of(source))
    lead = len(out) - len(shape)
    order = [None if at < lead or shape[at - lead] != size else at - lead for at, size in enumerate(out)]
    if reading.kind is Kind.SUM:
        return only(reading)
    if reading.kind is Kind.CUT and reading.dim not in order:
        raise ConflictError("makes a dim longer that is cut")
    return reordered(call, reading, order)


def _repeat(call: Call) -> Options:
    source = source_of(call)
    reading, times = plain_view(call.of(source)), list(call["repeats"])
    lead = len(times) - len(call.shape(source))
    if reading.kind is Kind.CUT:
        return only(reading._replace(dim=reading.dim + lead, outer=reading.outer * int(times[reading.dim + lead])))
    if reading.kind is Kind.SAME:
        order = [None if at < lead else at - lead for at in range(len(times))]
        return only(same(moved_bits(reading.dim, order)))
    if reading.kind in WITH_ROWS and (lead or times[0] != 1):
        return only(UNKNOWN)
    return only(reading)


# ---- other shapes -------------------------------------------------------------------------------------------------------


def _complex(call: Call) -> Options:
    """Real and imaginary part as a last dim of two, or back."""
    source = source_of(call)
    reading, ndim = plain_view(call.of(source)), min(len(call.shape(source)), len(call.out_shape))
    if reading.kind is Kind.CUT and reading.dim >= ndim:
        raise ConflictError("has real and imaginary part on different ranks")
    return only(SAME if reading.kind is Kind.SAME else reading)


def _triangle(call: Call) -> Options:
    source = source_of(call)
    reading, ndim = plain_view(call.of(source)), len(call.shape(source))
    if reading.kind is Kind.CUT and reading.dim >= ndim - 2:
        raise ConflictError("takes a triangle of a matrix that is cut")
    return only(SAME if reading.kind is Kind.SAME else reading)


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        words("aten.reshape aten.view aten._unsafe_view aten.flatten aten.unflatten aten.view_as aten.reshape_as"),
        _reshape,
    ),
    "aten.permute": _permute,
    **dict.fromkeys(words("aten.transpose aten.t aten.swapaxes"), _transpose),
    "aten.movedim": _movedim,
    "aten.unsqueeze": _unsqueeze,
    "aten.squeeze": _squeeze,
    **dict.fromkeys(words("aten.expand aten.expand_as aten.broadcast_to"), _expand),
    "aten.repeat": _repeat,
    **dict.fromkeys(words("aten.view_as_real aten.view_as_complex"), _complex),
    **dict.fromkeys(words("aten.tril aten.triu"), _triangle),
}

RESHAPES = frozenset(name for name, rule in RULES.items() if rule is _reshape)
# these bring the dim of an axis to the front, or back
MOVES = frozenset({"aten.permute", "aten.transpose", "aten.movedim"})
