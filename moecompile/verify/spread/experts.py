"""Rows of experts: where they are, which counts and sizes belong to them, and which weights they may meet.

Rows, counts and row maps carry the permute that they come from as their tag, and the stripes in which its tokens lie.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ... import ops
from .call import Call, Rule, only, plain
from .layers import gradient, summed
from .readings import SAME, SUM, UNKNOWN, ZERO, ConflictError, Kind, Options, Reading, cut, is_even
from .width import RECEIVED, SENT, back_to_front, back_to_front_backward, linear_in_parts, rows_of_all, wgrad_in_parts

_PLAIN = (Kind.SAME, Kind.ZERO)


def _rows_of(call: Call, tag: str, tokens: Reading) -> list[Options]:
    """What a permute of a rank's own tokens returns."""
    rows = Reading(Kind.ROWS, outer=tokens.outer, tag=tag, zigzag=tokens.zigzag)
    return [only(rows), only(rows._replace(kind=Kind.COUNTS)), only(rows)]


def _permute(call: Call) -> list[Options]:
    tokens, ids = plain(call.of(call["x"])), plain(call.of(call["topk_ids"]))
    if ids.kind in _PLAIN:
        if tokens.kind not in (*_PLAIN, Kind.SUM):
            raise ConflictError(f"sorts tokens that are {tokens} by choices that are {ids}")
        return [only(SUM if tokens.kind is Kind.SUM else SAME), only(SAME), only(SAME)]
    if Kind.UNKNOWN in (tokens.kind, ids.kind):
        return [only(UNKNOWN)] * 3
    if ids.kind is not Kind.CUT or ids.dim != 0 or (tokens != ids and not is_even(tokens, 0)):
        raise ConflictError(f"sorts tokens that are {tokens} by choices that are {ids}")
    return _rows_of(call, call.node.name, ids)


def numbers_of(node: Node) -> list[Node]:
    """What the number of rows was read from that a rank takes of the tokens of all."""
    if node.target is not ops.permute_local:
        return []
    number = node.args[4]
    return number.all_input_nodes if isinstance(number, Node) else []


def _permute_local(call: Call) -> list[Options]:
    """All tokens of the group, of which each rank takes the rows of its own experts."""
    tokens, ids, first = plain(call.of(call["x"])), plain(call.of(call["topk_ids"])), call.of(call["first_expert"])
    if first.kind is not Kind.OFFSET and ids.kind is not Kind.FRONT:
        return _permute(call)
    if first.kind is not Kind.OFFSET:
        return rows_of_all(call, tokens, ids)
    if first.dim != call["num_local_experts"]:
        raise ConflictError(
            f"takes {call['num_local_experts']} experts, but the first one's number grows by {first.dim} a rank"
        )
    for counts in numbers_of(call.node):
        if call.of(counts).kind in (Kind.SUM, Kind.COUNTS):
            raise ConflictError(
                f"makes as many rows as {counts.name} says, which is {call.of(counts)}, and not of all ranks"
            )
    if tokens != ids and not is_even(tokens, 0):
        raise ConflictError(f"sorts tokens that are {tokens} by choices that are {ids}")
    if ids.kind not in (*_PLAIN, Kind.FRONT):
        raise ConflictError(f"takes the rows of its own experts from tokens that are {ids}; gather them first")
    front = ids if ids.kind is Kind.FRONT else SAME
    rows = Reading(Kind.AWAY, outer=front.outer, tag=call.node.name, zigzag=front.zigzag)
    return [only(rows), only(rows._replace(kind=Kind.TABLE)), only(rows)]


def _tokens_of(rows: Reading) -> Reading:
    """How tokens lie whose rows these are."""
    if rows.kind is Kind.ROWS:
        return cut(0, rows.outer, rows.zigzag)
    return Reading(Kind.FRONT, outer=rows.outer, zigzag=rows.zigzag) if rows.outer > 1 or rows.zigzag else SAME


def sum_in_front(order: Reading) -> Reading:
    """A sum of tokens that stand as those of some rows were gathered."""
    return SUM._replace(outer=order.outer, zigzag=order.zigzag)


def fits(reading: Reading, wanted: Reading) -> bool:
    return reading == wanted or is_even(reading, 0) or (wanted.kind is Kind.SAME and reading.kind in _PLAIN)


