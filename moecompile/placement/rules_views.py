"""Views and other moves of dims: the cut follows its dim; sizes among the arguments become this rank's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from .call import Call, Decision, Emitter, Needs, NoRuleError, Rule, Walk, follow
from .shapes import reshape_shard
from .types import PARTIAL, REPLICATE, Partial, Placement, Shard

aten = torch.ops.aten

_RESHAPES = [
    aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.unflatten.int, aten.ravel.default,
    aten.squeeze.dim, aten.squeeze.default, aten.squeeze.dims, aten.unsqueeze.default, aten.view_as.default, aten.reshape_as.default,
]  # fmt: skip
_EXPANDS = [aten.expand.default, aten.expand_as.default, aten.broadcast_to.default]
_TRANSPOSES = [
    aten.permute.default, aten.transpose.int, aten.t.default, aten.movedim.int, aten.movedim.intlist, aten.swapaxes.default,
    aten.swapdims.default, aten.mT.default, aten.adjoint.default, aten.numpy_T.default,
]  # fmt: skip


def _source(call: Call) -> tuple[Node, Placement]:
    """The operand whose elements are moved; a second one only names a shape."""
    for item in call.tensors():
        call.placed(item)
    source = call.args[0]
    return source, call.placed(source)


def reshape(call: Call) -> Decision:
    """view, reshape, flatten, unflatten, squeeze, unsqueeze."""
    source, placed = _source(call)
    if not isinstance(placed, Shard):
        return Decision(placed)
    found = reshape_shard(placed, call.shape(source), call.out_shape, call.ranks)
    if found is None:
        raise NoRuleError(
            f"reshaping {list(call.shape(source))} cut as {placed} to {list(call.out_shape)} would mix the ranks' parts; "
            f"keep the batch dim first, or whole, in the new shape."
        )
    return Decision(found)


def expand(call: Call) -> Decision:
    source, placed = _source(call)
    if not isinstance(placed, Shard):
        return Decision(placed)
    return Decision(placed.moved(placed.dim + len(call.out_shape) - len(call.shape(source))))


def _order(call: Call) -> list[int]:
    """For each output dim the input dim it comes from, found by moving numbered dims."""
    ndim = len(call.out_shape)
    probe = torch.empty(tuple(range(2, ndim + 2)), device="meta")
    found = call.node.target(probe, *call.args[1:], **call.node.kwargs)  # type: ignore[operator]
    return [size - 2 for size in found.shape]


def permute_dims(call: Call) -> Decision:
    placed = call.placed(call.args[0])
    return Decision(placed.moved(_order(call).index(placed.dim)) if isinstance(placed, Shard) else placed)


def cat(call: Call) -> Decision:
    """Concatenating equal cuts along the cut dim interleaves them: the cut gains an outer factor."""
    parts = [part for part in call.args[0] if call.shape(part) != (0,) or len(call.out_shape) == 1]
    dim = call.get("dim") % len(call.out_shape)
    cut = _only_cut(call, parts)
    if cut is None:
        return _combined(call, parts)
    needs = Needs()
    for part in parts:
        follow(call, needs, part, cut, cut.dim)
    if cut.dim != dim:
        return Decision(cut, needs)
    if len(parts) > 1 and (cut.rows or len({call.shape(part)[dim] for part in parts}) > 1):
        raise NoRuleError(
            "parts of different length are concatenated along the cut dim; give them equal lengths or another dim."
        )
    return Decision(replace(cut, outer=cut.outer * len(parts)), needs)


def stack(call: Call) -> Decision:
    parts = list(call.args[0])
    dim = call.get("dim") % len(call.out_shape)
    cut = _only_cut(call, parts)
    if cut is None:
        return _combined(call, parts)
    needs = Needs()
    for part in parts:
        follow(call, needs, part, cut, cut.dim)
    return Decision(cut.moved(cut.dim + (dim <= cut.dim)), needs)


def _only_cut(call: Call, parts: Sequence[Node]) -> Shard | None:
    cuts = {placed for part in parts if isinstance(placed := call.placed(part), Shard)}
    if len(cuts) > 1:
        raise NoRuleError("its parts are cut differently; put together tensors whose batch dim is in one place.")
    return next(iter(cuts), None)


def _combined(call: Call, parts: Sequence[Node]) -> Decision:
    """Parts of which none is cut: partial if all are."""
    if all(isinstance(call.placed(part), Partial) for part in parts):
        return Decision(PARTIAL)
    return Decision(REPLICATE, call.reduced())


def repeat(call: Call) -> Decision:
    """Copies of a cut dim stand one after the other: the cut gains an outer factor."""
    source, repeats = call.args[0], call.args[1]
    placed = call.placed(source)
    if not isinstance(placed, Shard):
        return Decision(placed)
    dim = placed.dim + len(call.out_shape) - len(call.shape(source))
    at = dim - (len(call.out_shape) - len(repeats))
    times = repeats[at] if at >= 0 else 1
    if placed.rows and times != 1:
        raise NoRuleError("rows of an expert region are repeated; repeat the tokens before they are routed.")
    return Decision(replace(placed, dim=dim, outer=placed.outer * times))


def take_diagonal(call: Call) -> Decision:
    """diagonal: both of its dims must be whole; the cut moves up past those that go."""
    source = call.args[0]
    placed = call.placed(source)
    if not isinstance(placed, Shard):
        return Decision(placed)
    gone = {call.get(name) % len(call.shape(source)) for name in ("dim1", "dim2")}
    if placed.dim in gone:
        raise NoRuleError("it takes a diagonal of the batch dim, which is spread over ranks.")
    return Decision(placed.moved(placed.dim - sum(dim < placed.dim for dim in gone)))


def borrow(call: Call) -> Decision:
    """Ops of fresh tensors that only borrow dtype and device (``new_zeros``)."""
    for item in call.tensors():
        call.placed(item)
    return Decision(REPLICATE)


def _emit_as_reshape(walk: Walk, node: Node, decisions: dict[str, Decision]) -> Node | None:
    """To this rank's shape. Also ``squeeze``, which would drop a cut dim of which this rank holds one element."""
    shapes_itself = node.target not in (aten.view_as.default, aten.reshape_as.default)
    if shapes_itself and not any(isinstance(item.out, Shard) for item in decisions.values()):
        return None
    shape = walk.out_local_shape(node, decisions)
    return walk.emit(node, (node.args[0], shape), {}, decisions, target=aten.reshape.default)


def _emit_as_expand(walk: Walk, node: Node, decisions: dict[str, Decision]) -> Node | None:
    shape = walk.out_local_shape(node, decisions)
    return walk.emit(node, (node.args[0], shape), {}, decisions, target=aten.expand.default)


_FRESH = [aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default]

RULES: dict[Any, Rule] = {
    **dict.fromkeys(_RESHAPES, reshape),
    **dict.fromkeys(_EXPANDS, expand),
    **dict.fromkeys(_TRANSPOSES, permute_dims),
    **dict.fromkeys([aten.cat.default, aten.concat.default], cat),
    aten.stack.default: stack,
    **dict.fromkeys([aten.repeat.default, aten.tile.default], repeat),
    aten.diagonal.default: take_diagonal,
    **dict.fromkeys(_FRESH, borrow),
}

EMITTERS: dict[Any, Emitter] = {
    **dict.fromkeys(_RESHAPES, _emit_as_reshape),
    **dict.fromkeys(_EXPANDS, _emit_as_expand),
}

# these read nothing but the shape of their second operand, or of their only one
ABSORBS = frozenset([*_FRESH, aten.view_as.default, aten.reshape_as.default, aten.expand_as.default])
