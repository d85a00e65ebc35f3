"""What can be said of a value on one digit of the rank's number.

A value that could be meant in two ways (``x / 2`` may halve it, or make it this rank's share of two) has several readings; an op
drops those that it cannot take, and a value that has none left is wrong.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class Kind(enum.Enum):
    """The value of a kind is what an error calls it."""

    SAME = "the same on all ranks"
    ZERO = "zero"
    CUT = "cut"
    SUM = "a sum still to be taken over the ranks"
    MEAN = "a mean still to be taken over the ranks"
    EXTREME = "a maximum or minimum still to be taken over the ranks"
    FRONT = "gathered, with the ranks in front"
    ROWS = "rows of this rank's own tokens"
    AWAY = "rows at the rank of their expert"
    COUNTS = "counts of this rank's own tokens"
    RECEIVED = "counts that the ranks told each other"
    TABLE = "counts of the rows at the rank of their expert"
    ROLL = "counts of the rows of all ranks"
    SIZES = "the sizes of an exchange"
    OFFSET = "this rank's index"
    OWN = "the numbers of this rank's own elements"
    PACKED = "several values in a row"
    PASSED = "parts on their way round a ring"
    PARTLY = "attention to the keys of some ranks"
    TERMS = "a sum of which some hops of a ring are there"
    UNKNOWN = "different on each rank in a way that is not known"

    __hash__ = object.__hash__  # readings are looked up all the time


class Reading(NamedTuple):
    """``dim``: which dim is cut; of SAME the set of dims along which all elements are equal, as bits; of an OFFSET its stride; of SIZES
    whether they are sent, received or gathered.

    ``outer``: a cut dim is ``[outer, ranks, inner]``, and so are the tokens that rows and their counts come from. Of FRONT, and of a SUM
    whose ranks stand in front: how many elements come before the ranks where they belong, in the flat order. ``tag``: the permute that
    rows and counts come from; of an OFFSET its axis; of PACKED the parts; of PASSED the places between a part and where it belongs; of
    PARTLY the number of hops and those that are in it; of TERMS all three.

    ``zigzag``: the ranks have two pieces each of what is ``[outer, 2 * ranks, inner]``, r from the front and r from the end, which is so on
    each of the digits of an axis if it is on the axis.
    """

    kind: Kind
    dim: int = 0
    outer: int = 1
    tag: Any = ""
    zigzag: bool = False

    def __str__(self) -> str:
        if self.kind is Kind.CUT:
            stripes = f" in {self.outer} stripes" if self.outer > 1 else ""
            return f"cut in dim {self.dim}{stripes}{self.order}"
        return f"{self.kind.value}{self.order}"

    @property
    def order(self) -> str:
        return " in zigzag" if self.zigzag else ""


ALL_DIMS = -1
RINGS = frozenset({Kind.PASSED, Kind.PARTLY, Kind.TERMS})
SAME = Reading(Kind.SAME)
FILLED = Reading(Kind.SAME, ALL_DIMS)
ZERO = Reading(Kind.ZERO)
SUM = Reading(Kind.SUM)
MEAN = Reading(Kind.MEAN)
UNKNOWN = Reading(Kind.UNKNOWN)

Options = tuple[Reading, ...]


class ConflictError(Exception):
    """An op cannot take its operands as they are spread; the message continues the name of the node."""


def cut(dim: int, outer: int = 1, zigzag: bool = False) -> Reading:
    return Reading(Kind.CUT, dim, outer, zigzag=zigzag)


def same(equal: int) -> Reading:
    """The same on all ranks, with all elements equal along the dims ``equal``."""
    return Reading(Kind.SAME, equal)


def is_even(reading: Reading, dim: int) -> bool:
    """Whether a whole value may stand for one that is cut in ``dim``: its elements along it are equal, or all zero."""
    return reading.kind is Kind.ZERO or (reading.kind is Kind.SAME and bool(reading.dim >> dim & 1))


def moved_bits(bits: int, order: Sequence[int | None]) -> int:
    """The set of dims after a view: ``order[new]`` is the old dim, None for a new dim of equal elements."""
    if bits == ALL_DIMS:
        return bits
    return sum(1 << new for new, old in enumerate(order) if old is None or bits >> old & 1)


def described(readings: Iterable[Reading]) -> str:
    return ", ".join(str(reading) for reading in readings)


# ---- rings -------------------------------------------------------------------------------------------------------------


def passed(part: Reading, steps: int) -> Reading:
    """A part that has come so many places."""
    return part._replace(kind=Kind.PASSED, tag=steps) if steps else cut(part.dim, zigzag=part.zigzag)


def partly(part: Reading, ranks: int, hops: frozenset[int]) -> Reading:
    """Attention to the keys that came with these hops; to all of them once none is missing. It lies as its queries do."""
    due = len(hops) < ranks
    return part._replace(kind=Kind.PARTLY, tag=(ranks, hops)) if due else cut(part.dim, zigzag=part.zigzag)


def terms(part: Reading, steps: int, ranks: int, hops: frozenset[int]) -> Reading:
    """A gradient to which these hops have given, ``steps`` places from home; that of a part once none is missing and it is there."""
    due = steps or len(hops) < ranks
    return part._replace(kind=Kind.TERMS, tag=(steps, ranks, hops)) if due else cut(part.dim, zigzag=part.zigzag)


def added(readings: Sequence[Reading]) -> Reading:
    """The sum of gradients that different hops have given."""
    first, *others = readings
    if first.kind is not Kind.TERMS or len(others) != 1 or others[0].kind is not Kind.TERMS:
        raise ConflictError(f"adds up {described(readings)}")
    steps, ranks, hops = first.tag
    more_steps, more_ranks, more = others[0].tag
    alike = first._replace(tag="") == others[0]._replace(tag="") and (steps, ranks) == (more_steps, more_ranks)
    if not alike or hops & more:
        raise ConflictError("adds up gradients of hops that do not belong together, or one of them twice")
    return terms(first, steps, ranks, hops | more)
