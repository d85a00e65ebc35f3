"""Trace one segment forward and backward into a joint graph that serves every segment of its structure."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.fx.traceback import preserve_node_meta, set_current_meta

from .. import graph as graphs
from .. import meta, ops
from ..compat import (
    FakeTensorMode,
    OpOverload,
    TracingContext,
    code_when_asked,
    functionalized,
    get_proxy_mode,
    make_fx,
    setup_stacktrace_preservation_hooks,
    tracing,
    tree_flatten,
    without_new_symbols,
)
from ..errors import PassError
from .segments import Segment

aten = torch.ops.aten


@dataclass
class Template:
    """A joint graph. ``gradients[i]`` belongs to the segment's ``inputs[i]``, None where there is none.

    ``layer`` is the module path of the layer that was traced; copies are of other layers. ``values[i]`` is what the segment's
    ``nodes[i]`` has become, None where nothing was left of it.
    """

    inputs: list[Node]
    cotangents: list[Node]
    forward: list[Node]
    backward: list[Node]
    outputs: list[Any]
    gradients: list[Any]
    values: list[Node | None]
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
    early: set[str] = set()  # names of the forward's nodes; make_fx drops some of them afterwards

    def joint(values: list[Any], cotangents: list[torch.Tensor]) -> tuple[list[Any], list[Any], list[Any]]:
        env = _run(segment, values)
        outputs, known = [env[node] for node in segment.outputs], [env[node] for node in segment.nodes]
        if not seeded or not wanted:
            return outputs, [None] * len(wanted), known
        heads = [env[node] for node in seeded]
        setup_stacktrace_preservation_hooks([head.grad_fn for head in heads])
        early.update(node.name for node in _current_graph().nodes)
        grads = torch.autograd.grad(heads, [values[index] for index in wanted], cotangents, allow_unused=True)
        return outputs, list(grads), known

    leaves = [_leaf(node, need, mode) for node, need in zip(segment.inputs, inputs, strict=True)]
    cotangents = [_leaf(node, False, mode) for node in seeded]

    def record(function: Callable[..., Any]) -> Graph:
        early.clear()
        with (
            code_when_asked(),
            mode,
            tracing(TracingContext(mode)),
            preserve_node_meta(),
            torch.enable_grad(),
            torch.autograd.set_multithreading_enabled(False),
        ):
            return make_fx(function)(leaves, cotangents).graph

    graph = record(joint)
    if _writing(graph) is not None:  # formulas of some gradients fill a tensor of their own in place
        graph = record(functionalized(joint))
    node = _writing(graph)
    if node is not None:
        raise PassError(
            f"differentiate: {meta.where(node)} writes in place in its gradient ({node.target}), which has no functional form; rewrite "
            "the line with other operations, or run it in a torch.autograd.Function whose backward writes nothing in place."
        )
    return _read(segment, graph, inputs, len(leaves), early)


def _writing(graph: Graph) -> Node | None:
    """The first node that changes a tensor in place."""
    calls = (node for node in graph.nodes if isinstance(node.target, OpOverload))
    return next((node for node in calls if node.target._schema.is_mutable), None)


def _current_graph() -> Graph:
    """The graph being recorded by the innermost proxy mode."""
    mode = get_proxy_mode()
    assert mode is not None
    return mode.tracer.graph


def _read(segment: Segment, graph: Graph, inputs: Sequence[bool], num_inputs: int, early: set[str]) -> Template:
    """Split the traced nodes by direction and name their twins."""
    nodes = list(graph.nodes)
    late = {node for node in nodes if early and node.name not in early}
    flat = iter(tree_flatten(graph.output_node().args[0])[0])
    outputs, grads = list(islice(flat, len(segment.outputs))), list(islice(flat, sum(inputs)))
    values = [list(islice(flat, len(tree_flatten(meta.value(node))[0]))) for node in segment.nodes]
    graph.output_node().args = ((outputs, grads),)  # a value is no reason to keep a node
    graphs.eliminate_dead(graph)
    kept = list(graph.nodes)
    placeholders = [node for node in kept if node.op == "placeholder"]
    calls = [node for node in kept if node.op == "call_function"]
    forward = [node for node in calls if node not in late]
    backward = [node for node in calls if node in late]
    _tag(forward, backward)
    _loosen_views(calls)
    found = iter(grads)
    gradients = [next(found) if need else None for need in inputs]
    return Template(
        placeholders[:num_inputs],
        placeholders[num_inputs:],
        forward,
        backward,
        outputs,
        gradients,
        [_made_of(node, value, set(kept)) for node, value in zip(segment.nodes, values, strict=True)],
        segment.layer,
    )


def _made_of(node: Node, leaves: list[Any], kept: set[Node]) -> Node | None:
    """The traced node that holds the value of ``node``; for a tuple the one call that gave all its elements."""
    found = leaves[0] if leaves else None
    if isinstance(meta.value(node), (tuple, list)):
        sources = {item.args[0] for item in leaves if isinstance(item, Node) and item.target is operator.getitem}
        found = sources.pop() if len(sources) == 1 else None
        found = found if isinstance(found, Node) and found.target is node.target else None
    return found if isinstance(found, Node) and found in kept else None


def _loosen_views(nodes: list[Node]) -> None:
    """Copy where a view may fail: elementwise kernels keep the memory order of an operand where their fake rules promise another.

    Known of ``softplus_backward``; asked of every elementwise op and backward that reads a value that is not contiguous.
    """
    for node in nodes:
        source = node.args[0] if node.target is aten.view.default else None
        if isinstance(source, Node) and isinstance(source.target, OpOverload):
            elementwise = torch.Tag.pointwise in source.target.tags or str(source.target).endswith("_backward.default")
            if elementwise and any(_is_scattered(item) for item in source.all_input_nodes):
                node.target = aten.reshape.default


def _is_scattered(node: Node) -> bool:
    """Whether a tensor of known sizes is not contiguous."""
    found = node.meta.get("val")
    if not isinstance(found, torch.Tensor) or any(True for _ in graphs.symbolic_sizes(found)):
        return False
    return not found.is_contiguous()


def _tag(forward: list[Node], backward: list[Node]) -> None:
    """Backward nodes take module and source of the forward node with their autograd sequence number."""
    by_number: dict[int, list[Node]] = {}
    for node in forward:
        meta.set_direction(node, meta.Direction.FORWARD)
        number = node.meta.get("seq_nr")
        if number is not None:
            by_number.setdefault(number, []).append(node)
    for node in backward:
        meta.set_direction(node, meta.Direction.BACKWARD)
        sources = by_number.get(node.meta.get("seq_nr", -1))
        if sources:
            # ops without gradient share the number of the one before them: the op tells whose gradient this is
            transposed = [one for one in sources if ops.TRANSPOSE.get(one.target) is node.target]  # type: ignore[call-overload]
            source = transposed[0] if transposed else sources[-1]
            meta.set_twin(node, source.name)
            if transposed:
                meta.mark_differentiated(source)
            for key in ("nn_module_stack", "stack_trace"):
                if key in source.meta:
                    node.meta[key] = source.meta[key]