def _unpermute(call: Call) -> Options:
    rows, order, probs = plain(call.of(call["rows"])), call.of(call["row_map"]), call.get("probs")
    weights = plain(call.of(probs)) if isinstance(probs, Node) else None
    if Kind.UNKNOWN in (rows.kind, order.kind, weights.kind if weights else order.kind):
        return only(UNKNOWN)
    if order.kind is Kind.FRONT:
        return only(back_to_front(rows, order, weights))
    if order.kind in _PLAIN:
        terms = [item for item in (rows, weights) if item is not None and item.kind is Kind.SUM]
        if len(terms) > 1 or any(item is not None and item.kind not in (*_PLAIN, Kind.SUM) for item in (rows, weights)):
            raise ConflictError(f"brings back rows that are {rows} in an order that is {order}")
        return only(SUM if terms else SAME)
    if rows != order and not is_even(rows, 0):
        raise ConflictError(f"brings back rows that are {_named(rows)} in the order of rows that are {_named(order)}")
    wanted = _tokens_of(order)
    if weights is not None and not fits(weights, wanted):
        raise ConflictError(f"weighs rows of tokens that are {wanted} by numbers that are {weights}")
    return only(wanted if order.kind is Kind.ROWS else sum_in_front(order))


def _unpermute_backward(call: Call) -> list[Options]:
    grad, rows, order, probs = (plain(call.of(call[name])) for name in ("grad", "rows", "row_map", "probs"))
    if Kind.UNKNOWN in (grad.kind, rows.kind, order.kind, probs.kind):
        return [only(UNKNOWN)] * 2
    if order.kind in (*_PLAIN, Kind.FRONT):
        return back_to_front_backward(call, grad, rows, order, probs)
    wanted = _tokens_of(order)
    if rows != order and not is_even(rows, 0):
        raise ConflictError(f"brings back rows that are {_named(rows)} in the order of rows that are {_named(order)}")
    if not fits(grad, wanted) or not fits(probs, wanted):
        raise ConflictError(f"has gradients that are {grad} and weights that are {probs} for tokens that are {wanted}")
    return [only(order), only(wanted if order.kind is Kind.ROWS else sum_in_front(order))]


def _gather_rows(call: Call) -> Options:
    source, order = plain(call.of(call["x"])), call.of(call["row_map"])
    if Kind.UNKNOWN in (source.kind, order.kind):
        return only(UNKNOWN)
    if order.kind in _PLAIN:
        return only(gradient(call, call["x"], SAME))
    if order.kind is Kind.FRONT and source in (order._replace(tag=""), ZERO):
        return only(SAME)
    if not fits(source, _tokens_of(order)):
        raise ConflictError(f"takes rows from tokens that are {source}, in an order of rows that are {_named(order)}")
    return only(order)


def _named(rows: Reading) -> str:
    return f"{rows} ({rows.tag})" if rows.tag else str(rows)


# ---- the experts' own linears ------------------------------------------------------------------------------------------


def counted(call: Call, rows: Reading, counts: Any) -> None:
    """Counts must be those of these very rows, where the rows are; rows of all ranks may be cut, or be terms of a sum."""
    found = call.of(counts)
    if found.kind is Kind.ROLL and rows.kind in (*_PLAIN, Kind.CUT, Kind.SUM):
        return
    wanted = {Kind.ROWS: Kind.COUNTS, Kind.AWAY: Kind.TABLE}.get(rows.kind)
    if wanted is None and found.kind not in _PLAIN:
        raise ConflictError(f"counts rows that are {_named(rows)} by numbers that are {_named(found)}")
    if wanted is not None and (found.kind is not wanted or found.tag != rows.tag):
        raise ConflictError(f"counts rows that are {_named(rows)} by numbers that are {_named(found)}")


def _grouped_linear(call: Call) -> Options:
    rows, weight, bias = plain(call.of(call["rows"])), plain(call.of(call["weight"])), call.get("bias")
    if Kind.UNKNOWN in (rows.kind, weight.kind, call.of(call["tokens_per_expert"]).kind):
        return only(UNKNOWN)
    rows = _even_rows(call, rows)
    counted(call, rows, call["tokens_per_expert"])
    if (weight.kind is Kind.CUT and weight.dim) or rows.kind is Kind.CUT:
        return only(linear_in_parts(call, rows, weight, bias))
    for item in (call["weight"], bias):
        wanted = cut(0) if rows.kind is Kind.AWAY else SUM if rows.kind is Kind.SUM and item is bias else SAME
        found = plain(call.of(item))
        fitting = found == wanted or (
            found.kind is Kind.ZERO if wanted is SUM else wanted is SAME and found.kind in _PLAIN
        )
        if item is not None and not fitting:
            raise ConflictError(
                f"multiplies rows that are {rows} by {item.name}, which is {found} and must be {wanted}"
            )
    return only(rows if rows.kind is not Kind.SAME else SAME)


def _even_rows(call: Call, rows: Reading) -> Reading:
    """Rows of equal elements may stand for those that the counts are of."""
    counts = call.of(call["tokens_per_expert"])
    kind = {Kind.COUNTS: Kind.ROWS, Kind.TABLE: Kind.AWAY}.get(counts.kind)
    return counts._replace(kind=kind) if kind is not None and is_even(rows, 0) else rows


