"""The timeline of a schedule as a figure of matplotlib: PNG, PDF or SVG."""

from __future__ import annotations

import os
from collections.abc import Sequence

from matplotlib.figure import Figure

from .timeline import COLORS, Timed, bubble


def figure(rows: Sequence[Sequence[Timed]], title: str = "") -> Figure:
    """One bar a rank: forwards blue, backwards green, paler for a later chunk of the rank; the number is the microbatch."""
    length = max(row[-1].end for row in rows)
    made = Figure(figsize=(min(24.0, 1.5 + 0.3 * length), 0.8 + 0.4 * len(rows)), layout="constrained")
    axes = made.add_subplot()
    for rank, row in enumerate(rows):
        for item in row:
            axes.barh(
                rank,
                item.end - item.start,
                left=item.start,
                height=0.9,
                color=COLORS[item.action.kind],
                alpha=max(0.4, 1.0 - 0.2 * (item.action.stage // len(rows))),
                edgecolor="white",
            )
            middle = (item.start + item.end) / 2
            axes.text(middle, rank, str(item.action.microbatch), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), [f"rank {rank}" for rank in range(len(rows))])
    axes.invert_yaxis()
    axes.set_xlim(0, length)
    axes.set_xlabel("time")
    axes.set_title(f"{title}{': ' if title else ''}bubble {bubble([list(row) for row in rows]):.0%}", fontsize=9)
    return made


def save(rows: Sequence[Sequence[Timed]], path: str | os.PathLike[str], title: str = "") -> None:
    """Write the figure; the ending of ``path`` chooses the format."""
    figure(rows, title).savefig(path, dpi=100)
