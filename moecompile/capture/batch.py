"""Which arguments of a call are batch, and the call at the global batch shape."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from moecompile.compat import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten
from moecompile.errors import CaptureError


def leaf_names(args: tuple[Any, ...], kwargs: dict[str, Any], forward: Callable[..., Any] | None = None) -> list[str]:
    """A readable name for each leaf of the flattened ``(args, kwargs)``: its argument, and its place inside that.

    Positional arguments take the names of ``forward``'s parameters, ``arg0``, ``arg1``, ... without them.
    """
    positional = _positional_names(forward) if forward is not None else []
    names = []
    for path, _ in tree_flatten_with_path((args, kwargs))[0]:
        section, key = path[0], path[1]
        if section.idx == 1:  # type: ignore[attr-defined]
            first = str(key.key)  # type: ignore[attr-defined]
        else:
            index = key.idx  # type: ignore[attr-defined]
            first = positional[index] if index < len(positional) else f"arg{index}"
        names.append(first + keystr(tuple(path[2:])))
    return names


def _positional_names(forward: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(forward).parameters
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, item in parameters.items() if item.kind in kinds]


def batch_inputs(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch_dims: Mapping[str, int | None] | None = None,
    *,
    forward: Callable[..., Any] | None = None,
) -> dict[int, int]:
    """The leaves that data ranks split: index in the flattened ``(args, kwargs)`` -> the dim that is split.

    A tensor is batch along dim 0 when its size there equals that of the first tensor argument.  ``batch_dims`` names
    arguments that differ: the dim that is split, or None for one that is equal on all ranks.

    `CaptureError` when ``batch_dims`` names no argument of this call or a dim that its tensor does not have.
    """
    leaves, _ = tree_flatten((args, kwargs))
    names = leaf_names(args, kwargs, forward)
    given = dict(batch_dims or {})
    unknown = [name for name in given if not any(_belongs(leaf, name) for leaf in names)]
    if unknown:
        raise CaptureError(
            f"batch_dims names {unknown[0]!r}, which is no argument of this call; its arguments are "
            f"{', '.join(names) or 'none'}."
        )
    size = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0), None)
    found: dict[int, int] = {}
    for index, (leaf, name) in enumerate(zip(leaves, names, strict=True)):
        if hides_tensors(leaf):
            raise CaptureError(
                f"the argument {name} is a {type(leaf).__name__} that holds tensors, which would be taken for constants; pass tensors by "
                "themselves, or in tuples, lists or dicts."
            )
        if not isinstance(leaf, torch.Tensor):
            continue
        override = [key for key in given if _belongs(name, key)]
        dim = given[override[-1]] if override else 0 if leaf.dim() > 0 and leaf.shape[0] == size else None
        if dim is None:
            continue
        if not -leaf.dim() <= dim < leaf.dim():
            raise CaptureError(f"batch_dims says that {name} is split along dim {dim}, but it has {leaf.dim()} dims.")
        found[index] = dim % leaf.dim()
    return found


def hides_tensors(leaf: Any) -> bool:
    """Whether a leaf of what is passed or returned is no tensor, but an object that has some."""
    return not isinstance(leaf, torch.Tensor) and any(isinstance(item, torch.Tensor) for item in _members(leaf))


def _members(value: Any) -> Iterator[Any]:
    """The values in an object's attributes, and in its lists one level down."""
    for item in vars(value).values() if hasattr(value, "__dict__") else ():
        yield item
        if isinstance(item, (list, tuple)):
            for part in item:
                yield part
                yield from vars(part).values() if hasattr(part, "__dict__") else ()


def _belongs(leaf: str, name: str) -> bool:
    """Whether the leaf is the argument ``name``, or lies inside it."""
    return leaf == name or leaf.startswith((f"{name}[", f"{name}."))


def globalize(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    num_data_ranks: int,
    batch_dims: Mapping[str, int | None] | None = None,
    *,
    forward: Callable[..., Any] | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call at the global batch shape, for `capture_model`: batch tensors ``num_data_ranks`` times as long.

    The new tensors are placeholders for shape, type and device: they take no memory and their values mean nothing.
    """
    leaves, spec = tree_flatten((args, kwargs))
    split = batch_inputs(args, kwargs, batch_dims, forward=forward)
    for index, dim in split.items():
        leaf = leaves[index]
        shape = list(leaf.shape)
        shape[dim] *= num_data_ranks
        # All strides are zero: one element of memory, whatever the shape.
        made = torch.empty_strided(shape, [0] * len(shape), dtype=leaf.dtype, device=leaf.device)
        leaves[index] = made.requires_grad_(leaf.requires_grad)
    return tree_unflatten(leaves, spec)  # type: ignore[no-any-return]
