"""Nodes, interface and sizes: what any graph of ours has to look like."""

from __future__ import annotations

from typing import Any

import torch

from ..compat import HigherOrderOperator, OpOverload
from ..errors import VerifyError
from ..graph import symbolic_sizes
from ..program import Program
from .report import fault


def check_structure(program: Program) -> None:
    """Interface in step with the graph, values everywhere, sizes read before use, nothing shared by accident."""
    _check_interface(program)
    _check_nodes(program)
    _check_symbols(program)
    _check_meta(program)


def _check_interface(program: Program) -> None:
    placeholders, outputs = program.placeholders(), program.output_nodes()
    if len(placeholders) != len(program.inputs):
        raise VerifyError(
            f"the graph has {len(placeholders)} placeholders but {len(program.inputs)} inputs are described; append to "
            f"program.inputs whenever a placeholder is made."
        )
    if len(outputs) != len(program.outputs):
        raise VerifyError(
            f"the graph returns {len(outputs)} values but {len(program.outputs)} outputs are described; append to "
            f"program.outputs whenever a value is returned."
        )


def _check_nodes(program: Program) -> None:
    for node in program.graph.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            raise fault(node, f"is a {node.op} node; only calls of functions on placeholders are allowed")
        if node.op != "output" and "val" not in node.meta:
            raise fault(node, "carries no value; build nodes with graph.call()")
        if isinstance(node.target, HigherOrderOperator):
            raise fault(
                node,
                f"calls {node.target}, whose branches may differ between ranks; write it as straight-line ops",
            )
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            raise fault(
                node, f"writes in place ({node.target}), which no pass follows; use the form that returns a new tensor"
            )


def _check_symbols(program: Program) -> None:
    """Sizes known only at run time are defined before use."""
    defined: set[Any] = set()
    for node in program.graph.nodes:
        if node.op not in ("placeholder", "call_function"):
            continue
        found = node.meta["val"]
        if isinstance(found, torch.SymInt):
            defined |= found.node.expr.free_symbols
            continue
        if isinstance(node.target, OpOverload) and torch.Tag.dynamic_output_shape in node.target.tags:
            for size in symbolic_sizes(found):  # rows chosen by a mask: their number comes with them
                defined |= size.node.expr.free_symbols
        for size in symbolic_sizes(found):
            missing = size.node.expr.free_symbols - defined
            if missing:
                names = ", ".join(sorted(str(symbol) for symbol in missing))
                raise fault(node, f"has the size {size}, but {names} is not read before it; insert it after the read")


def _check_meta(program: Program) -> None:
    seen: dict[int, str] = {}
    for node in program.graph.nodes:
        for key, found in node.meta.items():
            # the module stack is only ever replaced as a whole, so nodes may share it
            if not isinstance(found, dict) or not found or key == "nn_module_stack":
                continue
            other = seen.setdefault(id(found), node.name)
            if other != node.name:
                raise fault(node, f"and {other} share one meta['{key}']; copy it with meta.copy_meta()")
