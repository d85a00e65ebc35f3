"""Products in one labelled form: a letter for each axis of each operand, as in an einsum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from moecompile import meta

aten = torch.ops.aten


@dataclass(frozen=True)
class Labelled:
    """``operands`` with their letters, the letters of the result, and what is added to it."""

    operands: tuple[tuple[Node, str], ...]
    out: str
    bias: Node | None = None


def labelled(node: Node) -> Labelled | None:
    """The labelled form of a product; None for one that has none (a scaled addmm, an einsum with '...')."""
    target, args = node.target, node.args
    if target is aten.linear.default:
        batch = "abcdefgh"[: _ndim(args[0]) - 1]
        bias = args[2] if len(args) > 2 else node.kwargs.get("bias")
        return Labelled(((args[0], batch + "k"), (args[1], "nk")), batch + "n", bias)  # type: ignore[arg-type]
    if target in (aten.addmm.default, aten.baddbmm.default):
        if any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
            return None
        batch = "a" if target is aten.baddbmm.default else ""
        return Labelled(((args[1], batch + "mk"), (args[2], batch + "kn")), batch + "mn", args[0])  # type: ignore[arg-type]
    if target in (aten.matmul.default, aten.mm.default, aten.bmm.default):
        return _matmul(args[0], args[1])
    return _einsum(node) if target is aten.einsum.default else None


def _matmul(first: Any, second: Any) -> Labelled:
    left_dims, right_dims = _ndim(first), _ndim(second)
    batch = "abcdefgh"[: max(left_dims, right_dims, 2) - 2]
    left = batch[len(batch) - max(left_dims - 2, 0) :] + ("mk" if left_dims > 1 else "k")
    right = batch[len(batch) - max(right_dims - 2, 0) :] + ("kn" if right_dims > 1 else "k")
    out = batch + ("m" if "m" in left else "") + ("n" if "n" in right else "")
    return Labelled(((first, left), (second, right)), out)


def _einsum(node: Node) -> Labelled | None:
    equation = str(node.args[0]).replace(" ", "")
    if "." in equation:
        return None
    inputs, arrow, out = equation.partition("->")
    if not arrow:
        out = "".join(sorted(one for one in set(inputs) - {","} if inputs.count(one) == 1))
    letters = inputs.split(",")
    operands: Any = node.args[1]
    if len(operands) != len(letters) or any(len(set(one)) != len(one) for one in letters):
        return None
    return Labelled(tuple(zip(operands, letters, strict=True)), out)


def _ndim(node: Any) -> int:
    return meta.tensor(node).dim()
