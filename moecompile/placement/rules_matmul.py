"""Products, all through one labelled form: a cut label that survives cuts the result, one that is contracted makes it partial."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from .sharder import Call, Decision, NoRule, Rule
from .types import PARTIAL, REPLICATE, Partial, Placement, Shard

aten = torch.ops.aten


def product(call: Call, operands: list[tuple[Node, str]], out: str, extra: list[Node]) -> Decision:
    """``operands`` with one letter a dim; ``extra`` are operands added to the result (a bias)."""
    label, outer, rows = None, 1, False
    partial = []
    for item, letters in operands:
        placed = call.placed(item)
        if isinstance(placed, Partial):
            partial.append(item)
        if isinstance(placed, Shard):
            found = letters[placed.dim]
            if label is not None and (found, placed.outer, placed.rows) != (label, outer, rows):
                raise NoRule("its operands are cut along different dims; only one of them may carry the batch.")
            label, outer, rows = found, placed.outer, placed.rows
    need: dict[Node, Placement] = {}
    if label is None:
        for item in extra:
            if isinstance(call.placed(item), Shard):
                raise NoRule("a whole product is added to a cut tensor; write the addition as a line of its own.")
        if len(partial) == 1 and not extra:
            return Decision(PARTIAL)
        return Decision(
            REPLICATE,
            {item: REPLICATE for item in [*partial, *extra] if isinstance(call.placed(item), Partial)},
        )
    for item, letters in operands:
        placed = call.placed(item)
        if isinstance(placed, Shard):
            continue
        if label in letters and call.shape(item)[letters.index(label)] != 1:
            if rows:
                raise NoRule("rows of an expert region meet a whole tensor of as many rows, whose order is another.")
            need[item] = Shard(letters.index(label), outer)
        elif isinstance(placed, Partial):
            need[item] = REPLICATE
    if label not in out:
        for item in extra:
            if not isinstance(call.placed(item), Partial):
                need[item] = PARTIAL
        return Decision(PARTIAL, need)
    dim = out.index(label)
    for item in extra:
        ndim = len(call.shape(item))
        at = dim - (len(out) - ndim)
        if isinstance(call.placed(item), Shard):
            continue
        if at >= 0 and call.shape(item)[at] != 1:
            need[item] = Shard(at, outer)
        elif isinstance(call.placed(item), Partial):
            need[item] = REPLICATE
    return Decision(Shard(dim, outer, rows), need)


def linear(call: Call) -> Decision:
    source, weight, bias = call.args[0], call.args[1], call.arg(2, "bias")
    batch = "abcdefgh"[: len(call.shape(source)) - 1]
    return product(call, [(source, batch + "k"), (weight, "nk")], batch + "n", [bias] if bias is not None else [])


def matmul(call: Call) -> Decision:
    first, second = call.args[0], call.args[1]
    ndim = max(len(call.shape(first)), len(call.shape(second)))
    batch = "abcdefgh"[: max(ndim - 2, 0)]
    left = batch[len(batch) - max(len(call.shape(first)) - 2, 0) :] + ("mk" if len(call.shape(first)) > 1 else "k")
    right = batch[len(batch) - max(len(call.shape(second)) - 2, 0) :] + ("kn" if len(call.shape(second)) > 1 else "k")
    out = batch + ("m" if "m" in left else "") + ("n" if "n" in right else "")
    return product(call, [(first, left), (second, right)], out, [])


def added(call: Call) -> Decision:
    """addmm, baddbmm."""
    batch = "b" if call.node.target is aten.baddbmm.default else ""
    return product(call, [(call.args[1], batch + "mk"), (call.args[2], batch + "kn")], batch + "mn", [call.args[0]])


def einsum(call: Call) -> Decision:
    equation = call.args[0].replace(" ", "")
    if "..." in equation:
        raise NoRule("'...' in an einsum has no rule; name every dim.")
    inputs, _, out = equation.partition("->")
    letters = inputs.split(",")
    if "->" not in equation:
        out = "".join(sorted(letter for letter in set(inputs) - {","} if inputs.count(letter) == 1))
    return product(call, list(zip(call.args[1], letters, strict=True)), out, [])


def outer(call: Call) -> Decision:
    return product(call, [(call.args[0], "m"), (call.args[1], "n")], "mn", [])


RULES: dict[Any, Rule] = {
    aten.linear.default: linear,
    **dict.fromkeys(
        [aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default], matmul
    ),
    aten.addmm.default: added,
    aten.baddbmm.default: added,
    aten.einsum.default: einsum,
    aten.outer.default: outer,
}
