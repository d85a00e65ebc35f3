"""Values of a region that may be the experts' tokens, the weights, and masks of what is dropped."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Node

from moecompile import meta
from moecompile.compat import tree_flatten
from moecompile.recognition import rowwise
from moecompile.recognition.base import MismatchError
from moecompile.recognition.body import Body
from moecompile.recognition.formula import Keep
from moecompile.recognition.regions import Region
from moecompile.recognition.scale import LIMITS

aten = torch.ops.aten
_VIEWS = rowwise.RESHAPES | {
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.default,
    aten.contiguous.default,
    aten.clone.default,
    aten.alias.default,
}
_REPEATS = frozenset({aten.expand.default, aten.repeat.default, aten.repeat_interleave.self_int})
_MANY = 12


def find_tokens(region: Region, bodies: list[Body]) -> tuple[Node, bool]:
    """The value all experts take rows from, and whether it has a row for each choice: ``[T, H]`` if they share one."""
    choice, names = region.choice, "none"
    wide = {body.entry: int(meta.tensor(body.entry).shape[body.entry_axes.index("F")]) for body in bodies}
    for count in dict.fromkeys((choice.num_tokens, choice.num_tokens * choice.top_k)):
        for flat in (True, False):
            roots: dict[Node, None] = {}
            for entry, width in wide.items():
                sources = region.outer_sources(entry) if entry in region.routed else [entry]
                found = (_root(region, item, count, width, flat) for item in sources)
                roots.update((root, None) for root in found if root is not None)
            if len(roots) == 1:
                return next(iter(roots)), count != choice.num_tokens
            names = ", ".join(node.name for node in roots) or names
    raise MismatchError(
        f"the experts' rows must come from one tensor of {choice.num_tokens} tokens, and come from {names}"
    )


def _root(region: Region, node: Node, count: int, width: int, flat: bool) -> Node | None:
    """Back over repeats and views to the tensor with a row per token; with ``flat`` to the first ``[count, width]``."""
    size = count * width
    while not (flat and tuple(meta.tensor(node).shape) == (count, width)):
        found = meta.tensor(node)
        source = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        if source is None or not meta.is_tensor(source) or source in region.static:
            break
        back = node.target in _VIEWS or (node.target in _REPEATS and found.numel() != size)
        if not back or found.numel() < size:
            break
        node = source
    found = meta.tensor(node)
    return node if found.numel() == size and (found.dim() > 1 or width == 1) else None


def find_weights(region: Region, cone: Iterable[Node], results: list[Node]) -> list[Node]:
    """Values that may be the routing weights, the most direct ones first."""
    choice, found = region.choice, []
    tokens, top_k, options = choice.num_tokens, choice.top_k, choice.num_options
    for node in cone:
        if node in results or node in region.static or not _is_fixed(node):
            continue
        value = meta.tensor(node)
        shape, count = tuple(value.shape), value.numel()
        if not shape or not value.is_floating_point():
            continue
        if count == tokens * top_k and (shape[-1] == top_k or top_k == 1):
            found.append((0 if shape == (tokens, top_k) else 1, -region.order[node], node))
        elif count == tokens * options and shape[-1] == options:
            found.append((2, -region.order[node], node))
    return [node for *_, node in sorted(found, key=lambda item: item[:2])]


def find_keeps(region: Region, cone: list[Node]) -> list[Keep]:
    """Ways in which choices may be dropped: the first so many of an expert, else by a mask of the graph."""
    choice = region.choice
    masks: list[Keep] = []
    thresholds: list[Keep] = []
    sizes = {choice.num_tokens * choice.top_k: choice.top_k, choice.num_tokens * choice.num_options: choice.num_options}
    sizes.setdefault(choice.num_tokens * choice.top_k * choice.num_options, choice.num_options)
    limits: dict[int, None] = {}
    for node in cone:
        if node.target in LIMITS:
            numbers = [item for item in tree_flatten((node.args, node.kwargs))[0] if type(item) is int]
            limits.update(
                (item + more, None)
                for item in numbers
                for more in (0, 1)
                if 0 < item < choice.num_tokens * choice.top_k
            )
        if node in region.static or not _is_fixed(node):
            continue
        value = meta.tensor(node)
        early = node not in region.routed  # made from the scores alone: a threshold
        if early and value.dtype is not torch.bool:
            continue
        last = sizes.get(value.numel())
        if value.dim() and last is not None and (value.shape[-1] == last or last == 1):
            (thresholds if early else masks).append(Keep(node))
    counted = [Keep(None, limit, by) for limit in limits for by in (False, True)[: choice.top_k]]
    return [*counted[: 2 * _MANY], *thresholds[: 2 * _MANY], *masks[::-1][: 2 * _MANY]]


def _is_fixed(node: Node) -> bool:
    return meta.is_tensor(node) and all(isinstance(size, int) for size in meta.tensor(node).shape)
