"""Refuse a state in which one expert stands in the place of another: what is left when ranks number their experts from 0.

All experts alike is how a dense model becomes a sparse one, and is fine; some alike and others not is a file put together wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from .placement.types import Shard
from .weights import Weights


def refuse_copies(weights: Weights, found: Mapping[str, Any]) -> None:
    """RuntimeError naming two experts of a layer that hold the same numbers while others do not. Whole tensors only."""
    for experts in _layers(weights, found).values():
        copies = _copies([[item for _, item in expert] for expert in experts])
        if copies is not None:
            first, second = ([name for name, _ in experts[at]] for at in copies)
            raise RuntimeError(
                f"the state holds one expert twice: '{second[0]}' has the numbers of '{first[0]}', as when each rank names its own experts "
                "from 0; gather the experts under their global numbers (moecompile.full_state_dict does), or pass strict=False "
                "if copies are meant."
            )


_Expert = list[tuple[str, Tensor]]


def _layers(weights: Weights, found: Mapping[str, Any]) -> dict[str, list[_Expert]]:
    """By layer, what makes up each expert: modules of their own, or slices of stacked parameters."""
    layers: dict[str, list[_Expert]] = {}
    for names in _stacks(weights):
        values = [found.get(name) for name in names]
        if all(_is_plain(value) for value in values):
            prefix = _common(names[0], names[1])
            layer = layers.setdefault(prefix, [[] for _ in names])
            if len(layer) == len(names):
                for expert, name, value in zip(layer, names, values, strict=True):
                    expert.append((name, value))  # type: ignore[arg-type]
    for name, cut in weights.cuts.items():
        value = found.get(name)
        if cut.owner is None and ("ep", Shard(0)) in cut.parts and _is_plain(value):
            assert isinstance(value, Tensor)
            layer = layers.setdefault(name.rpartition(".")[0], [[] for _ in value])
            if len(layer) == len(value):
                for at, expert in enumerate(layer):
                    expert.append((f"{name}[{at}]", value[at]))
    return layers


def _stacks(weights: Weights) -> Iterator[tuple[str, ...]]:
    """Experts that are modules of their own, by number; one tuple a parameter."""
    seen: set[tuple[str, ...]] = set()
    for name in weights.cuts:
        names = weights.stack_of(name)
        if names is not None and names not in seen:
            seen.add(names)
            yield names


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter) and not value.is_meta


def _common(one: str, other: str) -> str:
    """Module path up to where two names part."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    same: list[str] = []
    for left, right in pairs:
        if left != right:
            break
        same.append(left)
    return ".".join(same)


def _copies(experts: list[list[Tensor]]) -> tuple[int, int] | None:
    """The first two experts that are equal, unless all are. A few numbers tell most experts apart."""
    groups: dict[tuple[bytes, ...], list[int]] = {}
    for at, expert in enumerate(experts):
        key = tuple(item.reshape(-1)[:8].double().cpu().numpy().tobytes() for item in expert)
        groups.setdefault(key, []).append(at)
    for group in groups.values():
        for first, second in pairwise(group):
            if all(torch.equal(one, other) for one, other in zip(experts[first], experts[second], strict=True)):
                alike = all(
                    torch.equal(one, other) for expert in experts for one, other in zip(experts[0], expert, strict=True)
                )
                return None if alike else (first, second)
    return None
