"""Experts that are cut along their width: all ranks that hold parts of one compute on the rows of all of them.

On the digits of ``etp`` the rows that were gathered are the same on all ranks, what the first linears make of them is cut along the
features, and what the last one makes is a sum, of which every rank takes its own rows back.
"""

from __future__ import annotations

from typing import Any

from .call import Call, Rule, only, plain
from .layers import gradient
from .readings import SAME, SUM, UNKNOWN, ConflictError, Kind, Options, Reading, cut, is_even

SENT, RECEIVED, GATHERED = 0, 1, 2  # what sizes are for
_PLAIN = (Kind.SAME, Kind.ZERO)


# ---- rows of all ranks -------------------------------------------------------------------------------------------------


def _gathered_sizes(call: Call) -> list[Options]:
    """send, recv, sizes, tokens. The counts of a digit are told over ``ep``, over ``etp``, or stay this rank's own."""
    own, received, gathered = (call.of(call[name]) for name in ("tokens_per_expert", "received", "gathered"))
    kinds = (own.kind, received.kind, gathered.kind)
    if Kind.UNKNOWN in kinds:
        return [only(UNKNOWN)] * 4
    if all(kind in _PLAIN for kind in kinds):
        return [only(SAME)] * 4
    tags = {own.tag, received.tag, gathered.tag}
    table = own._replace(kind=Kind.TABLE)
    if len(tags) == 1 and kinds == (Kind.COUNTS, Kind.RECEIVED, Kind.RECEIVED):
        sizes = [own._replace(kind=Kind.SIZES, dim=way) for way in (SENT, RECEIVED)]
        return [only(sizes[0]), only(sizes[1]), only(table), only(table)]
    if len(tags) == 1 and kinds == (Kind.COUNTS, Kind.COUNTS, Kind.RECEIVED):
        return [
            only(own),
            only(own),
            only(own._replace(kind=Kind.SIZES, dim=GATHERED)),
            only(own._replace(kind=Kind.ROLL)),
        ]
    if len(tags) == 1 and set(kinds) == {Kind.COUNTS}:
        return [only(own)] * 4
    raise ConflictError(f"takes sizes from {own}, {received} and {gathered}, which do not belong together")


def _elsewhere(call: Call, rows: Reading, sizes: Reading) -> Options:
    """On the other digits rows stay where they are, with the sizes of their own permute."""
    due = {Kind.ROWS: Kind.COUNTS, Kind.AWAY: Kind.TABLE}.get(rows.kind)
    if due is not None and (sizes.kind is not due or sizes.tag != rows.tag):
        raise ConflictError(f"moves rows that are {rows} ({rows.tag}) by sizes that are {sizes}")
    if due is None and sizes.kind is Kind.SIZES:
        raise ConflictError(f"moves rows over {call['axis']} by sizes that were told over another axis")
    return only(rows)


def _all_gather_rows(call: Call) -> Options:
    rows, sizes = plain(call.of(call["rows"])), call.of(call["sizes"])
    if Kind.UNKNOWN in (rows.kind, sizes.kind):
        return only(UNKNOWN)
    if not call.within(call["axis"]):
        return _elsewhere(call, rows, sizes)
    if rows.kind is Kind.ZERO or (rows.kind is Kind.SAME and is_even(rows, 0)):
        return only(rows)
    if (sizes.kind, sizes.dim) != (Kind.SIZES, GATHERED) or rows.kind is not Kind.ROWS or rows.tag != sizes.tag:
        raise ConflictError(f"gathers rows that are {rows} by sizes that are {sizes}")
    return only(SAME)


def _reduce_scatter_rows(call: Call) -> Options:
    rows, sizes = plain(call.of(call["rows"])), call.of(call["sizes"])
    if Kind.UNKNOWN in (rows.kind, sizes.kind):
        return only(UNKNOWN)
    if not call.within(call["axis"]):
        return _elsewhere(call, rows, sizes)
    if rows.kind is Kind.ZERO:
        return only(rows)
    if (sizes.kind, sizes.dim) != (Kind.SIZES, GATHERED) or rows.kind is not Kind.SUM:
        raise ConflictError(f"adds up rows that are {rows} by sizes that are {sizes}; only a sum of parts may be taken")
    return only(Reading(Kind.ROWS, outer=sizes.outer, tag=sizes.tag, zigzag=sizes.zigzag))


