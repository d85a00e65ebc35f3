"""Pipeline layouts as text: which layers stand on which stage.

``Et*3|(tt|)*29,m|L``: ``|`` ends a stage, ``E`` is the embedding, ``t`` a decoder layer, ``m`` a layer for multi-token prediction,
``L`` the loss; ``x*n`` and ``(...)*n`` repeat, commas and blanks mean nothing, a stage may be empty. Stage s lies on pipeline rank
``s % pp`` as its chunk ``s // pp``. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from moecompile.errors import PlanError

_CELLS = "EtmL"
_NAMES = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
_MOST_STAGES = 100_000
EVEN, BALANCED, BALANCED_FLOPS = "even", "balanced", "balanced-flops"  # what a layout may be in place of text


@dataclass(frozen=True)
class Layout:
    """One word over ``EtmL`` a stage, in the order in which a batch passes them."""

    stages: tuple[str, ...]

    @property
    def num_layers(self) -> int:
        """Decoder layers on all stages."""
        return sum(stage.count("t") for stage in self.stages)

    @property
    def num_mtp(self) -> int:
        """Multi-token-prediction layers on all stages."""
        return sum(stage.count("m") for stage in self.stages)

    def layer_stages(self) -> list[int]:
        """The stage of each decoder layer."""
        return [at for at, stage in enumerate(self.stages) for cell in stage if cell == "t"]

    def __str__(self) -> str:
        """The shortest text of runs that `parse` reads back."""
        return _fold(["".join(_runs(stage)) for stage in self.stages])

    def table(self, pp: int) -> str:
        """One line a pipeline rank, one column a chunk."""
        rows = [[_cell(stage) for stage in self.stages[rank::pp]] for rank in range(pp)]
        head = ["rank", *(f"chunk {at}" for at in range(len(self.stages) // pp))]
        lines = [head, *([str(rank), *row] for rank, row in enumerate(rows))]
        widths = [max(len(line[at]) for line in lines) for at in range(len(head))]
        return "\n".join(
            "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )

    def described(self, stage: int) -> str:
        """What stands on a stage, as in `table`."""
        return _cell(self.stages[stage])


def parse(text: str) -> Layout:
    """The layout that ``text`` writes; a PlanError shows the faulty place."""
    at, word = _read(text, 0, 0)
    if at < len(text):
        raise _fault(text, at, "this ')' closes nothing", "take it out")
    return Layout(tuple(word.split("|")))


def _read(text: str, at: int, depth: int) -> tuple[int, str]:
    """Cells and bars from ``at`` up to the end or to the ')' of this depth."""
    done: list[str] = []
    while at < len(text) and text[at] != ")":
        mark, start = text[at], at
        at += 1
        if mark in ", \t\n":
            continue
        if mark == "(":
            at, word = _read(text, at, depth + 1)
            if at == len(text):
                raise _fault(text, start, "this '(' is never closed", "add ')'")
            at += 1
        elif mark in _CELLS or mark == "|":
            word = mark
        elif mark == "*":
            raise _fault(text, start, "'*' follows nothing that can repeat", "write a cell or (...) before it")
        else:
            raise _fault(text, start, f"{mark!r} is no cell", "use E, t, m, L, |, (...), * and a number")
        at, times = _times(text, at)
        if (len(word) or 1) * times > _MOST_STAGES:
            raise _fault(text, start, f"this repeats to more than {_MOST_STAGES} cells", "use a smaller number")
        done.append(word * times)
    return at, "".join(done)


def _times(text: str, at: int) -> tuple[int, int]:
    """The number behind ``*``, 1 where there is none."""
    while text[at : at + 1].isspace():
        at += 1
    if text[at : at + 1] != "*":
        return at, 1
    end = at + 1
    while text[end : end + 1].isspace():
        end += 1
    first = end
    while end < len(text) and text[end] in "0123456789":
        end += 1
    if end == first or int(text[first:end]) < 1 or end - first > 6:
        raise _fault(text, at, "'*' needs a whole number from 1 on", "write for example t*3")
    return end, int(text[first:end])


def _fault(text: str, at: int, found: str, advice: str) -> PlanError:
    return PlanError(f"layout {text!r}, position {at}: {found}; {advice}.\n  {text}\n  {' ' * at}^")


def check(layout: Layout, pp: int, num_layers: int | None = None, num_mtp: int = 0) -> None:
    """PlanError, naming stage and cell, for a layout that ``pp`` ranks or a model of so many layers cannot have."""
    stages = layout.stages
    if len(stages) % pp:
        near = max(pp, len(stages) // pp * pp)
        raise _stage_error(
            layout,
            len(stages) - 1,
            f"pp={pp} must divide the number of stages, {len(stages)}",
            f"write {near} stages, or {near + pp}",
        )
    _check_ends(layout)
    _check_mtp(layout, pp)
    if num_layers is not None:
        _check_count(layout, "t", layout.num_layers, num_layers, "decoder layer")
        _check_count(layout, "m", layout.num_mtp, num_mtp, "mtp layer")


def _check_count(layout: Layout, letter: str, found: int, needed: int, what: str) -> None:
    """PlanError at the last stage that has ``letter`` where the layout has another number of them than the model."""
    if found != needed:
        last = max((at for at, stage in enumerate(layout.stages) if letter in stage), default=0)
        raise _stage_error(
            layout,
            last,
            f"{found} {what}s ({letter}) for a model of {needed}",
            f"write {needed} times {letter}" if needed else f"leave {letter} out",
        )


def _check_ends(layout: Layout) -> None:
    stages = layout.stages
    for at, stage in enumerate(stages):
        if "E" in (stage if at else stage[1:]):
            raise _stage_error(
                layout, at, "the embedding (E) comes first, once", "move it to the front of the first stage"
            )
        if "L" in (stage[:-1] if at == len(stages) - 1 else stage):
            raise _stage_error(layout, at, "the loss (L) comes last, once", "move it to the end of the last stage")
    if not stages[0].startswith("E"):
        raise _stage_error(layout, 0, "the first stage does not begin with the embedding (E)", "begin with E")
    if not stages[-1].endswith("L"):
        raise _stage_error(layout, len(stages) - 1, "the last stage does not end with the loss (L)", "end with L")


def _check_mtp(layout: Layout, pp: int) -> None:
    holders = [at for at, stage in enumerate(layout.stages) if "m" in stage]
    if not holders:
        return
    first = holders[0]
    decoders = [at for at, stage in enumerate(layout.stages) if "t" in stage]
    if any(at > first for at in decoders) or "mt" in layout.stages[first]:
        raise _stage_error(
            layout, first, "a decoder layer (t) comes after an mtp layer (m)", "put all t before the first m"
        )
    if len(holders) > 1:
        raise _stage_error(layout, holders[1], "mtp layers (m) stand on several stages", "put all m on one stage")
    if first < len(layout.stages) - pp:
        raise _stage_error(
            layout,
            first,
            "mtp layers (m) stand on a chunk that is not its rank's last",
            "move them to one of the last pp stages",
        )
    if first % pp == 0 and pp > 1:
        raise _stage_error(
            layout, first, "mtp layers (m) stand on the first pipeline rank", "move them to a later rank"
        )


def _stage_error(layout: Layout, at: int, found: str, advice: str) -> PlanError:
    before = "|".join(layout.stages[:at])
    text, column = "|".join(layout.stages), len(before) + bool(at)
    return PlanError(
        f"layout {str(layout)!r}, stage {at} ('{layout.stages[at]}'): {found}; {advice}.\n  {text}\n  {' ' * column}^"
    )


def even(num_layers: int, stages: int) -> Layout:
    """Layers over stages in order, as equal as can be; earlier stages take what is left over."""
    share, rest = divmod(num_layers, stages)
    if share == 0:
        raise PlanError(
            f"{num_layers} layers cannot be split evenly over {stages} pipeline stages: a stage would be empty; use pp of at most "
            f"{num_layers}, write the empty stages in a layout, or say which list holds the layers with "
            "passes='+split-stages{layers=model.layers}'."
        )
    return _dressed([share + (at < rest) for at in range(stages)])


def balanced(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> Layout:
    """The contiguous split whose dearest stage is cheapest; ``first`` and ``last`` are the costs of embedding and loss.

    Every stage has a layer. Among equally good splits the one whose early stages are fullest.
    """
    count = len(costs)
    if count < stages:
        return even(count, stages)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def price(start: int, end: int, at: int) -> float:
        return sums[end] - sums[start] + first * (at == 0) + last * (at == stages - 1)

    # best[k][i]: dearest of stages k.. over layers i.., and where stage k ends
    best: list[dict[int, tuple[float, int]]] = [{} for _ in range(stages + 1)]
    best[stages][count] = (0.0, count)
    for at in reversed(range(stages)):
        for start in range(at, count - (stages - at) + 1):
            ends = range(start + 1, count - (stages - at - 1) + 1)
            found = [(max(price(start, end, at), best[at + 1][end][0]), -end) for end in ends if end in best[at + 1]]
            if found:
                cost, end = min(found)
                best[at][start] = (cost, -end)
    borders = [0]
    for at in range(stages):
        borders.append(best[at][borders[-1]][1])
    return _dressed([end - start for start, end in pairwise(borders)])


def _dressed(counts: Sequence[int]) -> Layout:
    words = ["t" * count for count in counts]
    words[0] = "E" + words[0]
    words[-1] += "L"
    return Layout(tuple(words))


def _cell(stage: str) -> str:
    """What a table says of a stage: ``embedding, 3 decoder``."""
    said = []
    for cell in dict.fromkeys(stage):
        number = stage.count(cell)
        said.append(_NAMES[cell] if cell in "EL" else f"{number} {_NAMES[cell]}")
    return ", ".join(said) or "-"


def _runs(stage: str) -> list[str]:
    """``Ettt`` as ``E``, ``t*3``; two equal cells stay as they are."""
    found: list[str] = []
    at = 0
    while at < len(stage):
        end = at
        while end < len(stage) and stage[end] == stage[at]:
            end += 1
        number = end - at
        found.append(stage[at:end] if number < 3 else f"{stage[at]}*{number}")
        at = end
    return found


def _fold(words: list[str]) -> str:
    """Stages joined by bars; three or more equal ones that a bar follows are written once."""
    said, at = "", 0
    while at < len(words):
        end = at
        while end < len(words) - 1 and words[end] == words[at]:
            end += 1
        number = end - at
        if number > 2:
            said += f"({words[at]}|)*{number}"
            at = end
        else:
            said += words[at] + ("|" if at < len(words) - 1 else "")
            at += 1
    return re.sub(r"(\*\d+)(?=[EtmL(])", r"\1,", said)


SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b")


def check_plan(pp: int, layout: str | None, schedule: str | None, microbatches: int) -> None:
    """PlanError for settings that a pipeline of ``pp`` ranks cannot run together."""
    schedule = schedule or "1f1b"
    if schedule not in SCHEDULES:
        raise PlanError(f"Plan(schedule={schedule!r}): schedule must be one of {', '.join(map(repr, SCHEDULES))}.")
    chunks = 1
    if layout is not None and layout not in (EVEN, BALANCED, BALANCED_FLOPS):
        found = parse(layout)
        check(found, pp)
        chunks = len(found.stages) // pp
    if schedule == "interleaved-1f1b" and chunks == 1:
        raise PlanError(
            f"Plan(schedule={schedule!r}): each rank needs several stages for it, and this layout gives one; write a layout of "
            f"{2 * pp} stages (or another multiple of pp={pp}), or use schedule='1f1b'."
        )
    if schedule != "interleaved-1f1b" and chunks > 1:
        raise PlanError(
            f"Plan(schedule={schedule!r}): the layout gives each rank {chunks} stages, but {schedule!r} has one; use "
            f"schedule='interleaved-1f1b', or a layout of {pp} stages."
        )
    if schedule != "gpipe" and microbatches < pp:
        raise PlanError(
            f"Plan(microbatches={microbatches}): {schedule!r} over pp={pp} needs at least {pp} microbatches; use microbatches={pp} or "
            f"more, or schedule='gpipe'."
        )
    if schedule == "interleaved-1f1b" and microbatches % (rounds := max(1, microbatches // pp)):
        near = microbatches // pp * pp
        raise PlanError(
            f"Plan(microbatches={microbatches}): {schedule!r} runs them in {rounds} equal rounds over pp={pp}; use {near} or {near + pp} "
            f"microbatches."
        )
