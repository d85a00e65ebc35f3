"""Probe with few tokens: which constants of a region mean a number of tokens, and how few tokens show everything.

A region that was captured for T tokens holds T in its shapes.  Where T is told apart from every other size, shapes
are rewritten for fewer tokens.  Limits (a capacity, a cut-off) stay, and there are more probe tokens than any limit,
so that what a limit drops is seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from moecompile import meta
from moecompile.compat import tree_flatten, tree_map
from moecompile.recognition import rowwise
from moecompile.recognition.choices import Choice

aten = torch.ops.aten
_ENDLESS = 2**62
_SHAPED = rowwise.RESHAPES | {
    aten.expand.default,
    aten.repeat.default,
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
    aten.empty.memory_format,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
}
LIMITS = frozenset(
    {
        aten.arange.default,
        aten.arange.start,
        aten.arange.start_step,
        aten.lt.Scalar,
        aten.le.Scalar,
        aten.gt.Scalar,
        aten.ge.Scalar,
        aten.clamp.default,
        aten.clamp_max.default,
        aten.clamp_min.default,
        aten.slice.Tensor,
        aten.narrow.default,
        aten.one_hot.default,
        aten.topk.default,
        aten.remainder.Scalar,
        aten.fmod.Scalar,
    }
)


@dataclass(frozen=True)
class Scale:
    """Sizes of the captured region -> sizes of the probe; empty where the probe has the captured sizes."""

    sizes: Mapping[int, int] = field(default_factory=dict)

    def size(self, size: int) -> int:
        return self.sizes.get(size, size)

    def shape(self, shape: Sequence[Any]) -> list[Any]:
        return [self.sizes.get(size, size) if isinstance(size, int) else size for size in shape]

    def arguments(self, node: Node, args: Any) -> Any:
        """Arguments of a call with its token counts replaced."""
        if not self.sizes or node.target not in _SHAPED | LIMITS:
            return args
        limits = {size - 1: small - 1 for size, small in self.sizes.items()} if node.target in LIMITS else {}
        known = {**limits, **self.sizes}
        return tree_map(lambda item: known.get(item, item) if type(item) is int else item, args)


def choose_scale(nodes: list[Node], sources: Iterable[Node], choice: Choice, tokens: Node, width: int) -> Scale:
    """The smallest probe that shows all that the region of ``nodes`` does; no change where sizes cannot be told apart.

    ``sources`` are the values that the region takes from outside.
    """
    counts = [choice.num_tokens, choice.num_tokens * choice.top_k]
    outer = 1
    positions = _positions([tokens], nodes, choice)
    if positions is not None:  # [batch, sequence, width]: fewer positions, as many sequences
        counts.append(positions)
        outer = choice.num_tokens // positions
    known = {*counts, *(count - 1 for count in counts)}
    floor = _largest_limit(nodes, known)
    if floor is None or set(counts) & _feature_sizes([tokens, *sources], choice, width, outer):
        return Scale()
    wanted = max(8, 2 * -(-choice.num_options // choice.top_k), 2 * (floor + 1))
    inner = -(-wanted // outer)
    small = inner * outer
    if 2 * small > choice.num_tokens:
        return Scale()
    found = Scale(dict(zip(counts, (small, small * choice.top_k, inner), strict=False)))
    # The decision has to be probed in its own shape.
    fits = all(math.prod(found.shape(meta.tensor(node).shape)) == small * choice.top_k for node in _ids(choice))
    return found if fits else Scale()


def _ids(choice: Choice) -> tuple[Node, ...]:
    return () if choice.parts else (choice.ids,)


def _positions(tokens: list[Node], nodes: Iterable[Node], choice: Choice) -> int | None:
    """The length of a sequence, where tokens or decisions have the shape [batch, sequence, ...] or are given it."""
    shaped = [node for node in nodes if node.target in rowwise.RESHAPES]
    for node in (*tokens, *_ids(choice), *shaped):
        shape = meta.tensor(node).shape
        leading = shape if node in _ids(choice) and math.prod(shape) == choice.num_tokens else shape[:-1]
        fixed = all(isinstance(size, int) for size in leading)
        if len(leading) > 1 and fixed and math.prod(leading) == choice.num_tokens:
            return int(leading[-1])
    return None


def _largest_limit(nodes: list[Node], known: set[int]) -> int | None:
    """The largest number that may cut tokens off; None where a token count stands where it is not understood."""
    floor = 0
    for node in nodes:
        for item in tree_flatten((node.args, node.kwargs))[0]:
            if type(item) is not int or abs(item) >= _ENDLESS:
                continue
            if item in known and node.target not in _SHAPED | LIMITS:
                return None
            if node.target in LIMITS and item not in known:
                floor = max(floor, item)
        if node.op != "call_function" and meta.is_tensor(node):
            sizes = [size for size in meta.tensor(node).shape if isinstance(size, int)]
            if not meta.tensor(node).is_floating_point():
                floor = max([floor, *sizes])
    return floor


def _feature_sizes(sources: Iterable[Node], choice: Choice, width: int, outer: int) -> set[int]:
    """Sizes that mean something else than tokens, as far as they come from outside the region."""
    found = {choice.num_options, choice.top_k, width, outer}
    for node in sources:
        if meta.is_tensor(node) and meta.tensor(node).is_floating_point() and meta.tensor(node).dim() > 1:
            last = meta.tensor(node).shape[-1]
            if isinstance(last, int):
                found.add(last)
    return found
