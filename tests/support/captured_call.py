"""Run a captured graph on real tensors, and compare it with the plain model: output, loss and every gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_flatten, tree_leaves

from moecompile import meta
from moecompile.capture import Captured
from moecompile.program import InputKind, OutputKind


def run_captured(captured: Captured, model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """The graph's outputs on the model's own parameters and copies of its buffers, with autograd."""
    params = dict(model.named_parameters(remove_duplicate=False))
    buffers = {name: value.detach().clone() for name, value in model.named_buffers(remove_duplicate=False)}
    leaves, _ = tree_flatten((args, kwargs))
    values = []
    for item in captured.inputs:
        if item.kind is InputKind.PARAM:
            values.append(params[item.fqns[0]])
        elif item.kind is InputKind.BUFFER:
            values.append(buffers[item.fqns[0]])
        elif item.kind is InputKind.CONSTANT:
            values.append(captured.constants[item.name])
        else:
            assert item.kind is InputKind.BATCH
            values.append(leaves[item.leaf])
    return torch.fx.Interpreter(captured.graph_module).run(*values)


def copied(captured: Captured) -> Captured:
    """The same capture with a graph of its own, which passes may rewrite."""
    graph, env = Graph(), dict[Node, Node]()
    for node in captured.graph_module.graph.nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
        env[node].meta = meta.copy_meta(node)
    made = GraphModule(captured.graph_module, graph)
    made.meta = dict(captured.graph_module.meta)
    return dataclasses.replace(captured, graph_module=made, constants=dict(captured.constants))


def assert_close(name: str, found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    """Largest difference relative to the reference's largest entry; NaN, inf and other shapes are errors."""
    assert found.shape == wanted.shape and found.dtype == wanted.dtype, (name, found.shape, wanted.shape)
    assert torch.isfinite(wanted).all() and torch.isfinite(found).all(), f"{name} is not finite"
    scale = float(wanted.abs().max()) if wanted.numel() else 0.0
    error = float((found - wanted).abs().max()) if wanted.numel() else 0.0
    assert error <= tolerance * max(scale, 1e-6), f"{name}: error {error:.3e} at scale {scale:.3e}"


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor | None]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    found = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def assert_matches_eager(
    captured: Captured,
    model: nn.Module,
    *args: Any,
    loss_of: Callable[[Any], torch.Tensor] = lambda out: out.loss,
    tolerance: float = 1e-5,
    **kwargs: Any,
) -> None:
    """The graph and the plain model agree on this call and the buffers behind it; at least one gradient must be there."""
    held = {name: value.detach().clone() for name, value in model.named_buffers()}
    outs = run_captured(captured, model, *args, **kwargs)
    wanted = model(*args, **kwargs)
    for item, out in zip(captured.outputs, outs, strict=True):
        if item.kind is OutputKind.BUFFER:
            held[item.name] = out
    for name, value in model.named_buffers():
        assert_close(f"buffer {name}", held[name].detach(), value.detach(), tolerance)
    found = captured.rebuild(outs)
    for index, (one, other) in enumerate(zip(tree_leaves(found), tree_leaves(wanted), strict=True)):
        if isinstance(other, torch.Tensor):
            assert_close(f"output {index}", one.detach(), other.detach(), tolerance)
        else:
            assert one == other
    eager = gradients(model, loss_of(wanted))
    loss = outs[captured.loss_index] if captured.loss_index is not None else loss_of(found)
    graph = gradients(model, loss)
    compared = 0
    for name, reference in eager.items():
        if reference is None:
            # An expert that no token chose has no gradient in eager and a zero one in the graph.
            assert graph[name] is None or not graph[name].any(), name
            continue
        assert graph[name] is not None, f"{name} got no gradient"
        assert_close(f"gradient of {name}", graph[name], reference, tolerance)
        compared += bool(reference.any())
    assert compared > 0


def targets(captured: Captured) -> list[str]:
    """The operators of the graph in order, as text."""
    return [str(node.target) for node in captured.graph_module.graph.nodes if node.op == "call_function"]
