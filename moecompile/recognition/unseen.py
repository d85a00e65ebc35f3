"""What the probes of a region do not show: thresholds that nothing crosses, and weights that are all zero.

``w > 0.05`` is true for every probe whose scores are larger, and the rows it drops on other scores are never missed.  So where a
comparison, a clamp or a weight says nothing on the probes, they are run again with another value in its place: a formula that
means the region holds for that value, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from moecompile import meta
from moecompile.recognition.formula import Probed, close

aten = torch.ops.aten
_COMPARISONS = frozenset(
    getattr(getattr(aten, name), overload)
    for name in ("lt", "le", "gt", "ge", "eq", "ne")
    for overload in ("Scalar", "Tensor")
)
_CLAMPS = frozenset(
    {
        aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.hardtanh.default, aten.relu.default,
        aten.abs.default, aten.minimum.default, aten.maximum.default, aten.threshold.default,
    }
)  # fmt: skip


def unseen(nodes: Iterable[Node], probes: list[Probed]) -> list[Node]:
    """Comparisons of floating values that come out the same everywhere, and clamps that change nothing, in graph order."""
    found = []
    for node in nodes:
        if node.target not in _COMPARISONS | _CLAMPS or not all(node in one.values for one in probes):
            continue
        source: Any = node.args[0]
        if not isinstance(source, Node) or not meta.is_tensor(source) or not meta.tensor(source).is_floating_point():
            continue
        values = [one.values[node] for one in probes]
        if node.target in _COMPARISONS:
            quiet = all(bool(value.all()) for value in values) or not any(bool(value.any()) for value in values)
        else:
            before = [one.values.get(source) for one in probes]
            quiet = all(
                isinstance(one, torch.Tensor) and close(one, value) for one, value in zip(before, values, strict=True)
            )
        if quiet and all(value.dim() for value in values):
            found.append(node)
    return found


def silent(node: Node, order: list[int], probes: list[Probed]) -> bool:
    """Whether weights are zero for a choice that an expert serves: rows with zero weights do not show what else drops them."""
    options = torch.tensor(order)
    return any(bool((one.slots(node)[torch.isin(one.ids, options)] == 0).any()) for one in probes)


def other_weights(value: torch.Tensor, ids: torch.Tensor, order: list[int], generator: torch.Generator) -> torch.Tensor:
    """Weights, one for each choice or each option, that are not zero for choices that experts serve."""
    served = torch.isin(ids, torch.tensor(order))
    if value.numel() != ids.numel():
        options = torch.zeros(ids.shape[0], value.numel() // ids.shape[0], dtype=torch.bool)
        served = options.scatter(1, ids, served)
    drawn = torch.rand(value.shape, generator=generator, dtype=torch.float64) + 0.1
    return torch.where(served.reshape(value.shape), drawn, value.detach()).requires_grad_()


def other_value(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Truth at random, or a number times a random factor."""
    drawn = torch.rand(value.shape, generator=generator, dtype=torch.float64)
    return drawn > 0.5 if value.dtype is torch.bool else (value * (drawn + 0.5)).detach().requires_grad_()
