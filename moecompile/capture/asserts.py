"""Asserts on tensors, and torch's own checks of arguments: a captured program takes them to hold.

Whether an assert holds depends on values, so no tracer can run it.  Python's own meaning of an assert is that the rest of
the program may count on it, and it may be switched off (``python -O``); the captured program has it switched off.  A check
that raises by itself is taken so in torch's own code alone: distributions look at their parameters.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType

from moecompile.capture.where import asked_by_user, is_torchs, is_user_file


def outcome_of_assert() -> bool | None:
    """What the truth test that is running must give for the user's assert, or torch's check, to hold; None outside of one."""
    frame: FrameType | None = sys._getframe(1)
    users = asked_by_user()
    while frame is not None and not (is_user_file if users else is_torchs)(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else _outcome(frame, _fails if users else _raises)


def _outcome(frame: FrameType, fails: Callable[[Sequence[dis.Instruction]], bool]) -> bool | None:
    """A test in an assert jumps past the failure, or to it."""
    code = _instructions(frame.f_code)
    at = next((index for index, item in enumerate(code) if item.offset >= frame.f_lasti), len(code))
    while at < len(code) and code[at].opname in ("TO_BOOL", "COMPARE_OP", "CACHE", "EXTENDED_ARG", "NOT_TAKEN"):
        at += 1
    if at + 1 >= len(code) or "JUMP" not in code[at].opname or "IF_" not in code[at].opname:
        return None
    jumps_if = "IF_TRUE" in code[at].opname
    target = next((index for index, item in enumerate(code) if item.offset == code[at].argval), len(code))
    if fails(code[at + 1 :]):
        return jumps_if
    return not jumps_if if fails(code[target:]) else None


@functools.lru_cache(maxsize=64)
def _instructions(code: CodeType) -> list[dis.Instruction]:
    return [item for item in dis.get_instructions(code) if item.opname != "CACHE"]


def _fails(code: Sequence[dis.Instruction]) -> bool:
    return bool(code) and (code[0].opname == "LOAD_ASSERTION_ERROR" or code[0].argrepr == "AssertionError")


def _raises(code: Sequence[dis.Instruction]) -> bool:
    """Whether all that follows is making an error and raising it."""
    for item in code:
        if item.opname == "RAISE_VARARGS":
            return True
        if "JUMP" in item.opname or item.opname == "FOR_ITER" or item.opname.startswith(("STORE", "RETURN")):
            return False
    return False
