"""What a forward remembers outside of its modules: objects, closures, globals, classes, iterators, random numbers of Python.

``state.calls += 1`` in an object, ``nonlocal calls`` in a closure or a global that a forward writes leave no trace in a graph, like
attributes of modules (`attributes`), and are judged alike: what only counts is fine, what settles after one call and leaves the
graph as it is is a cache, everything else is refused.  A tensor that is left behind becomes a `Forgotten`.

Looked at is what the model's modules and the functions of their classes reach: attributes, items, closures, defaults and the
globals that their code names; not the insides of torch, of the standard library and of imported modules.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import random
import sys
import threading
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from moecompile.capture.attributes import ABSENT, INTERNAL, Forgotten
from moecompile.capture.followed import followed, unfollowed
from moecompile.capture.where import forward_line, is_user_file
from moecompile.errors import CaptureError

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (dict, list, deque, set, tuple)
_WRAPPERS = (functools.partial, staticmethod, classmethod, property, types.MethodType)
_FOREIGN = {"torch", "numpy", "moecompile", "builtins", *sys.stdlib_module_names}
_MOST, _DEEPEST = 20_000, 12  # values looked into, and how far from a module
_POSITION = "position"  # the key of what can be seen and not set: how far an iterator is


@dataclass(eq=False)
class Holder:
    """Something that holds values under keys, as it was once. ``keys`` are those of interest, each with a line; None for all."""

    held: Any
    name: str
    line: str
    keys: dict[str, str] | None = None
    before: dict[Any, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.before = self.now()

    def now(self) -> dict[Any, Any]:
        found = _entries(self.held)
        return found if self.keys is None else {key: found[key] for key in self.keys.keys() & found.keys()}

    def put(self, key: Any, value: Any) -> None:
        """Set one entry; `ABSENT` takes it away."""
        held = self.held
        if isinstance(held, dict):  # not by ways of a subclass
            dict.pop(held, key) if value is ABSENT else dict.__setitem__(held, key, value)
        elif isinstance(held, (list, deque)):
            held[key] = value
        elif isinstance(held, types.CellType):
            held.cell_contents = value
        elif value is ABSENT:
            delattr(held, key)
        else:
            (setattr if isinstance(held, type) else object.__setattr__)(held, key, value)

    def restore(self) -> None:
        """Everything as it was; an iterator stays where it is."""
        now = self.now()
        changed = [key for key in {**now, **self.before} if now.get(key, ABSENT) is not self.before.get(key, ABSENT)]
        if not changed or _POSITION in now:
            return
        if isinstance(self.held, (list, deque, set)):
            self.held.clear()
            (self.held.update if isinstance(self.held, set) else self.held.extend)(self.before.values())
            return
        for key in changed:
            self.put(key, self.before.get(key, ABSENT))

    def said(self, key: Any) -> str:
        if isinstance(self.held, types.CellType) or key == _POSITION:
            return self.name
        return f"{self.name}[{key!r}]" if isinstance(self.held, _CONTAINERS) and not self.keys else f"{self.name}.{key}"


@dataclass(eq=False)
class Remembered:
    """An entry that holds something else after a forward than before it."""

    holder: Holder
    key: Any
    before: Any
    after: Any

    def refuse(self) -> None:
        """`CaptureError` for state that a captured program would not carry to the next call."""
        line = (self.holder.keys or {}).get(self.key) or self.holder.line
        done = f"changes {self.holder.said(self.key)} (from {_short(self.before)} to {_short(self.after)})"
        if self.key == _POSITION:
            done = f"takes the next value of {self.holder.name}"
        raise CaptureError(
            f"{line}: the forward {done}, and a captured program repeats one call; keep such state outside forward, or hand it "
            f"in as an argument."
        )


class Surroundings:
    """The plain state around ``model`` and ``functions``, as it is when this object is made."""

    def __init__(self, model: nn.Module, *functions: Callable[..., Any]) -> None:
        self._holders: dict[int, Holder] = {}
        self._used: set[tuple[int, Any]] = set()
        self._walk(model, functions)

    def changed(self) -> list[Remembered]:
        """Numbers, texts and positions that are not what they were."""
        return [item for item in self._differences() if not isinstance(item.after, torch.Tensor)]

    def follow(self, changed: list[Remembered]) -> None:
        """Let numbers that have changed tell from now on whether they are used for more than counting."""
        for item in changed:
            if type(item.after) in (int, float):
                mark = (id(item.holder), item.key)
                item.holder.put(item.key, followed(item.after, functools.partial(self._used.add, mark)))

    def moved(self, changed: list[Remembered]) -> list[Remembered]:
        """Which of ``changed`` have changed again since `follow`, and were more than counted up."""
        before = {(id(item.holder), item.key): item.after for item in changed}
        again = []
        for item in self.changed():
            mark = (id(item.holder), item.key)
            counted = mark in before and type(item.after) in (int, float) and mark not in self._used
            if not _same(before.get(mark, ABSENT), item.after) and not counted:
                again.append(item)
        return again

    def restore(self) -> None:
        for holder in self._holders.values():
            holder.restore()

    def forget(self) -> None:
        """Everything as it was; where a tensor was left behind, a `Forgotten`. Refuses one in the place of another."""
        left = [item for item in self._differences() if isinstance(item.after, torch.Tensor)]
        self.restore()
        for item in left:
            if isinstance(item.before, torch.Tensor):
                item.refuse()
            line = (item.holder.keys or {}).get(item.key) or item.holder.line
            lost, held = Forgotten(item.holder.said(item.key), line), item.holder.held
            held.append(lost) if isinstance(held, (list, deque)) else item.holder.put(item.key, lost)

    def _differences(self) -> list[Remembered]:
        found = []
        for holder in self._holders.values():
            now = holder.now()
            for key in {**holder.before, **now}:
                before, after = holder.before.get(key, ABSENT), unfollowed(now.get(key, ABSENT))
                if before is not after and not _same(before, after) and (_is_leaf(before) or _is_leaf(after)):
                    found.append(Remembered(holder, key, before, after))
        return found

    # ---- what is looked at ---------------------------------------------------------------------------------------------

    def _walk(self, model: nn.Module, functions: tuple[Callable[..., Any], ...]) -> None:
        waiting: deque[tuple[Any, str, str, int]] = deque()
        own = {id(module) for module in model.modules()}
        for path, module in model.named_modules():
            line, name = forward_line(module), path or type(module).__name__
            waiting.append((type(module), type(module).__name__, line, 0))
            held = [(key, value) for key, value in vars(module).items() if key not in INTERNAL]
            hooks = [value for key, value in vars(module).items() if key.endswith("_hooks") and isinstance(value, dict)]
            held += [("hook", hook) for found in hooks for hook in found.values()]  # what is hooked stays so
            waiting.extend((value, f"{name}.{key}", line, 0) for key, value in held)
        waiting.extend((function, getattr(function, "__name__", "loss_fn"), "", 0) for function in functions)
        seen: dict[int, Any] = {}
        while waiting and len(seen) < _MOST:
            value, name, line, depth = waiting.popleft()
            if id(value) in seen or id(value) in own or depth > _DEEPEST or not _is_open(value):
                continue
            seen[id(value)] = value
            if isinstance(value, types.FunctionType):
                line = f"{value.__code__.co_filename}:{value.__code__.co_firstlineno}"
            for holder in self._held_by(value, name, line):
                for key, item in holder.before.items():
                    waiting.append((item, holder.said(key), line, depth + 1))
        drawing = [("random", random.getstate, "Python's random numbers")]
        if "numpy" in sys.modules:
            drawing.append(("np", sys.modules["numpy"].random.get_state, "NumPy's random numbers"))
        for called, state, name in drawing:
            lines = [found for holder in self._holders.values() if (found := (holder.keys or {}).get(called))]
            self._holder(state, name, (lines or [forward_line(model)])[0])

    def _held_by(self, value: Any, name: str, line: str) -> Iterator[Holder]:
        """What one value holds; a function holds its closure, its defaults and the globals that its code names."""
        if not isinstance(value, types.FunctionType):
            yield self._holder(value, name, line)
            return
        for free, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield self._holder(cell, f"{free!r} of {value.__qualname__}", line)
        yield self._holder(
            value.__globals__, f"module {value.__module__}", line, dict.fromkeys(names_in_code(value.__code__), line)
        )
        for default in (value.__defaults__, value.__kwdefaults__):
            if default:
                yield self._holder(default, f"a default of {value.__qualname__}", line)

    def _holder(self, held: Any, name: str, line: str, keys: dict[str, str] | None = None) -> Holder:
        known = self._holders.get(id(held))
        if known is None:
            self._holders[id(held)] = known = Holder(held, name, line, keys)
        elif known.keys is not None and keys is not None and not keys.keys() <= known.keys.keys():
            known.keys = keys | known.keys
            known.before = known.now()
        return known


def names_in_code(code: types.CodeType) -> set[str]:
    """Names in a function's code and in the functions inside it."""
    inner = [item for item in code.co_consts if isinstance(item, types.CodeType)]
    return set(code.co_names).union(*map(names_in_code, inner))


