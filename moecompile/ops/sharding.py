"""This rank's part of a value that every rank holds whole: local_slice and its adjoint; of a range of numbers: own_index.

The index is a 0-d int64 tensor and a graph input, so all ranks of a plan share one graph text.  Dimension `dim` is seen as
`[outer, ranks, inner]`; the part of rank r is `[:, r]`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moecompile.ops.registry import define, require


def split_dim(where: str, x: Tensor, dim: int, outer: int, parts: int, advice: str) -> list[int]:
    """The shape in which ``dim`` is ``outer`` blocks of ``parts`` parts; ValueError with the advice where it is no whole number."""
    size = x.shape[dim]
    require(
        size % (outer * parts) == 0,
        f"moe::{where}: dim {dim} has size {size}, but a multiple of {outer * parts} is needed; {advice}.",
    )
    return [*x.shape[:dim], outer, parts, size // (outer * parts), *x.shape[dim + 1 :]]


def _split(where: str, x: Tensor, dim: int, outer: int, ranks: int) -> list[int]:
    return split_dim(where, x, dim, outer, ranks, "choose a batch that the ranks divide")


def _local_slice(x: Tensor, index: Tensor, dim: int, outer: int, ranks: int) -> Tensor:
    parts = x.reshape(_split("local_slice", x, dim, outer, ranks))
    return parts.select(dim + 1, int(index)).flatten(dim, dim + 1).clone(memory_format=torch.contiguous_format)


def _local_slice_fake(x: Tensor, index: Tensor, dim: int, outer: int, ranks: int) -> Tensor:
    _split("local_slice", x, dim, outer, ranks)
    return x.new_empty([*x.shape[:dim], x.shape[dim] // ranks, *x.shape[dim + 1 :]])


def _local_place(x: Tensor, index: Tensor, dim: int, outer: int, ranks: int) -> Tensor:
    inner = x.shape[dim] // outer
    shape = [*x.shape[:dim], outer, ranks, inner, *x.shape[dim + 1 :]]
    whole = x.new_zeros(shape)
    whole.select(dim + 1, int(index)).copy_(x.reshape([*x.shape[:dim], outer, inner, *x.shape[dim + 1 :]]))
    return whole.flatten(dim, dim + 2)


def _local_place_fake(x: Tensor, index: Tensor, dim: int, outer: int, ranks: int) -> Tensor:
    return x.new_empty([*x.shape[:dim], x.shape[dim] * ranks, *x.shape[dim + 1 :]])


def keep_cut(ctx: Any, inputs: tuple[Tensor, Tensor, int, int, int], output: Tensor) -> None:
    """For the backward of an op that takes or places a rank's part."""
    _, index, ctx.dim, ctx.outer, ctx.ranks = inputs
    ctx.save_for_backward(index)


def adjoint(name: str) -> Callable[[Any, Tensor], tuple[Tensor, None, None, None, None]]:
    """The backward by the op of that name, at the same place: slice and place are each other's."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (index,) = ctx.saved_tensors
        return getattr(torch.ops.moe, name).default(grad, index, ctx.dim, ctx.outer, ctx.ranks), None, None, None, None

    return backward


local_slice = define(
    "local_slice(Tensor x, Tensor index, int dim, int outer, int ranks) -> Tensor",
    _local_slice,
    _local_slice_fake,
    setup=keep_cut,
    backward=adjoint("local_place"),
)

local_place = define(
    "local_place(Tensor x, Tensor index, int dim, int outer, int ranks) -> Tensor",
    _local_place,
    _local_place_fake,
    setup=keep_cut,
    backward=adjoint("local_slice"),
)

# ---- own_index ---------------------------------------------------------------------------------------------


def _check_index(index: Tensor) -> None:
    require(
        index.dtype in (torch.int32, torch.int64),
        f"moe::own_index: index is {index.dtype}, but int32 or int64 is needed; cast it.",
    )


def _own_index(index: Tensor, first: Tensor, held: int, total: int, ignore: int) -> tuple[Tensor, Tensor]:
    """Numbers below `total` of which this rank has `held` from `first` on: counted from there, 0 for those of others; which are own.

    A number out of range is an IndexError on the CPU, as it is where the whole is indexed; `ignore` is none's.
    """
    _check_index(index)
    if index.device.type == "cpu":
        wrong = (index != ignore) & ((index < 0) | (index >= total))
        if wrong.any():
            raise IndexError(
                f"moe::own_index: index {int(index[wrong][0])} is out of range for {total} classes or rows; pass 0 to {total - 1}"
                + (f", or {ignore} for what is left out." if ignore < 0 else ".")
            )
    here = index - first
    own = (here >= 0) & (here < held) & (index != ignore)
    return here * own, own


def _own_index_fake(index: Tensor, first: Tensor, held: int, total: int, ignore: int) -> tuple[Tensor, Tensor]:
    _check_index(index)
    return torch.empty_like(index), torch.empty_like(index, dtype=torch.bool)


own_index = define(
    "own_index(Tensor index, Tensor first, int held, int total, int ignore) -> (Tensor safe, Tensor own)",
    _own_index,
    _own_index_fake,
)
