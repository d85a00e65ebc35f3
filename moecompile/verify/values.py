"""Compute every value again and compare: finds a pass that changed an argument and forgot the shapes behind it."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from .. import meta, ops
from ..graph import compute, mode_of
from ..pass_base import Fact
from ..printer import type_text
from ..program import Program
from .report import fault


def verify_values(program: Program) -> None:
    """Raise a VerifyError for a node whose recorded value is not what its op gives for its recorded operands.

    Calls with operands of the same types are computed once, so layers of one structure cost one. Between shard-experts
    and insert-dispatch a grouped linear has one rank's weights and all experts' rows, and is passed over.
    """
    halfway = Fact.EXPERTS_SHARDED in program.facts and Fact.TOKENS_DISPATCHED not in program.facts
    mode = mode_of(program.graph)
    known: dict[Any, str] = {}
    for node in program.graph.nodes:
        if node.op != "call_function" or isinstance(meta.value(node), torch.SymInt):
            continue  # reading a size gives a new symbol each time
        if halfway and node.target is ops.grouped_linear:
            continue
        names = _Symbols()
        recorded_of = (node.target, names.call(node))
        again = names.copy()  # rows chosen by a mask have a size of their own each time
        recorded = names(meta.value(node))
        if recorded_of not in known:
            try:
                found = compute(node.target, node.args, node.kwargs, mode)
            except Exception as error:
                raise fault(
                    node,
                    f"cannot be computed from its operands ({type(error).__name__}: {error}); refresh what was changed",
                ) from error
            known[recorded_of] = again(found)
        if known[recorded_of] != recorded:
            raise fault(
                node,
                f"is recorded as {type_text(meta.value(node))}, but its op gives {known[recorded_of]}; "
                f"call graph.refresh() after changing an argument",
            )


class _Typed(str):
    """The type of an operand within the text of a call."""

    def __repr__(self) -> str:
        return str(self)


class _Symbols:
    """Types as text, with run-time sizes named by first appearance within one call."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def copy(self) -> _Symbols:
        made = _Symbols()
        made._names = dict(self._names)
        return made

    def __call__(self, found: Any) -> str:
        if isinstance(found, torch.Tensor):
            return f"{found.dtype}[{', '.join(map(self._size, found.shape))}] on {found.device}"
        if isinstance(found, (tuple, list)):
            return f"({', '.join(map(self, found))})"
        return self._size(found)

    def call(self, node: Node) -> str:
        """The arguments of a call, operands by their types."""

        def typed(arg: Node) -> Any:
            return _Typed(self(meta.value(arg)))

        return str(map_arg((node.args, node.kwargs), typed))

    def _size(self, size: Any) -> str:
        if not isinstance(size, torch.SymInt):
            return str(size)
        text = str(size.node.expr)
        for symbol in sorted(map(str, size.node.expr.free_symbols), key=len, reverse=True):
            text = text.replace(symbol, self._names.setdefault(symbol, f"s{len(self._names)}"))
        return text
