"""Write joined ops out again as the ops that they stand for, so that every check reads them by the rules of those."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .. import graph as graphs
from .. import meta
from ..compat import OpOverload
from ..ops import cpu
from ..program import Program

_JOINED = (cpu.grouped_mlp, cpu.grouped_mlp_backward)


def expanded(program: Program) -> Program:
    """The program with every grouped_mlp and its backward written out; the program itself where it has none."""
    if not graphs.find(program.graph, *_JOINED):
        return program
    made, env = Graph(), dict[Node, Any]()
    for node in program.graph.nodes:
        if node.target is operator.getitem and isinstance(env[node.args[0]], list):
            env[node] = env[node.args[0]][node.args[1]]
        elif node.target in _JOINED:
            args = [env[arg] for arg in node.args]
            env[node] = (_forward if node.target is cpu.grouped_mlp else _backward)(_Writer(made, node), *args)
        else:
            env[node] = made.node_copy(node, env.__getitem__)
            env[node].meta = meta.copy_meta(node)
    module = GraphModule(program.graph_module, made)
    module.meta = dict(program.graph_module.meta)
    return dataclasses.replace(program, graph_module=module)


@dataclasses.dataclass
class _Writer:
    """Writes calls in place of ``origin``."""

    graph: Graph
    origin: Node

    def __call__(self, target: OpOverload[..., Any], *args: Any) -> Node:
        return graphs.call(self.graph, target, *args, like=self.origin)


def _forward(write: _Writer, rows: Node, counts: Node, w_in: Node, w_out: Node) -> list[Node]:
    h = write(cpu.grouped_linear, rows, counts, w_in)
    return [write(cpu.grouped_linear, write(cpu.swiglu, h), counts, w_out), h]


def _backward(write: _Writer, grad: Node, rows: Node, counts: Node, w_in: Node, w_out: Node, h: Node) -> list[Node]:
    slope = write(cpu.grouped_linear, grad, counts, write(torch.ops.aten.transpose.int, w_out, 1, 2))
    grad_h = write(cpu.swiglu_backward, slope, h)
    grad_out = write(cpu.grouped_linear_wgrad, grad, write(cpu.swiglu, h), counts)
    return [
        write(cpu.grouped_linear, grad_h, counts, write(torch.ops.aten.transpose.int, w_in, 1, 2)),
        write(cpu.grouped_linear_wgrad, grad_h, rows, counts),
        grad_out,
    ]
