"""Constant factors of routing weights that an expert has picked, as factors of all weights.

Before:  mul(index(probs, [token, slot]), 2.5)
After:   index(mul(probs, 2.5), [token, slot])

The same values and gradients, the product made once for all experts; the weights are then values of the whole batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from moecompile import graph as ir
from moecompile import meta
from moecompile.compat import FakeTensorMode
from moecompile.recognition.choices import Choice, find_choices
from moecompile.recognition.regions import positions

aten = torch.ops.aten
_PICKS = frozenset({aten.index.Tensor, aten.index_select.default, aten.gather.default, aten.select.int})
_VIEWS = frozenset({aten.unsqueeze.default, aten.squeeze.dim, aten.reshape.default})
_PRODUCTS = frozenset({aten.mul.Tensor, aten.div.Tensor})


def scale_before_gathers(graph: Graph, mode: FakeTensorMode) -> int:
    """Move them; returns how many there were."""
    choices: list[Choice] = []
    made: dict[Any, Node] = {}
    done = 0
    for node in [*graph.nodes]:
        if node.target not in _PRODUCTS or _is_fixed(node):
            continue
        choices = choices or find_choices(graph)
        found = _factor(node)
        path = [] if found is None else _path(found[0], choices)
        if found is None or not path:
            continue
        source, factor = path[-1].args[0], found[1]
        key = (node.target, source, factor)
        if key not in made:
            order = positions(graph)
            last = max((item for item in (source, factor) if isinstance(item, Node)), key=order.__getitem__)
            while last.op == "placeholder" and last.next.op == "placeholder":
                last = last.next
            with graph.inserting_after(last):
                made[key] = ir.call(graph, node.target, source, factor, like=source, mode=mode)  # type: ignore[arg-type]
        value = made[key]
        with graph.inserting_before(node):
            for step in reversed(path):
                value = ir.call(graph, step.target, value, *step.args[1:], like=step, mode=mode, **step.kwargs)  # type: ignore[arg-type]
        ir.replace(node, value)
        done += 1
    if done:
        ir.eliminate_dead(graph)
    return done


def _is_fixed(node: Node) -> bool:
    return not meta.is_tensor(node) or all(isinstance(size, int) for size in meta.tensor(node).shape)


def _factor(node: Node) -> tuple[Node, Any] | None:
    """What is multiplied, and the number or the tensor of one element that it is multiplied or divided by."""
    sides = [node.args[:2]]
    if node.target is aten.mul.Tensor:
        sides.append(node.args[1::-1])
    for rows, factor in sides:
        if not isinstance(rows, Node) or _is_fixed(rows):
            continue
        if not isinstance(factor, Node):
            return rows, factor
        if meta.is_tensor(factor) and meta.tensor(factor).dim() == 0 and meta.tensor(factor).is_floating_point():
            return rows, factor
    return None


def _path(node: Node, choices: list[Choice]) -> list[Node]:
    """The steps back from picked weights to those of all tokens, the last first; none if they are something else."""
    path: list[Node] = []
    while node.target in _PICKS | _VIEWS and isinstance(node.args[0], Node):
        path.append(node)
        node = node.args[0]
        if _is_fixed(node) and any(_fits(node, choice) for choice in choices):
            kept = all(meta.tensor(step).dtype == meta.tensor(node).dtype for step in path)
            return path if kept and any(step.target in _PICKS for step in path) else []
    return []


def _fits(node: Node, choice: Choice) -> bool:
    """Whether a value has one number for each choice or each option of every token."""
    if not meta.is_tensor(node) or not meta.tensor(node).is_floating_point():
        return False
    shape, tokens = tuple(meta.tensor(node).shape), choice.num_tokens
    return shape in ((tokens, choice.top_k), (tokens, choice.num_options)) or (choice.top_k == 1 and shape == (tokens,))
