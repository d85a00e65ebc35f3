"""Numbers that tell whether they were used: what a forward reads from an attribute that it changes in every call.

``n = self.calls; self.calls = n + 1`` only counts; ``if n > 5`` behind it steers the forward by a number that the next
call finds changed.  Both read once and write once, so the number itself has to be asked.  Sums and differences with other
numbers stay followed, and everything else is a use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_COUNTS = ("__add__", "__radd__", "__sub__", "__rsub__")
_USES = (
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__bool__", "__hash__", "__int__", "__float__"),
    *("__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__floordiv__", "__rfloordiv__", "__mod__", "__rmod__"),
    *("__divmod__", "__rdivmod__", "__pow__", "__rpow__", "__neg__", "__abs__", "__round__", "__trunc__", "__ceil__"),
    *("__floor__", "__and__", "__rand__", "__or__", "__ror__", "__xor__", "__rxor__", "__lshift__", "__rlshift__"),
    *("__rshift__", "__rrshift__", "__invert__", "__index__"),
)


class FollowedInt(int):
    """An int that calls ``on_use`` for whatever is more than counting on."""

    on_use: Callable[[], None]


class FollowedFloat(float):
    """The same for a float."""

    on_use: Callable[[], None]


def followed(value: Any, on_use: Callable[[], None]) -> Any:
    """A plain number that reports its use; any other value as it is."""
    kind = {int: FollowedInt, float: FollowedFloat}.get(type(value))
    if kind is None:
        return value
    made = kind(value)
    made.on_use = on_use
    return made


def unfollowed(value: Any) -> Any:
    """The plain number again."""
    if isinstance(value, FollowedInt):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, FollowedFloat) else value


def _counting(plain: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, other: Any) -> Any:
        found = plain(self, unfollowed(other))
        if found is NotImplemented:
            if not isinstance(other, float):
                self.on_use()
            return found
        return followed(found, self.on_use)

    return method


def _using(plain: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        self.on_use()
        return plain(self, *map(unfollowed, args))

    return method


for _kind, _base in ((FollowedInt, int), (FollowedFloat, float)):
    for _names, _wrap in ((_COUNTS, _counting), (_USES, _using)):
        for _name in _names:
            if hasattr(_base, _name):
                setattr(_kind, _name, _wrap(getattr(_base, _name)))
