"""What a user changes on the plain model between calls: numbers that its code reads lead to another capture, other parameters are refused.

After capture the model's own code does not run again, so that nothing would come of either.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .capture.attributes import ABSENT, INTERNAL
from .capture.surroundings import names_in_code
from .errors import CaptureError

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_SETS = (set, frozenset)
_CONTAINERS = (dict, list, tuple, *_SETS)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MOST_ITEMS, _DEEPEST = 64, 4  # of a container, and containers in containers


@dataclass(frozen=True, eq=False)
class _Held:
    """What a container held."""

    kind: Any  # its type
    items: list[tuple[Any, Any]]


class ModelWatch:
    """Remembers a model as it was; `changes` and `check` compare it with what it is now."""

    def __init__(self, model: nn.Module) -> None:
        names = set().union(*(_names_of(kind) for kind in {type(module) for module in model.modules()}))
        self._read: list[tuple[str, dict[str, Any], str, Any]] = []
        seen: set[int] = set()
        for path, module in model.named_modules():
            prefix = f"{path}." if path else ""
            for key, value in _entries(vars(module), names):
                self._note(f"{prefix}{key}", vars(module), key, value, names, seen)
            for key in _HOOKS:
                self._read.append((f"{prefix}{key}", vars(module), key, tuple(vars(module)[key])))
        self._numbers: dict[int, tuple[Any, int]] = {}
        self.learn_parts(model)

    def learn_parts(self, model: nn.Module) -> None:
        """Take the parameters and submodules as they are now."""
        self._parts = [
            (f"{path}.{key}" if path else key, vars(module)[held], key, value)
            for path, module in model.named_modules()
            for held in ("_parameters", "_modules")
            for key, value in vars(module)[held].items()
        ]

    def _note(self, name: str, held: dict[str, Any], key: str, value: Any, names: set[str], seen: set[int]) -> None:
        self._read.append((name, held, key, _snapshot(value)))
        for inner in _objects(value):
            if id(inner) not in seen:
                seen.add(id(inner))
                read = names | _names_of(type(inner))
                for own, item in _entries(vars(inner), read):
                    self._note(f"{name}.{own}", vars(inner), own, item, read, seen)

    def changes(self) -> list[str]:
        """What the model's code reads and is not what it was, one ``name = value`` each, in the same words on all ranks."""
        found = []
        for name, held, key, before in self._read:
            now = held.get(key, ABSENT)
            if key in _HOOKS:
                if tuple(now) != before:
                    found.append(f"{name} are others: {list(now)}")
            elif now is not before and not _alike(before, now):
                found.append(f"{name} = {self._said(now)}")
        return found

    def _said(self, value: Any, depth: int = 0) -> str:
        """Plain values as they are written, others by a number."""
        if value is ABSENT:
            return "nothing"
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, _CONTAINERS) and len(value) <= _MOST_ITEMS and depth < _DEEPEST:
            items = [f"{self._said(key)}: {self._said(item, depth + 1)}" for key, item in _items(value)]
            return f"{type(value).__name__}({', '.join(sorted(items) if isinstance(value, _SETS) else items)})"
        return f"another {type(value).__name__} ({self._number(value)})"

    def _number(self, value: Any) -> int:
        return self._numbers.setdefault(id(value), (value, len(self._numbers)))[1]

    def check(self) -> None:
        """Raise a CaptureError if a parameter or a submodule is another one than at the first call."""
        for name, held, key, before in self._parts:
            if held.get(key) is not before:
                raise CaptureError(
                    f"'{name}' of the model was replaced after the first call, which the captured program does not follow; copy into the "
                    "parameter that is there (param.data.copy_), or call parallelize on the changed model."
                )


def _entries(held: dict[str, Any], names: set[str]) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in held.items() if key in names and key not in INTERNAL)


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    """What a container holds, by key or place."""
    if isinstance(value, dict):
        return value.items()
    return ((item, True) for item in value) if isinstance(value, _SETS) else enumerate(value)


def _snapshot(value: Any, depth: int = 0) -> Any:
    """What `_alike` compares later: a container as it is now, anything else itself."""
    if isinstance(value, _CONTAINERS) and len(value) <= _MOST_ITEMS and depth < _DEEPEST:
        return _Held(type(value), [(key, _snapshot(item, depth + 1)) for key, item in _items(value)])
    return value


def _alike(before: Any, now: Any) -> bool:
    """Whether a value is what a snapshot was taken of: equal if plain, else the same object."""
    if isinstance(before, _Held):
        if type(now) is not before.kind or len(now) != len(before.items):
            return False
        if issubclass(before.kind, _SETS):
            return all(key in now for key, _ in before.items)
        return all(
            key == other and _alike(item, value)
            for (key, item), (other, value) in zip(before.items, _items(now), strict=True)
        )
    return now is before or (isinstance(before, _PLAIN) and type(now) is type(before) and bool(now == before))


def _objects(value: Any, depth: int = 0) -> Iterator[Any]:
    """A value, or the items of a container, whose attributes the code may read."""
    if _is_object(value):
        yield value
    elif isinstance(value, _CONTAINERS) and len(value) <= _MOST_ITEMS and depth < _DEEPEST:
        for _, item in _items(value):
            yield from _objects(item, depth + 1)


def _is_object(value: Any) -> bool:
    others = (nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType, types.MethodType)
    return hasattr(value, "__dict__") and not isinstance(value, others)


def _names_of(kind: type) -> set[str]:
    """Names in the code of a module class's own methods."""
    found: set[str] = set()
    for base in kind.__mro__:
        if base.__module__ == "torch.nn.modules.module":
            break
        for value in vars(base).values():
            inner = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            inner = inner.fget if isinstance(inner, property) else inner
            if isinstance(inner, types.FunctionType) and value is not vars(base).get("__init__"):
                found |= names_in_code(inner.__code__)
    return found
