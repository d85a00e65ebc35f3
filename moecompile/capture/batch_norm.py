"""Norms by the statistics of the batch, as the sums that they are.

`batch_norm` and `instance_norm` write their running statistics where no schema says so, and their statistics are those
of the whole batch, which no rank has.  Written as means and products each of them has placement rules and a derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from moecompile import meta
from moecompile.errors import CaptureError
from moecompile.graph import arguments

aten = torch.ops.aten

# make(target, args): a functional call that takes module and source line from the norm
Make = Callable[..., Node]


def uses_batch(node: Node) -> bool:
    """Whether a traced call norms by the statistics of what it is given, which has a known size.

    `CaptureError` for running statistics of as many rows as data decide.
    """
    if node.target not in (aten.batch_norm.default, aten.instance_norm.default):
        return False
    given = arguments(node)
    if not given["training" if node.target is aten.batch_norm.default else "use_input_stats"]:
        return False
    known = all(isinstance(size, int) for size in meta.tensor(given["input"]).shape)
    if not known and given["running_mean"] is not None:
        raise CaptureError(
            f"{meta.source(node)}: the running statistics of this norm are those of as many rows as data decide; put the norm in "
            f"front of the experts or behind them, or set track_running_stats=False."
        )
    return known


def written_out(
    node: Node, operands: dict[str, Any], make: Make, constant: Callable[[Node], Node]
) -> tuple[Node, dict[str, Node]]:
    """The normed value, and the new running statistics by the name of the argument that holds them.

    ``operands`` are the arguments of the new graph by name, ``constant`` gives a value without its gradient.  Narrow
    types are computed in float32, as torch does.
    """
    source = operands["input"]
    found, whole = meta.tensor(source), node.target is aten.batch_norm.default
    last = found.dim() - 1
    wide = torch.promote_types(found.dtype, torch.float32)
    x = source if found.dtype == wide else make(aten._to_copy.default, source, dtype=wide)
    if last > 1:  # channels last, so that a statistic of the batch has no dim that one rank's part could be taken for
        x = make(aten.movedim.int, x, 1, last)
    dims = list(range(0 if whole else 1, last)) if last > 1 else [0]
    mean = make(aten.mean.dim, x, dims, not whole)
    centred = make(aten.sub.Tensor, x, mean)
    variance = make(aten.mean.dim, make(aten.mul.Tensor, centred, centred), dims, not whole)
    scale = make(aten.rsqrt.default, make(aten.add.Tensor, variance, operands["eps"]))
    normed = make(aten.mul.Tensor, centred, scale)
    for name, target in (("weight", aten.mul.Tensor), ("bias", aten.add.Tensor)):
        if operands[name] is not None:
            normed = make(target, normed, operands[name])
    if last > 1:
        normed = make(aten.movedim.int, normed, last, 1)
    if meta.tensor(normed).dtype != found.dtype:
        normed = make(aten._to_copy.default, normed, dtype=found.dtype)
    news: dict[str, Node] = {}
    for name, value in (("running_mean", mean), ("running_var", variance)):
        if operands[name] is None:
            continue
        factor = operands["momentum"] * (_unbiased(x, dims) if value is variance else 1)
        now = constant(value) if whole else make(aten.mean.dim, constant(value), list(range(last)))
        kept = make(aten.mul.Tensor, operands[name], 1 - operands["momentum"])
        news[name] = make(aten.add.Tensor, kept, make(aten.mul.Tensor, now, factor))
    return normed, news


def _unbiased(x: Node, dims: list[int]) -> float:
    """What makes the mean of squares over ``dims`` an estimate without bias."""
    count = math.prod(meta.tensor(x).shape[dim] for dim in dims)
    return count / (count - 1) if count > 1 else 1.0
