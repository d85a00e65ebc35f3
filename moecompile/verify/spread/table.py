"""The one table of what ops do, by name. An op of a backend that is named like a ``moe::`` op means the same."""

from __future__ import annotations

from typing import Any

import torch

from ...compat import OpOverload
from . import collectives, elementwise, experts, layers, lookups, products, reductions, views
from .call import Rule
from .elementwise import nonlinear

_MODULES = (elementwise, views, reductions, products, lookups, layers, experts, collectives)
RULES: dict[str, Rule] = {name: rule for module in _MODULES for name, rule in module.RULES.items()}

# these only move elements, so that parts may be on their way to where they belong
CARRIERS = frozenset({*views.RULES, "aten.clone", "aten.contiguous", "aten._to_copy", "moe.reduce_scatter"})


def name_of(target: Any) -> str:
    """``aten.mm`` for every overload of it."""
    space, _, rest = str(target).partition(".")
    return f"{'moe' if space.startswith('moe') else space}.{rest.partition('.')[0]}"


def rule_of(target: Any) -> Rule | None:
    """The rule of an op; torch's own word for it that an op is elementwise is enough, without being linear."""
    found = RULES.get(name_of(target))
    if found is None and isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags:
        return nonlinear
    return found
