"""One call as a rule sees it, on one digit: operands with their readings, local shapes, and how operands go together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from ... import meta
from ...graph import arguments
from ...placement.types import Shard
from .digits import Digits
from .readings import (
    ALL_DIMS,
    FILLED,
    RINGS,
    SAME,
    SUM,
    UNKNOWN,
    ZERO,
    ConflictError,
    Kind,
    Options,
    Reading,
    described,
)  # fmt: skip

Rule = Callable[["Call"], "Options | list[Options]"]

_TERMS = (Kind.SUM, Kind.MEAN)
_PARTS = (Kind.CUT, Kind.ROWS, Kind.AWAY, Kind.FRONT)
_OPAQUE = (Kind.RECEIVED, Kind.TABLE, Kind.ROLL, Kind.SIZES, Kind.OFFSET, Kind.OWN, Kind.PACKED, Kind.EXTREME)


@dataclass
class Call:
    """``now`` has the readings of the tensor operands on digit ``at``. Sizes known only at run time are numbers, too."""

    node: Node
    name: str
    shapes: Mapping[Node, Any]
    digits: Digits
    at: int = 0
    now: Mapping[Node, Reading] = field(default_factory=dict)
    offsets: Set[str] = frozenset()  # names of the inputs that hold this rank's index
    noted: Mapping[tuple[str, Sequence[int]], Set[tuple[str, Shard]]] = field(default_factory=dict)  # see `noted_ends`
    front: int = -1  # where a view moved the ranks to that stood in front, or took them from

    def __post_init__(self) -> None:
        self.args: dict[str, Any] = arguments(self.node)

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def get(self, name: str, default: Any = None) -> Any:
        """An argument by the name that the op's schema gives it; the default where it has no such argument."""
        found = self.args.get(name)
        return default if found is None else found

    def of(self, arg: Any) -> Reading:
        """Reading of an operand; a number is the same everywhere."""
        return self.now.get(arg, FILLED) if isinstance(arg, Node) else FILLED

    def shape(self, arg: Any) -> tuple[int, ...]:
        """Local shape; that of a number is empty."""
        found: tuple[int, ...] = self.shapes.get(arg, ()) if isinstance(arg, Node) else ()
        return found

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Local shape of the result, of the first one if there are several."""
        found = self.shapes[self.node]
        first: tuple[int, ...] = found[0] if isinstance(found, list) else found
        return first

    @property
    def outs(self) -> int:
        """Number of results."""
        value = self.node.meta["val"]
        return len(value) if isinstance(value, (tuple, list)) else 1

    @property
    def ranks(self) -> int:
        return self.digits.sizes[self.at]

    @property
    def later(self) -> int:
        """Ranks of all digits that may cut further what this one has cut."""
        return math.prod(self.digits.sizes[self.at + 1 :])

    def within(self, axis: str) -> bool:
        """Whether this digit belongs to an axis."""
        return self.at in self.digits.axis(axis)

    def size(self, axis: str) -> int:
        """Ranks of an axis."""
        size = 1
        for digit in self.digits.axis(axis):
            size *= self.digits.sizes[digit]
        return size

    @property
    def group_sizes(self) -> set[int]:
        """Ranks of the axes that this digit belongs to."""
        return {self.size(axis) for axis, digits in self.digits.of.items() if self.at in digits}

    def dim(self, name: str, arg: Any, default: int = 0) -> int:
        """A dim argument, counted from the front of ``arg``."""
        return int(self.get(name, default)) % max(len(self.shape(arg)), 1)

    def tensors(self) -> list[Node]:
        """Tensor operands, each as often as it is used, lists flattened."""
        return [item for item in flat(self.args.values()) if isinstance(item, Node) and item in self.now]

    def each(self, options: Options) -> Options | list[Options]:
        """The same for every result."""
        return [options] * self.outs if isinstance(self.node.meta["val"], (tuple, list)) else options

    def whole(self, *args: Any) -> None:
        """Refuse operands that are not the same on all ranks."""
        for arg in args:
            if self.of(arg).kind not in (Kind.SAME, Kind.ZERO):
                raise ConflictError(f"needs the whole of {name_of(arg)}, which is {self.of(arg)}")


def flat(args: Any) -> Iterator[Any]:
    for arg in args:
        if isinstance(arg, (list, tuple)):
            yield from flat(arg)
        else:
            yield arg


def name_of(arg: Any) -> str:
    return arg.name if isinstance(arg, Node) else str(arg)


def plain(reading: Reading) -> Reading:
    """A rank's own counts add up to those of all."""
    return SUM if reading.kind is Kind.COUNTS else reading


# ---- operands that meet element by element -----------------------------------------------------------------------------


