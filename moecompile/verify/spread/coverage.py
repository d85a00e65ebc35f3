"""What a check of a program could and could not decide."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Coverage:
    """What a check could not decide: ops whose result is not known, by name, and outputs that depend on them.

    ``checked`` is False where nothing can be said: the batch is not cut yet, or weights of experts are and their rows are not, or
    the meshes of the plan have no digits in common, a parameter is a shard of a dim that another axis cuts, or passes in an unusual
    order have cut one dim over tp before cp. ``proved`` of
    ``ops`` have a result that is known on all digits; ``unknown_ops`` are those where knowledge ends, not those that merely read
    what is not known.
    """

    checked: bool = True
    ops: int = 0
    proved: int = 0
    unknown_ops: Counter[str] = field(default_factory=Counter)
    unproved: list[str] = field(default_factory=list)
