"""Names of axes: E counts experts, R rows, F features. Sizes are compared as text: nothing is guessed about symbols."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.fx import Node

from moecompile import meta

aten = torch.ops.aten


def sizes(node: Node) -> list[str]:
    """Sizes as text: equal symbols are equal text, and nothing is guessed about unknown ones."""
    return [str(size) for size in meta.tensor(node).shape]


def features(node: Node, axes: str) -> list[str]:
    return [size for size, letter in zip(sizes(node), axes, strict=True) if letter == "F"]


def from_end(axes: str, dim: int) -> int:
    """Position of a feature axis among the features, from the end."""
    return -axes[dim:].count("F")


def axis_order(node: Node, ndim: int) -> list[int]:
    """Where each axis of a transposed value comes from."""
    order, args = list(range(ndim)), cast(tuple[Any, ...], node.args)
    if node.target is aten.permute.default:
        return [dim % ndim for dim in args[1]]
    if node.target is aten.numpy_T.default:
        return order[::-1]
    named = args[1:3] if node.target is aten.transpose.int else (-2, -1)
    one, other = (dim % ndim for dim in named)
    if ndim > 1:
        order[one], order[other] = order[other], order[one]
    return order


def aligned(operand: Node, result: Node, axes: str) -> str:
    """Axis names of an operand that is broadcast to the result: an axis of size 1 does not count experts."""
    ndim = meta.tensor(operand).dim()
    return without_broadcast_expert(operand, axes[len(axes) - ndim :]) if ndim else ""


def without_broadcast_expert(operand: Node, letters: str) -> str:
    shape = meta.tensor(operand).shape
    return "".join(
        "R" if letter == "E" and str(size) == "1" else letter for letter, size in zip(letters, shape, strict=True)
    )