def together(call: Call, operands: Sequence[Any], linear: str = "") -> Reading:
    """Reading of an elementwise result. ``linear`` says when terms of a sum may pass: in all operands (``all``), in any one
    (``one``), in the first (``first``), or never.
    """
    items = [item for item in operands if isinstance(item, Node) and item in call.now]
    readings = [_of_one_row(call, item, plain(call.of(item))) for item in items]
    kinds = {reading.kind for reading in readings}
    if len(items) == 1 and linear and kinds <= RINGS:
        return readings[0]
    if Kind.UNKNOWN in kinds or not kinds.isdisjoint(_OPAQUE):
        return UNKNOWN
    if not kinds.isdisjoint(_PARTS):
        return _aligned(call, items, readings)
    if not kinds.isdisjoint(_TERMS):
        return _terms(call, operands, items, readings, linear)
    if Kind.SAME not in kinds:
        return ZERO if linear and kinds else FILLED
    if Kind.ZERO in kinds and (linear == "one" or (linear == "first" and call.of(operands[0]).kind is Kind.ZERO)):
        return ZERO
    ndim, bits = len(call.out_shape), ALL_DIMS
    for item, reading in zip(items, readings, strict=True):
        bits &= _spread(call.shape(item), call.out_shape, reading.dim if reading.kind is Kind.SAME else ALL_DIMS)
    return Reading(Kind.SAME, bits if bits == ALL_DIMS else bits & ((1 << ndim) - 1))


def _of_one_row(call: Call, item: Node, reading: Reading) -> Reading:
    """The one row of this rank that a backward makes longer is its term of a sum: autograd, which sums over what was broadcast, leaves a
    sum of one element out.
    """
    shape, out = call.shape(item), call.out_shape
    if reading.kind is not Kind.CUT or meta.direction(call.node) is not meta.Direction.BACKWARD:
        return reading
    longer = shape[reading.dim] == 1 < out[len(out) - len(shape) + reading.dim]
    return SUM if longer else reading


def _spread(shape: Sequence[int], out: Sequence[int], bits: int) -> int:
    """Dims of equal elements, seen from the result of a broadcast."""
    if bits == ALL_DIMS:
        return bits
    lead, found = len(out) - len(shape), 0
    for dim, size in enumerate(out):
        at = dim - lead
        if at < 0 or bits >> at & 1 or (shape[at] == 1 and size != 1):
            found |= 1 << dim
    return found


def _aligned(call: Call, items: Sequence[Node], readings: Sequence[Reading]) -> Reading:
    """One cut for all; whole operands lack the dim, or have equal elements along it."""
    out, found = call.out_shape, None
    for item, reading in zip(items, readings, strict=True):
        lead = len(out) - len(call.shape(item))
        if reading.kind not in _PARTS:
            continue
        seen = reading._replace(dim=reading.dim + lead) if reading.kind is Kind.CUT else reading
        if (reading.kind is not Kind.CUT and lead) or (found is not None and seen != found):
            raise ConflictError(f"has operands that do not lie alike ({described(readings)})")
        found = seen
    assert found is not None
    for item, reading in zip(items, readings, strict=True):
        if reading.kind in _PARTS or reading.kind is Kind.ZERO:
            continue
        if reading.kind is not Kind.SAME:
            raise ConflictError(f"takes {item.name}, {reading}, together with one that is {found}")
        at = found.dim - (len(out) - len(call.shape(item)))
        if at >= 0 and call.shape(item)[at] != 1 and not reading.dim >> at & 1:
            raise ConflictError(f"takes the whole of {item.name} together with an operand that is {found}")
    return found


def _terms(
    call: Call, operands: Sequence[Any], items: Sequence[Node], readings: Sequence[Reading], linear: str
) -> Reading:
    terms = [reading for reading in readings if reading.kind in _TERMS]
    others = [reading for reading in readings if reading.kind not in _TERMS]
    if linear == "all":
        numbers = any(not isinstance(item, Node) and item for item in operands)
        fits = all(
            reading.kind is Kind.ZERO or (reading.kind is Kind.SAME and terms[0].kind is Kind.MEAN)
            for reading in others
        )
        if fits and not (numbers and terms[0].kind is Kind.SUM) and len(set(terms)) == 1:
            return terms[0]
    passes = linear == "one" or (linear == "first" and readings[0].kind in _TERMS)
    if passes and len(terms) == 1 and all(reading.kind in (Kind.SAME, Kind.ZERO) for reading in others):
        return ZERO if any(reading.kind is Kind.ZERO for reading in others) else terms[0]
    raise ConflictError(f"takes {described(readings)}, which it cannot before the ranks' parts are added up")


def only(reading: Reading) -> Options:
    return (reading,)


def first_linear(call: Call, source: Any, *others: Any) -> Reading:
    """A result that is linear in ``source`` and laid out like it, the others being the same on all ranks."""
    reading = plain(call.of(source))
    call.whole(*others)
    return reading if reading.kind is not Kind.SAME else SAME
