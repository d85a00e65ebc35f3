"""moe:: ops on the token axes: permuting this rank's tokens gives this rank's rows, and counts that are partial sums."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from .. import ops
from . import sharder as sharders
from .sharder import Call, Decision, Emitter, NoRule, Rule
from .types import PARTIAL, REPLICATE, Partial, Placement, Shard

ROWS = Shard(0, rows=True)


def permute(call: Call) -> Decision:
    """x and topk_ids carry the tokens."""
    tokens, ids = call.args[0], call.args[1]
    cut = next(item for item in (call.placed(tokens), call.placed(ids)) if isinstance(item, Shard))
    if cut.dim != 0:
        raise NoRule("tokens must be dim 0 of the MoE layer's input.")
    need: dict[Node, Placement] = {item: cut for item in (tokens, ids) if call.placed(item) != cut}
    return Decision([ROWS, PARTIAL, ROWS], need)


def grouped_linear(call: Call) -> Decision:
    """The counts belong to the same rows, so their partial sums are what is wanted here."""
    rows, weight = call.args[0], call.args[2]
    if call.placed(rows) != ROWS:
        raise NoRule("its rows do not come from permute.")
    for item in (weight, call.arg(3, "bias")):
        if isinstance(item, Node) and isinstance(call.placed(item), Shard):
            raise NoRule("expert weights may not depend on the batch.")
    need: dict[Node, Placement] = {weight: REPLICATE} if isinstance(call.placed(weight), Partial) else {}
    return Decision(ROWS, need)


def _tokens_of(node: Node) -> Node:
    """The ids of the permute that made a row map."""
    source: Any = node
    while source.target is not ops.permute:
        source = source.args[0]
    return source.args[1]  # type: ignore[no-any-return]


def unpermute(call: Call) -> Decision:
    """Back to token order."""
    rows, row_map, probs = call.args[0], call.args[1], call.arg(4, "probs")
    cut = call.placed(_tokens_of(row_map))
    if call.placed(rows) != ROWS or not isinstance(cut, Shard):
        raise NoRule("its rows do not come from permute.")
    need: dict[Node, Placement] = {probs: cut} if probs is not None and call.placed(probs) != cut else {}
    return Decision(cut, need)


def _emit_unpermute(walk: sharders.Sharder, node: Node, decisions: dict[str, Decision]) -> Node | None:
    shape = walk.out_local_shape(node, decisions)
    args = list(node.args)
    args[2] = shape[0]
    return walk.emit(node, tuple(args), node.kwargs, decisions)


RULES: dict[Any, Rule] = {ops.permute: permute, ops.grouped_linear: grouped_linear, ops.unpermute: unpermute}
EMITTERS: dict[Any, Emitter] = {ops.unpermute: _emit_unpermute}
