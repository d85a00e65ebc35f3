"""The semantic check: is the region ``base + sum_k w[t, k] * f_ids[t, k](x[t])``, for some w and x of the graph?

Candidates for x, for the weights w and for the result y come from the graph; probes decide.  Values and gradients must
both agree, in float64, on probes where every expert is hit, where all tokens go to the same experts, and random ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from moecompile import meta
from moecompile.recognition import rowwise
from moecompile.recognition.base import Base, MismatchError
from moecompile.recognition.body import Body
from moecompile.recognition.choices import dependents
from moecompile.recognition.probe import Evaluator, Setup
from moecompile.recognition.regions import Region
from moecompile.recognition.scale import Scale, choose_scale
from moecompile.recognition.stand_in import BodyStandIn, StandIn, expert_count, probe_ids

aten = torch.ops.aten
_ROUNDS = 4
_LARGEST = 2**27  # elements of the largest value of a probe
_VIEWS = rowwise.RESHAPES | {
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.default,
    aten.contiguous.default,
    aten.clone.default,
    aten.alias.default,
}
_REPEATS = frozenset({aten.expand.default, aten.repeat.default, aten.repeat_interleave.self_int})


@dataclass
class Match:
    """Nodes that mean x ``[..., H]``, the weights (``[T, K]``, ``[T, E]``, None for ones), the result and its base."""

    tokens: Node
    probs: Node | None
    result: Node
    base: Node | None
    order: list[int]  # expert of each component


@dataclass
class Probed:
    """Values of one probe."""

    ids: torch.Tensor  # [T, K]
    values: dict[Node, Any]
    bases: dict[Node, Any]
    parts: torch.Tensor  # [T, K, width]: each expert's stand-in on its token
    leaves: list[torch.Tensor]  # what was drawn and has a gradient


class Matcher:
    """Proves the meaning of one region whose expert bodies are known."""

    def __init__(
        self, region: Region, bodies: list[Body], experts: list[int], constants: Mapping[str, torch.Tensor]
    ) -> None:
        self.region = region
        self.choice = region.choice
        self.bodies = bodies
        self.experts = dict(enumerate(experts))
        self.num_experts = expert_count(bodies[0]) if bodies[0].batched else len(set(experts))
        self.exits = [body.exit for body in bodies]
        self.width = int(meta.tensor(self.exits[0]).shape[bodies[0].exit_axes.index("F")])
        self.linear = all(body.is_linear() for body in bodies)  # then it does not matter where the weight is applied
        self.tokens = self._find_tokens()
        self.affected = dependents(self.exits) | set(self.exits)
        inner = frozenset(dependents([self.tokens]) | region.routed)
        self.setup = Setup(region.order, region.static, inner, constants)
        size = self.choice.num_tokens * self.width
        self.results = [node for node in region.results(self.exits) if meta.tensor(node).numel() == size]
        if not self.results:
            raise MismatchError("the experts' results do not come together in one tensor with a row for each token")
        given = {node for node in (self.tokens, self.choice.ids, self.choice.chosen) if node is not None}
        needs = {
            body.exit: BodyStandIn(body, self.experts, index, _nothing, region.static, Scale())
            for index, body in enumerate(bodies)
        }
        cone = self.setup.cone(self.results, given, needs)
        self.weights = self._weights(cone)
        sources = [node for node in cone if node not in given and node not in needs and self.setup.is_source(node)]
        self.scale = choose_scale(cone, sources, self.choice, self.tokens, self.width)
        self._check_cost(cone)
        self.num_tokens = self.scale.size(self.choice.num_tokens)

    # Candidates --------------------------------------------------------------------------------------------------

    def _find_tokens(self) -> Node:
        """The value all experts take rows from, one row per token: ``[T, H]`` if they share one, else ``[..., H]``."""
        wide = {body.entry: int(meta.tensor(body.entry).shape[body.entry_axes.index("F")]) for body in self.bodies}
        names = "none"
        for flat in (True, False):
            roots: dict[Node, None] = {}
            for entry, width in wide.items():
                sources = self.region.outer_sources(entry) if entry in self.region.routed else [entry]
                roots.update((root, None) for item in sources if (root := self._root(item, width, flat)) is not None)
            if len(roots) == 1:
                return next(iter(roots))
            names = ", ".join(node.name for node in roots) or names
        raise MismatchError(
            f"the experts' rows must come from one tensor of {self.choice.num_tokens} tokens, and come from {names}"
        )

    def _root(self, node: Node, width: int, flat: bool) -> Node | None:
        """Back over repeats and views to the tensor with a row per token; with ``flat`` to the first ``[T, H]``."""
        shape = (self.choice.num_tokens, width)
        size = shape[0] * shape[1]
        while not (flat and tuple(meta.tensor(node).shape) == shape):
            found = meta.tensor(node)
            source = node.args[0] if node.args and isinstance(node.args[0], Node) else None
            if source is None or not meta.is_tensor(source) or source in self.region.static:
                break
            back = node.target in _VIEWS or (node.target in _REPEATS and found.numel() != size)
            if not back or found.numel() < size:
                break
            node = source
        found = meta.tensor(node)
        return node if found.numel() == size and (found.dim() > 1 or width == 1) else None

    def _weights(self, cone: list[Node]) -> list[Node]:
        """Values that may be the routing weights, the most direct ones first."""
        tokens, top_k, options = self.choice.num_tokens, self.choice.top_k, self.choice.num_options
        found = []
        for node in cone:
            if node in self.results or not meta.is_tensor(node) or not meta.tensor(node).is_floating_point():
                continue
            shape = tuple(meta.tensor(node).shape)
            if not shape or not all(isinstance(size, int) for size in shape) or node in self.region.static:
                continue
            count = meta.tensor(node).numel()
            if count == tokens * top_k and (shape[-1] == top_k or top_k == 1):
                found.append((0 if shape == (tokens, top_k) else 1, -self.region.order[node], node))
            elif count == tokens * options and shape[-1] == options:
                found.append((2, -self.region.order[node], node))
        return [node for *_, node in sorted(found, key=lambda item: item[:2])]

    def _check_cost(self, cone: list[Node]) -> None:
        """A probe at the captured size must be affordable."""
        counts = [meta.tensor(node).shape for node in cone if meta.is_tensor(node)]
        known = [math.prod(shape) for shape in map(self.scale.shape, counts) if all(isinstance(n, int) for n in shape)]
        if max(known, default=0) > _LARGEST:
            raise MismatchError(
                f"its {self.choice.num_tokens} tokens cannot be told apart from other sizes, and are too many to try "
                "the layer on (use another batch size)"
            )

    # Probing -----------------------------------------------------------------------------------------------------

    def match(self) -> Match:
        """The meaning, or a MismatchError that says what stands in its way."""
        why = ""
        for order in self._orders():
            probes = [self._probe(round_, order, self.linear) for round_ in range(_ROUNDS)]
            for result, probs in self._fits(probes):
                if not self._gradients_agree(result, probs, order):
                    why = "its values are those of a weighted sum of experts, but its gradients are not"
                    continue
                base = Base(set(self.exits)).of(result)
                if base is None and not all(
                    _close(one.bases[result], torch.zeros((), dtype=torch.float64)) for one in probes
                ):
                    raise MismatchError("what the experts' results are added to depends on the routing decision")
                return Match(self.tokens, probs, result, base, order)
        raise MismatchError(why or self._why())

    def _orders(self) -> Iterator[list[int]]:
        """Which expert each component is: as they stand in the graph, else as the ids select them."""
        count = len(self.bodies)
        standing = [self.experts[index] for index in range(count)]
        yield standing
        if not self.bodies[0].batched:
            selected = self._selected(self.results[0])
            if selected is not None and list(selected.values()) != standing:
                yield [selected[expert] for expert in standing]

    def _selected(self, result: Node) -> dict[int, int] | None:
        """The id that selects each component, found by letting one component after the other mark its rows."""
        count = self.num_experts
        fits = torch.ones(count, count, dtype=torch.bool)  # [number of a component, id]
        for round_ in (0, 2, 3):
            for first in range(0, count, self.width):

                def mark(expert: int, rows: torch.Tensor, first: int = first) -> torch.Tensor:
                    made = rows.new_zeros(rows.shape[0], self.width)
                    if first <= expert < first + self.width:
                        made[:, expert - first] = 1
                    return made

                ids, seen = self._marked(round_, result, mark)
                chosen = torch.zeros(ids.shape[0], count, dtype=torch.bool).scatter(1, ids, True)
                for expert in range(first, min(first + self.width, count)):
                    fits[expert] &= (chosen == seen[:, expert - first, None]).all(0)
        if not bool((fits.sum(1) == 1).all()) or len(set(fits.int().argmax(1).tolist())) != count:
            return None
        return dict(enumerate(fits.int().argmax(1).tolist()))

    def _marked(self, round_: int, result: Node, mark: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids of a probe, and where each feature of the result was touched by a mark."""
        evaluator, generator = self._evaluator(round_)
        given, ids = self._given(round_, evaluator, generator)
        order = list(self.experts.values())
        with torch.no_grad():
            marked = evaluator.run([result], given, self._stand_ins(order, mark))[result]
            plain = evaluator.run([result], given, self._stand_ins(order, lambda *rows: mark(*rows) * 0))[result]
        return ids, ((marked - plain).abs() > 1e-12).reshape(self.num_tokens, -1)

    def _evaluator(self, seed: int) -> tuple[Evaluator, torch.Generator]:
        generator = torch.Generator().manual_seed(seed)
        return Evaluator(self.setup, self.scale, generator), generator

    def _stand_ins(self, order: list[int], function: Any) -> dict[Node, BodyStandIn]:
        names, static = dict(enumerate(order)), self.region.static
        return {
            body.exit: BodyStandIn(body, names, index, function, static, self.scale)
            for index, body in enumerate(self.bodies)
        }

    def _given(
        self, round_: int, evaluator: Evaluator, generator: torch.Generator
    ) -> tuple[dict[Node, Any], torch.Tensor]:
        """Random tokens and scores, and the ids of this round."""
        choice = self.choice
        ids = probe_ids(choice, self.scale, round_, generator)
        tokens = torch.rand(self._shape(self.tokens), generator=generator, dtype=torch.float64, requires_grad=True)
        given: dict[Node, Any] = {self.tokens: tokens, choice.ids: ids}
        evaluator.drawn[self.tokens] = tokens
        if choice.chosen is not None:
            drawn = torch.rand(self._shape(choice.chosen), generator=generator, dtype=torch.float64) + 0.1
            given[choice.chosen] = evaluator.drawn[choice.chosen] = drawn.requires_grad_()
        return given, ids.reshape(self.num_tokens, choice.top_k)

    def _probe(self, round_: int, order: list[int], linear: bool) -> Probed:
        """Run the region once as it is, and once with experts that return zero."""
        evaluator, generator = self._evaluator(round_)
        stand_in = StandIn.make(self.num_experts, self.width, linear, generator)
        given, ids = self._given(round_, evaluator, generator)
        none = self._stand_ins(order, lambda expert, rows: stand_in(expert, rows) * 0)
        values = evaluator.run([*self.results, *self.weights], given, self._stand_ins(order, stand_in))
        same = {node: value for node, value in values.items() if node not in self.affected}
        bases = evaluator.run(self.results, same, none)
        parts = self._apart(stand_in, values[self.tokens], ids)
        leaves = [tensor for tensor in evaluator.drawn.values() if tensor.requires_grad]
        return Probed(ids, values, bases, parts, leaves)

    def _apart(self, stand_in: StandIn, tokens: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Each expert's stand-in on the tokens that chose it, ``[T, K, width]``."""
        rows = tokens.reshape(self.num_tokens, -1)
        made = rows.new_zeros(*ids.shape, self.width)
        for expert in range(self.num_experts):
            token, slot = torch.where(ids == expert)
            if token.numel():
                made = made.index_put((token, slot), stand_in(expert, rows[token]))
        return made

    def _wanted(self, probed: Probed, result: Node, probs: Node | None) -> torch.Tensor:
        """What the formula says the result is."""
        parts = probed.parts
        if probs is not None:
            parts = parts * self._slots(probed.values[probs], probed.ids)[:, :, None]
        base = probed.bases[result].reshape(self.num_tokens, -1)
        total: torch.Tensor = base + parts.sum(1)
        return total

    def _slots(self, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Weights as ``[T, K]``."""
        tokens, top_k = ids.shape
        return (
            weights.reshape(ids.shape)
            if weights.numel() == tokens * top_k
            else weights.reshape(tokens, -1).gather(1, ids)
        )

    def _fits(self, probes: list[Probed]) -> Iterator[tuple[Node, Node | None]]:
        """Results and weights for which the formula holds on all probes."""
        for probs in (*self.weights, None):
            for result in self.results:
                if all(_close(self._found(one, result), self._wanted(one, result, probs)) for one in probes):
                    yield result, probs

    def _found(self, probed: Probed, result: Node) -> torch.Tensor:
        found: torch.Tensor = probed.values[result].reshape(self.num_tokens, -1)
        return found

    def _gradients_agree(self, result: Node, probs: Node | None, order: list[int]) -> bool:
        """Whether both sides have one gradient with respect to tokens, chosen scores and every drawn value."""
        probed = self._probe(_ROUNDS, order, self.linear)
        sides = self._found(probed, result), self._wanted(probed, result, probs)
        factor = torch.rand(sides[0].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        found, wanted = (
            torch.autograd.grad((side * factor).sum(), probed.leaves, allow_unused=True, retain_graph=True)
            for side in sides
        )
        zero = torch.zeros((), dtype=torch.float64)
        return all(
            _close(zero if one is None else one, zero if other is None else other)
            for one, other in zip(found, wanted, strict=True)
        )

    # Reasons -----------------------------------------------------------------------------------------------------

    def _why(self) -> str:
        """The likely reason, found by loosening the check."""
        order = list(self.experts.values())
        loose = [self._probe(round_, order, True) for round_ in range(_ROUNDS)]
        if not self.linear and next(self._fits(loose), None) is not None:
            return (
                "the routing weight is applied before the expert, which is nonlinear, so it cannot be moved behind it"
            )
        if self._drops(self._probe(2, order, self.linear)):
            return "some tokens are dropped, as when an expert is over its capacity, which is not accepted yet"
        return "on probes it is not the sum over the chosen experts of weight times expert(token)"

    def _drops(self, probed: Probed) -> bool:
        """Whether tokens get the sum over some of their choices only."""
        for probs in (*self.weights, None):
            parts = probed.parts
            if probs is not None:
                parts = parts * self._slots(probed.values[probs], probed.ids)[:, :, None]
            for result in self.results:
                got = self._found(probed, result) - probed.bases[result].reshape(self.num_tokens, -1)
                if _is_partial_sum(parts.detach(), got.detach()):
                    return True
        return False

    def _shape(self, node: Node) -> list[int]:
        return self.scale.shape(meta.tensor(node).shape)


def _nothing(expert: int, rows: torch.Tensor) -> torch.Tensor:
    return rows


def _is_partial_sum(parts: torch.Tensor, got: torch.Tensor) -> bool:
    """Whether each row of ``got [T, width]`` is the sum of some of ``parts [T, K, width]``."""
    kept = torch.linalg.lstsq(parts.transpose(1, 2), got.unsqueeze(2)).solution
    whole = _close(torch.einsum("tkw,tk->tw", parts, kept.squeeze(2)), got)
    return whole and _close(kept.round().clamp(0, 1), kept)


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = torch.broadcast_tensors(one.detach(), other.detach())  # type: ignore[no-untyped-call]
    return bool(torch.allclose(one, other, rtol=1e-9, atol=1e-9))
