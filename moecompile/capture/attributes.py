"""Plain attributes that a forward writes: fine within the call, not available afterwards.

A router that stores its loss in ``self.aux_loss`` for the model to add up is captured as it is.  After the call the
tensor does not exist: the program returns what the model returns.  So that nobody reads a stale value, the attribute
then holds a `Forgotten`, which raises when it is used.  A forward that reads such an attribute before it writes it
carries state from call to call and is refused; so is one that uses a number which it changes itself, unless that has
settled after one call and leaves the graph as it is (a length that is cached).  Counting calls alone is fine.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moecompile.capture.followed import followed
from moecompile.capture.where import forward_line, module_name
from moecompile.errors import CaptureError


class Forgotten:
    """In place of a tensor that a captured forward assigned to an attribute; any use raises `CaptureError`."""

    def __init__(self, name: str, line: str) -> None:
        vars(self)["_said"] = (
            f"{line}: the forward assigns a tensor to attribute {name!r}, and a captured program keeps no such tensor "
            f"after the call; return it from the model to use it outside."
        )

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise CaptureError(self._said)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copy and pickle look for
            raise AttributeError(name)
        raise CaptureError(vars(self)["_said"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = [item for item in (*args, *(kwargs or {}).values()) if isinstance(item, cls)]
        nested = [part for item in args if isinstance(item, (list, tuple)) for part in item if isinstance(part, cls)]
        return (found or nested)[0]._refuse()

    def __repr__(self) -> str:
        return "<not kept by the captured program>"

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _refuse
    __matmul__ = __getitem__ = __iter__ = __len__ = __float__ = __int__ = __bool__ = __call__ = __iadd__ = _refuse


@dataclass(frozen=True)
class Carried:
    """A plain attribute that a forward read and left with another value."""

    module: nn.Module
    name: str
    before: Any
    after: Any
    line: str
    said: str  # both values as text
    used: bool  # for more than counting up: read more often than written, compared, changed in place

    def put(self, value: Any) -> None:
        if value is ABSENT:
            vars(self.module).pop(self.name, None)
        else:
            vars(self.module)[self.name] = value


class Attributes:
    """What happens to plain attributes of a model's modules during one forward.

    Modules are known by their ids; `begin` keeps those alive that the trace is about, and others are not looked at.
    ``followed`` are what an earlier forward changed: numbers among them tell whether they are used for more than counting.
    """

    def __init__(self, followed: Iterable[Carried] = ()) -> None:
        self._followed = {(id(item.module), item.name) for item in followed}
        self._used: set[tuple[int, str]] = set()
        self._read: Counter[tuple[int, str]] = Counter()
        self._wrote: Counter[tuple[int, str]] = Counter()
        self._written: dict[tuple[int, str], tuple[nn.Module, str, Any]] = {}
        self._lines: dict[tuple[int, str], str] = {}
        self._plain: list[tuple[nn.Module, dict[str, Any], dict[str, str]]] = []
        self._hooks: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._flags: list[tuple[nn.Module, str]] = []
        self.carried: list[Carried] = []

    def begin(self, modules: Iterable[nn.Module]) -> None:
        """Remember the values that the forward finds."""
        self._plain.clear()
        self._read.clear()
        self._wrote.clear()
        self._used.clear()
        self._hooks.clear()
        for module in modules:
            self._hooks += [(found, dict(found)) for name in _HOOKS if (found := vars(module).get(name)) is not None]
            values = {name: value for name, value in vars(module).items() if name not in INTERNAL}
            self._plain.append((module, values, {name: _text(value) for name, value in values.items()}))

    def read(self, module: nn.Module, name: str) -> None:
        if name not in INTERNAL and not name.startswith("__"):
            self._read[id(module), name] += 1

    def value(self, module: nn.Module, name: str, found: Any) -> Any:
        """What the forward gets to see of an attribute."""
        key = (id(module), name)
        return followed(found, lambda: self._used.add(key)) if key in self._followed else found

    def write(self, module: nn.Module, name: str, line: str) -> None:
        """Note an assignment; the first one of this forward only counts if nothing was read before."""
        self._lines[id(module), name] = line
        self._wrote[id(module), name] += 1
        if (id(module), name) not in self._read:
            self._written.setdefault((id(module), name), (module, line, vars(module).get(name, ABSENT)))

    def is_local(self, module: nn.Module, name: str) -> bool:
        """Whether the forward wrote the attribute before it read it."""
        return (id(module), name) in self._written

    def end(self) -> None:
        """See what the forward left: `carried` are attributes without tensors that do not hold what they held before.

        A flag that a first forward sets when it registers hooks belongs to the hooks: both stay, as after an eager call.
        """
        self.carried, self._flags = [], []
        hooked = any(hooks.keys() != before.keys() for hooks, before in self._hooks)
        for module, values, texts in self._plain:
            for name, value in vars(module).items():
                if name in INTERNAL or self.is_local(module, name) or _holds_tensor(value):
                    continue
                if hooked and name not in values and value is True:
                    self._flags.append((module, name))
                    continue
                before = texts.get(name) or _text(getattr(type(module), name, ABSENT))
                if _text(value) != before:
                    line = self._lines.get((id(module), name)) or forward_line(module)
                    said = f"from {before} to {_text(value)}"
                    key = (id(module), name)
                    read, wrote = self._read[key], self._wrote[key]
                    used = read > wrote or not wrote or key in self._used
                    self.carried.append(Carried(module, name, values.get(name, ABSENT), value, line, said, used))

    def forget(self) -> None:
        """Put a `Forgotten` wherever a tensor of the trace was assigned, and the weights where it was a list of them."""
        for (_, name), (module, line, before) in self._written.items():
            if _holds_tensor(vars(module).get(name)):
                vars(module)[name] = before if _are_weights(module, before) else Forgotten(name, line)

    def restore(self) -> None:
        """Give every attribute the value from before the trace; lists and dictionaries stay the objects they are."""
        for (_, name), (module, _, before) in self._written.items():
            if before is ABSENT:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = before
        for item in self.carried:
            item.put(item.before)
        for module, name in self._flags:
            vars(module).pop(name, None)
        for hooks, held in self._hooks:
            if hooks.keys() != held.keys():
                hooks.clear()
                hooks.update(held)


def refuse_carried(root: nn.Module, item: Carried) -> None:
    """`CaptureError` for state that a captured program would not carry to the next call."""
    raise CaptureError(
        f"{item.line}: the forward changes attribute {item.name!r} of {module_name(root, item.module)} ({item.said}), "
        f"and a captured program repeats one call; keep such state outside "
        f"forward, or hand it in as an argument."
    )


INTERNAL = frozenset(vars(nn.Module()))
ABSENT = object()
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")


def _holds_tensor(value: Any) -> bool:
    """Whether a value is a tensor, or a list or dictionary of some."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
    return any(isinstance(item, torch.Tensor) for item in items)


def _are_weights(module: nn.Module, value: Any) -> bool:
    """Whether a value is one of the module's weights, or a list of some, as recurrences of torch keep."""
    own = {id(item) for item in (*module.parameters(), *module.buffers())}
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    return bool(items) and all(id(item) in own for item in items)


def _text(value: Any, depth: int = 4) -> str:
    """Equal texts for equal plain values; other objects count by their kind."""
    if value is ABSENT:
        return "nothing"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if depth and isinstance(value, (list, tuple, set, frozenset, deque)):
        return f"{type(value).__name__}({', '.join(_text(item, depth - 1) for item in value)})"
    if depth and isinstance(value, dict):
        return f"{{{', '.join(f'{_text(key, 1)}: {_text(item, depth - 1)}' for key, item in value.items())}}}"
    return type(value).__name__
