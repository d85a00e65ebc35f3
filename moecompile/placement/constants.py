"""Values of a graph that depend on no input, worked out where a rule has to know them."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from .. import meta
from ..compat import OpOverload

_LARGEST = 1 << 22  # elements of a value a rule is willing to compute


def constant_value(node: Node) -> torch.Tensor | None:
    """The value of ``node`` on the CPU; None if it depends on an input, on random numbers, or is large."""
    found = _evaluate(node, {})
    return found if isinstance(found, torch.Tensor) else None


def counts_up_along(node: Node, size: int) -> int | None:
    """The dim along which an integer index is ``0, 1, ... size - 1`` while it is the same along all others; else None."""
    shape = meta.tensor(node).shape  # of chosen rows the number is not known, and no constant has such a shape
    if meta.tensor(node).dtype.is_floating_point or not any(isinstance(one, int) and one == size for one in shape):
        return None
    found = constant_value(node)
    if found is None:
        return None
    for dim in range(found.dim()):
        along = [1] * found.dim()
        if found.shape[dim] == size:
            along[dim] = size
            if bool((found == torch.arange(size).reshape(along)).all()):
                return dim
    return None


def _evaluate(node: Node, known: dict[Node, Any]) -> Any:
    """Depth first, each node once; None stands for a value that is not constant."""
    todo = [node]
    while todo:
        one = todo[-1]
        if one in known:
            todo.pop()
            continue
        if not _computable(one):
            known[one] = None
            continue
        missing = [source for source in one.all_input_nodes if source not in known]
        if missing:
            todo.extend(missing)
            continue
        known[one] = None
        if all(known[source] is not None for source in one.all_input_nodes):
            kwargs = {key: "cpu" if key == "device" else found for key, found in one.kwargs.items()}
            args, kwargs = map_arg((one.args, kwargs), known.__getitem__)
            known[one] = one.target(*args, **kwargs)  # type: ignore[operator]
    return known[node]


def _computable(node: Node) -> bool:
    if node.op != "call_function" or not meta.is_tensor(node) or meta.tensor(node).numel() > _LARGEST:
        return False
    target = node.target
    return (
        isinstance(target, OpOverload)
        and target.namespace == "aten"
        and not target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
    )
