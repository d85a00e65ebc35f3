"""Tensors that share memory: gradients that are handed out must not, since whoever owns one changes it in place.

A graph computes once what is equal (the gradients of two biases that are added to one sum), and views cost nothing in it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.fx import Node

from .compat import OpOverload


def is_input(node: Node) -> bool:
    """Whether a node is an input of its graph, or a view of one."""
    while node.op == "call_function":
        source = _viewed(node)
        if source is None:
            return False
        node = source
    return node.op == "placeholder"


def _viewed(node: Node) -> Node | None:
    """What a node is, or may be, a view of."""
    if node.target is operator.getitem:
        source = node.args[0]
        return source if isinstance(source, Node) else None
    if not isinstance(node.target, OpOverload):
        return None
    schema = node.target._schema
    if all(item.alias_info is None for item in schema.returns):
        return None
    for argument, value in zip(schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and isinstance(value, Node):
            return value
    return None


def overlapping(tensors: Sequence[Tensor], others: Iterable[Tensor] = ()) -> set[int]:
    """Which of ``tensors`` have to be copied so that no two elements of them share memory, nor one with any of ``others``.

    Memory counts from a tensor's first element to its last, holes included.
    """
    storages = {item.untyped_storage().data_ptr() for item in others if item.numel()}
    held = [(at, item) for at, item in enumerate(tensors) if item.numel()]
    found = {at for at, item in held if item.untyped_storage().data_ptr() in storages or _is_expanded(item)}
    spans = sorted((*_span(item), at) for at, item in held)
    end = 0
    for first, last, at in spans:
        if first < end:
            found.add(at)
        end = max(end, last)
    return found


def _is_expanded(item: Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(item.shape, item.stride(), strict=True))


def _span(item: Tensor) -> tuple[int, int]:
    elements = 1 + sum((size - 1) * stride for size, stride in zip(item.shape, item.stride(), strict=True))
    return item.data_ptr(), item.data_ptr() + elements * item.element_size()
