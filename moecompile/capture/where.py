"""Which line of the user's code is being traced, or raised an error: the ``file:line`` in every capture error."""

from __future__ import annotations

import inspect
import os
import sys
import traceback

import torch
from torch import nn

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# What a user types at a prompt, pipes in or executes as text; any other name in brackets stands for generated code.
_TYPED = ("<stdin>", "<string>", "<console>", "<ipython-input", "<python-input", "<doctest")


def is_user_file(path: str) -> bool:
    """Whether ``path`` is neither torch, nor this package, nor generated code."""
    if path.startswith("<"):
        return path.startswith(_TYPED)
    return not path.startswith((_TORCH, _PACKAGE)) and "contextlib" not in os.path.basename(path)


def is_torchs(path: str) -> bool:
    """Whether ``path`` is a file of torch in which functions of tensors are written, not what passes a call on."""
    return path.startswith(_TORCH) and not _is_passed_on(path)


def current_line() -> str:
    """``file:line`` of the innermost running user frame, '' when there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def asked_by_user() -> bool:
    """Whether the method of a tensor that is running was called by a user's line, not from inside torch."""
    frame = sys._getframe(1)
    while frame is not None and _is_passed_on(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and is_user_file(frame.f_code.co_filename)


def _is_passed_on(path: str) -> bool:
    return path.startswith(_PACKAGE) or path in (f"{_TORCH}_tensor.py", f"{_TORCH}overrides.py")


def raising_line(error: BaseException) -> str:
    """``file:line`` of the innermost user frame that ``error`` passed through, '' when there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if is_user_file(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return ""


def forward_line(module: nn.Module) -> str:
    """``file:line`` where the forward of ``module`` begins."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def module_name(root: nn.Module, module: nn.Module) -> str:
    """Dotted path of ``module`` inside ``root`` for an error text; its class name for the root itself."""
    for name, found in root.named_modules():
        if found is module:
            return name or type(root).__name__
    return type(module).__name__
