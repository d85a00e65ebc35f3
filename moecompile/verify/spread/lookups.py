"""Indexing by tensors: embeddings, gather and scatter, index."""

from __future__ import annotations

import math
from typing import Any

from torch.fx import Node

from .call import Call, Rule, only, plain
from .layout import locate
from .readings import FILLED, SAME, SUM, UNKNOWN, ZERO, ConflictError, Kind, Options, Reading, cut, is_even

_WITH_ROWS = (Kind.ROWS, Kind.AWAY)
_TERMS = (Kind.SUM, Kind.MEAN)
_KNOWN = {Kind.SAME, Kind.ZERO, Kind.CUT, *_TERMS}


def _same_or(reading: Reading) -> Reading:
    return SAME if reading.kind in (Kind.SAME, Kind.ZERO) else reading


def _embedding(call: Call) -> Options:
    table, ids = plain(call.of(call["weight"])), plain(call.of(call["indices"]))
    ndim = len(call.shape(call["indices"]))
    if ids.kind in _TERMS:
        raise ConflictError(f"looks up ids that are {ids}")
    if ids.kind in (Kind.CUT, *_WITH_ROWS):
        call.whole(call["weight"])
        return only(ids)
    if ids.kind not in (Kind.SAME, Kind.ZERO):
        return only(UNKNOWN)
    if table.kind is Kind.CUT:
        if table.dim == 0:
            raise ConflictError("looks up ids of the whole vocabulary in a table of which this rank has a part")
        return only(cut(ndim, table.outer))
    return only(SAME if table.kind is Kind.ZERO else _same_or(table) if table.kind is not Kind.SAME else SAME)


def _embedding_backward(call: Call) -> Options:
    """The gradients of all tokens of an id are added up."""
    grad, ids = plain(call.of(call["grad_output"])), plain(call.of(call["indices"]))
    ndim = len(call.shape(call["indices"]))
    if ids.kind is Kind.CUT:
        if grad == ids or is_even(grad, ids.dim):
            return only(SUM)
        raise ConflictError(f"has a gradient that is {grad} for ids that are {ids}")
    if ids.kind is not Kind.SAME:
        return only(UNKNOWN)
    if grad.kind is Kind.CUT:
        if grad.dim < ndim:
            raise ConflictError(f"has a gradient that is {grad} for ids that are {ids}")
        return only(cut(1, grad.outer))
    return only(_same_or(grad))


def _gather(call: Call) -> Options:
    """gather, take_along_dim: the index has the dims of the tensor."""
    source, ids = plain(call.of(call["self"])), plain(call.of(call.args.get("index", call.args.get("indices"))))
    if call.get("dim") is None or not {source.kind, ids.kind} <= _KNOWN | set(_WITH_ROWS):
        return only(
            UNKNOWN if source.kind not in (Kind.SAME, Kind.ZERO) or ids.kind not in (Kind.SAME, Kind.ZERO) else SAME
        )
    dim = call.dim("dim", call["self"])
    if ids.kind in _TERMS:
        raise ConflictError(f"looks up places that are {ids}")
    if source.kind in (Kind.SAME, Kind.ZERO):
        if (
            ids.kind is Kind.CUT
            and ids.dim != dim
            and not is_even(source, ids.dim)
            and call.shape(call["self"])[ids.dim] != 1
        ):
            raise ConflictError(f"looks up in the whole of {call['self'].name} by an index that is {ids}")
        return only(_same_or(ids) if source.kind is Kind.SAME or ids.kind is Kind.SAME else ids)
    at = source.dim if source.kind is Kind.CUT else 0
    if source.kind in _TERMS:
        call.whole(call.args.get("index", call.args.get("indices")))
        return only(source)
    if at == dim:
        raise ConflictError(f"looks up along a dim in which {call['self'].name} is {source}")
    if ids != source and not is_even(ids, at):
        raise ConflictError(f"looks up in a tensor that is {source} by an index that is {ids}")
    return only(source)


