"""Compute values of a region on probes: in float64 on the CPU, with the experts' results made by stand-ins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from moecompile import meta
from moecompile.recognition import rowwise
from moecompile.recognition.scale import Scale
from moecompile.recognition.stand_in import BodyStandIn


class UnknownError(Exception):
    """A value of the region cannot be computed from probes."""


@dataclass(frozen=True)
class Setup:
    """The region as the probes see it.

    ``inner`` is what depends on the experts' tokens or on the decision; other floating values are drawn at random, and
    so are products with weights, whose own operands then do not matter.
    """

    order: Mapping[Node, int]
    static: frozenset[Node]
    inner: frozenset[Node]
    constants: Mapping[str, torch.Tensor]

    def is_source(self, node: Node) -> bool:
        if node.op != "call_function":
            return True
        if rowwise.is_linear(node) and any(item in self.static for item in rowwise.tensor_inputs(node)):
            return True
        if node in self.inner or node in self.static or _is_made(node) or not meta.is_tensor(node):
            return False
        return meta.tensor(node).is_floating_point()

    def cone(self, outs: Iterable[Node], given: set[Node], computed: Mapping[Node, Any]) -> list[Node]:
        """What has to be computed for ``outs``, in graph order."""
        seen, todo = set(outs), list(outs)
        while todo:
            here = todo.pop()
            if here in given or (here not in computed and self.is_source(here)):
                continue
            for source in computed[here].needs if here in computed else here.all_input_nodes:
                if source not in seen:
                    seen.add(source)
                    todo.append(source)
        return sorted(seen, key=self.order.__getitem__)


class Evaluator:
    """Computes values of a region; ``drawn`` holds what was drawn, for gradients with respect to it."""

    def __init__(self, setup: Setup, scale: Scale, generator: torch.Generator) -> None:
        self.setup = setup
        self.scale = scale
        self.generator = generator
        self.drawn: dict[Node, torch.Tensor] = {}

    def run(
        self, outs: Iterable[Node], given: Mapping[Node, Any], computed: Mapping[Node, BodyStandIn]
    ) -> dict[Node, Any]:
        """Values of ``outs``. ``given`` are known; ``computed`` are the experts' results."""
        values: dict[Node, Any] = dict(given)
        for node in self.setup.cone(outs, set(given), computed):
            if node in values:
                continue
            if node in computed:
                values[node] = computed[node](values)
            elif self.setup.is_source(node):
                values[node] = self._draw(node)
            else:
                values[node] = self._call(node, values)
        return values

    def _draw(self, node: Node) -> Any:
        if node.name in self.setup.constants:
            return _double(self.setup.constants[node.name])
        if node not in self.drawn:
            found = node.meta.get("val")
            if not isinstance(found, torch.Tensor) or not all(isinstance(size, int) for size in found.shape):
                raise UnknownError(f"{meta.where(node)} has no size that is known")
            shape = self.scale.shape(found.shape)
            if found.is_floating_point():
                made = torch.rand(shape, generator=self.generator, dtype=torch.float64) + 0.1
                self.drawn[node] = made.requires_grad_()
            else:
                self.drawn[node] = torch.zeros(shape, dtype=found.dtype)
        return self.drawn[node]

    def _call(self, node: Node, values: dict[Node, Any]) -> Any:
        target: Any = node.target
        args, kwargs = self.scale.arguments(node, (node.args, node.kwargs))
        try:
            made = target(*_resolved(args, values), **_resolved(kwargs, values))
        except Exception as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise UnknownError(f"{meta.where(node)} ({target}) could not be tried on probes: {first}") from error
        return torch.zeros_like(made) if target in _EMPTY else made  # never written elements mean nothing


aten = torch.ops.aten
# Only the shape of their operand counts, so they are computed even where that is drawn.
_MADE = frozenset(
    {
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.empty_like.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
        aten.new_empty.default,
    }
)
_EMPTY = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.empty_strided.default,
        aten.new_empty_strided.default,
    }
)


def _is_made(node: Node) -> bool:
    """Whether a value is filled with a number, whatever it is shaped like, or a view of such a value."""
    while node.target in rowwise.RESHAPES | rowwise.AXES and isinstance(node.args[0], Node):
        node = node.args[0]
    return node.target in _MADE


def _resolved(item: Any, values: Mapping[Node, Any]) -> Any:
    """An argument with its values; probes run in float64 on the CPU, whatever the model's types and devices."""
    if isinstance(item, Node):
        return values[item]
    if isinstance(item, (list, tuple)):
        return [_resolved(part, values) for part in item]
    if isinstance(item, dict):
        return {key: _resolved(part, values) for key, part in item.items()}
    if isinstance(item, torch.dtype):
        return torch.float64 if item.is_floating_point else item
    return torch.device("cpu") if isinstance(item, torch.device) else item


def _double(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().to("cpu")
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor
