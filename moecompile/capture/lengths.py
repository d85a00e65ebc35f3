"""``len(t)`` for rows whose number is a symbol.

Python wants an integer from ``__len__``, where ``t.shape[0]`` can be a symbol.  Loops over experts ask either way
(``if len(rows) == 0: continue``), so while a model is traced the built-in ``len`` answers as the shape does.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def lengths_known() -> Iterator[None]:
    """Within, ``len`` of a tensor with an unknown first size is that symbol; every other answer is the plain one."""
    plain = builtins.len

    def length(item: Any, /) -> Any:
        if isinstance(item, torch.Tensor) and item.dim() and isinstance(item.shape[0], torch.SymInt):
            return item.shape[0]
        return plain(item)

    builtins.len = length
    try:
        yield
    finally:
        builtins.len = plain
