"""What each pipeline rank does when: the order of a schedule, its timeline as text and SVG, its bubble and its live microbatches.

The orders are those in which ``torch.distributed.pipelining`` runs the schedules. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

COLORS = {"F": "#7aa6d8", "B": "#8cc58c"}


@dataclass(frozen=True)
class Action:
    """Forward (``F``) or backward (``B``) of one microbatch on one stage."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Timed:
    """An action with its start and end."""

    action: Action
    start: float
    end: float


def order(schedule: str, rank: int, pp: int, microbatches: int, chunks: int = 1) -> list[Action]:
    """What one rank does, in order; ``chunks`` stages a rank for ``interleaved-1f1b``."""
    if schedule != "interleaved-1f1b":
        count = microbatches if schedule == "gpipe" else min(microbatches, pp - rank)
        ahead = [Action("F", rank, at) for at in range(microbatches)]
        back = [Action("B", rank, at) for at in range(microbatches)]
        return _mixed(ahead, back, count, backward_first=True)
    per_round = microbatches // max(1, microbatches // pp)
    total = microbatches * chunks

    def item(kind: str, at: int) -> Action:
        chunk = at // per_round % chunks
        local = chunk if kind == "F" else chunks - 1 - chunk
        return Action(kind, local * pp + rank, at // (per_round * chunks) * per_round + at % per_round)

    warmup = min(total, (chunks - 1) * per_round + 2 * (pp - 1 - rank))
    ahead, back = ([item(kind, at) for at in range(total)] for kind in "FB")
    return _mixed(ahead, back, warmup, backward_first=False)


def _mixed(ahead: list[Action], back: list[Action], warmup: int, *, backward_first: bool) -> list[Action]:
    """Warm-up forwards, then one of each in turn, then what is left."""
    found, done = ahead[:warmup], 0
    for action in ahead[warmup:]:
        found += [back[done], action] if backward_first else [action, back[done]]
        done += 1
    return found + back[done:]


def timeline(
    schedule: str, pp: int, microbatches: int, chunks: int = 1, forward: float = 1.0, backward: float = 2.0
) -> list[list[Timed]]:
    """When each rank does what, if every stage takes the same time and messages none."""
    queues = [order(schedule, rank, pp, microbatches, chunks) for rank in range(pp)]
    ends: dict[Action, float] = {}
    rows: list[list[Timed]] = [[] for _ in range(pp)]
    last = pp * chunks - 1
    while any(queues):
        before = len(ends)
        for rank, queue in enumerate(queues):
            while queue and (ready := _ready(queue[0], ends, last)) is not None:
                action = queue.pop(0)
                start = max(ready, rows[rank][-1].end if rows[rank] else 0.0)
                ends[action] = start + (forward if action.kind == "F" else backward)
                rows[rank].append(Timed(action, start, ends[action]))
        if len(ends) == before:
            raise ValueError(f"{schedule!r} over pp={pp} with {microbatches} microbatches never goes on.")
    return rows


def _ready(action: Action, ends: dict[Action, float], last: int) -> float | None:
    """When what an action waits for is there; None if not yet known."""
    if action.kind == "F":
        needed = None if action.stage == 0 else Action("F", action.stage - 1, action.microbatch)
    elif action.stage == last:
        needed = Action("F", action.stage, action.microbatch)
    else:
        needed = Action("B", action.stage + 1, action.microbatch)
    return 0.0 if needed is None else ends.get(needed)


def bubble(rows: list[list[Timed]]) -> float:
    """The idle part of all ranks' time, from 0 to 1."""
    length = max(row[-1].end for row in rows)
    busy = sum(item.end - item.start for row in rows for item in row)
    return 1.0 - busy / (length * len(rows))


def most_live(actions: list[Action]) -> int:
    """How many forwards wait for their backward at most, over all stages of a rank."""
    live = most = 0
    for action in actions:
        live += 1 if action.kind == "F" else -1
        most = max(most, live)
    return most


def text(rows: list[list[Timed]], unit: float = 1.0) -> str:
    """One line a rank, one column a unit of time; ``2F0`` is the forward of microbatch 0 on stage 2, ``=`` goes on, ``.`` waits."""
    width = max(len(str(item.action)) for row in rows for item in row) + 1
    length = round(max(row[-1].end for row in rows) / unit)
    lines = []
    for rank, row in enumerate(rows):
        cells = ["."] * length
        for item in row:
            first = round(item.start / unit)
            for at in range(first, round(item.end / unit)):
                cells[at] = str(item.action) if at == first else "="
        lines.append(f"rank {rank}  " + "".join(cell.ljust(width) for cell in cells).rstrip())
    return "\n".join(lines)


def svg(rows: list[list[Timed]], scale: float = 24.0) -> str:
    """The timeline as a picture: forwards blue, backwards green, darker for a later chunk of the rank."""
    height, left = 28, 60
    length = max(row[-1].end for row in rows) * scale
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + length:g}" height="{height * len(rows):g}" '
        'font-family="sans-serif" font-size="11">'
    ]
    for rank, row in enumerate(rows):
        top = rank * height
        parts.append(f'<text x="4" y="{top + 18}">rank {rank}</text>')
        for item in row:
            x, wide = left + item.start * scale, (item.end - item.start) * scale
            opacity = max(0.4, 1.0 - 0.2 * (item.action.stage // len(rows)))
            parts.append(
                f'<rect x="{x:g}" y="{top + 2}" width="{wide:g}" height="{height - 4}" fill="{COLORS[item.action.kind]}" '
                f'fill-opacity="{opacity:g}" stroke="#fff"><title>{item.action}</title></rect>'
                f'<text x="{x + 3:g}" y="{top + 18}">{item.action.microbatch}</text>'
            )
    return "\n".join([*parts, "</svg>", ""])
