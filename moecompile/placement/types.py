"""Placements: how one value is spread over the ranks of one mesh axis.

The reading that makes gradients derivable: a sharded program is an ordinary function of what *all* ranks hold, each rank
returns its own share of the loss, and the loss is the sum of the shares. Every collective has a true adjoint in that function
(all-reduce: all-reduce, all-gather: reduce-scatter, exchange: exchange back), so the backward needs no tags, and the
gradient of a value that several ranks hold as one (a replicated parameter) is the plain sum over those ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Replicate:
    """Every rank of the axis holds the same value."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Shard:
    """Dimension ``dim`` is cut: seen as ``[outer, ranks, inner]``, rank r holds ``[:, r]``.

    ``outer > 1`` is what a reshape or a concatenation over layers makes of a plain cut. ``rows`` marks rows of an expert
    region: this rank's own rows in an order of their own, comparable only with rows of the same ``origin`` (a permute).

    ``zigzag``: seen as ``[outer, 2 * ranks, inner]``, rank r holds ``[:, r]`` and ``[:, 2 * ranks - 1 - r]``, one behind the other:
    of what is causal along the dim all ranks then have as much to do.
    """

    dim: int
    outer: int = 1
    rows: bool = False
    origin: str = ""
    zigzag: bool = False

    def pieces(self, ranks: int) -> int:
        """Into how many pieces a block of the dim is cut, each of them whole on one rank."""
        return 2 * ranks if self.zigzag else ranks

    def moved(self, dim: int) -> Shard:
        """The same cut, of another dim."""
        return replace(self, dim=dim)

    def __str__(self) -> str:
        if self.rows:
            return "V"
        outer = f",outer={self.outer}" if self.outer > 1 else ""
        return f"S({self.dim}{outer}{',zigzag' if self.zigzag else ''})"


@dataclass(frozen=True)
class Partial:
    """The true value is the sum over the ranks of the axis."""

    def __str__(self) -> str:
        return "P"


Placement = Replicate | Shard | Partial

REPLICATE = Replicate()
PARTIAL = Partial()


def text(placements: dict[str, Placement]) -> str:
    """``S(0)@dp`` and the like; replicated axes are left out."""
    parts = [f"{placed}@{axis}" for axis, placed in sorted(placements.items()) if not isinstance(placed, Replicate)]
    return " ".join(parts) or "R"


def is_partial(placements: dict[str, Placement]) -> bool:
    """Whether the ranks of some axis hold terms of a sum that has not been taken yet."""
    return any(isinstance(placed, Partial) for placed in placements.values())


def parse(source: str) -> Placement:
    """Inverse of ``str`` for one placement."""
    if source == "R":
        return REPLICATE
    if source == "P":
        return PARTIAL
    if source == "V":
        return Shard(0, rows=True)
    dim, *options = source[2:-1].split(",")
    outer = next((int(item.removeprefix("outer=")) for item in options if item != "zigzag"), 1)
    return Shard(int(dim), outer, zigzag="zigzag" in options)
