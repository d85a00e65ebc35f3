"""What a plan is written in: mappings that cannot change, TOML text, and the names of its fields."""

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from moecompile.errors import PlanError

V = TypeVar("V")


class FrozenMap(Mapping[str, V]):
    """A mapping that cannot change, keeps its order, and hashes and compares by its ordered items."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, V] | Iterable[tuple[str, V]] = ()) -> None:
        self._items: dict[str, V] = dict(items)

    def __getitem__(self, key: str) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(self._items.items()))

    def __eq__(self, other: object) -> bool:
        # Order counts: of two override patterns that match, the later one wins.
        return isinstance(other, Mapping) and list(self._items.items()) == list(other.items())

    def __repr__(self) -> str:
        return repr(self._items)


def to_toml(values: Mapping[str, Any]) -> str:
    """One `key = value` line per value that is not None, then one table per mapping that is not empty.

    Values are bools, numbers and texts; tables hold the same and may have any text as a key.
    """
    lines = [f"{key} = {_value(v)}" for key, v in values.items() if v is not None and not isinstance(v, Mapping)]
    for key, table in values.items():
        if isinstance(table, Mapping) and table:
            lines += ["", f"[{key}]", *(f"{_value(name)} = {_value(v)}" for name, v in table.items())]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, except for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def nearest(name: object, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name), list(known), n=2)
    return f"; nearest: {' or '.join(repr(item) for item in near)}" if near else ""


def unknown_field(where: str, name: str, known: Iterable[str]) -> PlanError:
    """The error for a field that a plan does not have."""
    if name == "edp":
        return PlanError(
            f"{where}: edp, the number of copies of each expert, follows from the other degrees by tp*cp*dp == etp*ep*edp; leave it out, "
            "choose ep, and read plan.edp."
        )
    near = nearest(name, known) or f"; its fields are {', '.join(known)}"
    return PlanError(f"{where}: a plan has no field {name!r}{near}.")
