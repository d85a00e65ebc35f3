"""Views and other moves of dims: the cut follows its dim; sizes among the arguments become this rank's."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from . import sharder as sharders
from .shapes import reshape_shard
from .sharder import Call, Decision, Emitter, NoRule, Rule
from .types import Partial, Placement, Shard

aten = torch.ops.aten

_RESHAPES = [
    aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.unflatten.int,
    aten.squeeze.dim, aten.squeeze.default, aten.squeeze.dims, aten.unsqueeze.default,
]  # fmt: skip


def reshape(call: Call) -> Decision:
    """view, reshape, flatten, unflatten, squeeze, unsqueeze."""
    source = call.args[0]
    placed = call.placed(source)
    if not isinstance(placed, Shard):
        return Decision(placed)
    found = reshape_shard(placed, call.shape(source), call.out_shape, call.ranks)
    if found is None:
        raise NoRule(
            f"reshaping {list(call.shape(source))} cut as {placed} to {list(call.out_shape)} would mix the ranks' parts; "
            f"keep the batch dim first, or whole, in the new shape."
        )
    return Decision(found)


def expand(call: Call) -> Decision:
    source = call.args[0]
    placed = call.placed(source)
    if not isinstance(placed, Shard):
        return Decision(placed)
    return Decision(Shard(placed.dim + len(call.out_shape) - len(call.shape(source)), placed.outer, placed.rows))


def _dims(call: Call) -> list[int]:
    """For each output dim the input dim it comes from."""
    ndim = len(call.out_shape)
    target = call.node.target
    if target is aten.permute.default:
        return [dim % ndim for dim in call.args[1]]
    order = list(range(ndim))
    if target is aten.t.default:
        return order[::-1]
    if target is aten.movedim.int:
        order.insert(call.args[2] % ndim, order.pop(call.args[1] % ndim))
        return order
    first, second = (dim % ndim for dim in call.args[1:3])
    order[first], order[second] = order[second], order[first]
    return order


def permute_dims(call: Call) -> Decision:
    placed = call.placed(call.args[0])
    if not isinstance(placed, Shard):
        return Decision(placed)
    return Decision(Shard(_dims(call).index(placed.dim), placed.outer, placed.rows))


def cat(call: Call) -> Decision:
    """Concatenating equal cuts along the cut dim interleaves them: the cut gains an outer factor."""
    parts = list(call.args[0])
    ndim = len(call.out_shape)
    dim = call.arg(1, "dim", 0) % ndim
    kinds = {call.placed(part) for part in parts}
    cuts = {kind for kind in kinds if isinstance(kind, Shard)}
    if not cuts:
        partial = any(isinstance(kind, Partial) for kind in kinds)
        out: Placement = sharders.PARTIAL if partial and len(kinds) == 1 else sharders.REPLICATE
        return Decision(
            out,
            {part: out for part in parts if isinstance(call.placed(part), Partial) and out != sharders.PARTIAL},
        )
    if len(cuts) > 1:
        raise NoRule("its parts are cut differently; concatenate tensors whose batch dim is in one place.")
    cut = cuts.pop()
    need: dict[Node, Placement] = {part: cut for part in parts if not isinstance(call.placed(part), Shard)}
    if cut.dim != dim:
        return Decision(cut, need)
    if cut.rows or len({call.shape(part)[dim] for part in parts}) > 1:
        raise NoRule(
            "parts of different length are concatenated along the cut dim; give them equal lengths or another dim."
        )
    return Decision(Shard(dim, cut.outer * len(parts)), need)


def stack(call: Call) -> Decision:
    parts = list(call.args[0])
    dim = call.arg(1, "dim", 0) % len(call.out_shape)
    kinds = {call.placed(part) for part in parts}
    cuts = {kind for kind in kinds if isinstance(kind, Shard)}
    if not cuts:
        return (
            Decision(kinds.pop())
            if len(kinds) == 1
            else Decision(sharders.REPLICATE, dict.fromkeys(parts, sharders.REPLICATE))
        )
    if len(cuts) > 1:
        raise NoRule("its parts are cut differently; stack tensors whose batch dim is in one place.")
    cut = cuts.pop()
    need: dict[Node, Placement] = {part: cut for part in parts if not isinstance(call.placed(part), Shard)}
    return Decision(Shard(cut.dim + (dim <= cut.dim), cut.outer, cut.rows), need)


def repeat(call: Call) -> Decision:
    source, repeats = call.args[0], call.args[1]
    placed = call.placed(source)
    if not isinstance(placed, Shard):
        return Decision(placed)
    dim = placed.dim + len(call.out_shape) - len(call.shape(source))
    return Decision(Shard(dim, placed.outer * repeats[dim], placed.rows))


def _localise_sizes(walk: sharders.Sharder, node: Node, decisions: dict[str, Decision]) -> Node | None:
    """Emit as a reshape or expand to this rank's shape."""
    if all(not isinstance(item.out, Shard) for item in decisions.values()):
        return None
    shape = walk.out_local_shape(node, decisions)
    source = node.args[0]
    if node.target in (aten.expand.default,):
        return walk.emit(node, (source, shape), {}, decisions)
    return walk.emit(node, (source, shape), {}, decisions, target=aten.reshape.default)


def keep_whole(call: Call) -> Decision:
    """Ops of fresh tensors that only borrow dtype and device (``new_zeros``)."""
    return Decision(sharders.REPLICATE)


RULES: dict[Any, Rule] = {
    **dict.fromkeys(_RESHAPES, reshape),
    aten.expand.default: expand,
    **dict.fromkeys(
        [aten.permute.default, aten.transpose.int, aten.t.default, aten.movedim.int, aten.swapaxes.default],
        permute_dims,
    ),
    aten.cat.default: cat,
    aten.stack.default: stack,
    aten.repeat.default: repeat,
    **dict.fromkeys(
        [aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default],
        keep_whole,
    ),
}

EMITTERS: dict[Any, Emitter] = {
    **dict.fromkeys(
        [aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.unflatten.int],
        _localise_sizes,
    ),
    aten.expand.default: _localise_sizes,
}
