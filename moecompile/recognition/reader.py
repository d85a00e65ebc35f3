"""From a proposal to a layer: bodies of the experts, their numbers and weights, and the proof of what they mean together."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from moecompile import graph as ir
from moecompile import meta
from moecompile.errors import CaptureError
from moecompile.program import Input, InputKind
from moecompile.recognition.base import MismatchError
from moecompile.recognition.body import Body, NotRowwiseError, Setting, Source
from moecompile.recognition.choices import Choice
from moecompile.recognition.formula import Match
from moecompile.recognition.match import Matcher
from moecompile.recognition.probe import UnknownError
from moecompile.recognition.regions import Component, Proposal, Region, hashable
from moecompile.recognition.stand_in import expert_count
from moecompile.recognition.trace import trace_body

_GATHERS = (torch.ops.aten.index.Tensor, torch.ops.aten.index_select.default)

ACCEPTED = (
    "accepted forms: a loop over experts that picks an expert's tokens (torch.where, masks, nonzero, sorted and split) "
    "and adds weight * expert(tokens) back; every expert on all tokens times a masked weight; stacked weights [E, ...] "
    "with bmm, einsum or w[e]"
)


@dataclass
class Layer:
    """One recognised MoE layer.

    ``body`` is the body of the first expert, ``weights`` line up with its leaves: for each, the E sources in expert
    order (one source where the weight is stacked or all experts share it).
    """

    choice: Choice
    match: Match
    body: Body
    weights: list[list[Source]]
    num_experts: int
    how: str

    @property
    def top_k(self) -> int:
        return self.choice.top_k


def refusal(choice: Choice, why: str) -> CaptureError:
    return CaptureError(f"recognize-moe: {meta.where(choice.node)} routes tokens to experts, but {why}; {ACCEPTED}.")


class Reader:
    """From a proposal to a layer."""

    def __init__(
        self,
        region: Region,
        proposal: Proposal,
        inputs: Mapping[Node, Input],
        constants: Mapping[str, torch.Tensor],
    ) -> None:
        self.region = region
        self.choice = region.choice
        self.proposal = proposal
        self.inputs = inputs
        self.constants = constants
        self._equal: dict[Any, Node] = {}
        self.shared = self._shared_weights()

    def layer(self) -> Layer | None:
        """The layer; None when the decision has nothing to do with experts."""
        components, why = self.proposal.components, self.proposal.trouble
        for bodies, reason in self._groups(components) if components and not why else []:
            if not bodies:
                why = why or reason
                continue
            try:
                return self._matched(bodies)
            except (MismatchError, UnknownError) as error:
                why = why or str(error)
        picked_apart = len(components) > 1 and not self.proposal.dense
        if picked_apart or self._has_expert_weights():
            raise refusal(self.choice, why or self._nothing_found())
        return None

    def _nothing_found(self) -> str:
        """What is said where no experts are seen; weights gathered token by token are named."""
        for node in sorted(self.region.routed, key=self.region.order.__getitem__):
            picked = node.args[0] if node.target in _GATHERS and node.args else None
            held = isinstance(picked, Node) and picked in self.region.static and meta.is_tensor(picked)
            if isinstance(picked, Node) and held and meta.tensor(picked).dim() > 2:
                return (
                    f"{meta.where(node)} gathers a whole weight for each token (w[ids]); loop over the experts and gather "
                    "each one's tokens instead (x[torch.where(ids == e)[0]]), or use the stacked weights with bmm or einsum"
                )
        return "no expert computation that it selects was found behind it"

    # Bodies ------------------------------------------------------------------------------------------------------

    def _groups(self, components: list[Component]) -> list[tuple[list[Body], str]]:
        """Sets of bodies that may be the experts of the decision, or the reason why not."""
        if len(components) == 1 or (
            any(self._expert_axes(item) for item in components) and len(components) < self.choice.num_options
        ):
            return [self._batched(item) for item in components]
        kept: list[Body] = []
        for item in components:
            try:
                kept.append(self._trace(item, "R" * (meta.tensor(item.exit).dim() - 1) + "F"))
            except NotRowwiseError as error:
                if not self.proposal.dense:
                    return [([], str(error))]
        if self.proposal.dense:
            return [self._checked(kind) for kind in _alike(kept)]
        return [self._checked(kept)]

    def _trace(self, component: Component, axes: str, num_experts: int = 0) -> Body:
        stops = frozenset() if component.entry is None else frozenset({component.entry})
        setting = Setting(
            self.region.static,
            self.shared,
            stops,
            num_experts,
            # a factor that the expert computes from its rows is none of the decision
            lambda node: node not in component.nodes and self.region.is_coefficient(node),
            self._constant,
            self._one,
        )
        return trace_body(component.exit, axes, setting)

    def _batched(self, component: Component) -> tuple[list[Body], str]:
        """One batched body: the axis that counts experts is found by trying."""
        why = f"{meta.where(component.exit)} has no axis of {self.choice.num_options} experts"
        for axes in self._expert_axes(component):
            try:
                body = self._trace(component, axes, int(meta.tensor(component.exit).shape[axes.index("E")]))
            except NotRowwiseError as error:
                why = str(error)
                continue
            if any(source.kind == "stacked" for source in body.leaves):
                return [body], ""
        return [], why

    def _expert_axes(self, component: Component) -> list[str]:
        """Readings of the exit's axes; not all options need to have an expert."""
        shape, options = meta.tensor(component.exit).shape, self.choice.num_options
        sizes = [(size, dim) for dim, size in enumerate(shape[:-1]) if isinstance(size, int) and 1 < size <= options]
        order = sorted(sizes, key=lambda item: -item[0])
        return ["R" * dim + "E" + "R" * (len(shape) - dim - 2) + "F" for _, dim in order]

    def _checked(self, bodies: list[Body]) -> tuple[list[Body], str]:
        """All experts must compute the same thing, with weights of the same shapes."""
        first = bodies[0]
        for body in bodies[1:]:
            difference = _difference(first, body)
            if difference:
                name = self._expert_name(body) or meta.where(body.exit)
                other = self._expert_name(first) or "the first expert"
                return (
                    [],
                    f"{name} differs from {other}: {difference}, and all experts must be alike",
                )
        return bodies, ""

    def _constant(self, node: Node) -> torch.Tensor | None:
        """The value of a small constant that indexes a weight."""
        while node.op == "call_function" and len(node.all_input_nodes) == 1:
            node = node.all_input_nodes[0]
        return self.constants.get(node.name)

    def _one(self, node: Node) -> Node:
        """The first of all weight-side values that are computed alike."""
        if node.op != "call_function":
            return node
        args, kwargs = map_arg((node.args, node.kwargs), self._one)
        return self._equal.setdefault((node.target, hashable(args), hashable(kwargs)), node)

    def _shared_weights(self) -> frozenset[Node]:
        """Weight-side values that the bodies of all components read."""
        counts: dict[Node, int] = {}
        components = self.proposal.components
        for component in components:
            read = {item for node in component.nodes for item in node.all_input_nodes if item in self.region.static}
            every = read | {source for item in read for source in ir.ancestors(item)}
            for node in {self._one(node) for node in every}:
                counts[node] = counts.get(node, 0) + 1
        return frozenset(node for node, count in counts.items() if count > 1 and count == len(components))

    # Experts -----------------------------------------------------------------------------------------------------

    def _matched(self, bodies: list[Body]) -> Layer:
        experts = [0] if bodies[0].batched else self._numbered(bodies)
        num_experts = expert_count(bodies[0]) if bodies[0].batched else len(set(experts))
        if num_experts > self.choice.num_options:
            raise MismatchError(
                f"the router chooses among {self.choice.num_options}, and {num_experts} experts were found"
            )
        with torch.inference_mode(False), torch.enable_grad():  # gradients count whatever the call is captured for
            match = self._proven(bodies, experts)
        options = sorted(set(match.order))
        if options != list(range(options[0], options[0] + num_experts)):
            raise MismatchError(
                f"only its options {options} have an expert; let options without one come before or behind all others"
            )
        return Layer(
            self.choice,
            match,
            bodies[0],
            self._weights(bodies, match.order),
            num_experts,
            self._how(bodies[0]),
        )

    def _proven(self, bodies: list[Body], experts: list[int]) -> Match:
        """The match, by preference with a result that is summed over the choices of each token."""
        try:
            return Matcher(self.region, bodies, experts, self.constants).match()
        except MismatchError as error:
            if self.choice.top_k > 1:
                with contextlib.suppress(MismatchError, UnknownError):
                    return Matcher(self.region, bodies, experts, self.constants, apart=True).match()
            found = len(set(experts))
            twice = next((expert for expert in experts if experts.count(expert) > 1), None)
            if not bodies[0].batched and found < len(experts) == self.choice.num_options and twice is not None:
                name = self._expert_name(bodies[experts.index(twice)]) or "with one set of weights"
                raise MismatchError(
                    f"{experts.count(twice)} of its {len(experts)} options lead to one and the same expert, {name}; give each option an "
                    "expert of its own (copy.deepcopy), or let the router choose among as many as there are"
                ) from None
            if not bodies[0].batched and found < self.choice.num_options:
                raise MismatchError(
                    f"the router chooses among {self.choice.num_options}, and {found} experts were found: {error}"
                ) from None
            raise

    def _numbered(self, bodies: list[Body]) -> list[int]:
        """A number for each distinct set of weights: the index into shared storage, else the order in the graph."""
        known: dict[Any, int] = {}
        numbers = []
        for body in bodies:
            slots = {source.index for source in body.leaves if source.kind in ("slice", "block")}
            if len(slots) > 1:
                raise MismatchError(f"{meta.where(body.exit)} reads the weights of several experts ({sorted(slots)})")
            key = tuple((source.kind, source.node, source.index) for source in body.leaves)
            known.setdefault(key, next(iter(slots)) if slots else len(known))
            numbers.append(known[key])
        return numbers

    def _weights(self, bodies: list[Body], order: list[int]) -> list[list[Source]]:
        """For each leaf of the first body: the sources of all experts, in expert order."""
        if bodies[0].batched:
            return [_joined_parameters(source) for source in bodies[0].leaves]
        by_expert = dict(zip(order, bodies, strict=True))
        rows = [
            [by_expert[expert].leaves[slot] for expert in sorted(by_expert)] for slot in range(len(bodies[0].leaves))
        ]
        for row in rows:
            first, stored = row[0], [source.index for source in row]
            together = len({source.node for source in row}) == 1 and first.kind in ("slice", "block")
            if together and stored != list(range(first.index, first.index + len(row))):
                raise MismatchError(
                    f"{meta.where(first.node)} holds the experts in the order {stored} of the router's options; store them in order"
                )
        return [row[:1] if len({source.node for source in row}) == 1 else row for row in rows]

    def _expert_name(self, body: Body) -> str:
        """The module of an expert, from its parameters' names."""
        names = [
            self.inputs[source.node].fqns[0]
            for source in body.leaves
            if source.node in self.inputs and self.inputs[source.node].fqns
        ]
        common = names[0].split(".")[:-1] if names else []
        for name in names[1:]:
            parts = name.split(".")
            while common and parts[: len(common)] != common:
                common.pop()
        return ".".join(common)

    def _how(self, body: Body) -> str:
        if body.batched:
            return (
                "stacked weights, every expert on all tokens"
                if self.proposal.dense
                else "stacked weights, one-hot dispatch"
            )
        if self.proposal.dense:
            return "loop over experts, masked weights"
        if body.entry.target in (torch.ops.aten.narrow.default, torch.ops.aten.slice.Tensor):
            return "tokens sorted by expert and split"
        return "loop over experts, gathered tokens"

    def _has_expert_weights(self) -> bool:
        """Parameters beside the router that come in as many copies as it has options."""
        scope = meta.module_path(self.choice.node).rpartition(".")[0]
        numbered: dict[str, set[int]] = {}
        for item in self.inputs.values():
            if item.kind is not InputKind.PARAM or not (scope == "" or item.fqns[0].startswith(scope + ".")):
                continue
            if len(item.shape) >= 3 and item.shape[0] == self.choice.num_options:
                return True
            for found in re.finditer(r"\.(\d+)(?=\.|$)", item.fqns[0][len(scope) :]):
                name = item.fqns[0][len(scope) :]
                key = f"{name[: found.start()]}.*{name[found.end() :]}"
                numbered.setdefault(key, set()).add(int(found.group(1)))
        return any(numbers >= set(range(self.choice.num_options)) for numbers in numbered.values())