def _is_open(value: Any) -> bool:
    """Whether to look into a value: containers, iterators, and functions and objects of users and packages."""
    if _is_leaf(value) or isinstance(value, types.ModuleType):
        return False
    if isinstance(value, types.FunctionType):
        package = str(value.__module__).partition(".")[
            0
        ]  # the standard library keeps caches that forget, such as that of `re`
        return is_user_file(value.__code__.co_filename) and package not in {"moecompile", *sys.stdlib_module_names}
    if isinstance(value, (*_CONTAINERS, *_WRAPPERS, types.SimpleNamespace, types.CellType)) or _position(value):
        return True
    kind = value if isinstance(value, type) else type(value)
    if issubclass(kind, threading.Thread):  # changes by itself, such as the monitor of a progress bar
        return False
    return getattr(kind, "__module__", "builtins").partition(".")[0] not in _FOREIGN


def _entries(held: Any) -> dict[Any, Any]:
    position = _position(held)
    if position:
        return {_POSITION: position}
    if isinstance(held, dict):  # not by ways of a subclass, which may make what it hands out
        return dict(dict.items(held))
    if isinstance(held, (list, deque, tuple)):
        return dict(enumerate(held))
    if isinstance(held, set):
        return {item: item for item in held}
    if isinstance(held, types.CellType):
        try:
            return {"": held.cell_contents}
        except ValueError:  # not filled yet
            return {}
    if isinstance(held, type):
        return {key: value for key, value in vars(held).items() if not key.startswith("__")}
    names = _slots(held)
    if isinstance(held, _WRAPPERS):
        names += ["__self__", "__func__", "func", "args", "keywords", "fget"]
    found = {**getattr(held, "__dict__", {})}
    for name in names:
        with contextlib.suppress(AttributeError):
            found[name] = object.__getattribute__(held, name)
    return found


