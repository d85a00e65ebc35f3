"""Indexing by tensors: gather, scatter, index, one_hot, embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from .. import meta
from .call import Call, Decision, Emitter, Needs, NoRuleError, Rule, Walk, align, follow
from .constants import counts_up_along
from .types import PARTIAL, REPLICATE, Partial, Placement, Shard
from .vocabulary import emit_lookup

aten = torch.ops.aten

_ALONG_BATCH = "it gathers or scatters along the batch, which is spread over ranks; do it along another dim."


def gather(call: Call) -> Decision:
    """gather, scatter: every operand cut in the same dim, which is not the one that is indexed."""
    source = call.args[0]
    dim = call.get("dim") % max(len(call.shape(source)), 1)
    cut, needs = _shared_cut(call, call.tensors())
    if cut is None:
        return Decision(REPLICATE, call.reduced())
    if cut.dim == dim:
        raise NoRuleError(_ALONG_BATCH)
    return Decision(cut, needs)


def _shared_cut(call: Call, operands: Sequence[Node]) -> tuple[Shard | None, Needs]:
    """One cut for operands of equal dims. Those that are shorter along it would meet the wrong elements."""
    cuts = {placed for item in operands if isinstance(placed := call.placed(item), Shard)}
    if len(cuts) > 1:
        raise NoRuleError("its operands are cut differently; keep the batch dim in one place.")
    needs = Needs()
    if not cuts:
        return None, needs
    cut = cuts.pop()
    ranked = [item for item in operands if call.shape(item)]  # a value of 0 dims goes with every part
    if len({call.shape(item)[cut.dim] for item in ranked}) > 1:
        raise NoRuleError("its operands have different lengths along the batch dim; slice them to one length first.")
    for item in operands:
        follow(call, needs, item, cut, cut.dim if call.shape(item) else -1)
    return cut, needs


def take_along(call: Call) -> Decision:
    """take_along_dim: as gather, with other dims broadcast."""
    source, ids = call.args[0], call.args[1]
    if call.get("dim") is None:
        if any(isinstance(call.placed(item), Shard) for item in (source, ids)):
            raise NoRuleError("take_along_dim without dim flattens the batch; give it a dim.")
        return Decision(REPLICATE, call.reduced())
    ndim = len(call.out_shape)
    dim = call.get("dim") % ndim
    cut, needs = align(call, [source, ids], ndim)
    if cut is None:
        return Decision(REPLICATE, call.reduced())
    if cut.dim == dim:
        raise NoRuleError(_ALONG_BATCH)
    return Decision(cut, needs)


def scatter_add(call: Call) -> Decision:
    """As gather; where only index and source carry the batch and it is summed away, the result is a partial sum."""
    target, ids, source = call.args[0], call.get("index"), call.get("src")
    dim = call.get("dim") % max(len(call.shape(target)), 1)
    placed = call.placed(target)
    cut, needs = _shared_cut(call, [ids, source])
    if cut is None or cut.dim != dim:
        return gather(call)
    if isinstance(placed, Shard):
        raise NoRuleError(_ALONG_BATCH)
    if not isinstance(placed, Partial):
        needs.want(target, PARTIAL)
    return Decision(PARTIAL, needs)


def index_add(call: Call) -> Decision:
    """The index is a vector; the batch may be in another dim, or be what is summed."""
    target, ids, source = call.args[0], call.get("index"), call.get("source")
    dim = call.get("dim") % len(call.shape(target))
    found, part = call.placed(ids), call.placed(source)
    needs = Needs()
    if isinstance(found, Shard) or (isinstance(part, Shard) and part.dim == dim):
        cut = found if isinstance(found, Shard) else part
        assert isinstance(cut, Shard)
        follow(call, needs, ids, cut.moved(0), 0)
        follow(call, needs, source, cut.moved(dim), dim)
        if isinstance(call.placed(target), Shard):
            raise NoRuleError(_ALONG_BATCH)
        if not isinstance(call.placed(target), Partial):
            needs.want(target, PARTIAL)
        return Decision(PARTIAL, needs)
    cut_other, needs = _shared_cut(call, [target, source])
    if cut_other is None:
        return Decision(REPLICATE, call.reduced())
    if cut_other.dim == dim:
        raise NoRuleError(_ALONG_BATCH)
    if isinstance(found, Partial):
        needs.want(ids, REPLICATE)
    return Decision(cut_other, needs)


def index(call: Call) -> Decision:
    """``x[i, j]``: the tensor is cut along a dim that is not indexed, the indices are cut, or both are and one of the indices is
    ``arange`` over the cut dim."""
    source, indices = call.args[0], call.args[1]
    at = [dim for dim, item in enumerate(indices) if item is not None]
    used = [indices[dim] for dim in at]
    if any(meta.tensor(item).dtype in (torch.bool, torch.uint8) for item in used):
        if any(isinstance(call.placed(item), Shard) for item in [source, *used]):
            raise NoRuleError(
                "a boolean mask picks a data-dependent number of batch elements; use torch.where or multiply by the mask."
            )
        return Decision(REPLICATE, call.reduced())
    adjacent = at == list(range(at[0], at[-1] + 1))
    width = max(len(call.shape(item)) for item in used)
    start = at[0] if adjacent else 0  # where the dims of the indices stand in the result
    placed = call.placed(source)
    if isinstance(placed, Shard) and placed.dim in at:
        return _index_batch(call, placed, width, start)
    cut, needs = align(call, used, width)
    if cut is not None:
        if isinstance(placed, Shard):
            raise NoRuleError(
                "both the indexed tensor and the indices carry the batch; use gather along the indexed dim."
            )
        if isinstance(placed, Partial):
            needs.want(source, REPLICATE)
        return Decision(cut.moved(cut.dim + start), needs)
    needs = call.reduced()
    if not isinstance(placed, Shard):
        return Decision(REPLICATE, needs)
    gone = sum(dim < placed.dim for dim in at)
    shift = width if (not adjacent or at[0] < placed.dim) else 0
    return Decision(placed.moved(placed.dim - gone + shift), needs)


def _index_batch(call: Call, placed: Shard, width: int, start: int) -> Decision:
    """``x[arange(B), j]``: every rank indexes its own batch elements, with numbers of its own."""
    indices = call.args[1]
    rows = indices[placed.dim]
    along = counts_up_along(rows, call.shape(call.args[0])[placed.dim])
    if along is None or isinstance(call.placed(rows), Shard) or placed.outer != 1 or placed.rows or placed.zigzag:
        raise NoRuleError("it indexes along the batch, which is spread over ranks; index along another dim.")
    cut = placed.moved(along + width - len(call.shape(rows)))
    needs = Needs()
    for item in indices:
        if item is not None and item is not rows:
            follow(call, needs, item, cut, cut.dim - (width - len(call.shape(item))))
    needs.want(rows, placed.moved(along))
    return Decision(cut.moved(cut.dim + start), needs)


def _emit_index(walk: Walk, node: Node, decisions: dict[str, Decision]) -> Node | None:
    """Batch indices, sliced to this rank's, start at 0 again."""
    source, indices = node.args[0], list(node.args[1])  # type: ignore[arg-type]
    assert isinstance(source, Node)
    for axis, ranks in walk.axes.items():
        placed = walk.given(source, axis, decisions)
        rows = indices[placed.dim] if isinstance(placed, Shard) and placed.dim < len(indices) else None
        if isinstance(placed, Shard) and isinstance(rows, Node):
            first = walk.offset(axis, meta.tensor(source).shape[placed.dim] // ranks)
            own = walk.call(aten.sub.Tensor, walk.operand(rows, decisions), first, like=node)
            local = [walk.operand(item, decisions) if isinstance(item, Node) else item for item in indices]
            local[placed.dim] = own
            return walk.call(node.target, walk.operand(source, decisions), local, like=node)
    return None


def index_put(call: Call) -> Decision:
    """``x[mask] = number`` for a boolean mask over the first dims; and counting, ``x.index_put([ids], values, accumulate=True)``."""
    target, indices, values = call.args[0], call.args[1], call.get("values")
    if not any(isinstance(call.placed(item), Shard) for item in call.tensors()):
        return Decision(REPLICATE, call.reduced())
    (ids, *others) = indices
    if others or ids is None:
        raise NoRuleError(
            "it writes through several indices into the batch, which is spread over ranks; use torch.where."
        )
    if meta.tensor(ids).dtype == torch.bool:
        return _masked_write(call, target, ids, values)
    cut, needs = align(call, [ids, values], len(call.shape(ids)))
    if (
        cut is None
        or isinstance(call.placed(target), Shard)
        or not call.get("accumulate")
        or len(call.shape(target)) != 1
    ):
        raise NoRuleError(
            "it writes to places of the batch, which is spread over ranks; use torch.where or scatter_add."
        )
    if not isinstance(call.placed(target), Partial):
        needs.want(target, PARTIAL)
    return Decision(PARTIAL, needs)


def _masked_write(call: Call, target: Node, mask: Node, values: Node) -> Decision:
    """The mask has the first dims of the target; the value is one number."""
    if call.shape(values):
        raise NoRuleError("it writes a tensor through a mask, in an order that ranks cannot know; use torch.where.")
    placed, found = call.placed(target), call.placed(mask)
    cuts = {item for item in (placed, found) if isinstance(item, Shard)}
    if len(cuts) > 1:
        raise NoRuleError("its operands are cut differently; keep the batch dim in one place.")
    cut = cuts.pop()
    needs = call.reduced()
    for item in (target, mask):
        needs.pop(item, None)
        follow(call, needs, item, cut, cut.dim if cut.dim < len(call.shape(item)) else -1)
    return Decision(cut, needs)


def index_select(call: Call) -> Decision:
    source, ids = call.args[0], call.get("index")
    dim = call.get("dim") % max(len(call.shape(source)), 1)
    placed, found = call.placed(source), call.placed(ids)
    if isinstance(found, Shard) and not isinstance(placed, Shard):
        return Decision(found.moved(dim), call.reduced())
    if isinstance(placed, Shard) and (placed.dim == dim or isinstance(found, Shard)):
        raise NoRuleError("it selects along the batch, which is spread over ranks; select along another dim.")
    return Decision(placed if isinstance(placed, Shard) else REPLICATE, call.reduced())


def one_hot(call: Call) -> Decision:
    placed: Placement = call.placed(call.args[0])
    if not isinstance(placed, Shard):
        return Decision(REPLICATE, call.reduced())
    if call.get("num_classes") < 0:
        raise NoRuleError("how many classes it makes depends on the ids; give num_classes.")
    return Decision(placed)


def embedding(call: Call) -> Decision:
    """The result is cut as the ids are; the table is whole."""
    table, ids = call.args[0], call.args[1]
    if call.placed(table) == Shard(0):
        return _over_rows(call, table, ids)
    call.whole([table], "table")
    placed = call.placed(ids)
    if isinstance(placed, Shard) and (call.get("scale_grad_by_freq") or call.get("sparse")):
        raise NoRuleError("scale_grad_by_freq and sparse gradients count ids on one rank only; leave both off.")
    return Decision(placed if isinstance(placed, Shard) else REPLICATE, call.reduced())


def _over_rows(call: Call, table: Node, ids: Node) -> Decision:
    """A table that is cut by rows, looked up for all ids on every rank."""
    if call.get("padding_idx") >= 0 or call.get("scale_grad_by_freq") or call.get("sparse"):
        raise NoRuleError("padding_idx, scale_grad_by_freq and sparse gradients look at whole tables; leave them off.")
    return Decision(PARTIAL, {} if call.placed(ids) == REPLICATE else {ids: REPLICATE})


def _emit_embedding(walk: Walk, node: Node, decisions: dict[str, Decision]) -> Node | None:
    for axis in decisions:
        if isinstance(node.args[0], Node) and walk.given(node.args[0], axis, decisions) == Shard(0):
            return emit_lookup(walk, node, decisions, axis)
    return None


RULES: dict[Any, Rule] = {
    **dict.fromkeys(
        [
            aten.gather.default, aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce,
            aten.scatter_reduce.two,
        ],
        gather,
    ),
    aten.take_along_dim.default: take_along,
    aten.scatter_add.default: scatter_add,
    aten.index_add.default: index_add,
    aten.index.Tensor: index,
    aten.index_put.default: index_put,
    aten.index_select.default: index_select,
    aten.one_hot.default: one_hot,
    aten.embedding.default: embedding,
}  # fmt: skip

EMITTERS: dict[Any, Emitter] = {aten.index.Tensor: _emit_index, aten.embedding.default: _emit_embedding}
