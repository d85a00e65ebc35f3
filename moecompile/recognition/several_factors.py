"""Products of three tensors and more, as products of two.

Before:  einsum("bsef,efh,bse->bsh", hidden, weight, scores)
After:   einsum("bseh,bse->bsh", einsum("bsef,efh->bseh", hidden, weight), scores)

Factors that alone share a letter to be summed come first, so that a weight is applied before the scores of its experts are.
"""

from __future__ import annotations

from itertools import combinations

import torch
from torch.fx import Graph, Node

from moecompile import graph as ir
from moecompile.compat import FakeTensorMode
from moecompile.recognition.products import labelled

aten = torch.ops.aten
Factor = tuple[Node, str]


def as_pairs(graph: Graph, mode: FakeTensorMode) -> int:
    """Rewrite them; returns how many there were."""
    done = 0
    for node in ir.find(graph, aten.einsum.default):
        form = labelled(node)
        if form is None or len(form.operands) < 3:
            continue
        factors = list(form.operands)
        with graph.inserting_before(node):
            while len(factors) > 1:
                at = _next(factors, form.out)
                (one, two), rest = [factors[index] for index in at], _without(factors, at)
                left = _left(one[1] + two[1], rest, form.out)
                text = f"{one[1]},{two[1]}->{left if rest else form.out}"
                made = ir.call(graph, aten.einsum.default, text, [one[0], two[0]], like=node, mode=mode)
                factors = [(made, left), *rest]
            ir.replace(node, made)
        done += 1
    return done


def _next(factors: list[Factor], out: str) -> tuple[int, int]:
    """Places of the first two that alone have a letter which is summed; of any two where there are none."""
    for at in combinations(range(len(factors)), 2):
        shared = set(factors[at[0]][1]) & set(factors[at[1]][1])
        if shared - set(out).union(*(letters for _, letters in _without(factors, at))):
            return at
    return 0, 1


def _without(factors: list[Factor], at: tuple[int, int]) -> list[Factor]:
    return [item for index, item in enumerate(factors) if index not in at]


def _left(letters: str, rest: list[Factor], out: str) -> str:
    """Those of the letters of a product that the result or another factor has, too."""
    return "".join(one for one in dict.fromkeys(letters) if one in out or any(one in other for _, other in rest))
