"""Turn in-place updates of local tensors into functional operations, one node at a time.

Every node of the traced graph stands for a `Handle`.  A handle owns its value, or is a view of another handle.  An
in-place operation computes a new value and writes it back along the chain of views to the owner; other views of that
owner are made again when next used.  What a buffer holds at the end is a result of the graph.  Parameters, constants
and inputs may not be written: the graph has no such side effect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from moecompile import meta
from moecompile.compat import OpOverload
from moecompile.errors import CaptureError

aten = torch.ops.aten

# emit(traced, target, args): insert a functional call that takes module and source line from the traced node
Emit = Callable[[Node, Any, tuple[Any, ...]], Node]


@dataclass(eq=False)
class Handle:
    """What one traced node stands for; ``node`` is its value as of ``version`` of its owner.

    A view has its ``parent``, and ``view(parent, *extra)`` makes it again; ``traced`` is the node that made it.
    """

    node: Node
    parent: Handle | None = None
    view: Any = None
    extra: tuple[Any, ...] = ()
    traced: Node | None = None
    version: int = 0
    frozen: str = ""  # what it is, when it must not be written

    @property
    def owner(self) -> Handle:
        return self if self.parent is None else self.parent.owner


def current(handle: Handle, emit: Emit) -> Node:
    """The node that holds the handle's value now."""
    if handle.parent is not None and handle.version != handle.owner.version:
        assert handle.traced is not None
        handle.node = emit(handle.traced, handle.view, (current(handle.parent, emit), *handle.extra))
        handle.version = handle.owner.version
    return handle.node


def write(handle: Handle, value: Node, traced: Node, emit: Emit) -> None:
    """Make ``value`` the value of ``handle``, and so of everything it is a view of.

    `CaptureError` when the owner is frozen, or when a view on the way cannot be undone.
    """
    owner = handle.owner
    if owner.frozen:
        raise CaptureError(
            f"{meta.source(traced)}: the forward writes into {owner.frozen} ({traced.target}), and a captured step has "
            f"no such side effect; compute a new tensor instead, or update it outside forward, after the step."
        )
    if handle.parent is None:
        handle.version += 1
    else:
        base = current(handle.parent, emit)
        write(handle.parent, _written_back(handle, base, value, traced, emit), traced, emit)
        handle.version = owner.version
    handle.node = value


def _written_back(view: Handle, base: Node, value: Node, traced: Node, emit: Emit) -> Node:
    """The parent's value after its view ``view`` became ``value``."""
    target, extra, shape = view.view, view.extra, meta.tensor(base).shape
    if target in _RESHAPES:
        return emit(traced, aten.reshape.default, (value, list(shape)))
    if target is aten.transpose.int:
        return emit(traced, aten.transpose.int, (value, *extra))
    if target in (aten.t.default, aten.numpy_T.default) and len(shape) == 2:
        return emit(traced, aten.transpose.int, (value, 0, 1))
    if target is aten.permute.default:
        order = [dim % len(shape) for dim in extra[0]]
        return emit(traced, aten.permute.default, (value, [order.index(dim) for dim in range(len(shape))]))
    if target is aten.select.int:
        return emit(traced, aten.select_scatter.default, (base, value, *extra))
    if target is aten.slice.Tensor:
        return emit(traced, aten.slice_scatter.default, (base, value, *extra))
    raise CaptureError(
        f"{meta.source(traced)}: the forward writes in place through a view made by {target}, which has no functional "
        f"form; write with index assignment or torch.where instead."
    )


# Views with the same elements in the same order.
_RESHAPES = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
    }
)


def part_view(traced: Node, index: int) -> tuple[Any, tuple[Any, ...]] | None:
    """The slice or select that element ``index`` of a chunk, split or unbind stands for; None for other calls."""
    _source, *rest = traced.args
    if traced.target is aten.unbind.int:
        return aten.select.int, (rest[0] if rest else 0, index)
    if traced.target in (aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default):
        dim = rest[1] if len(rest) > 1 else traced.kwargs.get("dim", 0)
        assert isinstance(dim, int)
        sizes = [part.shape[dim] for part in meta.value(traced)]
        start = sum(sizes[:index])
        if isinstance(start, int) and isinstance(sizes[index], int):
            return aten.slice.Tensor, (dim, start, start + sizes[index])
    return None


def writes_first_argument(target: Any) -> bool:
    """Whether the operator changes its first argument in place."""
    if not isinstance(target, OpOverload) or not target._schema.arguments:
        return False
    info = target._schema.arguments[0].alias_info
    return info is not None and bool(info.is_write)


_FUNCTIONAL_NAMES = {"normal_": "normal_functional", "zero_": "zeros_like"}
_FUNCTIONAL_FORMS = {aten.bernoulli_.float: aten.bernoulli.p}  # of another overload's name


def functional_form(target: OpOverload, traced: Node) -> Any:
    """The operator that returns what the in-place ``target`` would have written."""
    if target in _FUNCTIONAL_FORMS:
        return _FUNCTIONAL_FORMS[target]
    name = target._schema.name.removeprefix("aten::")
    name = _FUNCTIONAL_NAMES.get(name) or (f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_"))
    found = getattr(getattr(aten, name, None), target._overloadname or "default", None)
    if found is None or writes_first_argument(found):
        raise CaptureError(
            f"{meta.source(traced)}: the in-place operation {target} has no functional form; use the form that "
            f"returns a new tensor."
        )
    return found


def left_out(target: OpOverload, traced: Node) -> dict[str, Any]:
    """What ``target`` needs to be told and the in-place call leaves to its own defaults."""
    own = {item.name: item.default_value for item in traced.target._schema.arguments}  # type: ignore[union-attr]
    wanted = target._schema.arguments[len(traced.args) :]
    return {
        item.name: own[item.name]
        for item in wanted
        if not item.has_default_value() and item.name not in traced.kwargs and own.get(item.name) is not None
    }