def _joined_parameters(source: Source) -> list[Source]:
    """The parameters of the experts where the forward itself stacks them, else the weight as it is."""
    node, items = source.node, source.node.args[0] if source.node.args else None
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if source.kind != "stacked" or node.target is not torch.ops.aten.stack.default or dim != source.index:
        return [source]
    parts = [item for item in items if isinstance(item, Node) and item.op == "placeholder"]  # type: ignore[union-attr]
    whole = len(parts) == len(set(parts)) == int(meta.tensor(node).shape[source.index])
    return [Source("own", part) for part in parts] if whole else [source]


def _alike(bodies: list[Body]) -> list[list[Body]]:
    """Bodies grouped by what they compute; larger groups first."""
    groups: list[list[Body]] = []
    for body in bodies:
        for group in groups:
            if group[0].entry is body.entry and not _difference(group[0], body):
                group.append(body)
                break
        else:
            groups.append([body])
    return sorted((group for group in groups if len(group) > 1), key=len, reverse=True)


def _difference(one: Body, other: Body) -> str:
    """What distinguishes two bodies, '' for nothing."""
    for left, right in zip(one.steps, other.steps, strict=False):
        if (left.target, left.args, left.kwargs) != (right.target, right.args, right.kwargs):
            return f"{_call(right)} stands where the other has {_call(left)}"
    if len(one.steps) != len(other.steps) or one.result != other.result:
        return f"it has {len(other.steps)} operations where the other has {len(one.steps)}"
    for mine, theirs in zip(one.leaves, other.leaves, strict=True):
        if mine.kind != theirs.kind:
            return f"{theirs.node.name} is stored otherwise than {mine.node.name}"
        a, b = meta.tensor(mine.node), meta.tensor(theirs.node)
        if mine.shape != theirs.shape or a.dtype != b.dtype:
            found, wanted = f"{b.dtype}{list(theirs.shape)}", f"{a.dtype}{list(mine.shape)}"
            return f"{theirs.node.name} is {found} where {mine.node.name} is {wanted}"
    return ""


def _call(step: Any) -> str:
    constants = [str(item) for item in step.args if isinstance(item, (int, float, bool))]
    name = "linear" if step.target == "product" else str(step.target)
    bias = " without bias" if step.target == "product" and step.args[2] is None else ""
    return name + bias + (f" with {', '.join(constants)}" if constants else "")
