"""Random numbers by global index: each rank draws its own part of the global tensor."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from .. import ops
from .call import Call, Decision, Emitter, NoRuleError, Rule, Walk
from .types import REPLICATE, Shard


def uniform(call: Call) -> Decision:
    """Only the shape and place of ``like`` count."""
    placed = call.placed(call.args[0])
    if not isinstance(placed, Shard):
        return Decision(REPLICATE)
    if placed.rows:
        raise NoRuleError(
            "random numbers inside an expert would depend on the order of its rows; move the dropout out of the experts."
        )
    return Decision(placed)


def _emit_uniform(walk: Walk, node: Node, decisions: dict[str, Decision]) -> Node | None:
    cut = [(axis, item.out) for axis, item in decisions.items() if isinstance(item.out, Shard)]
    if not cut:
        return None
    axis, placed = cut[0]
    like, seed = (walk.env[arg] for arg in node.args[:2] if isinstance(arg, Node))
    where = (walk.offset(axis), placed.dim, placed.outer, walk.axes[axis])
    return walk.call(node.target, like, seed, *where, like=node)


RULES: dict[Any, Rule] = {ops.uniform: uniform}
EMITTERS: dict[Any, Emitter] = {ops.uniform: _emit_uniform}

# only the shape of its operand counts
ABSORBS = frozenset({ops.uniform})
