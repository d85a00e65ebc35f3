"""Find every MoE layer of a program and what it means: `find_layers`.

A structural match proposes (`regions`, `body`), probes dispose (`match`).  A routing decision that feeds expert weights
and is not matched is refused, naming the line and the accepted forms.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Graph, Node

from moecompile import graph as ir
from moecompile import meta, ops
from moecompile.errors import CaptureError
from moecompile.program import Input, InputKind
from moecompile.recognition.choices import Choice, find_choices, joined, static_nodes
from moecompile.recognition.reader import ACCEPTED, Layer, Reader
from moecompile.recognition.regions import Proposal, Region, positions
from moecompile.recognition.siblings import Siblings
from moecompile.recognition.unrouted import Unrouted, only_weighs, why_no_layer

__all__ = ["ACCEPTED", "Layer", "find_layers"]

aten = torch.ops.aten
_REDUCTIONS = {
    aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.histc.default, aten.bincount.default,
    aten.scatter_add.default, aten.index_add.default,
}  # fmt: skip
_KINDS = (InputKind.PARAM, InputKind.BUFFER, InputKind.CONSTANT)


def find_layers(
    graph: Graph,
    inputs: Mapping[Node, Input],
    constants: Mapping[str, torch.Tensor],
    unrouted: list[Unrouted] | None = None,
) -> list[Layer]:
    """All layers that are not yet in ``moe::`` ops, in graph order. CaptureError for one that is refused.

    ``unrouted`` collects choices that feed experts without being a token's choice among them.
    """
    static = static_nodes(graph, {node for node, item in inputs.items() if item.kind in _KINDS})
    choices = find_choices(graph)
    canonical = {choice.node for choice in choices if _is_canonical(choice)}
    finder = _Finder(graph, inputs, constants, static, choices, canonical)
    known: set[Node] = set()  # decisions that were made in parts
    for whole, parts in joined(choices):
        nodes = {part.node for part in parts}
        if not nodes & (canonical | known) and finder.find_joined(whole):
            known |= nodes
    for choice in choices:
        if choice.node not in known:
            finder.find(choice)
    found = finder.all()
    if unrouted is not None:
        unrouted += finder.unrouted
    return found


class _Finder:
    """Collects layers and refusals."""

    def __init__(
        self,
        graph: Graph,
        inputs: Mapping[Node, Input],
        constants: Mapping[str, torch.Tensor],
        static: frozenset[Node],
        choices: list[Choice],
        canonical: set[Node],
    ) -> None:
        self.graph = graph
        self.inputs = inputs
        self.constants = constants
        self.static = static
        self.choices = choices
        self.canonical = canonical
        self.order = positions(graph)
        self.siblings = Siblings(graph, inputs, constants, static, choices)
        self.layers: list[Layer] = []
        self.unrouted: list[Unrouted] = []
        self.refusals: list[tuple[Choice, Proposal, CaptureError]] = []

    def find(self, choice: Choice) -> None:
        """The layers of one decision."""
        if choice.node in self.canonical:
            return
        known = self.siblings.known(choice)
        if known:
            self.layers += known
            return
        if _only_counted(choice, self.inputs, self.static):
            return
        why = why_no_layer(choice, self.static)
        if why:
            self.unrouted.append(Unrouted(choice.node, why))
            return
        region = Region(self.graph, choice, self.static, order=self.order)
        if self.canonical & region.early or only_weighs(choice):
            return  # narrows down a decision whose layer is in ``moe::`` ops
        proposal = region.propose()
        if _prepares_another(region, proposal, self.choices):
            return
        before = len(self.layers)
        try:
            self._read(region, proposal)
        except CaptureError as error:
            self.refusals.append((choice, proposal, error))
        else:
            self.siblings.remember(choice, self.layers[before:])

    def find_joined(self, choice: Choice) -> bool:
        """Whether the parts of a decision make up a layer together."""
        region = Region(self.graph, choice, self.static, order=self.order)
        try:
            return self._read(region, region.propose())
        except CaptureError:
            return False  # each part may be a decision of its own, and says what is wrong with it

    def _read(self, region: Region, proposal: Proposal) -> bool:
        choice = region.choice
        layer = Reader(region, proposal, self.inputs, self.constants).layer()
        found = layer is not None
        done: tuple[Node, ...] = ()
        while layer is not None:
            self.layers.append(layer)
            # The same decision may route more: what comes out of one set of experts goes into the next.
            done = (*done, layer.match.result)
            region = Region(self.graph, choice, self.static, done, self.order)
            proposal = region.propose()
            layer = Reader(region, proposal, self.inputs, self.constants).layer() if proposal.components else None
        return found

    def all(self) -> list[Layer]:
        """The layers in graph order; the first refusal of a decision that is no part of their routers is raised."""
        refused = []
        for choice, proposal, error in self.refusals:
            picks = bool(proposal.components) and not proposal.dense
            if self._is_shared(proposal):
                self.unrouted.append(
                    Unrouted(choice.node, "several decisions weigh the results of the same experts there")
                )
            elif picks or not any(choice.node in _router(layer) for layer in self.layers):
                refused.append(error)
        if refused:
            raise refused[0]
        return sorted(self.layers, key=lambda layer: self.order[layer.match.result])

    def _is_shared(self, proposal: Proposal) -> bool:
        """Whether every expert computes on all tokens, once for several decisions."""
        exits = [
            {component.exit for component in other.components} for _, other, _ in self.refusals if other is not proposal
        ]
        own = {component.exit for component in proposal.components}
        return proposal.dense and any(own & others for others in exits)


def _router(layer: Layer) -> set[Node]:
    """What a layer's decision and weights are computed from."""
    match = layer.match
    found = [match.probs, match.scale, match.keep.mask if match.keep is not None else None, *layer.choice.starts]
    return ir.ancestors(*(node for node in found if node is not None))


