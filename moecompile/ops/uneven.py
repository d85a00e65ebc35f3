"""Rows that every rank of a group is to compute on, of which each has a number of its own: all_gather_rows, reduce_scatter_rows.

S ranks in the group. How many rows each of them holds travels first, as sizes [S] on the CPU (`gathered_sizes_to_host`). `axis` is a
mesh axis name while a graph is rewritten and the name of a process group when it runs.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moecompile.ops import transport
from moecompile.ops.collectives import group_of
from moecompile.ops.registry import define, require, require_index_tensor

# ---- gathered_sizes_to_host --------------------------------------------------------------------------------


def _check_gathered_sizes(tokens_per_expert: Tensor, received: Tensor, gathered: Tensor, group_size: int) -> None:
    where = "gathered_sizes_to_host"
    for name, counts in (("tokens_per_expert", tokens_per_expert), ("received", received), ("gathered", gathered)):
        require_index_tensor(where, name, counts)
    require(
        tokens_per_expert.dim() == 1 and received.dim() == 2 and tokens_per_expert.shape[0] == received.numel(),
        f"moe::{where}: tokens_per_expert has shape {list(tokens_per_expert.shape)} and received "
        f"{list(received.shape)}, but [S * E] and [S, E] are needed; pass what exchange_counts returned.",
    )
    require(
        gathered.dim() == 2
        and gathered.shape[0] == group_size * received.shape[0]
        and gathered.shape[1] == received.shape[1],
        f"moe::{where}: received has shape {list(received.shape)} and gathered {list(gathered.shape)}, but {group_size} "
        "times as many rows are needed; pass the all_gather of received.",
    )


def _gathered_sizes_to_host(
    tokens_per_expert: Tensor, received: Tensor, gathered: Tensor, group_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sizes of an exchange and of the gather behind it on the CPU; one read of device memory for all of them.

    tokens_per_expert [S*E], received [S, E], gathered [G*S, E] of G ranks -> send [S] and recv [S], sizes [G] (rows that each rank
    brings to the gather), and tokens [G*S, E].
    """
    _check_gathered_sizes(tokens_per_expert, received, gathered, group_size)
    send = tokens_per_expert.reshape(received.shape).sum(1)
    sizes = gathered.reshape(group_size, -1).sum(1)
    parts = [send, received.sum(1), sizes, gathered.reshape(-1)]
    packed = torch.cat(parts).cpu()
    found = torch.split(packed, [part.numel() for part in parts])
    return found[0].clone(), found[1].clone(), found[2].clone(), found[3].view(gathered.shape).clone()


def _gathered_sizes_to_host_fake(
    tokens_per_expert: Tensor, received: Tensor, gathered: Tensor, group_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_gathered_sizes(tokens_per_expert, received, gathered, group_size)
    ranks = received.shape[0]
    return (
        received.new_empty(ranks, device="cpu"),
        received.new_empty(ranks, device="cpu"),
        received.new_empty(group_size, device="cpu"),
        received.new_empty(gathered.shape, device="cpu"),
    )


gathered_sizes_to_host = define(
    "gathered_sizes_to_host(Tensor tokens_per_expert, Tensor received, Tensor gathered, int group_size) -> "
    "(Tensor send, Tensor recv, Tensor sizes, Tensor tokens)",
    _gathered_sizes_to_host,
    _gathered_sizes_to_host_fake,
)

# ---- all_gather_rows and reduce_scatter_rows ---------------------------------------------------------------


def _check_sizes(where: str, rows: Tensor, sizes: Tensor) -> None:
    require(rows.dim() >= 1, f"moe::{where}: rows is a scalar, but a leading dimension of rows is needed; reshape it.")
    require_index_tensor(where, "sizes", sizes)
    require(
        sizes.dim() == 1 and sizes.device.type == "cpu",
        f"moe::{where}: sizes is a {sizes.dim()}-dimensional tensor on {sizes.device}, but [S] on the CPU is needed; "
        "pass what gathered_sizes_to_host returned.",
    )


def _known(where: str, sizes: Tensor, one: int, all_of_them: int, axis: str) -> tuple[list[int], dist.ProcessGroup]:
    """The number of rows of each rank, checked against those of this rank and of all."""
    group, found = group_of(where, axis, sizes.shape[0]), sizes.tolist()
    if found[group.rank()] != one or sum(found) != all_of_them or min(found) < 0:
        raise ValueError(
            f"moe::{where}: sizes {found} must add up to the {all_of_them} rows of all ranks and give rank {group.rank()} of "
            f"its group {one}; gather the counts of this very routing first."
        )
    return found, group


def _all_gather_rows(rows: Tensor, sizes: Tensor, num_rows: int, axis: str) -> Tensor:
    """The rows of all ranks, one rank after another: [sizes[me], ...] -> [num_rows, ...]."""
    _check_sizes("all_gather_rows", rows, sizes)
    found, group = _known("all_gather_rows", sizes, rows.shape[0], num_rows, axis)
    out = rows.new_empty(num_rows, *rows.shape[1:])
    copies = torch.cat([rows] * len(found))
    transport.all_to_all(out, copies, group, found, [rows.shape[0]] * len(found))
    return out


def _all_gather_rows_fake(rows: Tensor, sizes: Tensor, num_rows: int, axis: str) -> Tensor:
    _check_sizes("all_gather_rows", rows, sizes)
    return rows.new_empty(num_rows, *rows.shape[1:])


def _reduce_scatter_rows(rows: Tensor, sizes: Tensor, num_rows: int, axis: str) -> Tensor:
    """This rank's rows of the sum over the group, taken in rank order: [sum of sizes, ...] -> [num_rows, ...]."""
    _check_sizes("reduce_scatter_rows", rows, sizes)
    found, group = _known("reduce_scatter_rows", sizes, num_rows, rows.shape[0], axis)
    parts = rows.new_empty(len(found) * num_rows, *rows.shape[1:])
    transport.all_to_all(parts, rows.contiguous(), group, [num_rows] * len(found), found)
    first, *others = parts.view(len(found), num_rows, *rows.shape[1:]).unbind(0)
    total: Tensor = first.clone()
    for part in others:
        total += part
    return total


def _reduce_scatter_rows_fake(rows: Tensor, sizes: Tensor, num_rows: int, axis: str) -> Tensor:
    _check_sizes("reduce_scatter_rows", rows, sizes)
    return rows.new_empty(num_rows, *rows.shape[1:])


def _rows_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, sizes, _, ctx.axis = inputs
    ctx.save_for_backward(sizes)
    ctx.num_rows = rows.shape[0]


def _all_gather_rows_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    (sizes,) = ctx.saved_tensors
    return reduce_scatter_rows(grad, sizes, ctx.num_rows, ctx.axis), None, None, None


def _reduce_scatter_rows_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    (sizes,) = ctx.saved_tensors
    return all_gather_rows(grad, sizes, ctx.num_rows, ctx.axis), None, None, None


all_gather_rows = define(
    "all_gather_rows(Tensor rows, Tensor sizes, SymInt num_rows, str axis) -> Tensor",
    _all_gather_rows,
    _all_gather_rows_fake,
    setup=_rows_setup,
    backward=_all_gather_rows_backward,
)
reduce_scatter_rows = define(
    "reduce_scatter_rows(Tensor rows, Tensor sizes, SymInt num_rows, str axis) -> Tensor",
    _reduce_scatter_rows,
    _reduce_scatter_rows_fake,
    setup=_rows_setup,
    backward=_reduce_scatter_rows_backward,
)