def _grouped_wgrad(call: Call) -> Options:
    grad, rows = plain(call.of(call["grad"])), plain(call.of(call["rows"]))
    if Kind.UNKNOWN in (grad.kind, rows.kind):
        return only(UNKNOWN)
    rows = _even_rows(call, rows)
    if rows.kind is Kind.CUT or grad.kind in (Kind.CUT, Kind.SUM):
        counted(call, rows, call["tokens_per_expert"])
        return only(wgrad_in_parts(grad, rows))
    found = gradient(call, call["grad"], rows)
    counted(call, rows, call["tokens_per_expert"])
    return only(cut(0) if found.kind is Kind.AWAY else summed(found))


def _grouped_sum(call: Call) -> Options:
    grad = plain(call.of(call["grad"]))
    if grad.kind is Kind.UNKNOWN:
        return only(UNKNOWN)
    if grad.kind is not Kind.SUM:
        counted(call, grad, call["tokens_per_expert"])
    if grad.kind is Kind.CUT:
        return only(grad)
    return only(cut(0) if grad.kind is Kind.AWAY else summed(grad) if grad.kind is not Kind.SAME else SAME)


# ---- the exchange ------------------------------------------------------------------------------------------------------


def _exchange_counts(call: Call) -> Options:
    counts = call.of(call["tokens_per_expert"])
    if not call.within(call["axis"]):
        return only(counts)
    if counts.kind is Kind.UNKNOWN:
        return only(UNKNOWN)
    if counts.kind is not Kind.COUNTS:
        raise ConflictError(
            f"tells other ranks numbers that are {_named(counts)}, where a permute's own counts are due"
        )
    return only(counts._replace(kind=Kind.RECEIVED))


def _sizes(call: Call) -> list[Options]:
    own, received = call.of(call["tokens_per_expert"]), call.of(call["received"])
    if Kind.UNKNOWN in (own.kind, received.kind):
        return [only(UNKNOWN)] * 3
    if received.kind is Kind.RECEIVED:
        if own.kind is not Kind.COUNTS or own.tag != received.tag:
            raise ConflictError(
                f"takes sizes from {_named(own)} and {_named(received)}, which belong to different routings"
            )
        sizes = [own._replace(kind=Kind.SIZES, dim=way) for way in (SENT, RECEIVED)]
        return [only(sizes[0]), only(sizes[1]), only(own._replace(kind=Kind.TABLE))]
    if own != received and not (own.kind in _PLAIN and received.kind in _PLAIN):
        raise ConflictError(
            f"takes sizes from {_named(own)} and {_named(received)}, which belong to different routings"
        )
    return [only(own)] * 3


def _exchange(call: Call) -> Options:
    """dispatch and combine: there with (send, recv), back with the two swapped."""
    rows, send, recv = plain(call.of(call["rows"])), call.of(call["send"]), call.of(call["recv"])
    if Kind.UNKNOWN in (rows.kind, send.kind, recv.kind):
        return only(UNKNOWN)
    if not call.within(call["axis"]):
        if Kind.SIZES in (send.kind, recv.kind):
            raise ConflictError(f"sends over {call['axis']} by sizes that were told over another axis")
        if rows.kind is Kind.ROWS and (send.kind is not Kind.COUNTS or send.tag != rows.tag):
            raise ConflictError(f"sends rows that are {_named(rows)} by the sizes of {_named(send)}")
        return only(rows)
    if rows.kind is Kind.ZERO:
        return only(rows)
    ways = (send.kind, recv.kind) == (Kind.SIZES, Kind.SIZES) and send.tag == recv.tag
    there, back = (send.dim, recv.dim) == (SENT, RECEIVED), (send.dim, recv.dim) == (RECEIVED, SENT)
    before, after = (Kind.ROWS, Kind.AWAY) if there else (Kind.AWAY, Kind.ROWS)
    if rows.kind is Kind.SAME and is_even(rows, 0) and ways:
        return only(Reading(after, outer=send.outer, tag=send.tag, zigzag=send.zigzag))
    if not ways or not (there or back) or rows.kind is not before or rows.tag != send.tag:
        raise ConflictError(
            f"sends rows that are {_named(rows)} over {call['axis']} by sizes that are not those of this exchange"
        )
    return only(rows._replace(kind=after))


RULES: dict[str, Rule] = {
    "moe.permute": _permute,
    "moe.permute_local": _permute_local,
    "moe.unpermute": _unpermute,
    "moe.unpermute_backward": _unpermute_backward,
    "moe.gather_rows": _gather_rows,
    "moe.grouped_linear": _grouped_linear,
    "moe.grouped_linear_wgrad": _grouped_wgrad,
    "moe.grouped_sum": _grouped_sum,
    "moe.exchange_counts": _exchange_counts,
    "moe.sizes_to_host": _sizes,
    "moe.dispatch": _exchange,
    "moe.combine": _exchange,
}
