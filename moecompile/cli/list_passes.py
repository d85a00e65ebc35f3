"""``moecompile passes``: every pass with its contract, read from the classes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import typing
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moecompile.pass_base import Pass, option_name
from moecompile.passes import ALL_PASSES, STEP

NAME = "passes"
HELP = "list all passes: what each does, its options, what it requires and provides"
EXAMPLE = "moecompile passes --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON")
    form.add_argument("--markdown", action="store_true", help="as the Markdown page docs/passes.md")


def run(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.json:
        print(json.dumps([describe(kind) for kind in ALL_PASSES], indent=2))
    elif arguments.markdown:
        print(markdown(), end="")
    else:
        console.print(_table())
        console.print(f"preset: {STEP}", highlight=False)
    return 0


def describe(kind: type[Pass]) -> dict[str, Any]:
    """One pass as plain data."""
    return {
        "name": kind.name,
        "sentence": sentence(kind),
        "options": options(kind),
        "level": kind.level.name.lower() if kind.level else "either",
        "requires": sorted(fact.name for fact in kind.requires),
        "provides": sorted(fact.name for fact in kind.provides),
        "removes": sorted(fact.name for fact in kind.removes),
        "numerics": kind.numerics.name.lower(),
    }


def sentence(kind: type[Pass]) -> str:
    """The first sentence of the class's docstring."""
    return " ".join((kind.__doc__ or "").strip().split("\n\n")[0].split())


def options(kind: type[Pass]) -> dict[str, str]:
    """Each option with its default, then the other values it takes where these are few."""
    hints = typing.get_type_hints(kind)
    found = {}
    for field in dataclasses.fields(kind):
        default = _text(field.default)
        choices = [_text(choice) for choice in typing.get_args(hints[field.name])]
        found[option_name(field.name)] = " | ".join([default, *(item for item in choices if item != default)])
    return found


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _table() -> Table:
    table = Table(show_lines=True)
    table.add_column("pass", no_wrap=True)
    table.add_column("what it does")
    for item in map(describe, ALL_PASSES):
        table.add_row(item["name"], f"{item['sentence']}\n[dim]{escape(_contract(item))}[/dim]")
    return table


def _contract(item: dict[str, Any]) -> str:
    """Options, level, numerics and facts, in words."""
    lines = [f"{item['level']} level, {item['numerics']}"]
    if item["options"]:
        lines.insert(0, "options " + ", ".join(f"{key}={value}" for key, value in item["options"].items()))
    facts = [f"{word} {', '.join(item[word])}" for word in ("requires", "provides", "removes") if item[word]]
    return "\n".join(lines + (["; ".join(facts)] if facts else []))


def markdown() -> str:
    """The page ``docs/passes.md``."""
    lines = [
        "# Passes",
        "",
        "Made by `moecompile passes --markdown`; a test keeps it fresh. In the order of the preset pipeline:",
        "",
        f"    {STEP}",
        "",
        "A pass runs where all facts it requires hold; `moecompile passes` prints the same in a terminal.",
        "",
        "| pass | what it does | options | level | requires | provides | ends | numerics |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in ALL_PASSES:
        item = describe(kind)
        file = kind.__module__.rpartition(".")[2]
        written = "<br>".join(f"`{key}={value}`" for key, value in item["options"].items()).replace("|", "\\|")
        facts = ["<br>".join(item[key]) for key in ("requires", "provides", "removes")]
        cells = [
            f"[{item['name']}](../passes/{file}.py)",
            item["sentence"],
            written,
            item["level"],
            *facts,
            item["numerics"],
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "## Facts", "", "| fact | meaning |", "|---|---|"]
    used = {fact for kind in ALL_PASSES for fact in kind.requires | kind.provides | kind.removes}
    lines += [f"| {fact.name} | {fact.value} |" for fact in sorted(used, key=lambda one: one.name)]
    return "\n".join(lines) + "\n"
