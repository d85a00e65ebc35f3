"""Products, all through one labelled form: a cut label that survives cuts the result, one that is contracted makes it partial."""

from __future__ import annotations

import string
from typing import Any

import torch
from torch.fx import Node

from .call import Call, Decision, Needs, NoRuleError, Rule, follow
from .types import PARTIAL, REPLICATE, Partial, Shard

aten = torch.ops.aten

_BATCH = "abcdefgh"


def product(call: Call, operands: list[tuple[Node, str]], out: str, extra: list[Node] | None = None) -> Decision:
    """``operands`` with one letter a dim, broadcast where a size is 1; ``extra`` are operands added to the result (a bias)."""
    added = extra or []
    biases = [(item, out[len(out) - len(call.shape(item)) :]) for item in added]
    cut = _common_cut(call, [*operands, *biases])
    if cut is None:
        return _whole(call, operands, added)
    label, placed = cut
    needs = Needs()
    for item, letters in operands:
        if letters.count(label) > 1:
            raise NoRuleError("it takes a diagonal of the batch dim; index the diagonal in a line of its own.")
        follow(call, needs, item, placed, letters.find(label))
    if label in out:
        result = placed.moved(out.index(label))
        for item in added:
            follow(call, needs, item, result, result.dim - (len(out) - len(call.shape(item))))
        return Decision(result, needs)
    for item in added:
        call.whole([item], "bias")
        if not isinstance(call.placed(item), Partial):
            needs.want(item, PARTIAL)
    return Decision(PARTIAL, needs)


def _common_cut(call: Call, operands: list[tuple[Node, str]]) -> tuple[str, Shard] | None:
    """The one label that is cut, and how."""
    found: tuple[str, Shard] | None = None
    for item, letters in operands:
        placed = call.placed(item)
        if not isinstance(placed, Shard):
            continue
        one = (letters[placed.dim], placed.moved(0))
        if found is not None and one != found:
            raise NoRuleError("its operands are cut along different dims; only one of them may carry the batch.")
        found = one
    return found


def _whole(call: Call, operands: list[tuple[Node, str]], added: list[Node]) -> Decision:
    """Nothing is cut in the product: it is linear in each operand, so one partial operand may stay."""
    call.whole(added, "bias")
    partial = call.partial([item for item, _ in operands])
    if len(partial) == 1 and all(isinstance(call.placed(item), Partial) for item in added):
        return Decision(PARTIAL)
    return Decision(REPLICATE, call.reduced())


def linear(call: Call) -> Decision:
    source, weight, bias = call.args[0], call.args[1], call.get("bias")
    batch = _BATCH[: len(call.shape(source)) - 1]
    rows = "n" if len(call.shape(weight)) > 1 else ""
    return product(
        call, [(source, batch + "k"), (weight, rows + "k")], batch + rows, [bias] if bias is not None else []
    )


def matmul(call: Call) -> Decision:
    first, second = call.args[0], call.args[1]
    sizes = len(call.shape(first)), len(call.shape(second))
    batch = _BATCH[: max(*sizes, 2) - 2]
    left = batch[len(batch) - max(sizes[0] - 2, 0) :] + ("mk" if sizes[0] > 1 else "k")
    right = batch[len(batch) - max(sizes[1] - 2, 0) :] + ("kn" if sizes[1] > 1 else "k")
    out = batch + ("m" if "m" in left else "") + ("n" if "n" in right else "")
    cuts = call.placed(first), call.placed(second)
    if batch and all(isinstance(placed, Shard) for placed in cuts) and first is not second:
        one, other = left[cuts[0].dim], right[cuts[1].dim]  # type: ignore[union-attr]
        at = right.find(one)
        alone = one != "k" and (at < 0 or call.shape(second)[at] == 1)
        if alone and other in "kn":  # rows of queries against all keys, and their scores against all values
            return Decision(cuts[0].moved(out.index(one)), {second: REPLICATE})  # type: ignore[union-attr]
    return product(call, [(first, left), (second, right)], out)


def added(call: Call) -> Decision:
    """addmm, addmv, baddbmm: the first operand is added to the product of the others."""
    batch = "b" if call.node.target is aten.baddbmm.default else ""
    columns = "" if call.node.target is aten.addmv.default else "n"
    operands = [(call.args[1], batch + "mk"), (call.args[2], batch + "k" + columns)]
    return product(call, operands, batch + "m" + columns, [call.args[0]])


def einsum(call: Call) -> Decision:
    equation = call.args[0].replace(" ", "")
    tensors = list(call.args[1])
    inputs, arrow, out = equation.partition("->")
    letters = inputs.split(",")
    free = [letter for letter in string.ascii_letters if letter not in equation]
    widths = [len(call.shape(item)) - len(text.replace("...", "")) if "..." in text else 0
              for item, text in zip(tensors, letters, strict=True)]  # fmt: skip
    dots = "".join(free[: max(widths, default=0)])
    letters = [text.replace("...", dots[len(dots) - width :]) for text, width in zip(letters, widths, strict=True)]
    if not arrow:
        named = inputs.replace(",", "").replace(".", "")
        out = "..." + "".join(sorted(letter for letter in set(named) if named.count(letter) == 1))
    return product(call, list(zip(tensors, letters, strict=True)), out.replace("...", dots))


def outer(call: Call) -> Decision:
    return product(call, [(call.args[0], "m"), (call.args[1], "n")], "mn")


def solve_triangular(call: Call) -> Decision:
    """Solves along the last two dims; linear in the right-hand side only."""
    matrix, right = call.args[0], call.args[1]
    ndim = len(call.out_shape)
    cuts = {item: call.placed(item) for item in (matrix, right)}
    for item, placed in cuts.items():
        if isinstance(placed, Shard) and placed.dim >= len(call.shape(item)) - 2:
            raise NoRuleError("the batch dim is part of the system that is solved; keep it in front.")
    found = [
        placed.moved(placed.dim + ndim - len(call.shape(item)))
        for item, placed in cuts.items()
        if isinstance(placed, Shard)
    ]
    if not found:
        return Decision(REPLICATE, call.reduced())
    needs = Needs()
    for item in (matrix, right):
        follow(call, needs, item, found[0], found[0].dim - (ndim - len(call.shape(item))))
    return Decision(found[0], needs)


RULES: dict[Any, Rule] = {
    aten.linear.default: linear,
    **dict.fromkeys(
        [aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default], matmul
    ),
    **dict.fromkeys([aten.addmm.default, aten.addmv.default, aten.baddbmm.default], added),
    aten.einsum.default: einsum,
    **dict.fromkeys([aten.outer.default, aten.ger.default], outer),
    aten.linalg_solve_triangular.default: solve_triangular,
}
