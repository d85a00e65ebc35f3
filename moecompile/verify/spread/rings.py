"""Attention round a ring: which rank's keys are there at a hop, which hops a result has seen, which a gradient has been given by.

Queries and keys are cut along the sequence. A hop looks at keys that have come exactly as many places as it says; results are joined of
hops that differ, and are attention to the whole sequence once all hops are in them. Gradients of keys are sums over the hops that are
right when all are there and they are home.
"""

from __future__ import annotations

from typing import Any

from .call import Call, Rule, only, plain
from .layers import check_index, check_mask, gradient
from .readings import (
    RINGS,
    SAME,
    UNKNOWN,
    ConflictError,
    Kind,
    Options,
    Reading,
    cut,
    described,
    is_even,
    partly,
    passed,
    terms,
)  # fmt: skip

# beside the ops of a ring itself, what may read a value that is on its way
TAKES = frozenset({"moe.rotate", "moe.attention_part", "moe.attention_part_backward", "moe.merge_attention",
                   "moe.merge_attention_backward", "aten.add", "aten.detach", "aten.clone", "aten.alias"})  # fmt: skip


def _rotate(call: Call) -> Options:
    source, axis = call["x"], str(call["axis"])
    reading, size = plain(call.of(source)), call.size(axis)
    if not call.within(axis):
        return only(UNKNOWN if reading.kind in (Kind.ROWS, Kind.AWAY) else reading)
    if reading.kind in (Kind.UNKNOWN, Kind.ZERO, Kind.SAME):
        return only(reading)
    steps = int(call["steps"])
    if reading.kind is Kind.TERMS:
        before, ranks, hops = reading.tag
        return only(terms(reading, (before + steps) % size, ranks, hops))
    if reading.kind is Kind.PASSED:
        return only(passed(reading, (reading.tag + steps) % size))
    if reading.kind is not Kind.CUT or reading.outer != 1:
        raise ConflictError(f"sends {source.name} round {axis}, which is {reading}; only parts may go round")
    return only(passed(reading, steps % size))


def _is_ring(call: Call) -> bool:
    """Whether this digit belongs to the ring."""
    index = call.of(call["index"])
    if index.kind is Kind.OFFSET:
        check_index(call, index, int(call["ranks"]))
        return True
    if call["index"].name not in call.offsets:
        raise ConflictError("goes round a ring by a number that is the same on all ranks")
    return False


def _looks(call: Call) -> Reading:
    """How the result of a hop lies, once queries, keys and mask are known to fit."""
    query, kv, mask = call["q"], call["kv"], call.get("mask")
    own, keys, along = plain(call.of(query)), plain(call.of(kv)), len(call.shape(query)) - 2
    ring = _is_ring(call)
    if Kind.UNKNOWN in (own.kind, keys.kind, call.of(mask).kind):
        return UNKNOWN
    check_mask(call, mask, own, along + 2)
    hop, ranks = int(call["hop"]), int(call["ranks"])
    if ring:
        due = cut(along, zigzag=bool(call.get("zigzag", False)))
        if not 0 <= hop < ranks or own != due or keys != passed(due, hop):
            raise ConflictError(
                f"is hop {hop} of a ring{due.order} with queries that are {own} and keys that are {keys} ({keys.tag or 0} places)"
            )
        return partly(due, ranks, frozenset({hop}))
    if own.kind is Kind.CUT and own.dim < along and keys == own:
        return own
    if {own.kind, keys.kind} <= {Kind.SAME, Kind.ZERO}:
        return SAME
    raise ConflictError(f"attends with queries that are {own} to keys that are {keys}")


def _part(call: Call) -> list[Options]:
    return [only(_looks(call))] * 2


def _gradients(call: Call, grad: Any, grad_lse: Any, value: Reading) -> Reading:
    """How what follows from both gradients of a value lies, which must lie as the value does."""
    if value.kind is Kind.UNKNOWN:
        return UNKNOWN
    if value.kind is Kind.PARTLY:
        for item in (grad, grad_lse):
            found = call.of(item)
            if found.kind is Kind.UNKNOWN:
                return UNKNOWN
            if found != value and not is_even(found, value.dim):
                raise ConflictError(f"has a gradient that is {found} for a value that is {value}")
        return value
    both = [gradient(call, item, value) for item in (grad, grad_lse) if call.of(item).kind is not Kind.ZERO]
    if len(set(both)) > 1 and UNKNOWN not in both:
        raise ConflictError("has gradients that do not lie alike (" + described(both) + ")")
    return UNKNOWN if UNKNOWN in both else both[0] if both else value


def _check_results(call: Call, value: Reading) -> None:
    """The results of the forward lie as those of the operands that the backward has."""
    for item in (call["out"], call["lse"]):
        found = call.of(item)
        if UNKNOWN not in (found, value) and found != value and not is_even(found, value.dim):
            raise ConflictError(f"takes {item.name}, which is {found}, for what is {value}")


def _part_backward(call: Call) -> list[Options]:
    value = _looks(call)
    _check_results(call, value)
    found = _gradients(call, call["grad"], call["grad_lse"], value)
    if not _is_ring(call) or found.kind is Kind.UNKNOWN:
        return [only(found)] * 2
    hop, ranks, own = int(call["hop"]), int(call["ranks"]), plain(call.of(call["q"]))
    return [only(terms(own, steps, ranks, frozenset({hop}))) for steps in (0, hop)]


def _joined(call: Call) -> Reading:
    """How what two parts give lies."""
    first, first_lse, second, second_lse = (plain(call.of(call[name])) for name in ("out_a", "lse_a", "out_b", "lse_b"))
    if Kind.UNKNOWN in {item.kind for item in (first, first_lse, second, second_lse)}:
        return UNKNOWN
    plains = {first.kind, first_lse.kind, second.kind, second_lse.kind} <= {Kind.SAME, Kind.ZERO}
    if plains:
        return SAME
    if first != first_lse or second != second_lse:
        raise ConflictError("joins results and logarithms that are not of the same hops")
    if first.kind is Kind.CUT and first == second:
        return first
    if first.kind is not Kind.PARTLY or second.kind is not Kind.PARTLY:
        raise ConflictError(f"joins {described((first, second))}")
    (ranks, hops), (more_ranks, more) = first.tag, second.tag
    if first._replace(tag=ranks) != second._replace(tag=more_ranks) or hops & more:
        raise ConflictError("joins hops that do not belong together, or one of them twice")
    return partly(first, ranks, hops | more)


def _merge(call: Call) -> list[Options]:
    return [only(_joined(call))] * 2


def _merge_backward(call: Call) -> list[Options]:
    value = _joined(call)
    _check_results(call, value)
    found = _gradients(call, call["grad"], call["grad_lse"], value)
    if value.kind in RINGS or value.kind is Kind.CUT:
        parts = (plain(call.of(call["out_a"])), plain(call.of(call["out_b"])))
        return [only(UNKNOWN if found.kind is Kind.UNKNOWN else part) for part in parts for _ in range(2)]
    return [only(found)] * 4


RULES: dict[str, Rule] = {
    "moe.rotate": _rotate,
    "moe.attention_part": _part,
    "moe.attention_part_backward": _part_backward,
    "moe.merge_attention": _merge,
    "moe.merge_attention_backward": _merge_backward,
}