# ---- linears of which every rank has a part ----------------------------------------------------------------------------


def linear_in_parts(call: Call, rows: Reading, weight: Reading, bias: Any) -> Reading:
    """Columns of whole rows, or a sum of rows that are cut along their features."""
    added = plain(call.of(bias)) if bias is not None else None
    if weight.kind is Kind.CUT and weight.dim == 1 and rows.kind in _PLAIN:
        found = cut(1, weight.outer)
        fits = added is None or added == found or is_even(added, 1)
    elif weight.kind is Kind.CUT and weight.dim == 2 and (rows == cut(1, weight.outer) or is_even(rows, 1)):
        found, fits = SUM, added is None or added.kind in (Kind.SUM, Kind.ZERO)
    else:
        raise ConflictError(f"multiplies rows that are {rows} by a weight that is {weight}")
    if not fits:
        raise ConflictError(f"adds a bias that is {added} to rows that are {found}")
    return found


def wgrad_in_parts(grad: Reading, rows: Reading) -> Reading:
    """``[experts, out, in]`` from ``grad [rows, out]`` and ``rows [rows, in]``: one of them is cut, or a sum."""
    if grad.kind is Kind.CUT and grad.dim == 1 and rows.kind in _PLAIN:
        return grad
    if rows.kind is Kind.CUT and rows.dim == 1 and grad.kind in _PLAIN:
        return cut(2, rows.outer)
    if grad.kind is Kind.SUM and rows.kind in _PLAIN:
        return SUM
    raise ConflictError(f"has a gradient that is {grad} for a value that is {rows}")


# ---- tokens of all ranks, with the ranks in front ------------------------------------------------------------------------


def rows_of_all(call: Call, tokens: Reading, ids: Reading) -> list[Options]:
    """All ranks sort the tokens of all alike; the row map knows in which order they came."""
    if tokens != ids and not is_even(tokens, 0):
        raise ConflictError(f"sorts tokens that are {tokens} by choices that are {ids}")
    return [only(SAME), only(SAME), only(ids._replace(tag=call.node.name))]


def back_to_front(rows: Reading, order: Reading, weights: Reading | None) -> Reading:
    """Rows that all ranks hold, back in the order in which the tokens were gathered."""
    front = Reading(Kind.FRONT, outer=order.outer, zigzag=order.zigzag)
    if rows.kind not in (*_PLAIN, Kind.SUM) or not (weights is None or weights == front or is_even(weights, 0)):
        raise ConflictError(
            f"brings back rows that are {rows}, with weights that are {weights}, to tokens that are {front}"
        )
    return front._replace(kind=Kind.SUM) if rows.kind is Kind.SUM else front


def back_to_front_backward(call: Call, grad: Reading, rows: Reading, order: Reading, probs: Reading) -> list[Options]:
    """Whole gradients of tokens give whole ones of rows; where the rows are a sum, so are the gradients of their weights."""
    if order.kind is not Kind.FRONT:
        call.whole(call["probs"])
        found = gradient(call, call["grad"], SAME)
        if rows.kind is Kind.SUM and found is SAME:
            return [only(SAME), only(SUM)]
        call.whole(call["rows"])
        return [only(found), only(found)]
    front = Reading(Kind.FRONT, outer=order.outer, zigzag=order.zigzag)
    if rows.kind not in (*_PLAIN, Kind.SUM) or any(item != front and not is_even(item, 0) for item in (grad, probs)):
        raise ConflictError(f"has gradients that are {grad} and weights that are {probs} for rows that are {rows}")
    return [only(SAME), only(front._replace(kind=Kind.SUM) if rows.kind is Kind.SUM else front)]


RULES: dict[str, Rule] = {
    "moe.gathered_sizes_to_host": _gathered_sizes,
    "moe.all_gather_rows": _all_gather_rows,
    "moe.reduce_scatter_rows": _reduce_scatter_rows,
}
