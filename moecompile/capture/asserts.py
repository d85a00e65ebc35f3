"""Asserts on tensors: a captured program takes them to hold.

Whether an assert holds depends on values, so no tracer can run it.  Python's own meaning of an assert is that the rest of
the program may count on it, and it may be switched off (``python -O``); the captured program has it switched off.
"""

from __future__ import annotations

import dis
import functools
import sys
from types import CodeType, FrameType

from moecompile.capture.where import is_user_file


def outcome_of_assert() -> bool | None:
    """What the truth test that the running user frame makes must give for its assert to hold; None outside of one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else _outcome(frame)


def _outcome(frame: FrameType) -> bool | None:
    """A test in an assert jumps past the failure, or to it."""
    code = _instructions(frame.f_code)
    at = next((index for index, item in enumerate(code) if item.offset >= frame.f_lasti), len(code))
    while at < len(code) and code[at].opname in ("TO_BOOL", "COMPARE_OP", "CACHE", "EXTENDED_ARG", "NOT_TAKEN"):
        at += 1
    if at + 1 >= len(code) or "JUMP" not in code[at].opname or "IF_" not in code[at].opname:
        return None
    jumps_if = "IF_TRUE" in code[at].opname
    target = next((item for item in code if item.offset == code[at].argval), None)
    if _fails(code[at + 1]):
        return jumps_if
    return not jumps_if if target is not None and _fails(target) else None


@functools.lru_cache(maxsize=64)
def _instructions(code: CodeType) -> list[dis.Instruction]:
    return [item for item in dis.get_instructions(code) if item.opname != "CACHE"]


def _fails(instruction: dis.Instruction) -> bool:
    return instruction.opname == "LOAD_ASSERTION_ERROR" or instruction.argrepr == "AssertionError"
