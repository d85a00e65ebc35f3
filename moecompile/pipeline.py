"""Pipelines: parse the text, reject an illegal order before anything runs, run, verify, time and record."""

from __future__ import annotations

import difflib
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from torch.fx import Graph

from . import graph as graphs
from .errors import PassError, VerifyError
from .pass_base import Fact, Pass, PassContext
from .printer import graph_text
from .program import HistoryEntry, Level, Program
from .verify import verify_program

PassTable = Mapping[str, type[Pass]]
_ITEM = re.compile(r"\s*([a-z][a-z0-9-]*)\s*(?:\{([^{}]*)\})?\s*(,|$)")


def parse(text: str, table: PassTable) -> tuple[Pass, ...]:
    """``a,b{x=1,y=2}`` as passes; a PassError names the place and what was expected."""
    passes: list[Pass] = []
    at = 0
    while at < len(text):
        found = _ITEM.match(text, at)
        if found is None:
            raise PassError(
                f"pipeline: cannot read '{text[at : at + 30]}' at position {at}; write name or name{{key=value}}, separated by commas."
            )
        name, options = found.group(1), found.group(2)
        if name not in table:
            close = difflib.get_close_matches(name, table, n=3, cutoff=0.4) or sorted(table)
            raise PassError(f"pipeline: there is no pass '{name}'; did you mean {' or '.join(close)}?")
        passes.append(table[name].from_options(_options(name, options)))
        at = found.end()
    return tuple(passes)


def _options(name: str, text: str | None) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in (text or "").split(","):
        if not part.strip():
            continue
        key, equals, raw = part.partition("=")
        if not equals:
            raise PassError(f"{name}: option '{part.strip()}' has no value; write {part.strip()}=VALUE.")
        options[key.strip()] = raw.strip()
    return options


def to_text(passes: Sequence[Pass]) -> str:
    """Inverse of ``parse``."""
    return ",".join(item.text for item in passes)


def check_order(
    passes: Sequence[Pass], table: PassTable, facts: frozenset[Fact] = frozenset(), level: Level = Level.MODEL
) -> None:
    """Raise a PassError if some pass would find a fact missing or the wrong level; nothing has run by then."""
    held = set(facts)
    for item in passes:
        if item.level is not None and item.level is not level:
            side = "after" if item.level is Level.STEP else "before"
            raise PassError(
                f"pipeline: '{item.name}' works on the {item.level.name.lower()} graph; put it {side} 'differentiate'."
            )
        for fact in sorted(item.requires - held, key=lambda one: one.name):
            givers = [name for name, kind in table.items() if fact in kind.provides] or ["no pass"]
            raise PassError(
                f"pipeline: '{item.name}' needs the fact {fact.name} ({fact.value}), which does not hold there; "
                f"put {' or '.join(givers)} before it."
            )
        held |= item.provides
        held -= item.removes
        if Fact.DIFFERENTIATED in item.provides:
            level = Level.STEP


def run(
    program: Program,
    passes: Sequence[Pass],
    table: PassTable,
    *,
    check: bool = True,
    record_text: bool = True,
    on_pass: Callable[[Program, Pass], None] | None = None,
) -> Program:
    """Run ``passes`` over ``program`` in place, verifying after each; returns it with its history."""
    check_order(passes, table, program.facts, program.level)
    ctx = PassContext(program, graphs.mode_of(program.graph))
    before = graph_text(program) if record_text else ""
    for item in passes:
        start, nodes_before = time.perf_counter(), len(program.graph.nodes)
        rewrites = item.run(program.graph_module, ctx)
        program.facts = (program.facts | item.provides) - item.removes
        if Fact.DIFFERENTIATED in item.provides:
            program.level = Level.STEP
        ctx.mode = graphs.mode_of(program.graph)
        if check:
            _verify(program, item)
        after = graph_text(program) if record_text else ""
        program.history.append(
            HistoryEntry(
                pass_text=item.text,
                rewrites=rewrites,
                nodes_before=nodes_before,
                nodes_after=len(program.graph.nodes),
                seconds=time.perf_counter() - start,
                ops=op_counts(program.graph),
                text=after,
                diff=_diff(before, after),
            )
        )
        before = after
        if on_pass is not None:
            on_pass(program, item)
    program.pipeline = ",".join(filter(None, (program.pipeline, to_text(passes))))
    program.graph_module.recompile()
    return program


def _verify(program: Program, item: Pass) -> None:
    try:
        verify_program(program)
    except VerifyError as error:
        done = ", ".join(entry.pass_text for entry in program.history) or "nothing"
        raise VerifyError(f"after pass '{item.text}' (run before it: {done}): {error}") from error


def op_counts(graph: Graph) -> tuple[tuple[str, int], ...]:
    """How often each op is called, most frequent first."""
    counts = Counter(str(node.target) for node in graph.nodes if node.op == "call_function")
    return tuple(counts.most_common())


def _diff(before: str, after: str) -> str:
    return "\n".join(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=1))
