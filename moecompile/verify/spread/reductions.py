"""Reductions, and ops that run along a dim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .call import Call, Rule, only, plain, together
from .elementwise import words
from .readings import ALL_DIMS, MEAN, SAME, SUM, UNKNOWN, ZERO, ConflictError, Kind, Options, Reading, same

_WITH_ROWS = (Kind.ROWS, Kind.AWAY)
_TOLD = (Kind.RECEIVED, Kind.TABLE, Kind.ROLL, Kind.SIZES)
_REORDERS = frozenset({"aten.flip", "aten.roll", "aten.sort"})
_EXTREMES = {
    "aten.amax": "max",
    "aten.any": "max",
    "aten.max": "max",
    "aten.amin": "min",
    "aten.all": "min",
    "aten.min": "min",
}


def dims_of(call: Call, source: Any, dims: Any) -> list[int]:
    """The dims that are reduced; none named means all."""
    ndim = len(call.shape(source))
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(ndim))
    return [int(dim) % max(ndim, 1) for dim in (dims if isinstance(dims, (list, tuple)) else [dims])]


def left(reading: Reading, dims: Sequence[int], keepdim: bool) -> Reading:
    """A cut, or dims of equal elements, once the reduced dims are gone."""
    if reading.kind is Kind.CUT:
        return reading if keepdim else reading._replace(dim=reading.dim - sum(dim < reading.dim for dim in dims))
    if reading.kind is Kind.SAME and reading.dim != ALL_DIMS:
        if keepdim:
            return same(reading.dim | sum(1 << dim for dim in dims))
        kept = [at for at in range(reading.dim.bit_length() + len(dims) + 1) if at not in dims]
        return same(sum(1 << new for new, old in enumerate(kept) if reading.dim >> old & 1))
    return reading


def reduces(reading: Reading, dims: Sequence[int]) -> bool:
    """Whether the ranks' elements are among those that are reduced."""
    if reading.kind is Kind.CUT:
        return reading.dim in dims
    return reading.kind in (*_WITH_ROWS, Kind.FRONT) and 0 in dims


def _sum(call: Call) -> Options:
    source = call["self"]
    reading, dims = plain(call.of(source)), dims_of(call, source, call.args.get("dim"))
    keepdim = bool(call.get("keepdim", False))
    if reading.kind is Kind.FRONT and 0 in dims:
        return only(SAME)
    if reduces(reading, dims):
        return only(SUM)
    if reading.kind is Kind.SAME and reading.dim != 0 and any(reading.dim >> dim & 1 for dim in dims):
        return left(reading, dims, keepdim), SUM  # equal elements may be a part of more of them
    return only(left(reading, dims, keepdim))


def _mean(call: Call) -> Options:
    source = call["self"]
    reading, dims = plain(call.of(source)), dims_of(call, source, call.args.get("dim"))
    if reduces(reading, dims):
        if reading.kind in _WITH_ROWS:
            raise ConflictError("takes the mean of rows, of which each rank has another number")
        return only(SAME if reading.kind is Kind.FRONT else MEAN)
    return only(left(reading, dims, bool(call.get("keepdim", False))))


def _extreme(call: Call) -> Options | list[Options]:
    source = call["self"]
    reading, dims = plain(call.of(source)), dims_of(call, source, call.args.get("dim"))
    if "other" in call.args:  # max(a, b)
        return only(UNKNOWN if reading.kind is not Kind.SAME else SAME)
    if reading.kind in (Kind.SUM, Kind.MEAN):
        raise ConflictError(f"takes an extreme of {source.name}, which is {reading}")
    if reduces(reading, dims) and call.outs == 1 and reading.kind is not Kind.FRONT:
        return only(Reading(Kind.EXTREME, tag=_EXTREMES[call.name]))
    if reduces(reading, dims):
        raise ConflictError(f"picks among elements of {source.name}, which is {reading}")
    return call.each(only(left(reading, dims, bool(call.get("keepdim", False)))))


def _statistic(call: Call) -> Options | list[Options]:
    """What cannot be put together from parts."""
    source = call["self"]
    reading, dims = plain(call.of(source)), dims_of(call, source, call.args.get("dim"))
    if reduces(reading, dims) or reading.kind in (Kind.SUM, Kind.MEAN, Kind.EXTREME):
        raise ConflictError(f"reduces {source.name}, which is {reading}")
    found = left(reading, dims, bool(call.get("keepdim", False)))
    return call.each(only(SAME if found.kind is Kind.ZERO else found))


