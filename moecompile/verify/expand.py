"""Write joined ops out again as the ops that they stand for, so that every check reads them by the rules of those.

The same for tensors that travel in one collective: a gather or scatter of rows that lie side by side is one of each of them. For
gradients whose ops say nothing one by one a call that does stands, see `adjoints`.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from .. import graph as graphs
from .. import meta, ops
from ..compat import OpOverload
from ..ops import cpu
from ..program import Program
from .adjoints import adjoints

aten = torch.ops.aten
_BUCKETED = (ops.all_gather, ops.reduce_scatter)


def expanded(program: Program) -> Program:
    """The program with every joined op, every bucket and such gradients written out; itself if it has none."""
    buckets = {
        node: source for node in graphs.find(program.graph, *_BUCKETED) if (source := _joined_in(node)) is not None
    }
    formulas = adjoints(program.graph)
    within = frozenset[Node]().union(*(formula.inner for formula in formulas.values()))
    if not buckets and not formulas and not graphs.find(program.graph, *_JOINED):
        return program
    made, env = Graph(), dict[Node, Any]()
    for node in program.graph.nodes:
        if node.target is operator.getitem and isinstance(env[node.args[0]], list):
            env[node] = env[node.args[0]][node.args[1]]
        elif node in buckets.values() or node in within:
            continue  # read by what is written out alone
        elif node in formulas:
            formula = formulas[node]
            env[node] = formula.write(_Writer(made, node), *(env[operand] for operand in formula.operands))
        elif node in buckets:
            write = _Writer(made, node)
            members: Any = buckets[node].args[0]
            env[node] = [write(node.target, env[member], *node.args[1:]) for member in members]
            env[next(iter(node.users))] = env[node]
        elif node in env:
            continue
        elif node.target in _JOINED:
            env[node] = _JOINED[node.target](_Writer(made, node), *(env.get(arg, arg) for arg in node.args))
        else:
            env[node] = made.node_copy(node, env.__getitem__)
            env[node].meta = meta.copy_meta(node)
    module = graphs.as_module(made, program.graph_module)
    module.meta = dict(program.graph_module.meta)
    return dataclasses.replace(program, graph_module=module)


def _joined_in(node: Node) -> Node | None:
    """The ``cat`` along dim 1 that a collective over dim 0 takes, if its result is taken apart into the same columns."""
    source, users = node.args[0], list(node.users)
    if not isinstance(source, Node) or source.target is not aten.cat.default or source.args[1:] != (1,):
        return None
    if len(users) != 1 or len(source.users) != 1 or users[0].target is not aten.split_with_sizes.default:
        return None
    members: Any = source.args[0]
    widths = [meta.tensor(member).shape[1] for member in members]
    return source if users[0].args[1:] == (widths, 1) else None


@dataclasses.dataclass
class _Writer:
    """Writes calls in place of ``origin``."""

    graph: Graph
    origin: Node

    def __call__(self, target: OpOverload[..., Any], *args: Any, **kwargs: Any) -> Node:
        return graphs.call(self.graph, target, *args, like=self.origin, **kwargs)

    def items(self, target: OpOverload[..., Any], *args: Any, **kwargs: Any) -> list[Node]:
        """What a call that returns a tuple returns."""
        return graphs.unpack(self.graph, self(target, *args, **kwargs))


def _mlp(write: _Writer, rows: Node, counts: Node, w_in: Node, w_out: Node) -> list[Node]:
    h = write(cpu.grouped_linear, rows, counts, w_in)
    return [write(cpu.grouped_linear, write(cpu.swiglu, h), counts, w_out), h]


def _mlp_backward(write: _Writer, grad: Node, rows: Node, counts: Node, w_in: Node, w_out: Node, h: Node) -> list[Node]:
    slope = write(cpu.grouped_linear, grad, counts, write(torch.ops.aten.transpose.int, w_out, 1, 2))
    grad_h = write(cpu.swiglu_backward, slope, h)
    grad_out = write(cpu.grouped_linear_wgrad, grad, write(cpu.swiglu, h), counts)
    return [
        write(cpu.grouped_linear, grad_h, counts, write(torch.ops.aten.transpose.int, w_in, 1, 2)),
        write(cpu.grouped_linear_wgrad, grad_h, rows, counts),
        grad_out,
    ]


def _attention(write: _Writer, query: Node, key: Node, value: Node, scale: float) -> list[Node]:
    """The logarithms of sums stand for the probabilities: the backward that reads them is written out, too."""
    return write.items(
        aten._scaled_dot_product_flash_attention_for_cpu.default, query, key, value, 0.0, True, scale=scale
    )


def _attention_backward(
    write: _Writer, grad: Node, query: Node, key: Node, value: Node, out: Node, probs: Node, scale: float
) -> list[Node]:
    flash = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return write.items(flash, grad, query, key, value, out, probs, 0.0, True, scale=scale)


_JOINED: dict[Any, Callable[..., list[Node]]] = {
    cpu.grouped_mlp: _mlp,
    cpu.grouped_mlp_backward: _mlp_backward,
    cpu.causal_attention: _attention,
    cpu.causal_attention_backward: _attention_backward,
}
