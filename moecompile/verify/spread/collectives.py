"""Collectives, and a rank's own part of what all ranks hold."""

from __future__ import annotations

from .call import Call, Rule, only, plain
from .layers import check_index
from .layout import before, locate
from .readings import SAME, SUM, UNKNOWN, ZERO, ConflictError, Kind, Options, Reading, cut, is_even

_PASSES_A_SUM = {
    Kind.SAME,
    Kind.ZERO,
    Kind.SUM,
    Kind.MEAN,
    Kind.CUT,
    Kind.ROWS,
    Kind.AWAY,
    Kind.PACKED,
    Kind.UNKNOWN,
    Kind.FRONT,
}


def _all_reduce(call: Call) -> Options:
    source, op = call["x"], call["op"]
    reading = plain(call.of(source))
    if not call.within(call["axis"]):
        if (op == "sum" and reading.kind not in _PASSES_A_SUM) or (
            op != "sum" and reading.kind in (Kind.SUM, Kind.MEAN)
        ):
            raise ConflictError(f"takes the {op} over {call['axis']} of {source.name}, which is {reading} elsewhere")
        return only(reading if op == "sum" or reading.kind is not Kind.SAME else SAME)
    if reading.kind in (Kind.UNKNOWN, Kind.ZERO):
        return only(reading)
    if op == "sum" and reading == SUM:
        return only(SAME)
    if op == "sum" and reading.kind is Kind.PACKED:
        return only(_packed_sums(reading))
    if op != "sum" and reading.kind is Kind.EXTREME and reading.tag == op:
        return only(SAME)
    due = (
        f"only the {reading.tag} of a partial {reading.tag}" if reading.kind is Kind.EXTREME else "only a sum of parts"
    )
    raise ConflictError(f"takes the {op} over {call['axis']} of {source.name}, which is {reading}; {due} may be taken")


def _packed_sums(reading: Reading) -> Reading:
    """Of several values in a row each has to be a sum, or zero; what is not known of one stays so."""
    found = tuple((size, only(_summed(options))) for size, options in reading.tag)
    return SAME if all(options == (SAME,) for _, options in found) else reading._replace(tag=found)


def _summed(options: Options) -> Reading:
    """What becomes of one of them."""
    packed = next((reading for reading in options if reading.kind is Kind.PACKED), None)
    if UNKNOWN in options:
        return UNKNOWN
    if SUM in options:
        return SAME
    if packed is not None:  # put together from several before
        return _packed_sums(packed)
    if ZERO in options:
        return ZERO
    raise ConflictError(f"adds up values in a row of which one is {options[0]}; only a sum of parts may be taken")


def _all_gather(call: Call) -> Options:
    """Parts of all ranks one behind the other, which is right where the ranks stand in front of all else."""
    source = call["x"]
    reading = plain(call.of(source))
    if call.of(source).kind in (Kind.COUNTS, Kind.RECEIVED) and len(call.shape(source)) == 2:
        return only(_told(call, call.of(source)))
    if not call.within(call["axis"]):
        if _is_behind(call, reading):  # the ranks come to stand in front of this cut
            reading = reading._replace(outer=reading.outer * call.size(call["axis"]))
        return only(UNKNOWN if reading.kind in (Kind.ROWS, Kind.AWAY) else reading)
    if reading.kind in (Kind.UNKNOWN, Kind.ZERO) or (reading.kind is Kind.SAME and is_even(reading, 0)):
        return only(reading)
    if reading.kind is not Kind.CUT:
        raise ConflictError(
            f"gathers {source.name} over {call['axis']}, which is {reading}; only parts may be gathered"
        )
    front = before(call.shape(source), reading)
    in_place = front == 1 and not reading.zigzag
    return only(SAME if in_place else Reading(Kind.FRONT, outer=front, zigzag=reading.zigzag))


def _told(call: Call, counts: Reading) -> Reading:
    """Counts by rank and expert, which ranks tell each other; on other digits they are as they were."""
    if not call.within(call["axis"]):
        return counts
    if counts.kind is not Kind.COUNTS:
        raise ConflictError(f"gathers {call['x'].name} over {call['axis']}, which is {counts} there already")
    return counts._replace(kind=Kind.RECEIVED)


def _is_behind(call: Call, reading: Reading) -> bool:
    """Whether a cut of dim 0 lies behind the ranks of the axis, which are more significant."""
    return reading.kind is Kind.CUT and reading.dim == 0 and call.at > max(call.digits.axis(call["axis"]))


def _reduce_scatter(call: Call) -> Options:
    source = call["x"]
    reading = plain(call.of(source))
    if not call.within(call["axis"]):
        if reading.kind not in _PASSES_A_SUM:
            raise ConflictError(f"adds up {source.name} over {call['axis']}, which is {reading} elsewhere")
        if _is_behind(call, reading):
            outer, rest = divmod(reading.outer, call.size(call["axis"]))
            return only(UNKNOWN if rest else reading._replace(outer=outer))
        return only(reading)
    if reading.kind in (Kind.UNKNOWN, Kind.ZERO):
        return only(reading)
    if reading.kind is not Kind.SUM:
        raise ConflictError(
            f"adds up {source.name} over {call['axis']}, which is {reading}; only a sum of parts may be taken"
        )
    return locate(call.out_shape, reading.outer, zigzag=reading.zigzag, later=call.later)