def _along(linear: bool) -> Rule:
    def rule(call: Call) -> Options | list[Options]:
        source = call.args.get("self", next(iter(call.args.values())))
        default = -1 if call.name in ("aten.topk", "aten.sort", "aten.argsort", "aten.kthvalue", "aten.glu") else 0
        dims = call.args.get("dims", call.get("dim", default))
        dims = dims_of(call, source, dims if dims not in (None, []) else list(range(len(call.shape(source)))))
        reading = plain(call.of(source))
        if reading.kind in _TOLD and call.name in _REORDERS:
            raise ConflictError(f"puts {source.name}, which is {reading}, into another order")
        if reduces(reading, dims):
            if call.name == "aten.cumsum":
                return only(UNKNOWN)  # this rank's own part of it; what comes before is added from elsewhere
            raise ConflictError(f"runs along a dim in which {source.name} is {reading}")
        if reading.kind in (Kind.SUM, Kind.MEAN, Kind.EXTREME) and not linear:
            raise ConflictError(f"is not linear in {source.name}, which is {reading}")
        if reading.kind is Kind.SAME and reading.dim != ALL_DIMS:
            reading = same(reading.dim & ~sum(1 << dim for dim in dims))
        if reading.kind is Kind.ZERO and not linear:
            reading = SAME
        return call.each(only(reading))

    return rule


def _diff(call: Call) -> Options:
    """Neighbours along a dim, with what is put before and behind."""
    source = call["self"]
    reading, dim = together(call, [source, call.get("prepend"), call.get("append")], "all"), call.dim("dim", source, -1)
    if reduces(reading, [dim]):
        raise ConflictError(f"takes neighbours along a dim in which {source.name} is {reading}")
    return only(same(reading.dim & ~(1 << dim)) if reading.kind is Kind.SAME and reading.dim != ALL_DIMS else reading)


def _along_backward(call: Call) -> Options:
    """Linear in the gradient; the result of the forward lies as it does."""
    grad, out = call["grad_output"], call["output"]
    dims = dims_of(call, out, call["dim"])
    readings = [plain(call.of(grad)), plain(call.of(out))]
    for reading in readings:
        if reduces(reading, dims):
            raise ConflictError(f"runs along a dim that is {reading}")
    if readings[0].kind in (Kind.SUM, Kind.MEAN):
        call.whole(out)
        return only(readings[0])
    from_both = [reading for reading in readings if reading.kind not in (Kind.SAME, Kind.ZERO)]
    if not from_both:
        return only(SAME)
    at = from_both[0].dim if from_both[0].kind is Kind.CUT else 0
    for reading in readings:
        if (
            reading != from_both[0]
            and reading.kind is not Kind.ZERO
            and not (reading.kind is Kind.SAME and reading.dim >> at & 1)
        ):
            raise ConflictError(f"has a gradient that is {readings[0]} for a value that is {readings[1]}")
    return only(from_both[0])


def _count(call: Call) -> Options:
    """As a sum, of what is not zero."""
    reading = plain(call.of(call["self"]))
    if reading.kind in (Kind.SUM, Kind.MEAN, Kind.EXTREME):
        raise ConflictError(f"counts the elements of {call['self'].name}, which is {reading}")
    dims = dims_of(call, call["self"], call.args.get("dim"))
    return only(SUM if reduces(reading, dims) else left(reading, dims, False))


def _bins(call: Call) -> Options:
    reading = plain(call.of(call["self"]))
    if reading.kind is Kind.ZERO:
        return only(ZERO)
    return only(SUM if reading.kind in (Kind.CUT, *_WITH_ROWS) else SAME if reading.kind is Kind.SAME else UNKNOWN)


RULES: dict[str, Rule] = {
    **dict.fromkeys(words("aten.sum aten.nansum"), _sum),
    "aten.mean": _mean,
    **dict.fromkeys(_EXTREMES, _extreme),
    **dict.fromkeys(
        words(
            """
            aten.argmax aten.argmin aten.logsumexp aten.var aten.std aten.var_mean aten.std_mean aten.prod aten.norm aten.aminmax
            aten.linalg_vector_norm aten.kthvalue aten.median aten.nanmean
            """
        ),
        _statistic,
    ),
    **dict.fromkeys(
        words(
            """
            aten.softmax aten._softmax aten._safe_softmax aten.log_softmax aten._log_softmax aten.cumprod aten.logcumsumexp
            aten.cummax aten.cummin aten.topk aten.sort aten.argsort aten.glu
            """
        ),
        _along(False),
    ),
    **dict.fromkeys(words("aten.cumsum aten.flip aten.roll"), _along(True)),
    **dict.fromkeys(words("aten._softmax_backward_data aten._log_softmax_backward_data"), _along_backward),
    "aten.diff": _diff,
    "aten.count_nonzero": _count,
    **dict.fromkeys(words("aten.bincount aten.histc"), _bins),
}
