"""Products of tensors, all as one: dims by name, those that are summed over and those that stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .call import Call, Rule, only, plain
from .readings import ALL_DIMS, SAME, SUM, UNKNOWN, ZERO, ConflictError, Kind, Options, Reading, same

_WITH_ROWS = (Kind.ROWS, Kind.AWAY)


def product(call: Call, terms: Sequence[tuple[Any, str]], out: str) -> Options:
    """``einsum`` of the terms, each an operand with a letter for every dim."""
    readings = [plain(call.of(item)) for item, _ in terms]
    kinds = {reading.kind for reading in readings}
    if not kinds <= {Kind.SAME, Kind.ZERO, Kind.CUT, Kind.SUM, Kind.MEAN, Kind.FRONT, *_WITH_ROWS}:
        return only(UNKNOWN)
    if Kind.ZERO in kinds:
        return only(ZERO)
    sums = [reading for reading in readings if reading.kind in (Kind.SUM, Kind.MEAN)]
    parts = [
        (letters[reading.dim if reading.kind is Kind.CUT else 0], reading)
        for (_, letters), reading in zip(terms, readings, strict=True)
        if reading.kind not in (Kind.SUM, Kind.MEAN, Kind.SAME)
    ]
    if sums:
        if len(sums) > 1 or parts:
            raise ConflictError("multiplies " + " with ".join(map(str, readings)))
        return only(sums[0])
    if not parts:
        return _whole(terms, readings, out)
    return only(_of_parts(call, terms, readings, parts, out))


def _of_parts(
    call: Call,
    terms: Sequence[tuple[Any, str]],
    readings: Sequence[Reading],
    parts: list[tuple[str, Reading]],
    out: str,
) -> Reading:
    letter, found = parts[0]
    for other, reading in parts:
        if other != letter or reading._replace(dim=found.dim) != found:
            raise ConflictError("multiplies operands that do not lie alike (" + ", ".join(map(str, readings)) + ")")
    for (item, letters), reading in zip(terms, readings, strict=True):
        if reading.kind is Kind.SAME and letter in letters:
            dim = letters.index(letter)
            if call.shape(item)[dim] != 1 and not reading.dim >> dim & 1:
                raise ConflictError(f"takes the whole of {item.name} together with an operand that is {found}")
    if letter not in out:
        return SAME if found.kind is Kind.FRONT else SUM
    at = out.index(letter)
    if found.kind is Kind.CUT:
        return found._replace(dim=at)
    return found if at == 0 else UNKNOWN


def _whole(terms: Sequence[tuple[Any, str]], readings: Sequence[Reading], out: str) -> Options:
    """Equal elements on both sides of a sum may be this rank's part of more of them."""
    bits = {
        letter: all(
            reading.dim >> letters.index(letter) & 1
            for (_, letters), reading in zip(terms, readings, strict=True)
            if letter in letters
        )
        for letter in {letter for _, letters in terms for letter in letters}
    }
    found = same(sum(1 << at for at, letter in enumerate(out) if bits.get(letter)))
    summed = [letter for letter in bits if letter not in out and bits[letter]]
    if all(reading.dim == ALL_DIMS for reading in readings):
        found = same(ALL_DIMS)
    return (found, SUM) if summed else (found,)


def _with_bias(call: Call, made: Options, bias: Any, ndim: int) -> Options:
    """A term that is added to a product, aligned with its last dims."""
    if bias is None:
        return made
    reading, found = plain(call.of(bias)), []
    for option in made:
        if option.kind is Kind.CUT and option.dim == ndim - 1:
            fits = reading == option._replace(dim=len(call.shape(bias)) - 1)
            fits = fits or (reading.kind is Kind.SAME and bool(reading.dim >> (len(call.shape(bias)) - 1) & 1))
        elif option.kind in (Kind.SUM, Kind.MEAN):
            fits = reading.kind is option.kind
        elif option.kind is Kind.ZERO:
            return only(_broadcast(reading, ndim - len(call.shape(bias))))
        else:
            fits = reading.kind is Kind.SAME
        if fits or reading.kind is Kind.ZERO:
            found.append(SAME if option.kind is Kind.SAME else option)
    if not found:
        raise ConflictError(f"adds {bias.name}, {reading}, to a product that is {made[0]}")
    return tuple(found)


def _broadcast(reading: Reading, more: int) -> Reading:
    """What is repeated along ``more`` dims in front of its own."""
    if reading.kind is Kind.CUT:
        return reading._replace(dim=reading.dim + more)
    if reading.kind is Kind.SAME and reading.dim != ALL_DIMS:
        return same(reading.dim << more | (1 << more) - 1)
    return reading


def _linear(call: Call) -> Options:
    source, weight = call["input"], call["weight"]
    ndim = len(call.shape(source))
    lead = "abcdefgh"[: ndim - 1]
    made = product(call, [(source, lead + "k"), (weight, "nk")], lead + "n")
    return _with_bias(call, made, call.get("bias"), ndim)


def _mm(call: Call) -> Options:
    first, second = list(call.args.values())[:2]
    return product(call, [(first, "mk"), (second, "kn")], "mn")


def _addmm(call: Call) -> Options:
    made = product(call, [(call["mat1"], "mk"), (call["mat2"], "kn")], "mn")
    return _with_bias(call, made, call["self"], 2)


def _bmm(call: Call) -> Options:
    return product(call, [(call["self"], "bmk"), (call["mat2"], "bkn")], "bmn")


def _baddbmm(call: Call) -> Options:
    made = product(call, [(call["batch1"], "bmk"), (call["batch2"], "bkn")], "bmn")
    term = plain(call.of(call["self"]))
    if term.kind is Kind.ZERO or call.get("beta", 1) == 0:
        return made
    return tuple(option for option in made if option == term) or only(UNKNOWN)


def _matmul(call: Call) -> Options:
    first, second = call["self"], call.args.get("other", call.args.get("tensor", call.args.get("vec")))
    left, right = len(call.shape(first)), len(call.shape(second))
    batch = "abcdefgh"[: max(left, right, 2) - 2]
    here = batch[len(batch) - max(left - 2, 0) :] + ("mk" if left > 1 else "k")
    there = batch[len(batch) - max(right - 2, 0) :] + ("kn" if right > 1 else "k")
    out = batch + ("m" if left > 1 else "") + ("n" if right > 1 else "")
    return product(call, [(first, here), (second, there)], out)


def _einsum(call: Call) -> Options:
    equation = str(call["equation"]).replace(" ", "")
    inputs, arrow, out = equation.partition("->")
    letters, tensors = inputs.split(","), call["tensors"]
    if not arrow or "." in equation or any(len(set(item)) != len(item) for item in letters):
        return only(SAME if all(call.of(item).kind is Kind.SAME for item in tensors) else UNKNOWN)
    return product(call, list(zip(tensors, letters, strict=True)), out)


def _outer(call: Call) -> Options:
    return product(call, [(call["self"], "m"), (call["vec2"], "n")], "mn")


RULES: dict[str, Rule] = {
    "aten.linear": _linear,
    "aten.mm": _mm,
    "moe_cpu.mm": _mm,
    "aten.addmm": _addmm,
    "aten.bmm": _bmm,
    "aten.baddbmm": _baddbmm,
    "aten.matmul": _matmul,
    "aten.dot": _matmul,
    "aten.mv": _matmul,
    "aten.einsum": _einsum,
    "aten.outer": _outer,
}
