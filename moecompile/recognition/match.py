"""The semantic check: which formula of `formula` does the region compute, for which values of the graph?

Candidates for x, for the weights w and for the result y come from the graph; probes decide.  Values and gradients must
both agree, in float64, on probes where every expert is hit, where all tokens go to the same experts, and random ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node

from moecompile import graph as graphs
from moecompile import meta
from moecompile.recognition.base import MismatchError
from moecompile.recognition.body import Body
from moecompile.recognition.candidates import find_keeps, find_tokens, find_weights
from moecompile.recognition.choices import dependents
from moecompile.recognition.formula import Formula, Match, Probed, close, same_gradients
from moecompile.recognition.probe import Evaluator, Setup
from moecompile.recognition.regions import Region
from moecompile.recognition.rest import Rest
from moecompile.recognition.scale import Scale, choose_scale
from moecompile.recognition.stand_in import BodyStandIn, StandIn, expert_count, probe_ids
from moecompile.recognition.unseen import other_value, other_weights, silent, unseen

_ROUNDS = 4
_LARGEST = 2**27  # elements of the largest value of a probe


class Matcher:
    """Proves the meaning of one region whose expert bodies are known.

    ``experts`` numbers the bodies: equal numbers are one expert.  ``apart``: the result has a row for each choice.
    """

    def __init__(
        self,
        region: Region,
        bodies: list[Body],
        experts: list[int],
        constants: Mapping[str, torch.Tensor],
        apart: bool = False,
    ) -> None:
        self.region = region
        self.choice = region.choice
        self.bodies = bodies
        self.experts = experts
        self.apart = apart
        self.num_experts = expert_count(bodies[0]) if bodies[0].batched else len(set(experts))
        self.exits = [body.exit for body in bodies]
        self.width = int(meta.tensor(self.exits[0]).shape[bodies[0].exit_axes.index("F")])
        self.linear = all(body.is_linear() for body in bodies)  # then it does not matter where the weight is applied
        self.scaled = any(self._is_scaled(body.entry) for body in bodies)
        self.zero_kept = self.scaled and all(body.keeps_zero() for body in bodies)
        self.tokens, self.by_choice = find_tokens(region, bodies)
        self.affected = dependents(self.exits) | set(self.exits)
        inner = frozenset(dependents([self.tokens]) | region.routed)
        self.setup = Setup(region.order, region.static, inner, constants)
        size = self.choice.num_tokens * self.width * (self.choice.top_k if apart else 1)
        self.results = [node for node in region.results(self.exits) if str(meta.tensor(node).numel()) == str(size)]
        if not self.results:
            raise MismatchError("the experts' results do not come together in one tensor with a row for each token")
        given = {self.tokens, *self.choice.starts} - ({self.choice.node} - {self.choice.ids, *self.choice.parts})
        each = list(range(max(self.num_experts, len(bodies))))
        needs = self._stand_ins(each, lambda expert, rows: rows, Scale())
        # behind the sum may stand another layer, whose rows nobody knows here
        self.results = [
            one for one in self.results if self._is_known(self.setup.cone([one], given, needs))
        ] or self.results
        self.cone = self.setup.cone(self.results, given, needs)
        self.weights = find_weights(region, self.cone, self.results)
        sources = [node for node in self.cone if node not in {*given, *needs} and self.setup.is_source(node)]
        self.scale = choose_scale(self.cone, sources, self.choice, self.tokens, self.width)
        self._check_cost()
        self.num_tokens = self.scale.size(self.choice.num_tokens)

    def _is_known(self, cone: list[Node]) -> bool:
        """Whether what has to be drawn for a result has sizes that are known."""
        drawn = [meta.tensor(node) for node in cone if self.setup.is_source(node)]
        return all(isinstance(size, int) for found in drawn for size in found.shape)

    def _is_scaled(self, entry: Node) -> bool:
        """Whether rows come in multiplied by a factor of the decision."""
        while isinstance(entry, Node) and entry in self.region.routed:
            if self.region.scales(entry):
                return True
            if not entry.args or not isinstance(entry.args[0], Node):
                return False
            entry = entry.args[0]
        return False

    def _check_cost(self) -> None:
        """A probe at the captured size must be affordable."""
        counts = [meta.tensor(node).shape for node in self.cone if meta.is_tensor(node)]
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
            for result, formula in self._fits(probes):
                if not self._holds_unseen(result, formula, order, probes):
                    why = (
                        why or "a comparison or a clamp between its experts and their sum does more than choose weights"
                    )
                    continue
                if not self._gradients_agree(result, formula, order):
                    why = "its values are those of a weighted sum of experts, but its gradients are not"
                    continue
                if self._left_over(result):
                    why = why or "what its options without an expert give is not read"
                    continue
                last = self._probe(_ROUNDS, order, self.linear)
                rest = Rest(self.region, self.exits, self.tokens, self.weights, formula, [*probes, last])
                try:
                    base, lone = rest.of(result)
                except MismatchError as error:
                    why = str(error)
                    continue
                return Match(
                    self.tokens,
                    formula.probs,
                    result,
                    base,
                    order,
                    formula.scale,
                    formula.keep,
                    lone,
                    self.by_choice,
                    self.apart,
                )
        raise MismatchError(why or self._why())

    def _left_over(self, result: Node) -> bool:
        """Whether options without an expert give something outside the result, on rows picked by their values."""
        if self.num_experts == self.choice.num_options:
            return False
        around = graphs.ancestors(self.region.graph.output_node(), stop=[result])  # read without the result
        return any(
            isinstance(size, torch.SymInt)
            for node in (around & self.region.early) - dependents([result])
            for size in graphs.symbolic_sizes(node.meta.get("val"))
        )

    def _orders(self) -> Iterator[list[int]]:
        """The option of each component: as they stand in the graph, else as the ids select them."""
        options = self.choice.num_options
        if self.bodies[0].batched:
            for first in dict.fromkeys((0, options - self.num_experts)):
                yield list(range(first, first + self.num_experts))
            return
        yield list(self.experts)
        selected = self._selected(self.results[0])
        if selected is not None:
            order = [selected[expert] for expert in self.experts]
            if order != list(self.experts):
                yield order

    def _selected(self, result: Node) -> dict[int, int] | None:
        """The option that selects each component, found by letting one component after the other mark its rows."""
        numbers = sorted(set(self.experts))
        count, options = len(numbers), self.choice.num_options
        fits = torch.ones(count, options, dtype=torch.bool)
        for round_ in (0, 2, 3):
            for first in range(0, count, self.width):

                def mark(expert: int, rows: torch.Tensor, first: int = first) -> torch.Tensor:
                    made = rows.new_zeros(rows.shape[0], self.width)
                    if first <= expert < first + self.width:
                        made[:, expert - first] = 1
                    return made

                ids, seen = self._marked(round_, result, mark)
                chosen = torch.zeros(ids.shape[0], options, dtype=torch.bool).scatter(1, ids, True)
                for expert in range(first, min(first + self.width, count)):
                    touched = seen[:, expert - first, None]  # choices may be dropped, but no other token is touched
                    fits[expert] &= (chosen | ~touched).all(0) & ((chosen & touched).any(0) | ~chosen.any(0))
        best = fits.int().argmax(1).tolist()
        if not bool((fits.sum(1) == 1).all()) or len(set(best)) != self.num_experts:
            return None
        return dict(zip(numbers, best, strict=True))

    def _marked(self, round_: int, result: Node, mark: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids of a probe, and where each feature of the result was touched by a mark."""
        evaluator, generator = self._evaluator(round_)
        given, ids = self._given(round_, evaluator, generator)
        each = [sorted(set(self.experts)).index(expert) for expert in self.experts]
        with torch.no_grad():
            marked = evaluator.run([result], given, self._stand_ins(each, mark))[result]
            plain = evaluator.run([result], given, self._stand_ins(each, lambda *rows: mark(*rows) * 0))[result]
        touched = (marked - plain).abs() > 1e-12
        return ids, touched.reshape(self.num_tokens, -1, self.width).any(1)

    def _evaluator(self, seed: int) -> tuple[Evaluator, torch.Generator]:
        generator = torch.Generator().manual_seed(seed)
        return Evaluator(self.setup, self.scale, generator), generator

    def _stand_ins(self, order: list[int], function: Any, scale: Scale | None = None) -> dict[Node, BodyStandIn]:
        """``order``: the option of each component, or of each expert of the one batched component."""
        known = scale or self.scale
        return {
            body.exit: BodyStandIn(body, order if body.batched else [order[index]], function, self.region.static, known)
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
        for index, part in enumerate(choice.parts):
            given[part] = ids[:, index].reshape(self._shape(part))
        evaluator.drawn[self.tokens] = tokens
        if choice.chosen is not None:
            drawn = torch.rand(self._shape(choice.chosen), generator=generator, dtype=torch.float64) + 0.1
            given[choice.chosen] = evaluator.drawn[choice.chosen] = drawn.requires_grad_()
        return given, ids.reshape(self.num_tokens, choice.top_k)

    def _probe(self, round_: int, order: list[int], linear: bool, drawn: Iterable[Node] = ()) -> Probed:
        """Run the region once as it is, and once with experts that return zero. What is in ``drawn`` gets other values."""
        evaluator, generator = self._evaluator(round_)
        stand_in = StandIn.make(self.choice.num_options, self.width, linear, self.zero_kept, generator)
        given, ids = self._given(round_, evaluator, generator)
        same: dict[Any, torch.Tensor] = {}  # a loop over experts writes a threshold once for each
        for node in sorted(drawn, key=self.region.order.__getitem__):
            value = evaluator.run([node], given, self._stand_ins(order, stand_in))[node]
            key = (node.target, node.args, node.name if node in self.weights else "")
            if key not in same:
                is_weight = node in self.weights
                same[key] = other_weights(value, ids, order, generator) if is_weight else other_value(value, generator)
            given[node] = same[key]
        values = evaluator.run([*self.results, *self.weights], given, self._stand_ins(order, stand_in))
        kept = {node: value for node, value in values.items() if node not in self.affected}
        none = self._stand_ins(order, lambda expert, rows: stand_in(expert, rows) * 0)
        bases = evaluator.run(self.results, kept, none)
        rows = values[self.tokens]
        rows = rows.reshape(self.num_tokens * (self.choice.top_k if self.by_choice else 1), -1)
        leaves = [tensor for tensor in evaluator.drawn.values() if tensor.requires_grad]
        return Probed(ids, values, bases, rows, stand_in, sorted(set(order)), leaves)

    # Formulas ----------------------------------------------------------------------------------------------------

    def _formulas(self) -> Iterator[Formula]:
        """Simple ones first."""
        if not self.scaled:
            yield from (Formula(probs) for probs in (*self.weights, None))
        else:
            yield from (Formula(None, scale) for scale in self.weights)
            yield from (Formula(probs, scale) for scale in (*self.weights, None) for probs in self.weights)
        for keep in find_keeps(self.region, self.cone):
            if not self.scaled:
                yield from (Formula(probs, None, keep) for probs in (*self.weights, None))
            else:
                yield from (Formula(None, scale, keep) for scale in self.weights)

    def _fits(self, probes: list[Probed]) -> Iterator[tuple[Node, Formula]]:
        """Results and formulas for which the formula holds on all probes."""
        # what options without an expert give may be added behind the experts' results
        results = self.results if self.num_experts == self.choice.num_options else self.results[::-1]
        for formula in self._formulas():
            for result in results:
                if all(close(self._experts(one, result), self._wanted(one, formula)) for one in probes):
                    yield result, formula

    def _experts(self, probed: Probed, result: Node) -> torch.Tensor:
        """What the experts add to the result, ``[T (* K), width]``."""
        found: torch.Tensor = (probed.values[result] - probed.bases[result]).reshape(-1, self.width)
        return found

    def _wanted(self, probed: Probed, formula: Formula) -> torch.Tensor:
        """What the formula says they add."""
        parts = probed.experts_part(formula)
        return parts.reshape(-1, self.width) if self.apart else parts.sum(1)

    def _holds_unseen(self, result: Node, formula: Formula, order: list[int], probes: list[Probed]) -> bool:
        """Whether the formula also holds with other values for what says nothing on the probes."""
        weights = [node for node in (formula.probs, formula.scale) if node is not None and silent(node, order, probes)]
        drawn = {*weights, *unseen(self.cone, probes)}
        if not drawn:
            return True
        again = [self._probe(round_, order, self.linear, drawn) for round_ in range(_ROUNDS)]
        return all(close(self._experts(one, result), self._wanted(one, formula)) for one in again)

    def _gradients_agree(self, result: Node, formula: Formula, order: list[int]) -> bool:
        """Whether both sides have one gradient with respect to tokens, chosen scores and every drawn value."""
        probed = self._probe(_ROUNDS, order, self.linear)
        return same_gradients(self._experts(probed, result), self._wanted(probed, formula), probed.leaves)

    # Reasons -----------------------------------------------------------------------------------------------------

    def _why(self) -> str:
        """The likely reason, found by loosening the check."""
        order = list(self.experts) if not self.bodies[0].batched else list(range(self.num_experts))
        loose = [self._probe(round_, order, True) for round_ in range(_ROUNDS)]
        if not self.linear and not self.scaled and next(self._fits(loose), None) is not None:
            return (
                "the routing weight is applied before the expert, which is nonlinear, so it cannot be moved behind it"
            )
        if self._drops(self._probe(2, order, self.linear)):
            return (
                "some tokens are dropped, and neither a mask [tokens, top_k] nor the first so many choices of each expert "
                "say which"
            )
        return "on probes it is not the sum over the chosen experts of weight times expert(token)"

    def _drops(self, probed: Probed) -> bool:
        """Whether tokens get the sum over some of their choices only."""
        if self.apart or self.scaled:
            return False
        for probs in (*self.weights, None):
            parts = probed.experts_part(Formula(probs))
            for result in self.results:
                if _is_partial_sum(parts.detach(), self._experts(probed, result).detach()):
                    return True
        return False

    def _shape(self, node: Node) -> list[int]:
        return self.scale.shape(meta.tensor(node).shape)


def _is_partial_sum(parts: torch.Tensor, got: torch.Tensor) -> bool:
    """Whether each row of ``got [T, width]`` is the sum of some of ``parts [T, K, width]``."""
    kept = torch.linalg.lstsq(parts.transpose(1, 2), got.unsqueeze(2)).solution
    whole = close(torch.einsum("tkw,tk->tw", parts, kept.squeeze(2)), got)
    return whole and close(kept.round().clamp(0, 1), kept)
