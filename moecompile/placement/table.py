"""The one table of placement rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx import Graph

from ..compat import FakeTensorMode
from . import (
    rules_collectives,
    rules_elementwise,
    rules_index,
    rules_loss,
    rules_matmul,
    rules_moe,
    rules_nn,
    rules_random,
    rules_reduce,
    rules_ring,
    rules_scan,
    rules_select,
    rules_views,
)
from .call import Emitter, Rule
from .sharder import Sharder

_MODULES = (
    rules_elementwise,
    rules_views,
    rules_reduce,
    rules_matmul,
    rules_select,
    rules_index,
    rules_nn,
    rules_loss,
    rules_moe,
    rules_random,
    rules_collectives,
    rules_ring,
    rules_scan,  # replaces the rule of cumsum in rules_reduce
)

RULES: dict[Any, Rule] = {op: rule for module in _MODULES for op, rule in module.RULES.items()}
EMITTERS: dict[Any, Emitter] = {
    op: emitter for module in _MODULES for op, emitter in getattr(module, "EMITTERS", {}).items()
}
SHARES: dict[Any, Rule] = {op: rule for module in _MODULES for op, rule in getattr(module, "SHARES", {}).items()}
ABSORBS: frozenset[Any] = frozenset().union(*(getattr(module, "ABSORBS", frozenset()) for module in _MODULES))


def sharder(source: Graph, axes: Mapping[str, int], mode: FakeTensorMode, *, strict: bool = False) -> Sharder:
    """A sharder with every rule."""
    return Sharder(source, axes, mode, RULES, EMITTERS, rules_elementwise.fallback, ABSORBS, SHARES, strict)
