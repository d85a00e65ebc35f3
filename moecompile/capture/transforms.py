"""Transforms of ``torch.func`` inside a model: `torch.vmap` as one call after the other, derivatives refused.

Under a transform tensors stand for others, and export would record what happens to one of them.  A map over experts
means what a loop over experts means, so it is traced as that loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from moecompile.capture.where import current_line
from moecompile.compat import batched_inputs, replace_transforms, tree_flatten, tree_unflatten
from moecompile.errors import CaptureError

_MOST = 1024  # calls that a loop may have


def _unrolled(func: Callable[..., Any], in_dims: Any, out_dims: Any, *args: Any, **kwargs: Any) -> Any:
    """``vmap(func, in_dims, out_dims)(*args, **kwargs)`` as a loop."""
    size, dims, leaves, spec = batched_inputs(in_dims, args, func)
    if not isinstance(size, int) or size > _MOST:
        raise CaptureError(
            f"{current_line()}: vmap maps over {size} entries, and a captured model may map over {_MOST} at most, since "
            f"each becomes a call of its own; write the batched operation out."
        )
    rows, out_spec = [], None
    for index in range(size):
        items = [leaf if dim is None else leaf.select(dim, index) for leaf, dim in zip(leaves, dims, strict=True)]
        found, out_spec = tree_flatten(func(*tree_unflatten(items, spec), **kwargs))
        rows.append(found)
    columns = list(zip(*rows, strict=True))
    places = [out_dims] * len(columns) if isinstance(out_dims, int) else list(tree_flatten(out_dims)[0])
    if len(places) != len(columns) or not all(isinstance(place, int) for place in places):
        raise CaptureError(f"{current_line()}: vmap with out_dims={out_dims!r} cannot be captured; use one number.")
    assert out_spec is not None
    return tree_unflatten([torch.stack(column, place) for column, place in zip(columns, places, strict=True)], out_spec)


def _refuse_derivative() -> Any:
    raise CaptureError(
        f"{current_line()}: the forward takes a derivative with torch.func (grad, vjp, jvp, ...), which no graph can "
        f"express; write the derivative out."
    )


@contextlib.contextmanager
def vmap_unrolled() -> Iterator[None]:
    """Within, `torch.vmap` and `torch.func.vmap` run as loops, and derivatives of ``torch.func`` are refused."""

    def run(func: Any, in_dims: Any, out_dims: Any, randomness: str, chunk_size: Any, *args: Any, **kwargs: Any) -> Any:
        return _unrolled(func, in_dims, out_dims, *args, **kwargs)

    with replace_transforms(run, _refuse_derivative):
        yield
