"""Parts of a dimension in zigzag: what is causal along it is as much work for every rank.

Dimension `dim` is seen as `[outer, 2 * ranks, inner]`; the part of rank r is `[:, r]` and `[:, 2 * ranks - 1 - r]`, one behind the
other: the cheapest piece with the dearest, and so on (Llama 3, arXiv 2407.21783; Megatron-Core's context parallelism).
"""

from typing import Any

import torch
from torch import Tensor

from moecompile.ops import transport
from moecompile.ops.collectives import group_of
from moecompile.ops.registry import define
from moecompile.ops.sharding import adjoint, keep_cut, split_dim

# ---- zigzag_slice ------------------------------------------------------------------------------------------


def pieces_of(rank: int, ranks: int) -> tuple[int, int]:
    """Which of the ``2 * ranks`` pieces a rank has."""
    return rank, 2 * ranks - 1 - rank


def _split(where: str, x: Tensor, dim: int, blocks: int, pieces: int) -> list[int]:
    return split_dim(where, x, dim, blocks, pieces, "pad it, or take a length that the pieces divide")


def _zigzag_slice(x: Tensor, index: Tensor, dim: int, outer: int, ranks: int) -> Tensor:
    """This rank's two pieces of what every rank holds whole."""
    parts = x.reshape(_split("zigzag_slice", x, dim, outer, 2 * ranks))
    mine = [parts.select(dim + 1, piece) for piece in pieces_of(int(index), ranks)]
    return torch.stack(mine, dim + 1).flatten(dim, dim + 2)


def _zigzag_slice_fake(x: Tensor, index: Tensor, dim: int, outer: int, ranks: int) -> Tensor:
    _split("zigzag_slice", x, dim, outer, 2 * ranks)
    return x.new_empty([*x.shape[:dim], x.shape[dim] // ranks, *x.shape[dim + 1 :]])


def _zigzag_place(x: Tensor, index: Tensor, dim: int, outer: int, ranks: int) -> Tensor:
    """A rank's two pieces where they belong, among zeros."""
    parts = x.reshape(_split("zigzag_place", x, dim, outer, 2))
    whole = x.new_zeros([*parts.shape[: dim + 1], 2 * ranks, *parts.shape[dim + 2 :]])
    for at, piece in enumerate(pieces_of(int(index), ranks)):
        whole.select(dim + 1, piece).copy_(parts.select(dim + 1, at))
    return whole.flatten(dim, dim + 2)


def _zigzag_place_fake(x: Tensor, index: Tensor, dim: int, outer: int, ranks: int) -> Tensor:
    _split("zigzag_place", x, dim, outer, 2)
    return x.new_empty([*x.shape[:dim], x.shape[dim] * ranks, *x.shape[dim + 1 :]])


zigzag_slice = define(
    "zigzag_slice(Tensor x, Tensor index, int dim, int outer, int ranks) -> Tensor",
    _zigzag_slice,
    _zigzag_slice_fake,
    setup=keep_cut,
    backward=adjoint("zigzag_place"),
)
zigzag_place = define(
    "zigzag_place(Tensor x, Tensor index, int dim, int outer, int ranks) -> Tensor",
    _zigzag_place,
    _zigzag_place_fake,
    setup=keep_cut,
    backward=adjoint("zigzag_slice"),
)

# ---- zigzag_exchange ---------------------------------------------------------------------------------------


def _owners(rank: int, ranks: int, to_zigzag: bool) -> list[int]:
    """Whom a rank sends its two pieces to: those who have them in the other order."""
    if to_zigzag:
        return [min(piece, 2 * ranks - 1 - piece) for piece in (2 * rank, 2 * rank + 1)]
    return [piece // 2 for piece in pieces_of(rank, ranks)]


def _zigzag_exchange(x: Tensor, group_size: int, dim: int, outer: int, to_zigzag: bool, axis: str) -> Tensor:
    """From parts in zigzag to parts in the order of the elements, or back: every piece travels once.

    Pieces go, and come, in the order of the ranks at the other end; where that is not the order in which they stand here, the two
    change places.
    """
    parts = x.reshape(_split("zigzag_exchange", x, dim, outer, 2))
    group = group_of("zigzag_exchange", axis, group_size)
    rank = group.rank()
    targets, sources = _owners(rank, group_size, to_zigzag), _owners(rank, group_size, not to_zigzag)
    sent = parts.movedim(dim + 1, 0)
    sent = (sent.flip(0) if targets[0] > targets[1] else sent).contiguous()
    found = torch.empty_like(sent)
    ins, outs = ([owners.count(peer) for peer in range(group_size)] for owners in (targets, sources))
    transport.all_to_all(found, sent, group, outs, ins)
    found = found.flip(0) if sources[0] > sources[1] else found
    return found.movedim(0, dim + 1).reshape(x.shape).contiguous()


def _zigzag_exchange_fake(x: Tensor, group_size: int, dim: int, outer: int, to_zigzag: bool, axis: str) -> Tensor:
    _split("zigzag_exchange", x, dim, outer, 2)
    return x.new_empty(x.shape)


def _exchange_setup(ctx: Any, inputs: tuple[Tensor, int, int, int, bool, str], output: Tensor) -> None:
    _, ctx.group_size, ctx.dim, ctx.outer, ctx.to_zigzag, ctx.axis = inputs


def _exchange_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    back = zigzag_exchange(grad, ctx.group_size, ctx.dim, ctx.outer, not ctx.to_zigzag, ctx.axis)
    return back, None, None, None, None, None


zigzag_exchange = define(
    "zigzag_exchange(Tensor x, int group_size, int dim, int outer, bool to_zigzag, str axis) -> Tensor",
    _zigzag_exchange,
    _zigzag_exchange_fake,
    setup=_exchange_setup,
    backward=_exchange_backward,
)
