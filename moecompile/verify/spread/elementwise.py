"""Elementwise ops, and what makes a value out of nothing."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from .call import Call, Rule, only, plain, together
from .readings import (
    ALL_DIMS,
    FILLED,
    RINGS,
    SAME,
    SUM,
    UNKNOWN,
    ZERO,
    ConflictError,
    Kind,
    Options,
    Reading,
    added,
    cut,
    same,
)  # fmt: skip


def words(text: str) -> list[str]:
    return text.split()


# linear in all tensor operands at once, in any one of them, in the first
_ALL = words("aten.add aten.sub aten.subtract aten.rsub aten.where aten.add_ aten.sub_ aten.complex")
_ONE = words("aten.mul aten.multiply aten.mul_")
_FIRST = words(
    """
    aten.div aten.true_divide aten.divide aten.div_ aten.neg aten.negative aten.positive aten.clone aten.contiguous aten.alias
    aten.detach aten.lift_fresh aten.lift_fresh_copy aten.real aten.imag aten.conj aten._conj aten.resolve_conj aten.resolve_neg
    aten.sigmoid_backward aten.silu_backward aten.tanh_backward aten.gelu_backward aten.threshold_backward aten.hardswish_backward
    aten.elu_backward aten.softplus_backward aten.leaky_relu_backward aten.hardsigmoid_backward aten.hardtanh_backward
    aten.log_sigmoid_backward aten.mish_backward moe.silu_mul_backward
    """
)
_CASTS = words(
    "aten._to_copy aten.to aten.type_as aten._autocast_to_reduced_precision aten._autocast_to_full_precision"
)
_NEVER = words(
    """
    aten.floor_divide aten.square aten.hardswish aten.log_sigmoid aten.bitwise_not aten.special_expit aten.special_log1p
    aten.special_expm1 aten.absolute aten.greater aten.less aten.not_equal aten.greater_equal aten.less_equal aten.polar
    aten.__and__ aten.__or__ aten.isreal  moe.silu_mul aten.fmod aten.remainder
    """
)


def nonlinear(call: Call) -> Options | list[Options]:
    """Any op that torch tags as elementwise."""
    return call.each(only(together(call, call.tensors())))


def _linear(mode: str) -> Rule:
    def rule(call: Call) -> Options | list[Options]:
        operands = list(call.args.values())[:2] if mode == "all" else call.tensors()
        return call.each(only(together(call, operands, mode)))

    return rule


def _add(call: Call) -> Options | list[Options]:
    """Positions of this rank: as many numbers, one after another, as the ranks before it have."""
    items = [call.args.get("self"), call.args.get("other")]
    for offset, other in (items, items[::-1]):
        if call.of(offset).kind is Kind.OFFSET:
            return only(_placed(call, call.of(offset), other))
    readings = [call.of(item) for item in items]
    if any(reading.kind in RINGS for reading in readings) and UNKNOWN not in readings:
        return only(added(readings))
    return _linear("all")(call)


def _placed(call: Call, offset: Reading, other: Any) -> Reading:
    """A range, or one number, plus the offset of this rank."""
    shape = call.shape(other)
    if len(shape) != 1 or not isinstance(other, Node) or call.of(other).kind not in (Kind.SAME, Kind.ZERO):
        return UNKNOWN
    counts_up = str(other.target).startswith("aten.arange") and len(other.args) == 1
    if counts_up and offset.dim != shape[0]:
        raise ConflictError(f"numbers {shape[0]} elements a rank, but its offset grows by {offset.dim}")
    return cut(0) if counts_up or shape[0] == 1 else UNKNOWN


def _subtract(call: Call) -> Options | list[Options]:
    """Positions in the whole less the offset of this rank: positions among its own elements."""
    offset, source = call.of(call.args.get("other")), call.args.get("self")
    if offset.kind is not Kind.OFFSET:
        return _linear("all")(call)
    reading = call.of(source)
    if reading.kind is not Kind.CUT or reading.outer > 1 or reading.zigzag:
        return only(UNKNOWN)
    if call.shape(source)[reading.dim] != offset.dim:
        raise ConflictError(
            f"numbers {call.shape(source)[reading.dim]} elements a rank, but its offset grows by {offset.dim}"
        )
    return only(Reading(Kind.OWN, reading.dim))


def _equal(call: Call) -> Options | list[Options]:
    """``index == 0`` is one on the first rank and zero on the others: a share of one."""
    if call.of(call["self"]).kind is Kind.OFFSET:
        return only(SUM if call["other"] == 0 else UNKNOWN)
    return nonlinear(call)


def _where(call: Call) -> Options:
    """The terms of a sum may be chosen among by what is the same everywhere."""
    if plain(call.of(call["condition"])).kind in (Kind.SUM, Kind.MEAN):
        raise ConflictError(f"chooses by a condition that is {call.of(call['condition'])}")
    both = together(call, [call["self"], call["other"]], "all")
    return only(together(call, [call["condition"], call["self"], call["other"]]) if both.kind is not Kind.SUM else both)


def _masked_fill(call: Call) -> Options:
    zero = call["value"] == 0
    return only(together(call, [call["self"], call["mask"]], "first" if zero else ""))


def _copy(call: Call) -> Options | list[Options]:
    """What is written over every element; what stood there does not count."""
    source = call["src"]
    return only(plain(call.of(source))) if call.shape(source) == call.shape(call["self"]) else _linear("all")(call)


def _cast(call: Call) -> Options:
    """Only the first operand counts; another one names the type."""
    reading = call.of(call["self"])
    return only(plain(reading) if reading.kind is Kind.COUNTS else reading)


def _first(call: Call) -> Options:
    """A value that carries the gradient of another one: both lie alike, and the value is what goes on."""
    together(call, [call["value"], call["path"]], "all")
    return only(call.of(call["value"]))


def _zeros(call: Call) -> Options:
    return only(ZERO)


def _filled(call: Call) -> Options:
    return only(ZERO if call.get("fill_value", call.get("s", 1)) == 0 else FILLED)


def _fill(call: Call) -> Options:
    """All elements are one number, whatever stood there."""
    value = call["value"]
    if isinstance(value, Node) and call.of(value).kind not in (Kind.SAME, Kind.ZERO):
        return only(call.of(value) if call.of(value).kind in (Kind.SUM, Kind.MEAN) else UNKNOWN)
    return only(ZERO if value == 0 or call.of(value).kind is Kind.ZERO else FILLED)


def _listed(each: str, others: str) -> Rule:
    """Each element of one operand is looked for in the whole of another, which has no dims in common with it."""

    def rule(call: Call) -> Options:
        if isinstance(call.args.get(others), Node) and len(call.shape(call[others])) > 1:
            return only(together(call, call.tensors()))
        call.whole(call.get(others))
        return only(together(call, [call[each]]))

    return rule


def _range(call: Call) -> Options:
    return only(SAME)


def _power(call: Call) -> Options:
    """A number to the power of a tensor, or the other way round."""
    return only(together(call, call.tensors()))


def _swiglu(call: Call) -> Options:
    """Gate and up lie side by side in the last dim, so a cut of it must be one of each half."""
    return only(halved(call, call["h"]))


def halved(call: Call, source: Any) -> Reading:
    reading, last = plain(call.of(source)), len(call.shape(source)) - 1
    if reading.kind is Kind.CUT and reading.dim == last:
        if reading.outer % 2:
            raise ConflictError(f"takes gate and up apart, but {source.name} is {reading}")
        return reading._replace(outer=reading.outer // 2)
    if reading.kind in (Kind.SUM, Kind.MEAN):
        raise ConflictError(f"takes {source.name}, {reading}, which is not linear")
    return (
        reading
        if reading.kind is not Kind.SAME
        else same(reading.dim & ~(1 << last) if reading.dim != ALL_DIMS else ALL_DIMS)
    )


def _swiglu_backward(call: Call) -> Options:
    """Linear in the gradient, which lies as the result did."""
    grad, half = plain(call.of(call["grad"])), halved(call, call["h"])
    if half.kind is Kind.SAME:
        return only(grad if grad.kind is not Kind.SAME else SAME)
    if grad.kind not in (half.kind, Kind.ZERO) and not (grad.kind is Kind.SAME and _fits(grad, half)):
        raise ConflictError(f"has a gradient that is {grad} for a value that is {half}")
    if grad.kind is half.kind and grad != half:
        raise ConflictError(f"has a gradient that is {grad} for a value that is {half}")
    return only(call.of(call["h"]))


def _fits(grad: Reading, half: Reading) -> bool:
    return bool(grad.dim >> (half.dim if half.kind is Kind.CUT else 0) & 1)


def _rotary(call: Call) -> Options:
    """The halves of the last dim are turned into each other."""
    reading, last = call.of(call["x"]), len(call.shape(call["x"])) - 1
    if reading.kind is Kind.CUT and reading.dim == last:
        raise ConflictError(f"turns the last dim, in which {call['x'].name} is cut")
    return only(together(call, [call["x"], call["cos"], call["sin"]], "first"))


RULES: dict[str, Rule] = {
    **dict.fromkeys(_ALL, _linear("all")),
    **dict.fromkeys(_ONE, _linear("one")),
    **dict.fromkeys(_FIRST, _linear("first")),
    **dict.fromkeys(_NEVER, nonlinear),
    **dict.fromkeys(_CASTS, _cast),
    "aten.add": _add,
    "aten.copy": _copy,
    "aten.sub": _subtract,
    "aten.eq": _equal,
    "aten.where": _where,
    "aten.masked_fill": _masked_fill,
    "aten.masked_fill_": _masked_fill,
    "aten.pow": _power,
    **dict.fromkeys(words("aten.fill aten.fill_"), _fill),
    "aten.bucketize": _listed("self", "boundaries"),
    "aten.searchsorted": _listed("self", "sorted_sequence"),
    "aten.isin": _listed("elements", "test_elements"),
    "moe.graft": _first,
    "moe.swiglu": _swiglu,
    "moe.swiglu_backward": _swiglu_backward,
    "moe.rotary": _rotary,
    **dict.fromkeys(
        words(
            "aten.zeros aten.zeros_like aten.new_zeros aten.empty aten.empty_like aten.new_empty aten.new_empty_strided"
        ),
        _zeros,
    ),
    **dict.fromkeys(
        words("aten.ones aten.ones_like aten.new_ones aten.full aten.full_like aten.new_full aten.scalar_tensor"),
        _filled,
    ),
    **dict.fromkeys(
        words("aten.arange aten.linspace aten.eye aten.tril_indices aten.triu_indices moe.fold_seed"), _range
    ),
}
