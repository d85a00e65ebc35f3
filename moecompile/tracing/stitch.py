"""Put templates together to the step graph of the whole model."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from .. import graph as graphs
from .. import meta
from ..compat import FakeTensorMode, empty_fake, tree_map, without_new_symbols
from .segments import Segment
from .template import Template, needs_grad, trace

aten = torch.ops.aten


class Stitcher:
    """Builds the joint graph: forward bodies in order, then backward bodies in reverse."""

    def __init__(self, source: Graph, segments: list[Segment], mode: FakeTensorMode) -> None:
        self.source, self.segments, self.mode = source, segments, mode
        self.graph = Graph()
        self.env: dict[Node, Node] = {}
        self.grads: dict[Node, list[Node]] = {}
        self._needs: dict[tuple[str, tuple[bool, ...]], list[bool]] = {}
        self._templates: dict[tuple[str, tuple[bool, ...], tuple[bool, ...]], Template] = {}

    def run(self, loss: Node, trained: set[Node]) -> list[Node]:
        """Returns the parameters that have a gradient, in placeholder order."""
        for node in self.source.nodes:
            if node.op == "placeholder":
                self.env[node] = self.graph.node_copy(node)
                self.env[node].meta = meta.copy_meta(node)
        chosen = self._choose(loss, trained)
        local = [self._copy_forward(segment, template) for segment, template in zip(self.segments, chosen, strict=True)]
        with_loss = next(at for at, segment in enumerate(self.segments) if loss in segment.outputs)
        self._seed(loss)
        for at in range(with_loss, -1, -1):
            self._copy_backward(self.segments[at], chosen[at], local[at])
        return [node for node in self.source.nodes if node in trained and node in self.grads]

    def gradient(self, node: Node) -> Node:
        """The sum of what the readers of a value contributed; a later stage sends its part to an earlier one, never the other way."""
        parts = self.grads[node] = sorted(self.grads[node], key=lambda part: -(meta.stage(part) or 0))
        while len(parts) > 1:
            added = graphs.call(self.graph, aten.add.Tensor, parts[0], parts[1], like=parts[0], mode=self.mode)
            meta.set_direction(added, meta.Direction.BACKWARD)
            meta.set_stage(added, meta.stage(parts[1]))
            parts[:2] = [added]
        return parts[0]

    # -- choosing templates: what needs a gradient flows forward, what gets one flows backward -----------------------
    def _choose(self, loss: Node, trained: set[Node]) -> list[Template]:
        needs: dict[Node, bool] = dict.fromkeys(trained, True)
        structures = [segment.structure() for segment in self.segments]
        for segment, structure in zip(self.segments, structures, strict=True):
            pattern = tuple(needs.get(node, False) for node in segment.inputs)
            key = (structure, pattern)
            if key not in self._needs:
                self._needs[key] = needs_grad(segment, pattern, self.mode)
            needs.update(zip(segment.outputs, self._needs[key], strict=True))
        seeded: set[Node] = {loss}
        chosen: list[Template] = []
        for segment, structure in reversed(list(zip(self.segments, structures, strict=True))):
            pattern = tuple(needs.get(node, False) for node in segment.inputs)
            seeds = tuple(node in seeded and needs[node] for node in segment.outputs)
            full = (structure, pattern, seeds)
            if full not in self._templates:
                self._templates[full] = trace(segment, pattern, seeds, self.mode)
            template = self._templates[full]
            seeded |= {
                node for node, grad in zip(segment.inputs, template.gradients, strict=True) if isinstance(grad, Node)
            }
            chosen.append(template)
        return chosen[::-1]

    # -- copying -----------------------------------------------------------------------------------------------------
    def _copy_forward(self, segment: Segment, template: Template) -> _Instance:
        local = _Instance(self.graph, self.mode, {}, template.layer, segment.layer, segment.stage)
        for slot, node in zip(template.inputs, segment.inputs, strict=True):
            local.env[slot] = self.env[node]
        local.copy(template.forward)
        for node, found in zip(segment.outputs, template.outputs, strict=True):
            self.env[node] = local.env[found]
        for node, value in zip(segment.nodes, template.values, strict=True):
            if value in local.env:  # the template may stand for a segment that lives elsewhere
                meta.copy_placements(local.env[value], node)
        return local

    def _seed(self, loss: Node) -> None:
        value = meta.tensor(loss)
        with self.mode:
            one = torch.ones((), dtype=value.dtype, device=value.device)
        options: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
        seed = self.graph.create_node("call_function", aten.ones.default, ([],), options, name="ones")
        seed.meta["val"] = one
        meta.set_direction(seed, meta.Direction.BACKWARD)
        meta.set_stage(seed, meta.stage(loss))
        self.grads[loss] = [seed]

    def _copy_backward(self, segment: Segment, template: Template, local: _Instance) -> None:
        seeded = [node for node in segment.outputs if node in self.grads]
        for slot, node in zip(template.cotangents, seeded, strict=True):
            local.env[slot] = self._laid_out_as(slot, self.gradient(node))
        local.copy(template.backward)
        for node, grad in zip(segment.inputs, template.gradients, strict=True):
            if isinstance(grad, Node):
                self.grads.setdefault(node, []).append(local.env[grad])

    def _laid_out_as(self, slot: Node, grad: Node) -> Node:
        """The gradient in the memory order that the template was traced for: its views of it would fail in another one."""
        wanted, found = meta.tensor(slot), meta.tensor(grad)
        same = [str(step) for step in wanted.stride()] == [str(step) for step in found.stride()]
        if same or not wanted.is_contiguous() or found.is_contiguous():
            return grad
        made = graphs.call(self.graph, aten.contiguous.default, grad, like=grad, mode=self.mode)
        meta.set_direction(made, meta.Direction.BACKWARD)
        return made


class _Instance:
    """One copy of a template, with unbacked sizes of its own."""

    def __init__(
        self,
        graph: Graph,
        mode: FakeTensorMode,
        env: dict[Node, Node],
        template_layer: str | None,
        layer: str | None,
        stage: int | None,
    ) -> None:
        self.graph, self.mode, self.env, self.stage = graph, mode, env, stage
        self.template_layer, self.layer = template_layer, layer
        self._symbols: dict[Any, torch.SymInt] = {}
        self._made: dict[Any, torch.Tensor] = {}
        self._names: dict[str, str] = {}

    def copy(self, nodes: list[Node]) -> None:
        for node in nodes:
            made = self.graph.node_copy(node, self.env.__getitem__)
            made.meta = meta.copy_meta(node)
            meta.set_stage(made, self.stage)
            self._names[node.name] = made.name
            twin = meta.twin(node)
            if twin is not None and twin in self._names:
                meta.set_twin(made, self._names[twin])
            if self.template_layer and self.layer and self.template_layer != self.layer:
                meta.move_modules(made, self.template_layer, self.layer)
            if any(True for _ in graphs.symbolic_sizes(node.meta.get("val"))):
                made.meta["val"] = tree_map(self._fresh, node.meta["val"])
            self.env[node] = made

    def _fresh(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.SymInt):
            return self._size(leaf)
        if isinstance(leaf, torch.Tensor):
            shape, stride = [self._size(size) for size in leaf.shape], [self._size(size) for size in leaf.stride()]
            key = (str(shape), str(stride), leaf.dtype, leaf.device)
            if key not in self._made:
                made = empty_fake(self.mode, shape, stride, leaf.dtype, leaf.device)
                if not leaf.is_floating_point():
                    return made  # it may come to remember a size that was read from it
                self._made[key] = made
            return self._made[key]
        return leaf

    def _size(self, size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return size
        shape_env = self.mode.shape_env
        assert shape_env is not None
        expression = size.node.expr
        for symbol in expression.free_symbols:
            if symbol not in self._symbols:
                with without_new_symbols(self.mode):
                    self._symbols[symbol] = shape_env.create_unbacked_symint()
                torch._check(self._symbols[symbol] >= 0)  # type: ignore[no-untyped-call]
        replaced = expression.subs({symbol: self._symbols[symbol].node.expr for symbol in expression.free_symbols})
        if replaced.is_Integer:
            return int(replaced)
        return shape_env.create_symintnode(replaced, hint=None)


def stitch(
    source: Graph, segments: list[Segment], loss: Node, trained: set[Node], mode: FakeTensorMode
) -> tuple[Graph, list[Node]]:
    """The joint graph with all old outputs and one gradient per trained parameter; returns these parameters in order."""
    work = Stitcher(source, segments, mode)
    with_grad = work.run(loss, trained)
    results: list[Any] = list(source.output_node().args[0])  # type: ignore[arg-type]
    outputs = [work.env[found] if isinstance(found, Node) else found for found in results]
    gradients = [work.gradient(node) for node in with_grad]
    work.graph.output(tuple(outputs + gradients))
    graphs.eliminate_dead(work.graph)
    return work.graph, with_grad
