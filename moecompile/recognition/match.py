"""The semantic check: is the region ``base + sum_k w[t, k] * (f_ids[t, k](x[t]))``, for some w and x that the graph holds?

Candidates for x, for the weights w and for the result y come from the graph; probes decide.  Values and gradients must
both agree, in float64, on probes where every expert is hit, where all tokens go to the same experts, and random ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from moecompile import meta
from moecompile.recognition import rowwise
from moecompile.recognition.body import Body
from moecompile.recognition.probe import BodyStandIn, Evaluator, StandIn, Unknown, expert_count, probe_ids
from moecompile.recognition.regions import Region

aten = torch.ops.aten
_ROUNDS = 4
_VIEWS = rowwise.RESHAPES | {
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.default,
    aten.contiguous.default,
    aten.clone.default,
    aten.alias.default,
}
_REPEATS = frozenset({aten.expand.default, aten.repeat.default, aten.repeat_interleave.self_int})


class Mismatch(Exception):
    """The region is something else than a weighted sum of experts; the text says what was found."""


@dataclass
class Match:
    """Nodes that mean x ``[..., H]``, the weights (``[T, K]``, ``[T, E]``, or None for ones), the result and its base."""

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


class Matcher:
    """Proves the meaning of one region whose expert bodies are known."""

    def __init__(self, region: Region, bodies: list[Body], experts: list[int], constants: Mapping[str, torch.Tensor]) -> None:
        self.region = region
        self.choice = region.choice
        self.bodies = bodies
        self.experts = dict(enumerate(experts))
        self.constants = constants
        self.num_experts = expert_count(bodies[0]) if bodies[0].batched else len(set(experts))
        self.exits = [body.exit for body in bodies]
        self.width = int(meta.tensor(self.exits[0]).shape[bodies[0].exit_axes.index("F")])
        self.tokens = self._find_tokens()

    # Candidates --------------------------------------------------------------------------------------------------

    def _find_tokens(self) -> Node:
        """The value all experts take their rows from: ``[..., H]`` with one row per token."""
        roots: dict[Node, None] = {}
        wide = {body.entry: int(meta.tensor(body.entry).shape[body.entry_axes.index("F")]) for body in self.bodies}
        for entry, width in wide.items():
            sources = self.region.outer_sources(entry) if entry in self.region.routed else [entry]
            for source in sources:
                root = self._root(source, width)
                if root is not None:
                    roots[root] = None
        if len(roots) != 1:
            names = ", ".join(node.name for node in roots) or "none"
            raise Mismatch(f"the experts' rows must come from one tensor of {self.choice.num_tokens} tokens, and come from {names}")
        return next(iter(roots))

    def _root(self, node: Node, width: int) -> Node | None:
        """Back over repeats and views to the tensor with one row per token."""
        size = self.choice.num_tokens * width
        while True:
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

    def _weights(self, results: list[Node]) -> list[Node]:
        """Values that may be the routing weights, the most direct ones first."""
        tokens, top_k, options = self.choice.num_tokens, self.choice.top_k, self.choice.num_options
        found = []
        for node in self.region.graph.nodes:
            if node.op != "call_function" or not meta.is_tensor(node) or not meta.tensor(node).is_floating_point():
                continue
            shape = tuple(meta.tensor(node).shape)
            if not all(isinstance(size, int) for size in shape) or node in results:
                continue
            count = meta.tensor(node).numel()
            if count == tokens * top_k and shape and (shape[-1] == top_k or top_k == 1):
                found.append((0 if shape == (tokens, top_k) else 1, -self.region.order[node], node))
            elif count == tokens * options and shape[-1:] == (options,):
                found.append((2, -self.region.order[node], node))
        return [node for *_, node in sorted(found, key=lambda item: item[:2])]

    # Probing -----------------------------------------------------------------------------------------------------

    def match(self) -> Match:
        """The meaning, or a Mismatch that says what stands in its way."""
        results = [node for node in self.region.results(self.exits) if meta.tensor(node).numel() == self.choice.num_tokens * self.width]
        if not results:
            raise Mismatch("the experts' results do not come together in one tensor with a row for each token")
        last = self.region.order[results[-1]]
        weights = [node for node in self._weights(results) if self.region.order[node] < last]
        weights = self._reachable(weights, results)
        for order in self._orders(results):
            probes = [self._probe(round_, results, weights, order) for round_ in range(_ROUNDS)]
            found = self._fit(probes, results, weights)
            if found is not None:
                result, probs = found
                base = Base(self.region, set(self.exits)).of(result)
                self._check_base(base, result, probes)
                self._check_gradients(result, probs, order)
                return Match(self.tokens, probs, result, base, order)
        raise Mismatch(self._why(results, weights))

    def _reachable(self, weights: list[Node], results: list[Node]) -> list[Node]:
        """Only weights the results depend on, or that are computed from the scores."""
        wanted = set()
        todo = list(results)
        while todo:
            here = todo.pop()
            if here not in wanted and here is not self.tokens:
                wanted.add(here)
                todo += here.all_input_nodes
        return [node for node in weights if node in wanted]

    def _orders(self, results: list[Node]) -> Iterator[list[int]]:
        """Which expert each component is: as they stand in the graph, else as the ids select them."""
        count = len(self.bodies)
        standing = [self.experts[index] for index in range(count)]
        yield standing
        if not self.bodies[0].batched:
            selected = self._selected(results[0])
            if selected is not None and selected != standing:
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
        names = dict(enumerate(self.experts[index] for index in range(len(self.bodies))))
        made = {body.exit: BodyStandIn(body, names, index, mark, self.region.static) for index, body in enumerate(self.bodies)}
        with torch.no_grad():
            marked = evaluator.run([result], given, made)[result]
            blank = {body.exit: BodyStandIn(body, names, index, _blank(mark), self.region.static) for index, body in enumerate(self.bodies)}
            plain = evaluator.run([result], given, blank)[result]
        return ids, ((marked - plain).abs() > 1e-12).reshape(self.choice.num_tokens, -1)

    def _evaluator(self, seed: int) -> tuple[Evaluator, torch.Generator]:
        generator = torch.Generator().manual_seed(seed)
        return Evaluator(self.region.graph, self.region.static, self.constants, generator), generator

    def _given(self, round_: int, evaluator: Evaluator, generator: torch.Generator) -> tuple[dict[Node, Any], torch.Tensor]:
        """Random tokens and scores, and the ids of this round."""
        choice = self.choice
        ids = probe_ids(choice, round_, generator)
        tokens = torch.rand(meta.tensor(self.tokens).shape, generator=generator, dtype=torch.float64, requires_grad=True)
        given: dict[Node, Any] = {self.tokens: tokens, choice.ids: ids}
        evaluator.drawn[self.tokens] = tokens
        if choice.chosen is not None:
            drawn = torch.rand(meta.tensor(choice.chosen).shape, generator=generator, dtype=torch.float64) + 0.1
            given[choice.chosen] = evaluator.drawn[choice.chosen] = drawn.requires_grad_()
        return given, ids.reshape(choice.num_tokens, choice.top_k)

    def _probe(self, round_: int, results: list[Node], weights: list[Node], order: list[int], linear: bool | None = None) -> Probed:
        evaluator, generator = self._evaluator(round_)
        linear = self._is_linear() if linear is None else linear
        stand_in = StandIn.make(self.num_experts, self.width, linear, generator)
        given, ids = self._given(round_, evaluator, generator)
        names = dict(enumerate(order))

        def exits(function: Any) -> dict[Node, Any]:
            static = self.region.static
            return {body.exit: BodyStandIn(body, names, index, function, static) for index, body in enumerate(self.bodies)}

        wanted = [*results, *weights]
        with torch.enable_grad():
            values = evaluator.run(wanted, given, exits(stand_in))
            bases = evaluator.run(results, given, exits(lambda expert, rows: stand_in(expert, rows) * 0))
            parts = self._apart(stand_in, values[self.tokens], ids)
        self._drawn = evaluator.drawn
        return Probed(ids, values, bases, parts)

    def _is_linear(self) -> bool:
        """Whether the bodies are linear maps, for which it does not matter where the weight is applied."""
        return all(body.is_linear() for body in self.bodies)

    def _apart(self, stand_in: StandIn, tokens: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Each expert's stand-in on the tokens that chose it, ``[T, K, width]``."""
        rows = tokens.reshape(self.choice.num_tokens, -1)
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
        base = probed.bases[result].reshape(self.choice.num_tokens, -1)
        total: torch.Tensor = base + parts.sum(1)
        return total

    def _slots(self, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Weights as ``[T, K]``."""
        tokens, top_k = ids.shape
        return weights.reshape(ids.shape) if weights.numel() == tokens * top_k else weights.reshape(tokens, -1).gather(1, ids)

    def _fit(self, probes: list[Probed], results: list[Node], weights: list[Node]) -> tuple[Node, Node | None] | None:
        candidates: list[Node | None] = [*weights, None]
        for probs in candidates:
            for result in results:
                if all(_close(probed.values[result].reshape(self.choice.num_tokens, -1), self._wanted(probed, result, probs)) for probed in probes):
                    return result, probs
        return None

    def _check_base(self, base: Node | None, result: Node, probes: list[Probed]) -> None:
        for probed in probes:
            found = probed.bases[result]
            if base is None and not _close(found, torch.zeros_like(found)):
                raise Mismatch("what the experts add to depends on the routing decision")

    def _check_gradients(self, result: Node, probs: Node | None, order: list[int]) -> None:
        """The gradients of both sides with respect to tokens, chosen scores and every drawn value."""
        weights = [] if probs is None else [probs]
        probed = self._probe(_ROUNDS, [result], weights, order)
        leaves = [tensor for tensor in self._drawn.values() if tensor.requires_grad]
        got = probed.values[result].reshape(self.choice.num_tokens, -1)
        wanted = self._wanted(probed, result, probs)
        factor = torch.rand(got.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        pair = [torch.autograd.grad((side * factor).sum(), leaves, allow_unused=True, retain_graph=True) for side in (got, wanted)]
        for one, other in zip(*pair, strict=True):
            zero = torch.zeros(())
            if not _close(zero if one is None else one, zero if other is None else other):
                raise Mismatch("its values are those of a weighted sum of experts, but its gradients are not")

    def _drops(self, results: list[Node], weights: list[Node], order: list[int]) -> bool:
        """Whether tokens get the sum over some of their choices only."""
        probed = self._probe(2, results, weights, order)
        for probs in [*weights, None]:
            parts = probed.parts if probs is None else probed.parts * self._slots(probed.values[probs], probed.ids)[:, :, None]
            for result in results:
                got = (probed.values[result] - probed.bases[result]).reshape(self.choice.num_tokens, -1)
                if _is_partial_sum(parts.detach(), got.detach()):
                    return True
        return False

    def _why(self, results: list[Node], weights: list[Node]) -> str:
        """The likely reason, found by loosening the check."""
        order = [self.experts[index] for index in range(len(self.bodies))]
        loose = [self._probe(round_, results, weights, order, linear=True) for round_ in range(_ROUNDS)]
        if not self._is_linear() and self._fit(loose, results, weights) is not None:
            return "the routing weight is applied before the expert, which is nonlinear, so it cannot be moved behind it"
        if self._drops(results, weights, order):
            return "some tokens are dropped, as when an expert is over its capacity, which is not accepted yet"
        return "on probes it is not the sum over the chosen experts of weight times expert(token)"


def _is_partial_sum(parts: torch.Tensor, got: torch.Tensor) -> bool:
    """Whether each row of ``got [T, width]`` is the sum of some of ``parts [T, K, width]``."""
    kept = torch.linalg.lstsq(parts.transpose(1, 2), got.unsqueeze(2)).solution
    whole = _close(torch.einsum("tkw,tk->tw", parts, kept.squeeze(2)), got)
    return whole and _close(kept.round().clamp(0, 1), kept)


def _blank(function: Any) -> Any:
    return lambda expert, rows: function(expert, rows) * 0


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.allclose(one.detach().expand(torch.broadcast_shapes(one.shape, other.shape)), other.detach(), rtol=1e-9, atol=1e-9))


class Base:
    """What a result is when every expert returns zero: a value of the graph, or None for zero."""

    def __init__(self, region: Region, exits: set[Node]) -> None:
        self.region = region
        self.exits = exits
        self._known: dict[Node, Node | None] = {}

    def of(self, node: Node) -> Node | None:
        """None for zero; a Mismatch where it is neither zero nor a value that the graph holds."""
        todo = [node]
        while todo:
            here = todo[-1]
            if here in self._known:
                todo.pop()
                continue
            waiting = [item for item in self._looks_at(here) if item not in self._known]
            if waiting:
                todo += waiting
            else:
                self._known[here] = self._reduce(here)
                todo.pop()
        return self._known[node]

    def _depends(self, node: Node) -> bool:
        return node in self._affected()

    def _affected(self) -> set[Node]:
        if not hasattr(self, "_cache"):
            seen, todo = set(self.exits), list(self.exits)
            while todo:
                for user in todo.pop().users:
                    if user not in seen:
                        seen.add(user)
                        todo.append(user)
            self._cache = seen
        return self._cache

    def _looks_at(self, node: Node) -> list[Node]:
        if node in self.exits or not self._depends(node):
            return []
        return [item for item in rowwise.tensor_inputs(node) if self._depends(item)]

    def _value(self, item: object) -> Node | None:
        """None for zero."""
        if not isinstance(item, Node):
            if isinstance(item, (int, float)) and item == 0:
                return None
            raise Mismatch("the experts' sum is shifted by a number")
        if item in self._known:
            return self._known[item]
        return None if _is_zero(item) else item

    def _reduce(self, node: Node) -> Node | None:
        if node in self.exits:
            return None
        if not self._depends(node):
            return None if _is_zero(node) else node
        target, args = node.target, node.args
        if target in (aten.index_add.default, aten.scatter_add.default) and self._value(args[3]) is None:
            return self._value(args[0])
        if target in (aten.index_put.default, aten._unsafe_index_put.default):
            return self._reduce_put(node)
        if target in (aten.add.Tensor, aten.sub.Tensor):
            parts = [self._value(item) for item in args[:2]]
            if parts[1] is None or parts[0] is None and target is aten.add.Tensor:
                return parts[0] if parts[1] is None else parts[1]
        if target in _ZERO_IF_ONE_IS and any(self._value(item) is None for item in rowwise.tensor_inputs(node)):
            return None
        if all(self._value(item) is None for item in rowwise.tensor_inputs(node) if meta.tensor(item).is_floating_point()):
            if rowwise.is_pointwise(target) and target not in _KEEPS_ZERO:
                raise Mismatch(f"{meta.where(node)} changes the experts' sum where it is zero")
            return None
        if target in (aten.index.Tensor,) and isinstance(args[0], Node):
            return node
        raise Mismatch(f"{meta.where(node)} mixes the experts' results with another value")

    def _reduce_put(self, node: Node) -> Node | None:
        """``y[m] = y[m] + ...`` leaves y as it was, and so does putting zeros where there are zeros."""
        into, where, values = node.args[:3]
        base = self._value(into)
        accumulate = len(node.args) > 3 and bool(node.args[3])
        put = self._value(values)
        if put is None and (base is None or accumulate):
            return base
        same = put is not None and put.target is aten.index.Tensor and list(put.args[1]) == list(where)  # type: ignore[arg-type]
        if same and put is not None and self._value(put.args[0]) is base and not accumulate:
            return base
        raise Mismatch(f"{meta.where(node)} overwrites a value with the experts' results")


_KEEPS_ZERO = frozenset(
    {
        aten.mul.Tensor,
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.div.Tensor,
        aten.clone.default,
        aten.alias.default,
        aten.contiguous.default,
        aten.to.dtype,
        aten.to.dtype_layout,
        aten._to_copy.default,
        aten.detach.default,
        aten.neg.default,
        aten.where.self,
        aten.masked_fill.Scalar,
        aten.nan_to_num.default,
    }
)
_ZERO_IF_ONE_IS = frozenset({aten.mul.Tensor, aten.einsum.default, aten.bmm.default, aten.matmul.default, aten.mm.default})
_ZEROS = frozenset(
    {
        aten.zeros.default,
        aten.zeros_like.default,
        aten.new_zeros.default,
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.new_empty.default,
    }
)


def _is_zero(node: Node) -> bool:
    if node.target in _ZEROS:
        return True
    if node.target in (aten.full.default, aten.full_like.default, aten.new_full.default):
        fill = node.args[1] if node.target is not aten.new_full.default else node.args[2]
        return fill == 0
    return node.target in rowwise.RESHAPES | rowwise.AXES and isinstance(node.args[0], Node) and _is_zero(node.args[0])
