"""This rank's part of a value that every rank could hold whole, without making the whole: masks, positions, fresh tensors.

Instead of slicing the value, the op that makes it is called on slices of its operands wherever its own placement rule says that this
gives the part that is wanted. What is then unused of the whole computation is dead code. With many ranks this is the difference
between an attention mask of this rank's sequences and one of the global batch.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from .. import meta
from .call import Call, Decision, NoRuleError, Walk, changed
from .types import REPLICATE, Placement, Replicate, Shard

aten = torch.ops.aten

_FILLED = {aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format}
_NEW = {aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default}
_EXPANDS = {aten.expand.default, aten.expand_as.default, aten.broadcast_to.default}


def sliced(walk: Walk, node: Node, axis: str, want: Shard) -> Node | None:
    """The part of the global value ``node`` that ``want`` names, made from parts; None where only slicing the whole will do.

    That is also where the whole was paid for and somebody else may want it: masks are made twice rather than whole, matmuls and all
    else that gradients flow through not.
    """
    if node in walk.differentiated:
        return None
    if node.target is operator.getitem or (node in walk.whole and len(node.users) > 1):
        return None
    if node in walk.stand_ins or want.rows or not isinstance(walk.place(node, axis), Replicate):
        return None
    others = {name: decision for name, decision in walk.decide(node).items() if name != axis}
    shape = list(meta.tensor(walk.env[node]).shape)
    shape[want.dim] //= walk.axes[axis]
    if node.target in _FILLED | _NEW:
        args, kwargs = changed(node, size=shape)
        return walk.emit(node, args, kwargs, others)
    if node.target in _EXPANDS and _is_broadcast(node, want.dim):
        return walk.emit(node, (node.args[0], shape), {}, others, target=aten.expand.default)
    decision = _cut_an_operand(walk, node, axis, want)
    if decision is None:
        return None
    decisions = {**others, axis: decision}
    emitter = walk.emitters.get(node.target)
    made = emitter(walk, node, decisions) if emitter is not None else None
    return made if made is not None else walk.emit(node, node.args, node.kwargs, decisions)


def _is_broadcast(node: Node, dim: int) -> bool:
    """Whether an expansion makes ``dim`` out of nothing, or of a single element."""
    source: Any = node.args[0]
    at = dim - (meta.tensor(node).dim() - meta.tensor(source).dim())
    return at < 0 or meta.tensor(source).shape[at] == 1


def _cut_an_operand(walk: Walk, node: Node, axis: str, want: Shard) -> Decision | None:
    """A decision of the op's own rule that leads to ``want`` from whole operands, one of which is cut."""
    rule = walk.rules.get(node.target) or walk.fallback(node.target)
    if rule is None or not meta.is_tensor(node):
        return None
    for item in node.all_input_nodes:
        if not meta.is_tensor(item) or not isinstance(walk.place(item, axis), Replicate):
            return None
    for item in node.all_input_nodes:
        for cut in _cuts(meta.tensor(item), want, walk.axes[axis]):

            def place(other: Node, name: str, item: Node = item, cut: Shard = cut) -> Placement:
                return cut if other is item and name == axis else REPLICATE

            try:
                found = rule(Call(node, axis, walk.axes[axis], place))
            except NoRuleError:
                continue
            if found.out == want:
                return Decision(want, {**found.need, item: cut})
    return None


def _cuts(value: torch.Tensor, want: Shard, ranks: int) -> Iterator[Shard]:
    """Ways to cut an operand that may lead to ``want``."""
    for dim, size in enumerate(value.shape):
        for outer in dict.fromkeys((want.outer, 1)):
            cut = Shard(dim, outer, zigzag=want.zigzag)
            if isinstance(size, int) and size and size % (outer * cut.pieces(ranks)) == 0:
                yield cut
