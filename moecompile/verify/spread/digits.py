"""Both meshes as one: the digits of a rank's number.

The axes of the attention and of the expert mesh are ranges of strides over the same ranks. Cut at all their bounds, the ranks
become one mesh of digits, and every axis is a run of them: with ``dp=4, ep=2`` the digits are ``dp/edp`` and ``dp/ep``. What is
known about a value is known digit by digit, whichever mesh the op speaks of.

The stages of a pipeline (``pp``) are no digits: before it is taken apart, the graph of all of them says what one rank of each does in
turn, and every value is on one stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ...mesh import ATTENTION_AXES, EXPERT_AXES, Mesh


@dataclass(frozen=True)
class Digits:
    """``names`` and ``sizes`` from the most significant digit to the least; ``of`` says which digits an axis has."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    of: dict[str, tuple[int, ...]]

    def axis(self, name: str) -> tuple[int, ...]:
        """Digits of an axis, several joined by ``+``, or of the ``world``."""
        if name == "world":
            return tuple(range(len(self.sizes)))
        return tuple(sorted(digit for part in name.split("+") for digit in self.of[part]))


def digits_of(mesh: Mesh) -> Digits | None:
    """The digits of a mesh; None where the bounds of the two meshes do not nest, as in ``tp=2, ep=3`` of 6 ranks."""
    spans: dict[str, tuple[int, int]] = {}
    for axes in (ATTENTION_AXES[1:], EXPERT_AXES[1:]):
        stride = 1
        for axis in reversed(axes):
            spans[axis] = (stride, stride * mesh.size(axis))
            stride *= mesh.size(axis)
    bounds = sorted({bound for span in spans.values() for bound in span})
    steps = list(pairwise(bounds))
    if any(high % low for low, high in steps):
        return None
    steps.reverse()
    of = {
        axis: tuple(at for at, (low, high) in enumerate(steps) if first <= low and high <= last)
        for axis, (first, last) in spans.items()
    }
    of["pp"] = ()
    names = tuple("/".join(axis for axis in spans if at in of[axis]) for at in range(len(steps)))
    return Digits(names, tuple(high // low for low, high in steps), of)
