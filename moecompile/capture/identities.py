"""Calls that change nothing, and the one form kept for those that convert."""

from __future__ import annotations

from string import ascii_letters
from typing import Any

import torch
from torch.fx import Node

from moecompile import meta

aten = torch.ops.aten

_CONVERSIONS = frozenset(
    {
        aten.to.dtype,
        aten.to.dtype_layout,
        aten.to.device,
        aten.to.other,
        aten.type_as.default,
        aten._to_copy.default,
    }
)
_COPIES = frozenset(
    {
        aten.alias.default,
        aten.lift_fresh.default,
        aten.lift_fresh_copy.default,
        aten.clone.default,
        aten.contiguous.default,
    }
)
_SAME_SHAPE = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.view_as.default,
        aten.reshape_as.default,
        aten.expand.default,
        aten.slice.Tensor,
        aten.squeeze.dim,
        aten.squeeze.default,
        aten.flatten.using_ints,
    }
)
_DROPOUTS = frozenset({aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default})


def is_identity(node: Node, source: Node) -> bool:
    """Whether ``node`` has exactly the value of its first argument ``source``."""
    if not meta.is_tensor(node) or not meta.is_tensor(source):
        return False
    out, given = meta.tensor(node), meta.tensor(source)
    if out.dtype != given.dtype or out.device != given.device or len(out.shape) != len(given.shape):
        return False
    if node.target in _COPIES:
        # A copy that makes memory contiguous is kept: the model asked for the layout.
        relays = node.target is aten.contiguous.default or node.kwargs.get("memory_format") is torch.contiguous_format
        return not relays or given.is_contiguous()
    if node.target in _CONVERSIONS:
        return True
    if node.target in _SAME_SHAPE:
        return all(type(a) is int and type(b) is int and a == b for a, b in zip(out.shape, given.shape, strict=True))
    if node.target in _DROPOUTS:
        return bool(not node.args[2] or node.args[1] == 0)
    return node.target is aten.detach.default and not given.is_floating_point() and not given.is_complex()


def as_conversion(node: Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """A conversion in its one form `_to_copy(x, dtype=, device=)` naming only what changes; None for other calls."""
    if node.target not in _CONVERSIONS or not meta.is_tensor(node) or not isinstance(node.args[0], Node):
        return None
    out, given = meta.tensor(node), meta.tensor(node.args[0])
    changes: dict[str, Any] = {}
    if out.dtype != given.dtype:
        changes["dtype"] = out.dtype
    if out.device != given.device:
        changes["device"] = out.device
    return aten._to_copy.default, (node.args[0],), changes


def as_reshape(node: Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """A view in the shape of another tensor as a reshape, where that shape is known; None for other calls."""
    if node.target not in (aten.view_as.default, aten.reshape_as.default):
        return None
    shape = list(meta.tensor(node).shape)
    return (aten.reshape.default, (node.args[0], shape), {}) if all(type(size) is int for size in shape) else None


def as_einsum(node: Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """A product over listed dims in letters, as every rule reads it; None for other calls."""
    if node.target is not aten.tensordot.default:
        return None
    operands: Any = node.args
    first, second, dims, others = operands
    letters = iter(ascii_letters)
    left, right = ([next(letters) for _ in meta.tensor(item).shape] for item in (first, second))
    for one, two in zip(dims, others, strict=True):
        right[two] = left[one]
    kept = [one for one in left if one not in right] + [one for one in right if one not in left]
    return aten.einsum.default, (f"{''.join(left)},{''.join(right)}->{''.join(kept)}", [first, second]), {}
