"""Convolutions of size 1 over rows picked by their values, written as the products they are.

Before:  conv1d(x, w, b) with x [n, in, ...] and w [out, in, 1]
After:   linear(x.movedim(1, -1), w.reshape(out, in), b).movedim(-1, 1), or reshapes where there is one place a row
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from moecompile import graph as ir
from moecompile import meta
from moecompile.compat import FakeTensorMode

aten = torch.ops.aten
_DIMS: dict[Any, int] = {aten.conv1d.default: 1, aten.conv2d.default: 2, aten.conv3d.default: 3}
_NEUTRAL = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}


def as_products(graph: Graph, mode: FakeTensorMode) -> int:
    """Rewrite them; returns how many there were. Convolutions of known sizes stay: they are no expert's."""
    done = 0
    for node in ir.find(graph, *_DIMS):
        given: list[Any] = [*node.args, *[None] * (3 - len(node.args))]
        source, weight, bias, rest = *given[:3], given[3:]
        options = dict(zip(_NEUTRAL, rest, strict=False)) | dict(node.kwargs)
        bias = options.pop("bias", bias)
        dims, shape = _DIMS[node.target], meta.tensor(weight).shape
        plain = all(_is(options.get(name, wanted), wanted) for name, wanted in _NEUTRAL.items())
        batched = meta.tensor(source).dim() == dims + 2
        if (
            not plain
            or not batched
            or tuple(shape[2:]) != (1,) * dims
            or not list(ir.symbolic_sizes(meta.value(source)))
        ):
            continue
        ahead, back = [0, *range(2, dims + 2), 1], [0, dims + 1, *range(1, dims + 1)]
        with graph.inserting_before(node):

            def make(target: Any, *args: Any, like: Node = node) -> Node:
                return ir.call(graph, target, *args, like=like, mode=mode)

            matrix = make(aten.reshape.default, weight, list(shape[:2]))
            ones = all(str(size) == "1" for size in meta.tensor(source).shape[2:])
            rows = make(
                *((aten.reshape.default, source, [-1, shape[1]]) if ones else (aten.permute.default, source, ahead))
            )
            made = make(aten.linear.default, rows, matrix, bias)
            apart = (aten.reshape.default, made, [-1, shape[0], *[1] * dims])
            ir.replace(node, make(*(apart if ones else (aten.permute.default, made, back))))
        done += 1
    return done


def _is(found: Any, wanted: int) -> bool:
    return all(item == wanted for item in (found if isinstance(found, (list, tuple)) else [found]))
