"""Dataclasses and namespaces among a model's results: trees that pytree would take for single leaves.

Nothing is registered for the user's classes, so that his own use of pytree stays as it is.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch

from moecompile.compat import register_pytree_node, tree_flatten, tree_map

# the class of an object and the names of what it holds
_Context = tuple[type, tuple[str, ...]]


class _Fields:
    """An object on its way through a pytree. `tree_flatten` opens it, `tree_unflatten` gives an object of its own class."""

    def __init__(self, context: _Context, values: tuple[Any, ...]) -> None:
        self.context, self.values = context, values


def with_fields(output: Any) -> Any:
    """``output`` so that `tree_flatten` finds the tensors in dataclasses and namespaces, too, at any depth."""
    return tree_map(_opened, output)


def _opened(leaf: Any) -> Any:
    is_record = dataclasses.is_dataclass(leaf) or isinstance(leaf, types.SimpleNamespace)
    if not is_record or isinstance(leaf, (type, torch.Tensor)):
        return leaf
    known = [item.name for item in dataclasses.fields(leaf)] if dataclasses.is_dataclass(leaf) else []
    names = tuple(name for name in dict.fromkeys([*known, *getattr(leaf, "__dict__", ())]) if hasattr(leaf, name))
    values = tuple(with_fields(getattr(leaf, name)) for name in names)
    holds = any(isinstance(item, torch.Tensor) for item in tree_flatten(values)[0])
    return _Fields((type(leaf), names), values) if holds else leaf


def _flatten(found: _Fields) -> tuple[list[Any], _Context]:
    return list(found.values), found.context


def _rebuild(values: Iterable[Any], context: _Context) -> Any:
    """As `copy.copy` makes one: what a constructor would do to the fields has been done."""
    kind, names = context
    made: Any = object.__new__(kind) if dataclasses.is_dataclass(kind) else types.SimpleNamespace()
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)  # of frozen ones, too
    return made


def _as_text(context: _Context) -> list[Any]:
    kind, names = context
    if "<locals>" in kind.__qualname__:
        raise NotImplementedError(f"{kind.__qualname__} is defined in a function")
    return [kind.__module__, kind.__qualname__, list(names)]


def _from_text(text: list[Any]) -> _Context:
    module, name, names = text
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise NotImplementedError(f"{module}.{name}")
    return found, tuple(names)


register_pytree_node(
    _Fields,
    _flatten,
    _rebuild,
    serialized_type_name="moecompile.fields",
    to_dumpable_context=_as_text,
    from_dumpable_context=_from_text,
)
