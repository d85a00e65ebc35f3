"""What a result holds beside the experts: the value they are added to, and what options without an expert give."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from moecompile import meta
from moecompile.recognition.base import Base, MismatchError
from moecompile.recognition.formula import Formula, Lone, Probed, close, same_gradients
from moecompile.recognition.regions import Region

_UNKNOWN = "what the experts' results are added to depends on the routing decision"


class Rest:
    """Reads what is left of a result when the experts give nothing, on probes of which the last is for gradients."""

    def __init__(
        self,
        region: Region,
        exits: list[Node],
        tokens: Node,
        weights: list[Node],
        formula: Formula,
        probes: list[Probed],
    ) -> None:
        self.region = region
        self.exits = set(exits)
        self.tokens = tokens
        self.weights = weights
        self.keep = formula.keep
        self.probes = probes
        self.width = probes[0].stand_in.slopes.shape[1]
        self.complete = self.keep is None and len(probes[0].options) == region.choice.num_options

    def of(self, result: Node) -> tuple[Node | None, list[Lone]]:
        """The base, None for zero, and what lone choices give; a MismatchError where it is anything else."""
        why = _UNKNOWN
        for lone in (False, True) if self.complete else (True, False):
            try:
                base = Base(self.exits, frozenset(self.region.routed) if lone else frozenset()).of(result)
            except MismatchError as error:
                why = str(error) if self.complete else why
                continue
            if base is not None and not self._has_rows(base, result):
                continue
            found = self._lone(result, base)
            if found is not None:
                return base, found
        raise MismatchError(why)

    def _has_rows(self, base: Node, result: Node) -> bool:
        """Whether the base is a value of its own for each token, and known on probes."""
        known = all(base in one.values for one in self.probes)
        return known and meta.tensor(base).numel() == meta.tensor(result).numel()

    def _left(self, probed: Probed, result: Node, base: Node | None) -> torch.Tensor:
        value: torch.Tensor = probed.bases[result]
        if base is not None:
            value = value - probed.values[base].reshape(value.shape)
        return value.reshape(-1, self.width)

    def _lone(self, result: Node, base: Node | None) -> list[Lone] | None:
        """What makes up the difference of result and base, where the experts give nothing."""
        left = [self._left(one, result, base) for one in self.probes]
        if all(close(one, torch.zeros((), dtype=torch.float64)) for one in left):
            last = self.probes[-1]
            return [] if same_gradients(left[-1], torch.zeros_like(left[-1]), last.leaves) else None
        if self.complete or left[0].shape[0] != self.probes[0].ids.shape[0]:
            return None
        groups = [(option,) for option in range(self.region.choice.num_options) if option not in self.probes[0].options]
        found = [self._gives(group, left) for group in ([*groups, ()] if self.keep is not None else groups)]
        merged: dict[tuple[Node, Node | None, bool], tuple[int, ...]] = {}
        for item in found:
            if item is not None:
                key = item.value, item.probs, bool(item.options)
                merged[key] = merged.get(key, ()) + item.options
        lone = [Lone(value, probs, options) for (value, probs, _), options in merged.items()]
        if not all(close(one, self._sum(probed, lone)) for one, probed in zip(left, self.probes, strict=True)):
            return None
        last = self.probes[-1]
        return lone if same_gradients(left[-1], self._sum(last, lone), last.leaves) else None

    def _gives(self, options: tuple[int, ...], left: list[torch.Tensor]) -> Lone | None:
        """What choices of one option, or dropped ones, give: seen where a token has no other lone choice."""
        for item in self._candidates(options):
            fits, seen = True, False
            for probed, wanted in zip(self.probes, left, strict=True):
                alone = (probed.kept(self.keep) == 0).sum(1) == 1
                rows = alone & (self._chosen(probed, options).sum(1) == 1)
                given = None if item is None else self._sum(probed, [item])
                fits = fits and close(
                    wanted[rows], torch.zeros((), dtype=torch.float64) if given is None else given[rows]
                )
                seen = seen or bool(rows.any())
            if fits or not seen:
                return item
        return None

    def _candidates(self, options: tuple[int, ...]) -> Iterator[Lone | None]:
        yield None
        vectors = [
            node
            for node in self.probes[0].values
            if node in self.region.static and meta.is_tensor(node) and meta.tensor(node).numel() == self.width
        ]
        for value in (self.tokens, *vectors):
            if value is not self.tokens or self.probes[0].rows.shape == (self.probes[0].ids.shape[0], self.width):
                for probs in (*self.weights, None):
                    yield Lone(value, probs, options)

    def _chosen(self, probed: Probed, options: tuple[int, ...]) -> torch.Tensor:
        """1 for lone choices of these options, or for dropped ones."""
        if options:
            return torch.isin(probed.ids, torch.tensor(options)).double()
        served = torch.isin(probed.ids, torch.tensor(list(probed.options)))
        return served * (probed.kept(self.keep) == 0).double()

    def _sum(self, probed: Probed, lone: list[Lone]) -> torch.Tensor:
        total = torch.zeros(probed.ids.shape[0], self.width, dtype=torch.float64)
        for item in lone:
            factor = self._chosen(probed, item.options)
            if item.probs is not None:
                factor = factor * probed.slots(item.probs)
            value = probed.rows if item.value is self.tokens else probed.values[item.value].reshape(1, self.width)
            total = total + factor.sum(1, keepdim=True) * value
        return total
