"""Pipelines: parse the text, reject an illegal order before anything runs, run, verify, time and record."""

from __future__ import annotations

import contextlib
import difflib
import gc
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph

from . import graph as graphs
from . import meta
from .compat import GuardOnDataDependentSymNode
from .errors import MoeCompileError, PassError, VerifyError
from .pass_base import Fact, Pass, PassContext
from .printer import graph_text, saved_text
from .program import HistoryEntry, Level, Program
from .verify import verify_program, verify_values

PassTable = Mapping[str, type[Pass]]
_ITEM = re.compile(r"\s*([a-z][a-z0-9-]*)\s*(?:\{([^{}]*)\})?\s*(,|$)")


# ---- text ----------------------------------------------------------------------------------------------------------


def parse(text: str, table: PassTable) -> tuple[Pass, ...]:
    """``a,b{x=1,y=2}`` as passes; a PassError names the place and what was expected."""
    passes: list[Pass] = []
    at = 0
    while at < len(text):
        found = _ITEM.match(text, at)
        if found is None or (found.group(3) and not text[found.end() :].strip()):
            raise PassError(
                f"pipeline: cannot read '{text[at : at + 30]}' at position {at}; write name or name{{key=value}}, "
                f"separated by commas."
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
        key, equals, raw = (word.strip() for word in part.partition("="))
        if not equals:
            raise PassError(f"{name}: option '{key}' has no value; write {key}=VALUE.")
        if key in options:
            raise PassError(f"{name}: option '{key}' is given twice; keep one of {options[key]} and {raw}.")
        options[key] = raw
    return options


def to_text(passes: Sequence[Pass]) -> str:
    """Inverse of ``parse``."""
    return ",".join(item.text for item in passes)


# ---- order ---------------------------------------------------------------------------------------------------------


def check_order(
    passes: Sequence[Pass], table: PassTable, facts: frozenset[Fact] = frozenset(), level: Level = Level.MODEL
) -> None:
    """Raise a PassError if a pass would find a fact missing or too early, or the wrong level; nothing runs."""
    held = frozenset(facts)
    for item in passes:
        _check_place(item, table, held, level)
        held = (held | item.provides) - item.removes
        if Fact.DIFFERENTIATED in item.provides:
            level = Level.STEP


def _check_place(item: Pass, table: PassTable, held: frozenset[Fact], level: Level) -> None:
    """One pass, given what holds where it stands."""
    if item.level is not None and item.level is not level:
        side = "after" if item.level is Level.STEP else "before"
        raise PassError(
            f"pipeline: '{item.name}' works on the {item.level.name.lower()} graph; put it {side} 'differentiate'."
        )
    for fact in _sorted(item.requires - held):
        raise PassError(
            f"pipeline: '{item.name}' needs the fact {fact.name} ({fact.value}), which does not hold there; "
            f"put {_givers(fact, table)} before it."
        )
    for fact in _sorted(item.excludes & held):
        raise PassError(
            f"pipeline: '{item.name}' cannot run once the fact {fact.name} holds ({fact.value}); "
            f"put it before {_givers(fact, table)}."
        )
    halfway = Fact.EXPERTS_SHARDED in held and Fact.TOKENS_DISPATCHED not in held
    if halfway and item.provides & {Fact.DIFFERENTIATED, Fact.LOWERED}:
        fact = Fact.TOKENS_DISPATCHED
        raise PassError(
            f"pipeline: '{item.name}' stands where the experts are cut but the fact {fact.name} ({fact.value}) does not hold; "
            f"put {_givers(fact, table)} before it."
        )
    if item.provides and item.provides <= held:
        fact = _sorted(item.provides)[0]
        raise PassError(
            f"pipeline: '{item.name}' would run twice, since {fact.name} holds ({fact.value}); leave it out there."
        )


def _sorted(facts: frozenset[Fact]) -> list[Fact]:
    return sorted(facts, key=lambda one: one.name)


def _givers(fact: Fact, table: PassTable) -> str:
    names = [f"'{name}'" for name, kind in table.items() if fact in kind.provides]
    return " or ".join(names) or "a pass that provides it"


# ---- running -------------------------------------------------------------------------------------------------------


def run(
    program: Program,
    passes: Sequence[Pass],
    table: PassTable,
    *,
    check: bool = True,
    record_text: bool = True,
    on_pass: Callable[[Program, Pass], None] | None = None,
    dump_dir: str | os.PathLike[str] | None = None,
) -> Program:
    """Run ``passes`` over ``program`` in place, verifying after each; returns it with its history.

    ``dump_dir``: a folder for the program after each pass that changed it, numbered, as files that `moecompile.load`
    reads. When a pass or its verification fails, the program before it, the rest of the pipeline and the plan are left
    in a folder there, which the error names.
    """
    check_order(passes, table, program.facts, program.level)
    with _collector_off():
        return _run(program, passes, check, record_text, on_pass, dump_dir)


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    """Passes make many objects and few cycles; each full collection walks over everything that the process has loaded."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _run(
    program: Program,
    passes: Sequence[Pass],
    check: bool,
    record_text: bool,
    on_pass: Callable[[Program, Pass], None] | None,
    dump_dir: str | os.PathLike[str] | None,
) -> Program:
    graphs.tidy_names(program.graph)
    dump = _Dump(program, Path(dump_dir)) if dump_dir is not None else None
    ctx = PassContext(program, graphs.mode_of(program.graph))
    before = graph_text(program) if record_text else ""
    seen: _Seen | None = None
    for at, item in enumerate(passes):
        start, nodes_before, unchanged = time.perf_counter(), len(program.graph.nodes), False
        try:
            rewrites = _apply(program, item, ctx)
            verify_start = time.perf_counter()
            if check:
                seen, unchanged = _verify(program, item, seen, last=at == len(passes) - 1)
        except Exception as error:
            if dump is not None:
                dump.reproducer(error, passes[at:], at)
            raise
        verify_seconds = time.perf_counter() - verify_start
        after = before if unchanged or not record_text else graph_text(program)
        program.history.append(
            HistoryEntry(
                pass_text=item.text,
                rewrites=rewrites,
                nodes_before=nodes_before,
                nodes_after=len(program.graph.nodes),
                seconds=time.perf_counter() - start,
                ops=op_counts(program.graph),
                text=after,
                before=before,
                verify_seconds=verify_seconds,
                declined=tuple(ctx.declined),
            )
        )
        before = after
        ctx.declined.clear()
        program.pipeline = ",".join(filter(None, (program.pipeline, item.text)))
        if dump is not None:
            dump.after(item, at)
        if on_pass is not None:
            on_pass(program, item)
    program.graph_module.recompile()
    return program


def _apply(program: Program, item: Pass, ctx: PassContext) -> int:
    """Run one pass and bring facts, level and names up to date."""
    try:
        rewrites = item.run(program.graph_module, ctx)
    except GuardOnDataDependentSymNode as error:
        sized = [
            node for node in program.graph.nodes if torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ())
        ]
        places = ", ".join(dict.fromkeys(meta.where(node) for node in sized)) or "the model"
        raise PassError(
            f"{item.name}: the number of rows of {places} is known at run time only, and what reads them here needs it beforehand; use "
            f"masks, give a size (output_size=), or let the model return these rows and go on outside."
        ) from error
    program.facts = (program.facts | item.provides) - item.removes
    if Fact.DIFFERENTIATED in item.provides:
        program.level = Level.STEP
    graphs.tidy_names(program.graph)
    ctx.mode = graphs.mode_of(program.graph)
    return rewrites


def _verify(program: Program, item: Pass, seen: _Seen | None, *, last: bool) -> tuple[_Seen, bool]:
    """Check the program, unless it is what was ``seen`` to be right; returns what it is now, and whether it is the same."""
    now = _Seen(program)
    same = seen is not None and seen.same(now)
    try:
        written_out = None if same else verify_program(program)
        if last:
            verify_values(program, written_out)
    except VerifyError as error:
        done = ", ".join(entry.pass_text for entry in program.history) or "nothing"
        raise VerifyError(f"after pass '{item.text}' (run before it: {done}): {error}") from error
    return now, same


class _Seen:
    """All that the verifier reads of a program, to tell whether a pass has changed anything of it."""

    def __init__(self, program: Program) -> None:
        self.facts, self.level = program.facts, program.level
        self.inputs, self.outputs = list(program.inputs), list(program.outputs)
        self.nodes = [(node, node.target, node.args, node.kwargs, meta.copy_meta(node)) for node in program.graph.nodes]

    def same(self, other: _Seen) -> bool:
        if (self.facts, self.level, self.inputs, self.outputs) != (
            other.facts, other.level, other.inputs, other.outputs,
        ) or len(self.nodes) != len(other.nodes):  # fmt: skip
            return False
        return all(map(_same_node, self.nodes, other.nodes))


def _same_node(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether a node is the same one, with the very same arguments and meta."""
    if any(mine is not its for mine, its in zip(one[:4], other[:4], strict=True)) or one[4].keys() != other[4].keys():
        return False
    pairs = ((value, other[4][key]) for key, value in one[4].items())
    return all(mine is its or (isinstance(mine, (dict, str)) and mine == its) for mine, its in pairs)


def op_counts(graph: Graph) -> tuple[tuple[str, int], ...]:
    """How often each op is called, most frequent first."""
    counts = Counter(node.target for node in graph.nodes if node.op == "call_function")
    return tuple((str(target), count) for target, count in counts.most_common())


# ---- dumps ---------------------------------------------------------------------------------------------------------


class _Dump:
    """Writes programs into one folder. A failing pass leaves a half-rewritten graph, so the text before it is kept."""

    def __init__(self, program: Program, folder: Path) -> None:
        self.program, self.folder = program, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.before = saved_text(program)
        self._write("00-captured.py", self.before)

    def after(self, item: Pass, at: int) -> None:
        """The program after one pass, if it is another one."""
        now = saved_text(self.program)
        if _function(now) != _function(self.before):
            self._write(f"{at + 1:02d}-{item.name}.py", now)
        self.before = now

    def reproducer(self, error: Exception, rest: Sequence[Pass], at: int) -> None:
        """Everything to see the failure again; the error says where it is."""
        folder = f"{at + 1:02d}-{rest[0].name}-failed"
        (self.folder / folder).mkdir(exist_ok=True)
        self._write(f"{folder}/before.py", self.before)
        self._write(f"{folder}/pipeline.txt", to_text(rest) + "\n")
        self._write(f"{folder}/plan.toml", self.program.plan.to_toml())
        self._write(f"{folder}/error.txt", f"{type(error).__name__}: {error}\n")
        where = f"The program before '{rest[0].text}', the pipeline and the plan are in {self.folder / folder}."
        if isinstance(error, MoeCompileError) and error.args:
            error.args = (f"{error.args[0]} {where}", *error.args[1:])
        else:
            error.add_note(where)

    def _write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="utf-8")


def _function(text: str) -> str:
    """The function alone; pipeline and facts change with every pass."""
    return text[text.index("def forward(") : text.index("\nPROGRAM = ")]
