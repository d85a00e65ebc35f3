"""A cheap stand-in for each expert.

The expert bodies are known to be row-wise, so what is left to prove is how rows are picked, weighted and put back.
Each body is replaced by a nonlinear function of its rows that differs from expert to expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from moecompile import meta
from moecompile.recognition.body import Body
from moecompile.recognition.choices import Choice
from moecompile.recognition.scale import Scale

Expert = Callable[[int, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class StandIn:
    """A function of rows for every expert: ``sin(a * x + b)`` on features, or ``a * x`` where it has to be linear.

    b is 0 where experts are known to give nothing for rows of zeros.
    """

    slopes: torch.Tensor  # [E, out]
    shifts: torch.Tensor
    linear: bool = False

    @staticmethod
    def make(num_experts: int, width: int, linear: bool, zero_kept: bool, generator: torch.Generator) -> StandIn:
        shape = num_experts, width
        slopes = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
        shifts = torch.rand(shape, generator=generator, dtype=torch.float64) * (0 if zero_kept else 3)
        return StandIn(slopes, shifts, linear)

    def __call__(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        features = torch.arange(self.slopes.shape[1]) % rows.shape[1]
        scaled = rows[:, features] * self.slopes[expert]
        return scaled if self.linear else torch.sin(scaled + self.shifts[expert])


class BodyStandIn:
    """Computes a body's exit from its entry with a stand-in; ``experts`` says which expert each part of it is."""

    def __init__(
        self, body: Body, experts: Sequence[int], expert: Expert, static: frozenset[Node], scale: Scale
    ) -> None:
        self.body = body
        self.scale = scale
        self.expert = expert
        self.experts = experts
        self.needs = [body.entry, *[node for node, _ in body.coefficients if node not in static]]

    def __call__(self, values: dict[Node, Any]) -> torch.Tensor:
        body = self.body
        entry = values[body.entry]
        parts = _parts(entry, body.entry_axes, len(self.experts))
        made = [self.expert(expert, rows) for expert, rows in zip(self.experts, parts, strict=True)]
        for node, axes in body.coefficients:
            factors = [part.reshape(-1, 1) for part in _parts(values[node], axes, len(self.experts))]
            made = [rows * factor for rows, factor in zip(made, factors, strict=True)]
        return self._shaped(made, entry)

    def _shaped(self, made: list[torch.Tensor], entry: torch.Tensor) -> torch.Tensor:
        """Rows of each expert in the shape and order of axes of the exit."""
        axes, wanted = self.body.exit_axes, self.scale.shape(meta.tensor(self.body.exit).shape)
        rows = [
            size if isinstance(size, int) else -1 for size, letter in zip(wanted, axes, strict=True) if letter == "R"
        ]
        if rows.count(-1) > 1:
            rows = [size for size, letter in zip(entry.shape, self.body.entry_axes, strict=True) if letter == "R"]
        width = made[0].shape[1]
        if -1 in rows:
            known = 1
            for size in rows:
                known *= 1 if size == -1 else size
            rows[rows.index(-1)] = made[0].shape[0] // known
        whole = (
            torch.stack([part.reshape(*rows, width) for part in made]) if "E" in axes else made[0].reshape(*rows, width)
        )
        names = ("E" if "E" in axes else "") + "R" * len(rows) + "F"
        return whole.permute(_places(names, axes))


def expert_count(body: Body) -> int:
    return int(meta.tensor(body.exit).shape[body.exit_axes.index("E")])


def _places(names: str, wanted: str) -> list[int]:
    """The permutation that brings axes named ``names`` into the order ``wanted``; rows keep their order."""
    left: dict[str, list[int]] = {}
    for position, letter in enumerate(names):
        left.setdefault(letter, []).append(position)
    return [left[letter].pop(0) for letter in wanted]


def _parts(value: torch.Tensor, axes: str, count: int) -> list[torch.Tensor]:
    """The rows ``[n, features]`` that each expert sees of a value."""
    if value.dim() == 0:
        return [value.reshape(1, 1)] * count
    order = sorted(range(len(axes)), key=lambda dim: "ERF".index(axes[dim]))
    value = value.permute(order)
    features = 1
    for dim, letter in enumerate(axes):
        features *= value.shape[order.index(dim)] if letter == "F" else 1
    if "E" in axes:
        return [part.reshape(-1, features) for part in value]
    return [value.reshape(-1, features)] * count


def probe_ids(choice: Choice, scale: Scale, round_: int, generator: torch.Generator) -> torch.Tensor:
    """Distinct ids per token in the shape of the choice: every expert in turn, all tokens to a few, or at random."""
    tokens, top_k, options = scale.size(choice.num_tokens), choice.top_k, choice.num_options
    if round_ == 0:
        first = torch.arange(tokens)[:, None] * top_k
        ids = (first + torch.arange(top_k)) % options
    elif round_ == 1:
        ids = torch.arange(top_k).flip(0).expand(tokens, top_k).clone()
    else:
        ids = torch.stack([torch.randperm(options, generator=generator)[:top_k] for _ in range(tokens)])
    return ids if choice.parts else ids.reshape(scale.shape(meta.tensor(choice.ids).shape))
