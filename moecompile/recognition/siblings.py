"""Layers of the same structure are read once: what was proved of the first holds of the others, node by node.

A layer is a segment of the graph, as in differentiation. Two are alike if their calls, the types of their values and the kinds
of their inputs are, and constants hold the same numbers. What an MoE layer means follows from the calls between its decision and
its result, so a finding is handed on only where all of it lies inside the segment.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from moecompile.errors import PassError
from moecompile.program import Input
from moecompile.recognition.choices import Choice
from moecompile.recognition.reader import Layer
from moecompile.tracing.segments import Segment, split_segments


class Siblings:
    """Remembers what was found in one segment, for those that are like it. The graph must not change meanwhile."""

    def __init__(
        self,
        graph: Graph,
        inputs: Mapping[Node, Input],
        constants: Mapping[str, torch.Tensor],
        static: frozenset[Node],
        choices: list[Choice],
    ) -> None:
        self._inputs, self._constants, self._static = inputs, constants, static
        self._segments: dict[
            Node, tuple[Segment, Segment]
        ] = {}  # of a decision: its segment, and the first one like it
        self._found: dict[Node, tuple[Choice, list[Layer]]] = {}
        if len(choices) < 2:
            return
        try:
            segments = split_segments(graph)
        except PassError:  # rows of several layers depend on each other: each decision is read by itself
            return
        decisions = {choice.node for choice in choices}
        first: dict[Any, Segment] = {}
        for segment in segments:
            inside = decisions.intersection(segment.nodes)
            if inside and (key := self._key(segment)) is not None:
                self._segments.update(dict.fromkeys(inside, (segment, first.setdefault(key, segment))))

    def remember(self, choice: Choice, layers: list[Layer]) -> None:
        """These layers were found for a decision."""
        if choice.node in self._segments and layers:
            self._found[choice.node] = choice, layers

    def known(self, choice: Choice) -> list[Layer]:
        """The layers of a decision as they follow from those of a sibling; none where there is no such thing."""
        if choice.node not in self._segments:
            return []
        segment, first = self._segments[choice.node]
        at = segment.nodes.index(choice.node)
        if first is segment or first.nodes[at] not in self._found:
            return []
        before, layers = self._found[first.nodes[at]]
        nodes = dict(zip([*first.nodes, *first.inputs], [*segment.nodes, *segment.inputs], strict=True))
        inside = set(first.nodes)
        try:
            if _moved(before, nodes) != choice or not all(_lies_in(layer, first, inside) for layer in layers):
                return []
            return [_moved(layer, nodes) for layer in layers]
        except KeyError:  # a part of the layer lies elsewhere
            return []

    def _key(self, segment: Segment) -> Any:
        """Equal for segments that are alike; None for one that is like no other."""
        kinds = []
        for node in segment.inputs:
            item = self._inputs.get(node)
            if item is None and node in self._static:
                return None  # computed from weights somewhere else, in a way that may differ
            held = None if item is None else (item.kind, item.requires_grad, item.placements, self._digest(node))
            kinds.append(held)
        return segment.structure(), tuple(kinds)

    def _digest(self, node: Node) -> str | None:
        found = self._constants.get(node.name)
        if found is None or found.is_meta:
            return None if found is None else node.name
        data = found.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def _lies_in(layer: Layer, segment: Segment, inside: set[Node]) -> bool:
    """Whether all that the layer's meaning was derived from lies in the segment: nothing leaves it and comes back."""
    tokens = layer.match.tokens
    starts = [node for node in segment.inputs if node.op != "placeholder"]
    return layer.match.result in inside and (tokens in inside or all(not tokens < node for node in starts))


def _moved(found: Any, nodes: Mapping[Node, Node]) -> Any:
    """The same with other nodes; KeyError for a node that has no counterpart."""
    if isinstance(found, Node):
        return nodes[found]
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        values = {item.name: _moved(getattr(found, item.name), nodes) for item in dataclasses.fields(found)}
        return dataclasses.replace(found, **values)
    if isinstance(found, dict):
        return {_moved(key, nodes): _moved(value, nodes) for key, value in found.items()}
    if isinstance(found, (list, tuple, set, frozenset)):
        return type(found)(_moved(item, nodes) for item in found)
    return found
