"""What a user changes on the plain model between calls: numbers that its code reads lead to another capture, other parameters are refused.

After capture the model's own code does not run again, so that nothing would come of either.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .capture.attributes import ABSENT, INTERNAL
from .capture.surroundings import names_in_code
from .errors import CaptureError

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (dict, list, tuple, set, frozenset)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_MOST_ITEMS = 64  # of a container


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
        if isinstance(value, (*_PLAIN, torch.Tensor)):
            self._read.append((name, held, key, value))
        elif isinstance(value, _CONTAINERS):
            if len(value) <= _MOST_ITEMS and all(isinstance(item, _PLAIN) for item in _items(value)):
                self._read.append((name, held, key, type(value)(value)))
        elif _is_object(value) and id(value) not in seen:
            seen.add(id(value))
            for inner, item in _entries(vars(value), names):
                if isinstance(item, _PLAIN):
                    self._read.append((f"{name}.{inner}", vars(value), inner, item))

    def changes(self) -> list[str]:
        """What the model's code reads and is not what it was, one ``name = value`` each."""
        found = []
        for name, held, key, before in self._read:
            now = held.get(key, ABSENT)
            if now is before:
                continue
            if isinstance(before, torch.Tensor) or isinstance(now, torch.Tensor):
                found.append(f"{name} is another tensor ({self._number(now)})")
            elif key in _HOOKS:
                if tuple(now) != before:
                    found.append(f"{name} are others: {list(now)}")
            elif type(now) is not type(before) or now != before:
                found.append(f"{name} = {'nothing' if now is ABSENT else repr(now)}")
        return found

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


def _items(value: Any) -> Iterator[Any]:
    return itertools.chain(value.keys(), value.values()) if isinstance(value, dict) else iter(value)


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
