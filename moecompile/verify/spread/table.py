"""The one table of what ops do, by name. An op of a backend means the same as the one that it is named like."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from ...compat import OpOverload
from . import (
    collectives,
    elementwise,
    experts,
    joins,
    layers,
    lookups,
    parts,
    products,
    reductions,
    rings,
    views,
    width,
)
from .call import Rule
from .elementwise import nonlinear

_MODULES = (elementwise, views, parts, joins, reductions, products, lookups, layers, experts, width, collectives, rings)
RULES: dict[str, Rule] = {name: rule for module in _MODULES for name, rule in module.RULES.items()}

# these only move elements, so that parts may be on their way to where they belong
CARRIERS = frozenset(
    {*views.RULES, *parts.RULES, *joins.RULES, "aten.clone", "aten.contiguous", "aten._to_copy", "moe.reduce_scatter"}
)


@cache
def name_of(target: Any) -> str:
    """``aten.mm`` for every overload of it, and for the op of a backend that stands for it."""
    space, _, rest = str(target).partition(".")
    name = rest.partition(".")[0]
    if not space.startswith("moe"):
        return f"{space}.{name}"
    return f"moe.{name}" if f"moe.{name}" in RULES or f"aten.{name}" not in RULES else f"aten.{name}"


def rule_of(target: Any) -> Rule | None:
    """The rule of an op; torch's own word for it that an op is elementwise is enough, without being linear."""
    found = RULES.get(name_of(target))
    if found is None and isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags:
        return nonlinear
    return found
