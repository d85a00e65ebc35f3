"""Gradients that are linear as a whole, though none of the ops that autograd writes them with is.

The gradient of a matrix exponential is a corner of the exponential of a larger matrix, and that of ``logcumsumexp`` is scanned in
logarithms, what is positive apart from what is not. For the proof a call that is as linear in the gradient stands in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node

from .. import meta

aten = torch.ops.aten
Write = Callable[..., Node]


@dataclass(frozen=True)
class Adjoint:
    """``operands``: what a gradient is computed from, first the one that it is linear in; ``inner``: the calls between that nothing
    else reads; ``write`` makes the stand-in.
    """

    operands: tuple[Node, ...]
    write: Callable[..., Node]
    inner: frozenset[Node] = frozenset()


def adjoints(graph: Graph) -> dict[Node, Adjoint]:
    """What stands for which node."""
    found = {}
    for node in graph.nodes:
        if meta.direction(node) is meta.Direction.BACKWARD:
            made = _of_matrix_exp(node) or _of_logcumsumexp(node)
            if made is not None:
                found[node] = replace(made, inner=_between(node, made.operands))
    return found


def _between(node: Node, operands: tuple[Node, ...]) -> frozenset[Node]:
    """Calls between the operands and a node that nothing else reads."""
    within, queue = {node}, [node]
    while queue:
        for source in queue.pop().all_input_nodes:
            if source not in operands and source not in within:
                within.add(source)
                queue.append(source)
    while outside := {item for item in within - {node} if not set(item.users) <= within}:
        within -= outside
    return frozenset(within - {node})


def _args(node: Any, target: Any) -> tuple[Any, ...] | None:
    """The arguments of a call of one op; None for anything else."""
    return node.args if isinstance(node, Node) and node.target is target else None


def _of_matrix_exp(node: Node) -> Adjoint | None:
    """``exp([[a, grad], [0, a]])[:n, n:]``."""
    columns = _args(node, aten.slice.Tensor)
    rows = _args(columns[0], aten.slice.Tensor) if columns else None
    made = _args(rows[0], aten.linalg_matrix_exp.default) if rows else None
    whole = _args(made[0], aten.cat.default) if made else None
    halves = [_args(half, aten.cat.default) for half in whole[0]] if whole and whole[1:] == (-2,) else []
    if not columns or not rows or len(halves) != 2 or any(half is None or half[1:] != (-1,) for half in halves):
        return None
    (a, grad), (zeros, again) = halves[0][0], halves[1][0]  # type: ignore[index]
    size = meta.tensor(grad).shape[-1]
    corner = rows[1:] == (-2, 0, size) and columns[1:] == (-1, size, 2 * size)
    fits = corner and a is again and _args(zeros, aten.zeros_like.default) is not None
    return Adjoint((grad, a), _exponential) if fits else None


def _exponential(write: Write, grad: Node, a: Node) -> Node:
    """An integral of ``exp(s a) grad exp((1 - s) a)``."""
    power = write(aten.linalg_matrix_exp.default, a)
    return write(aten.matmul.default, write(aten.matmul.default, power, grad), power)


def _of_logcumsumexp(node: Node) -> Adjoint | None:
    """``scan(where(grad > 0, log|grad|)) - scan(where(grad < 0, log|grad|))``."""
    terms = _args(node, aten.sub.Tensor)
    if terms is None or len(terms) != 2:
        return None
    parts = [_scanned(term, sign) for term, sign in zip(terms, (aten.gt.Scalar, aten.lt.Scalar), strict=True)]
    if parts[0] is None or parts[0] != parts[1]:
        return None
    *operands, dim = parts[0]
    return Adjoint(tuple(operands), partial(_scan, dim=dim))


def _scanned(term: Any, sign: Any) -> tuple[Any, ...] | None:
    """``exp(flip(logcumsumexp(flip(where(..) - result))) + operand)``: the gradient, the result, the operand and the dim."""
    power = _args(term, aten.exp.default)
    added = _args(power[0], aten.add.Tensor) if power else None
    back = _args(added[0], aten.flip.default) if added else None
    scan = _args(back[0], aten.logcumsumexp.default) if back else None
    turned = _args(scan[0], aten.flip.default) if scan else None
    less = _args(turned[0], aten.sub.Tensor) if turned else None
    chosen = _args(less[0], aten.where.self) if less else None
    if not (added and back and scan and turned and less and chosen) or [scan[1]] != back[1] or back[1] != turned[1]:
        return None
    test, size = _args(chosen[0], sign), _args(chosen[1], aten.log.default)
    magnitude = _args(size[0], aten.abs.default) if size else None
    if not test or not magnitude or test[0] is not magnitude[0] or test[1] != 0:
        return None
    return test[0], less[1], added[1], scan[1]


def _scan(write: Write, grad: Node, result: Node, operand: Node, *, dim: int) -> Node:
    """Sums of the gradient along a dim, weighed by what the forward had, as for a softmax; the operand lies as the result does."""
    weighed = write(aten.mul.Tensor, grad, write(aten.exp.default, write(aten.sub.Tensor, operand, result)))
    return write(aten._softmax_backward_data.default, weighed, result, dim, meta.tensor(grad).dtype)
