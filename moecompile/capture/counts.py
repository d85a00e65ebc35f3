"""Numbers read out of the counts per expert, and out of their running sums: how many rows, and where they begin and end.

Read one by one they would be unrelated symbols.  Read as one list of counts and the sums of them, a difference of two
sums is a count, ``rows[start:end]`` is as long as the expert has rows, and all counts together are the known number of
choices.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from moecompile.compat import pretend_at_least


class HostNumbers(list[Any]):
    """Counts as a model has them after ``.numpy()``: a list that knows the few methods of an array that loops use."""

    def cumsum(self, axis: int | None = None) -> HostNumbers:
        return HostNumbers(itertools.accumulate(self))

    def sum(self) -> Any:
        return sum(self)

    def tolist(self) -> list[Any]:
        return list(self)

    def astype(self, dtype: Any, **options: Any) -> HostNumbers:
        return self


class Counts:
    """Which tensors are counts or running sums of counts, and which 0-d tensors are elements of one."""

    def __init__(self) -> None:
        # By identity; the keys are kept alive.
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor, bool]] = {}
        self._totals: dict[int, int | None] = {}
        self._elements: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        self._sizes: dict[int, list[Any]] = {}

    def add(self, counts: torch.Tensor, total: int | None) -> None:
        """``counts`` holds a number for each expert, together ``total`` where that is known."""
        if id(counts) not in self._known:
            self._known[id(counts)] = (counts, counts, False)
            self._totals[id(counts)] = total

    def add_sums(self, sums: torch.Tensor, counts: torch.Tensor) -> None:
        """``sums`` is ``counts.cumsum(0)``."""
        self._known[id(sums)] = (sums, counts, True)

    def add_elements(self, source: Any, elements: Sequence[torch.Tensor], first: int = 0) -> None:
        """``elements`` are those of ``source`` from ``first`` on; nothing happens where that is not known."""
        if id(source) in self._known:
            for index, element in enumerate(elements, first):
                self._elements[id(element)] = (element, source, index)

    def number(self, element: Any) -> Any:
        """The number in an element, None where it is none of ours."""
        found = self._elements.get(id(element))
        numbers = None if found is None else self.numbers(found[1])
        return None if found is None or numbers is None else numbers[found[2]]

    def numbers(self, source: Any) -> list[Any] | None:
        """All numbers of a tensor, None where it is not known."""
        found = self._known.get(id(source))
        if found is None:
            return None
        sizes = self._sizes_of(found[1])
        return list(itertools.accumulate(sizes)) if found[2] else list(sizes)

    def _sizes_of(self, counts: torch.Tensor) -> list[Any]:
        """Every count is taken for positive, as in all loops; the last one is what the others leave of the total."""
        if id(counts) not in self._sizes:
            total = self._totals[id(counts)]
            known = counts.shape[0] - (total is not None)
            sizes = [counts[index].item() for index in range(known)]
            pretend_at_least(sizes, 2)
            if total is not None:
                sizes.append(total - sum(sizes))
            end: Any = 0
            for size in sizes:
                torch._check(end + size > end)  # type: ignore[no-untyped-call]
                torch._check(size > 0)  # type: ignore[no-untyped-call]
                end = end + size
            self._sizes[id(counts)] = sizes
        return self._sizes[id(counts)]


def rows_between(tensor: torch.Tensor, index: Any) -> torch.Tensor | None:
    """``tensor[start:stop]`` with a symbol among the bounds, None for every other index."""
    first, *rest = index if isinstance(index, tuple) else (index,)
    if not isinstance(first, slice) or first.step not in (None, 1):
        return None
    if not all(item is Ellipsis or (isinstance(item, slice) and item == slice(None)) for item in rest):
        return None
    if not any(isinstance(item, torch.SymInt) for item in (first.start, first.stop)):
        return None
    start = 0 if first.start is None else first.start
    stop = tensor.shape[0] if first.stop is None else first.stop
    torch._check(stop <= tensor.shape[0])  # type: ignore[no-untyped-call]
    return tensor.narrow(0, start, stop - start)
