"""Plain attributes that a forward writes: fine within the call, not available afterwards.

A router that stores its loss in ``self.aux_loss`` for the model to add up is captured as it is.  After the call the
tensor does not exist: the program returns what the model returns.  So that nobody reads a stale value, the attribute
then holds a `Forgotten`, which raises when it is used.  A forward that reads such an attribute before it writes it
carries state from call to call and is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

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


class Attributes:
    """What happens to plain attributes of a model's modules during one forward."""

    def __init__(self) -> None:
        self._read: set[tuple[int, str]] = set()
        self._written: dict[tuple[int, str], tuple[nn.Module, str, Any]] = {}

    def read(self, module: nn.Module, name: str) -> None:
        if not name.startswith("_"):
            self._read.add((id(module), name))

    def write(self, module: nn.Module, name: str, line: str) -> None:
        """Note an assignment; the first one of this forward only counts if nothing was read before."""
        if (id(module), name) not in self._read:
            self._written.setdefault((id(module), name), (module, line, vars(module).get(name, _ABSENT)))

    def is_local(self, module: nn.Module, name: str) -> bool:
        """Whether the forward wrote the attribute before it read it."""
        return (id(module), name) in self._written

    def forget(self) -> None:
        """Put a `Forgotten` wherever a tensor of the trace was assigned."""
        for (_, name), (module, line, _) in self._written.items():
            if _holds_tensor(vars(module).get(name)):
                vars(module)[name] = Forgotten(name, line)

    def restore(self) -> None:
        """Give every attribute the value from before the trace."""
        for (_, name), (module, _, before) in self._written.items():
            if before is _ABSENT:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = before


_ABSENT = object()


def _holds_tensor(value: Any) -> bool:
    """Whether a value is a tensor, or a list or dictionary of some."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
    return any(isinstance(item, torch.Tensor) for item in items)
