"""moe:: ops on the token axes: permuting this rank's tokens gives this rank's rows, and counts that are partial sums."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Node

from .. import ops
from .call import Call, Decision, Emitter, Needs, NoRuleError, Rule, Walk, follow
from .types import PARTIAL, REPLICATE, Shard

_FOREIGN = "its rows do not come from permute, or went through an op that reorders them."


def permute(call: Call) -> Decision:
    """x and topk_ids carry the tokens. The rows remember whose they are."""
    tokens, ids = call.args[0], call.args[1]
    cuts = {placed for item in (tokens, ids) if isinstance(placed := call.placed(item), Shard)}
    if not cuts:
        return call.decide(REPLICATE, call.reduced())
    cut = cuts.pop()
    if cuts or cut.dim != 0:
        raise NoRuleError("tokens must be dim 0 of the MoE layer's input and of its expert ids.")
    needs = Needs()
    for item in (tokens, ids):
        follow(call, needs, item, cut, 0)
    rows = Shard(0, rows=True, origin=call.node.name)
    return Decision([rows, PARTIAL, rows], needs)


def share_tokens(call: Call) -> Decision:
    """Tokens that every rank holds whole are routed once: each rank takes its part of them."""
    tokens, ids = call.args[0], call.args[1]
    if call.shape(tokens)[0] % call.ranks:
        return call.decide(REPLICATE)
    rows = Shard(0, rows=True, origin=call.node.name)
    return Decision([rows, PARTIAL, rows], {item: Shard(0) for item in (tokens, ids)})


def _routing(node: Any) -> Node | None:
    """The permute of which ``node`` is an output."""
    source = node.args[0] if isinstance(node, Node) and node.target is operator.getitem else None
    return source if isinstance(source, Node) and source.target is ops.permute else None


def grouped_linear(call: Call) -> Decision:
    """The counts belong to the same rows, so this rank's part of their sum is what is wanted here."""
    rows, counts, weight, bias = call.args[0], call.args[1], call.args[2], call.get("bias")
    call.placed(counts)
    call.whole([weight, bias], "weight")
    placed = call.placed(rows)
    source = _routing(counts)
    if not isinstance(placed, Shard) or not placed.rows or source is None or source.name != placed.origin:
        raise NoRuleError(_FOREIGN)
    return Decision(placed, call.reduced([item for item in (weight, bias) if isinstance(item, Node)]))


def unpermute(call: Call) -> Decision:
    """Back to token order."""
    rows, row_map, probs = call.args[0], call.args[1], call.get("probs")
    placed, mapped = call.placed(rows), call.placed(row_map)
    source = _routing(row_map)
    if source is None or not isinstance(placed, Shard) or placed != mapped or placed.origin != source.name:
        raise NoRuleError(_FOREIGN)
    cuts = (call.place(item, call.axis) for item in source.args[:2])  # type: ignore[arg-type]
    tokens = next((found for found in cuts if isinstance(found, Shard)), Shard(0))  # none: whole tokens were shared out
    needs = Needs()
    if probs is not None:
        follow(call, needs, probs, tokens, 0)
    return Decision(tokens, needs)


def _emit_unpermute(walk: Walk, node: Node, decisions: dict[str, Decision]) -> Node | None:
    """The number of tokens is this rank's."""
    args = list(node.args)
    args[2] = walk.out_local_shape(node, decisions)[0]
    return walk.emit(node, tuple(args), node.kwargs, decisions)


RULES: dict[Any, Rule] = {ops.permute: permute, ops.grouped_linear: grouped_linear, ops.unpermute: unpermute}
EMITTERS: dict[Any, Emitter] = {ops.unpermute: _emit_unpermute}
SHARES: dict[Any, Rule] = {ops.permute: share_tokens}
ABSORBS = frozenset({ops.grouped_linear})