def _all_to_all(call: Call) -> Options:
    """From parts along one dim to parts along another."""
    source, reading = call["x"], plain(call.of(call["x"]))
    split, concat = int(call["split_dim"]), int(call["concat_dim"])
    if not call.within(call["axis"]):
        turned = reading.kind is Kind.CUT and reading.dim in (split, concat)
        return only(UNKNOWN if turned or reading.kind in (Kind.ROWS, Kind.AWAY) else reading)
    if reading.kind in (Kind.UNKNOWN, Kind.ZERO) or (reading.kind is Kind.SAME and is_even(reading, concat)):
        return only(reading)
    if reading != cut(concat):
        raise ConflictError(f"turns {source.name}, which is {reading}; only parts along dim {concat} may be turned")
    return only(cut(split))


def _zigzag_exchange(call: Call) -> Options:
    """The order of the pieces, out of zigzag or into it."""
    source, reading, dim, outer = call["x"], plain(call.of(call["x"])), int(call["dim"]), int(call["outer"])
    if not call.within(call["axis"]):
        behind = reading.kind is Kind.CUT and reading.dim == dim and call.at > max(call.digits.axis(call["axis"]))
        return only(UNKNOWN if behind or (reading.kind in (Kind.ROWS, Kind.AWAY) and dim == 0) else reading)
    if reading.kind in (Kind.UNKNOWN, Kind.ZERO) or is_even(reading, dim):
        return only(reading)
    into = bool(call["to_zigzag"])
    if reading != cut(dim, outer, not into):
        due = cut(dim, outer, not into)
        raise ConflictError(f"exchanges pieces of {source.name}, which is {reading}; only what is {due} may be so")
    return only(cut(dim, outer, into))


def _zigzag_slice(call: Call) -> Options:
    return _local_slice(call, zigzag=True)


def _local_slice(call: Call, zigzag: bool = False) -> Options:
    source, index = call["x"], call.of(call["index"])
    reading = plain(call.of(source))
    if index.kind is not Kind.OFFSET:
        if not _is_somewhere(call):
            raise ConflictError("takes a part by a number that is the same on all ranks")
        return only(_elsewhere(reading, int(call["dim"])))
    check_index(call, index, int(call["ranks"]))
    if reading.kind in (Kind.UNKNOWN, Kind.ZERO):
        return only(reading)
    if reading.kind is not Kind.SAME:
        raise ConflictError(
            f"takes this rank's part of {source.name}, which is {reading}; only what is whole may be cut"
        )
    return only(cut(int(call["dim"]), int(call["outer"]), zigzag))


def _elsewhere(reading: Reading, dim: int) -> Reading:
    """On other digits parts stay what they are; equal elements of a part are so still."""
    return UNKNOWN if reading.kind in (Kind.ROWS, Kind.AWAY) and dim == 0 else reading


def _zigzag_place(call: Call) -> Options:
    return _local_place(call, zigzag=True)


def _local_place(call: Call, zigzag: bool = False) -> Options:
    """The part of this rank among zeros: the whole is the sum over the ranks."""
    source, index = call["x"], call.of(call["index"])
    reading, dim = plain(call.of(source)), int(call["dim"])
    if index.kind is not Kind.OFFSET:
        if not _is_somewhere(call):
            raise ConflictError("places a part by a number that is the same on all ranks")
        return only(SAME if reading.kind is Kind.SAME else _elsewhere(reading, dim))
    check_index(call, index, int(call["ranks"]))
    if reading.kind in (Kind.UNKNOWN, Kind.ZERO):
        return only(ZERO if reading.kind is Kind.ZERO else UNKNOWN)
    due = cut(dim, int(call["outer"]), zigzag)
    if reading != due and not is_even(reading, dim):
        raise ConflictError(f"places {source.name}, {reading}, as this rank's part of what is {due}")
    return only(SUM)


def _is_somewhere(call: Call) -> bool:
    """Whether the index is that of a rank on some digit, if not on this one."""
    return call["index"].name in call.offsets


RULES: dict[str, Rule] = {
    "moe.all_reduce": _all_reduce,
    "moe.all_gather": _all_gather,
    "moe.reduce_scatter": _reduce_scatter,
    "moe.all_to_all": _all_to_all,
    "moe.local_slice": _local_slice,
    "moe.local_place": _local_place,
    "moe.zigzag_exchange": _zigzag_exchange,
    "moe.zigzag_slice": _zigzag_slice,
    "moe.zigzag_place": _zigzag_place,
}
