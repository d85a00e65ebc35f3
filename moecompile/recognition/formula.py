"""The formula that a layer is held against, with the parts of it that may differ from layer to layer.

``y[t] = base[t] + sum_k kept[t, k] * w[t, k] * f_ids[t, k](c[t, k] * x[t]) + sum_k lone[t, k] * u[t, k] * g[t]``

T tokens, K choices a token.  f are the experts; g is what options without weights give, for choices they got.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from moecompile.recognition.stand_in import StandIn


@dataclass(frozen=True)
class Keep:
    """Which choices an expert takes: where ``mask`` is not zero, else its first ``capacity``.

    ``by_choice``: first choices of all tokens come before second ones; else the choices of a token stand together.
    """

    mask: Node | None = None
    capacity: int = 0
    by_choice: bool = False


@dataclass(frozen=True)
class Lone:
    """What choices that no expert serves give: ``value`` (the tokens, or a weight ``[H]``), times ``probs`` or 1.

    ``options`` are those that give it; empty for experts that are over their capacity.
    """

    value: Node
    probs: Node | None
    options: tuple[int, ...]


@dataclass
class Match:
    """Nodes that mean x, the weights (``[T, K]``, ``[T, E]``, None for ones), the result and its base.

    ``scale`` are weights on the experts' input.  ``order`` says which option each component is.
    ``by_choice``: x has a row for each choice; ``apart``: so has the result, which is not summed over the choices.
    """

    tokens: Node
    probs: Node | None
    result: Node
    base: Node | None
    order: list[int]
    scale: Node | None = None
    keep: Keep | None = None
    lone: list[Lone] = field(default_factory=list)
    by_choice: bool = False
    apart: bool = False


@dataclass(frozen=True)
class Formula:
    """Which values are the weights behind and in front of the experts, and which choices count."""

    probs: Node | None = None
    scale: Node | None = None
    keep: Keep | None = None


@dataclass
class Probed:
    """Values of one probe: ``ids [T, K]``, ``rows [T or T * K, H]`` that experts read, ``options`` that have an expert."""

    ids: torch.Tensor
    values: dict[Node, Any]
    bases: dict[Node, Any]
    rows: torch.Tensor
    stand_in: StandIn
    options: Sequence[int]
    leaves: list[torch.Tensor]  # what was drawn and has a gradient
    _parts: dict[Node | None, torch.Tensor] = field(default_factory=dict)

    def parts(self, scale: Node | None) -> torch.Tensor:
        """Each expert's stand-in on the tokens that chose it, ``[T, K, width]``; zero for options without one."""
        if scale not in self._parts:
            tokens, top_k = self.ids.shape
            given = self.rows.reshape(tokens, -1, self.rows.shape[-1]).expand(tokens, top_k, -1)
            if scale is not None:
                given = given * self.slots(scale)[:, :, None]
            made = given.new_zeros(tokens, top_k, self.stand_in.slopes.shape[1])
            for option in self.options:
                token, slot = torch.where(self.ids == option)
                if token.numel():
                    made = made.index_put((token, slot), self.stand_in(option, given[token, slot]))
            self._parts[scale] = made
        return self._parts[scale]

    def slots(self, node: Node) -> torch.Tensor:
        """Weights or a mask as ``[T, K]``; of values per option the chosen ones are taken."""
        tokens, top_k = self.ids.shape
        found = self.values[node]
        if found.numel() == tokens * top_k:
            return found.reshape(tokens, top_k)  # type: ignore[no-any-return]
        if found.numel() == tokens * top_k * found.shape[-1]:
            return found.reshape(tokens, top_k, -1).gather(2, self.ids[:, :, None])[:, :, 0]  # type: ignore[no-any-return]
        return found.reshape(tokens, -1).gather(1, self.ids)  # type: ignore[no-any-return]

    def kept(self, keep: Keep | None) -> torch.Tensor:
        """1 for choices that an expert serves, 0 for others."""
        served = torch.isin(self.ids, torch.tensor(list(self.options)))
        if keep is None:
            return served.double()
        if keep.mask is not None:
            return served * (self.slots(keep.mask) != 0).double()
        return served * (places(self.ids, self.stand_in.slopes.shape[0], keep.by_choice) < keep.capacity).double()

    def experts_part(self, formula: Formula) -> torch.Tensor:
        """What the formula says the experts add, ``[T, K, width]``."""
        factor = self.kept(formula.keep)
        if formula.probs is not None:
            factor = factor * self.slots(formula.probs)
        return self.parts(formula.scale) * factor[:, :, None]


def places(ids: torch.Tensor, num_options: int, by_choice: bool) -> torch.Tensor:
    """How many choices of the same option stand before each one, ``[T, K]``."""
    flat = (ids.t() if by_choice else ids).reshape(-1)
    before = torch.nn.functional.one_hot(flat, num_options).cumsum(0).gather(1, flat[:, None]) - 1
    return before.reshape(ids.shape[::-1]).t() if by_choice else before.reshape(ids.shape)


def same_gradients(found: torch.Tensor, wanted: torch.Tensor, leaves: list[torch.Tensor]) -> bool:
    """Whether two values have one gradient with respect to every leaf."""
    factor = torch.rand(found.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    zero = torch.zeros((), dtype=torch.float64)
    sides = []
    for side in (found, wanted):
        if side.requires_grad:
            grads = torch.autograd.grad((side * factor).sum(), leaves, allow_unused=True, retain_graph=True)
            sides.append([zero if grad is None else grad for grad in grads])
        else:
            sides.append([zero] * len(leaves))
    return all(close(one, other) for one, other in zip(*sides, strict=True))


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = torch.broadcast_tensors(one.detach(), other.detach())  # type: ignore[no-untyped-call]
    return bool(torch.allclose(one, other, rtol=1e-9, atol=1e-9))