def _slots(held: Any) -> list[str]:
    found = [vars(kind).get("__slots__", ()) for kind in type(held).__mro__]
    names = [name for slots in found for name in ([slots] if isinstance(slots, str) else slots)]
    return [name for name in names if not name.startswith("__")]


def _position(held: Any) -> str:
    """How far an iterator or a generator of random numbers is; '' for anything else."""
    if isinstance(held, types.GeneratorType):
        frame = held.gi_frame
        if frame is None:
            return "its end"
        local = {key: value for key, value in frame.f_locals.items() if isinstance(value, _PLAIN)}
        return f"step {frame.f_lasti} {local} {_position(held.gi_yieldfrom)}"
    if isinstance(held, random.Random):
        held = held.getstate
    if isinstance(held, (types.BuiltinMethodType, types.MethodType)):
        if held.__name__ not in ("getstate", "get_state"):
            return ""
        return f"state {hash(str(held()))}"
    return f"position {_iterated(held)}" if _is_iterator(held) else ""


def _is_iterator(held: Any) -> bool:
    """One of the language's own; another has attributes to look at."""
    return hasattr(type(held), "__next__") and type(held).__module__ in ("builtins", "itertools")


def _iterated(held: Any) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parts = list(held.__reduce__())
    except (AttributeError, TypeError):
        return str(operator.length_hint(held, -1))
    texts = []
    while parts:
        part = parts.pop(0)
        if isinstance(part, tuple):
            parts = [*part, *parts]
        elif isinstance(part, _PLAIN):
            texts.append(repr(part))
        elif _is_iterator(part):
            texts.append(_iterated(part))
    return " ".join(texts)


def _is_leaf(value: Any) -> bool:
    return value is ABSENT or isinstance(value, (*_PLAIN, torch.Tensor))


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    plain = isinstance(one, _PLAIN) and type(one) is type(other)
    return plain and bool(one == other or one != one)


def _short(value: Any) -> str:
    text = "nothing" if value is ABSENT else repr(value) if isinstance(value, _PLAIN) else type(value).__name__
    return text if len(text) < 40 else f"{text[:37]}..."