def _is_canonical(choice: Choice) -> bool:
    """Whether the decision already feeds a ``moe::permute``."""
    reached, todo = {choice.ids}, [choice.ids]
    while todo:
        for user in todo.pop().users:
            if user.target is ops.permute and user.args[1] in reached:
                return True
            if user not in reached and meta.is_tensor(user) and not meta.tensor(user).is_floating_point():
                reached.add(user)
                todo.append(user)
    return False


def _only_counted(choice: Choice, inputs: Mapping[Node, Input], static: frozenset[Node]) -> bool:
    """Whether the decision ends in sums over tokens without meeting a weight before: a balance statistic of a router.

    Its readers may use what the decision itself was made from, and what no parameter enters (a padding mask); an expert would
    bring a parameter in.
    """
    weights = {node for node, item in inputs.items() if item.kind is InputKind.PARAM}
    reached = {choice.node}
    for node in ir.behind(choice.node):
        if not reached.intersection(node.all_input_nodes):
            continue
        for other in set(node.all_input_nodes) - reached:
            if other in static:
                if ({other} | ir.ancestors(other)) & weights:
                    return False
            elif ir.ancestors_beyond(other, choice.node) & weights:
                return False
        if not _is_statistic(node, choice.num_tokens):
            reached.add(node)
    return True


def _is_statistic(node: Node, num_tokens: int) -> bool:
    """A sum over tokens: a scalar, or a reduction to fewer numbers than there are tokens."""
    if not meta.is_tensor(node):
        return False
    found = meta.tensor(node)
    size = found.numel()  # of an expert's tokens the number is not known
    return found.dim() == 0 or (node.target in _REDUCTIONS and isinstance(size, int) and size < num_tokens)


def _prepares_another(region: Region, proposal: Proposal, choices: list[Choice]) -> bool:
    """Whether the decision only narrows down a later one (groups of experts) that the same experts obey."""
    later = {other.node for other in choices if other.node in region.routed and other.node is not region.choice.node}
    users = [user for component in proposal.components for user in component.exit.users]
    return bool(later & ir.ancestors(*users)) if later and users else False
