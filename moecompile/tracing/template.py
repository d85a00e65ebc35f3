"""Trace one segment forward and backward into a joint graph that serves every segment of its structure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.fx.traceback import preserve_node_meta, set_current_meta

from .. import graph as graphs
from .. import meta, ops
from ..compat import (
    FakeTensorMode,
    TracingContext,
    get_proxy_mode,
    make_fx,
    setup_stacktrace_preservation_hooks,
    tracing,
    without_new_symbols,
)
from .segments import Segment


@dataclass
class Template:
    """A joint graph. ``gradients[i]`` belongs to the segment's ``inputs[i]``, None where there is none.

    ``layer`` is the module path of the layer that was traced; copies are of other layers.
    """

    inputs: list[Node]
    cotangents: list[Node]
    forward: list[Node]
    backward: list[Node]
    outputs: list[Any]
    gradients: list[Any]
    layer: str | None = None


def _leaf(node: Node, needs_grad: bool, mode: FakeTensorMode) -> Any:
    """A fresh fake leaf with the value's shape; sizes and tuples pass as they are."""
    found = meta.value(node)
    if not isinstance(found, torch.Tensor):
        return found
    with mode:
        return torch.empty_strided(
            found.shape, found.stride(), dtype=found.dtype, device=found.device, requires_grad=needs_grad
        )


def _run(segment: Segment, values: Sequence[Any]) -> dict[Node, Any]:
    """Interpret the segment; each call is made under its node's metadata, which the traced nodes inherit."""
    env: dict[Node, Any] = dict(zip(segment.inputs, values, strict=True))
    for node in segment.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
        with set_current_meta(node):
            env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return env


def needs_grad(segment: Segment, inputs: Sequence[bool], mode: FakeTensorMode) -> list[bool]:
    """Which outputs depend differentiably on the inputs marked True."""
    with mode, torch.enable_grad(), without_new_symbols(mode):
        env = _run(segment, [_leaf(node, need, mode) for node, need in zip(segment.inputs, inputs, strict=True)])
    return [isinstance(env[node], torch.Tensor) and env[node].requires_grad for node in segment.outputs]


def trace(segment: Segment, inputs: Sequence[bool], seeds: Sequence[bool], mode: FakeTensorMode) -> Template:
    """Joint trace: gradients for the inputs marked True, given one cotangent for each output marked True."""
    wanted = [index for index, need in enumerate(inputs) if need]
    seeded = [node for node, seed in zip(segment.outputs, seeds, strict=True) if seed]
    border: list[int] = []

    def joint(values: list[Any], cotangents: list[torch.Tensor]) -> tuple[list[Any], list[Any]]:
        env = _run(segment, values)
        outputs = [env[node] for node in segment.outputs]
        if not seeded or not wanted:
            return outputs, [None] * len(wanted)
        heads = [env[node] for node in seeded]
        setup_stacktrace_preservation_hooks([head.grad_fn for head in heads])
        border.append(len(_current_graph().nodes))
        grads = torch.autograd.grad(heads, [values[index] for index in wanted], cotangents, allow_unused=True)
        return outputs, list(grads)

    leaves = [_leaf(node, need, mode) for node, need in zip(segment.inputs, inputs, strict=True)]
    cotangents = [_leaf(node, False, mode) for node in seeded]
    context = TracingContext(mode)
    with (
        mode,
        tracing(context),
        preserve_node_meta(),
        torch.enable_grad(),
        torch.autograd.set_multithreading_enabled(False),
    ):
        traced = make_fx(joint)(leaves, cotangents)
    return _read(segment, traced.graph, inputs, len(leaves), border)


def _current_graph() -> Graph:
    """The graph being recorded by the innermost proxy mode."""
    mode = get_proxy_mode()
    assert mode is not None
    return mode.tracer.graph


def _read(segment: Segment, graph: Graph, inputs: Sequence[bool], num_inputs: int, border: list[int]) -> Template:
    """Split the traced nodes by direction and name their twins."""
    nodes = list(graph.nodes)
    at_border = border[0] if border else len(nodes)
    late = set(nodes[at_border:])
    graphs.eliminate_dead(graph)
    kept = list(graph.nodes)
    placeholders = [node for node in kept if node.op == "placeholder"]
    calls = [node for node in kept if node.op == "call_function"]
    forward = [node for node in calls if node not in late]
    backward = [node for node in calls if node in late]
    _tag(forward, backward)
    flat: Any = graph.output_node().args[0]
    outputs, grads = flat[: len(segment.outputs)], list(flat[len(segment.outputs) :])
    if outputs and isinstance(flat[0], (list, tuple)):
        outputs, grads = list(flat[0]), list(flat[1])
    found = iter(grads)
    gradients = [next(found) if need else None for need in inputs]
    return Template(
        placeholders[:num_inputs],
        placeholders[num_inputs:],
        forward,
        backward,
        list(outputs),
        gradients,
        segment.layer,
    )


def _tag(forward: list[Node], backward: list[Node]) -> None:
    """Backward nodes take module and source of the forward node with their autograd sequence number."""
    by_number: dict[int, Node] = {}
    for node in forward:
        meta.set_direction(node, meta.Direction.FORWARD)
        number = node.meta.get("seq_nr")
        if number is not None:
            by_number[number] = node
    for node in backward:
        meta.set_direction(node, meta.Direction.BACKWARD)
        source = by_number.get(node.meta.get("seq_nr", -1))
        if source is not None:
            meta.set_twin(node, source.name)
            # other nodes may share the number, so only the op tells whose gradient this is
            if ops.TRANSPOSE.get(source.target) is node.target:  # type: ignore[call-overload]
                meta.mark_differentiated(source)
            for key in ("nn_module_stack", "stack_trace"):
                if key in source.meta:
                    node.meta[key] = source.meta[key]