def _scatter(call: Call) -> Options:
    """scatter, scatter_add: index and source have the dims of the tensor; a zero tensor lies as they do."""
    target, ids = plain(call.of(call["self"])), plain(call.of(call["index"]))
    value = call.args.get("src", call.args.get("value"))
    source = plain(call.of(value)) if isinstance(value, Node) else ZERO if value == 0 else FILLED
    if not {target.kind, ids.kind, source.kind} <= _KNOWN | set(_WITH_ROWS):
        return only(UNKNOWN)
    dim = call.dim("dim", call["self"])
    if ids.kind in _TERMS:
        raise ConflictError(f"writes to places that are {ids}")
    if source.kind in _TERMS or target.kind in _TERMS:
        terms = [item for item in (target, source) if item.kind is not Kind.ZERO]
        adds = call.name in ("aten.scatter_add",) or Kind.ZERO in (target.kind, source.kind)
        if ids.kind in (Kind.SAME, Kind.ZERO) and len(set(terms)) == 1 and adds:
            return only(terms[0])
        if ids.kind is not Kind.CUT or ids.dim != dim:
            raise ConflictError(f"writes {source} into a tensor that is {target}")
    parts = {item for item in (target, ids, source) if item.kind in (Kind.CUT, *_WITH_ROWS)}
    if not parts:
        return only(SAME)
    found = parts.pop()
    at = found.dim if found.kind is Kind.CUT else 0
    if parts or not all(item == found or is_even(item, at) for item in (ids, source)):
        raise ConflictError(f"writes {source} to places that are {ids}")
    if at == dim:
        if call.name != "aten.scatter_add" or target.kind not in (Kind.ZERO, Kind.SUM):
            raise ConflictError(f"writes along a dim that is {found}")
        return only(SUM)
    if target != found and not is_even(target, at):
        raise ConflictError(f"writes parts that are {found} into a tensor that is {target}")
    return only(found)


def _index(call: Call) -> Options:
    source, indices = plain(call.of(call["self"])), list(call["indices"])
    at = [dim for dim, item in enumerate(indices) if item is not None]
    used = [plain(call.of(indices[dim])) for dim in at]
    if any(item.kind in _TERMS for item in used):
        raise ConflictError("looks up places that are a sum still to be taken")
    own = [dim for dim, item in zip(at, used, strict=True) if item.kind is Kind.OWN]
    if len(own) == 1 and is_even(source, own[0]):
        source = cut(own[0])
    if own and source.kind is Kind.CUT:
        return _own(call, source, at, used)
    if any(item.kind not in (Kind.SAME, Kind.ZERO, Kind.CUT) for item in (source, *used) if item.kind not in _TERMS):
        return only(UNKNOWN)
    adjacent = at == list(range(at[0], at[-1] + 1))
    width = max(len(call.shape(indices[dim])) for dim in at)
    start = at[0] if adjacent else 0
    cuts = {
        item._replace(dim=item.dim + width - len(call.shape(indices[dim])))
        for dim, item in zip(at, used, strict=True)
        if item.kind is Kind.CUT
    }
    if source.kind is Kind.CUT:
        if cuts or source.dim in at:
            return only(UNKNOWN)  # each rank picks among its own elements
        gone = sum(dim < source.dim for dim in at)
        kept = source.dim - gone + (width if not adjacent or at[0] < source.dim else 0)
        return only(source._replace(dim=kept))
    if cuts:
        if len(cuts) > 1 or source.kind in _TERMS:
            raise ConflictError(f"looks up in a tensor that is {source} by indices that are cut")
        found = cuts.pop()
        return only(found._replace(dim=found.dim + start))
    return only(_same_or(source))


def _own(call: Call, source: Reading, at: list[int], used: list[Reading]) -> Options:
    """Each rank looks up its own elements: one index is their numbers, the others lie along, or are whole."""
    indices = call["indices"]
    width = max(len(call.shape(indices[dim])) for dim in at)
    start = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    own = {
        dim: item.dim + width - len(call.shape(indices[dim]))
        for dim, item in zip(at, used, strict=True)
        if item.kind is Kind.OWN
    }
    if list(own) != [source.dim] or source.outer > 1 or source.zigzag:
        raise ConflictError(
            f"looks up in a tensor that is {source} by the numbers of this rank's elements in another dim"
        )
    for dim, item in zip(at, used, strict=True):
        shape = call.shape(indices[dim])
        along = own[source.dim] - (width - len(shape))
        if item.kind is Kind.SAME and along >= 0 and shape[along] != 1 and not is_even(item, along):
            raise ConflictError(f"looks up by the whole of {indices[dim].name} together with this rank's own elements")
        if item.kind is Kind.CUT and item != cut(along):
            raise ConflictError(f"looks up by {indices[dim].name}, {item}, together with this rank's own elements")
    return only(cut(own[source.dim] + start))


def _index_put(call: Call) -> Options:
    target, values = plain(call.of(call["self"])), plain(call.of(call["values"]))
    used = [(item, plain(call.of(item))) for item in call["indices"] if item is not None]
    if any(reading.kind in _TERMS for _, reading in used):
        raise ConflictError("writes to places that are a sum still to be taken")
    kinds = {target.kind, values.kind, *(reading.kind for _, reading in used)}
    if kinds <= {Kind.SAME, Kind.ZERO}:
        return only(SAME)
    cuts = {
        reading._replace(dim=reading.dim + _width(call, used) - len(call.shape(item)))
        for item, reading in used
        if reading.kind is Kind.CUT
    }
    adds = bool(call.get("accumulate", False)) and target.kind in (Kind.ZERO, Kind.SUM)
    if values.kind is Kind.SUM and not cuts and target.kind in (Kind.ZERO, Kind.SUM):
        return only(SUM)
    if len(cuts) == 1 and adds and kinds <= _KNOWN:
        found = cuts.pop()
        fits = values == found or is_even(values, found.dim)
        first = call["indices"][0] is not None
        if first and not fits:
            raise ConflictError(f"adds values that are {values} at places that are {found}")
        return only(SUM if first else UNKNOWN)
    return only(UNKNOWN)


def _width(call: Call, used: list[tuple[Any, Reading]]) -> int:
    return max(len(call.shape(item)) for item, _ in used)


def _index_select(call: Call) -> Options:
    source, ids = plain(call.of(call["self"])), call.of(call["index"])
    dim = call.dim("dim", call["self"])
    if ids.kind in (Kind.SAME, Kind.ZERO):
        if source.kind is Kind.CUT and source.dim == dim:
            raise ConflictError(f"selects along a dim in which {call['self'].name} is {source}")
        return only(_same_or(source))
    if ids.kind is Kind.CUT and source.kind in (Kind.SAME, Kind.ZERO):
        return only(ids._replace(dim=dim))
    if ids.kind is Kind.OFFSET and source.kind is Kind.SAME:  # one element for each rank: its own
        if ids.dim != 1 or call.shape(call["self"])[dim] != call.size(ids.tag):
            raise ConflictError(
                f"picks one of {call.shape(call['self'])[dim]} elements by the index of {call.size(ids.tag)} ranks"
            )
        return locate(call.out_shape, math.prod(call.out_shape[:dim]))
    return only(UNKNOWN)


def _index_add(call: Call) -> Options:
    """The index is a vector of places along a dim; what is added there may be parts of a sum."""
    target, ids, source = (plain(call.of(call[name])) for name in ("self", "index", "source"))
    dim = call.dim("dim", call["self"])
    if not {target.kind, ids.kind, source.kind} <= _KNOWN:
        return only(UNKNOWN)
    if ids.kind is Kind.CUT:
        if source != ids._replace(dim=dim) and not is_even(source, dim):
            raise ConflictError(f"adds {source} at places that are {ids}")
        if target.kind not in (Kind.ZERO, Kind.SUM):
            raise ConflictError(f"adds parts of a sum to a tensor that is {target}")
        return only(SUM)
    if ids.kind in _TERMS:
        raise ConflictError(f"adds at places that are {ids}")
    found = {item for item in (target, source) if item.kind not in (Kind.ZERO, Kind.SAME)}
    if not found:
        return only(SAME if Kind.SAME in (target.kind, source.kind) else ZERO)
    one = found.pop()
    at = one.dim if one.kind is Kind.CUT else -1
    if (
        found
        or at == dim
        or not all(
            item == one or (item.kind is Kind.ZERO) or (at >= 0 and is_even(item, at)) for item in (target, source)
        )
    ):
        raise ConflictError(f"adds {source} to a tensor that is {target}")
    return only(one)


def _one_hot(call: Call) -> Options:
    reading = plain(call.of(call["self"]))
    if reading.kind in _TERMS:
        raise ConflictError(f"marks classes that are {reading}")
    return only(_same_or(reading))


RULES: dict[str, Rule] = {
    "aten.embedding": _embedding,
    "aten.embedding_dense_backward": _embedding_backward,
    "aten.gather": _gather,
    "aten.take_along_dim": _gather,
    "aten.scatter": _scatter,
    "aten.scatter_add": _scatter,
    "aten.index": _index,
    "aten._unsafe_index": _index,
    "aten.index_put": _index_put,
    "aten._unsafe_index_put": _index_put,
    "aten.index_select": _index_select,
    "aten.index_add": _index_add,
    "aten.one_hot": _one_hot,
}
