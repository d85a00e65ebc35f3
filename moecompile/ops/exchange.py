"""Rows between the ranks of a group: exchange_counts, sizes_to_host, dispatch, combine.

S ranks in the group, E experts of all of them, R rows.  Sizes travel as int64 tensors, so a graph holds no
per-rank integers and one unbacked size per layer.  `axis` is a mesh axis name while a graph is rewritten and
the name of a process group when it runs.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moecompile.ops import transport
from moecompile.ops.collectives import group_of
from moecompile.ops.registry import define, require, require_index_tensor

# ---- exchange_counts ---------------------------------------------------------------------------------------


def _check_counts(tokens_per_expert: Tensor, group_size: int) -> None:
    require_index_tensor("exchange_counts", "tokens_per_expert", tokens_per_expert)
    require(
        tokens_per_expert.dim() == 1 and tokens_per_expert.shape[0] % group_size == 0,
        f"moe::exchange_counts: tokens_per_expert has shape {list(tokens_per_expert.shape)}, but [E] with E "
        "a multiple of "
        f"the group size {group_size} is needed; choose ep from the divisors of the number of experts.",
    )


def _exchange_counts(tokens_per_expert: Tensor, group_size: int, axis: str) -> Tensor:
    """How many rows each source has for each of my experts.  int64 [E] -> [S, E/S], row s from rank s."""
    _check_counts(tokens_per_expert, group_size)
    group = group_of("exchange_counts", axis, group_size)
    received = torch.empty_like(tokens_per_expert, memory_format=torch.contiguous_format)
    transport.all_to_all(received, tokens_per_expert.contiguous(), group)
    return received.view(group_size, -1)


def _exchange_counts_fake(tokens_per_expert: Tensor, group_size: int, axis: str) -> Tensor:
    _check_counts(tokens_per_expert, group_size)
    return tokens_per_expert.new_empty(group_size, tokens_per_expert.shape[0] // group_size)


exchange_counts = define(
    "exchange_counts(Tensor tokens_per_expert, int group_size, str axis) -> Tensor",
    _exchange_counts,
    _exchange_counts_fake,
)

# ---- sizes_to_host -----------------------------------------------------------------------------------------


def _check_sizes_to_host(tokens_per_expert: Tensor, received: Tensor) -> None:
    require_index_tensor("sizes_to_host", "tokens_per_expert", tokens_per_expert)
    require_index_tensor("sizes_to_host", "received", received)
    require(
        tokens_per_expert.dim() == 1 and received.dim() == 2 and tokens_per_expert.shape[0] == received.numel(),
        f"moe::sizes_to_host: tokens_per_expert has shape {list(tokens_per_expert.shape)} and received "
        f"{list(received.shape)}, but [S * E] and [S, E] are needed; pass what exchange_counts returned.",
    )


def _sizes_to_host(tokens_per_expert: Tensor, received: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sizes of an exchange on the CPU; the only op of a layer that reads device memory on the host.

    tokens_per_expert [S*E], received [S, E] -> send [S] and recv [S], rows to and from each rank, and tokens [S, E].
    """
    _check_sizes_to_host(tokens_per_expert, received)
    num_ranks = received.shape[0]
    send = tokens_per_expert.reshape(received.shape).sum(1)
    # One copy to the host for all three; clones, because the outputs of an op must not share memory.
    packed = torch.cat([send, received.sum(1), received.reshape(-1)]).cpu()
    sizes, tokens = packed[: 2 * num_ranks], packed[2 * num_ranks :]
    return sizes[:num_ranks].clone(), sizes[num_ranks:].clone(), tokens.view(received.shape).clone()


def _sizes_to_host_fake(tokens_per_expert: Tensor, received: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _check_sizes_to_host(tokens_per_expert, received)
    num_ranks = received.shape[0]
    return (
        received.new_empty(num_ranks, device="cpu"),
        received.new_empty(num_ranks, device="cpu"),
        received.new_empty(received.shape, device="cpu"),
    )


sizes_to_host = define(
    "sizes_to_host(Tensor tokens_per_expert, Tensor received) -> (Tensor send, Tensor recv, Tensor tokens)",
    _sizes_to_host,
    _sizes_to_host_fake,
)

# ---- dispatch and combine ----------------------------------------------------------------------------------

_size_checks = False


def set_size_checks(enabled: bool) -> bool:
    """Switch the comparison of both sides of every dispatch and combine, and return the previous setting.

    gloo does not compare what a rank sends with what its peer expects: a receiver that expects a row too many
    is left with uninitialised memory and no error.  The check costs one more small exchange per call and must
    be set alike on all ranks.
    """
    global _size_checks
    previous, _size_checks = _size_checks, enabled
    return previous


def _check_split(where: str, rows: Tensor, send: Tensor, recv: Tensor) -> None:
    require(
        rows.dim() >= 1,
        f"moe::{where}: rows is a scalar, but a leading dimension of rows is needed; reshape it to [R].",
    )
    for name, sizes in (("send", send), ("recv", recv)):
        require_index_tensor(where, name, sizes)
        require(
            sizes.dim() == 1 and sizes.device.type == "cpu",
            f"moe::{where}: {name} is a {sizes.dim()}-dimensional tensor on {sizes.device}, but [S] on the "
            "CPU is needed; pass what sizes_to_host returned.",
        )


def _compare_both_sides(
    where: str, group: dist.ProcessGroup, send: Tensor, recv: list[int], device: torch.device
) -> None:
    offered = torch.zeros_like(send, device=device)
    transport.all_to_all(offered, send.to(device), group)
    if offered.tolist() != recv:
        raise ValueError(
            f"moe::{where}: rank {group.rank()} of its group expects {recv} rows from its peers, but they "
            f"send {offered.tolist()}; exchange the counts of this very routing first."
        )


def _exchange(where: str, rows: Tensor, send: Tensor, recv: Tensor, num_rows: int, axis: str) -> Tensor:
    _check_split(where, rows, send, recv)
    group = group_of(where, axis, send.shape[0])
    ins, outs = send.tolist(), recv.tolist()
    if len(ins) != len(outs) or sum(ins) != rows.shape[0] or sum(outs) != num_rows or min(ins + outs) < 0:
        raise ValueError(
            f"moe::{where}: send {ins} must add up to the {rows.shape[0]} rows and recv {outs} to num_rows "
            f"{num_rows}, with one entry per rank in both; pass the sizes of this exchange (the two are "
            "swapped on the way back)."
        )
    if _size_checks:
        _compare_both_sides(where, group, send, outs, rows.device)
    out = rows.new_empty(num_rows, *rows.shape[1:])
    transport.all_to_all(out, rows.contiguous(), group, outs, ins)
    return out


def _exchange_fake(where: str, rows: Tensor, send: Tensor, recv: Tensor, num_rows: int) -> Tensor:
    _check_split(where, rows, send, recv)
    return rows.new_empty(num_rows, *rows.shape[1:])


def _dispatch(rows: Tensor, send: Tensor, recv: Tensor, num_rows: int, axis: str) -> Tensor:
    """Rows [R, ...], grouped by destination rank, to the ranks of their experts; -> [num_rows, ...], source-major.

    send [S] and recv [S] are CPU tensors: rows to and from each rank.
    """
    return _exchange("dispatch", rows, send, recv, num_rows, axis)


def _dispatch_fake(rows: Tensor, send: Tensor, recv: Tensor, num_rows: int, axis: str) -> Tensor:
    return _exchange_fake("dispatch", rows, send, recv, num_rows)


def _combine(rows: Tensor, send: Tensor, recv: Tensor, num_rows: int, axis: str) -> Tensor:
    """The way back of dispatch: here send is what this rank returns to each source, recv what it gets back."""
    return _exchange("combine", rows, send, recv, num_rows, axis)


def _combine_fake(rows: Tensor, send: Tensor, recv: Tensor, num_rows: int, axis: str) -> Tensor:
    return _exchange_fake("combine", rows, send, recv, num_rows)


def _exchange_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, send, recv, _, ctx.axis = inputs
    ctx.save_for_backward(send, recv)
    ctx.num_rows = rows.shape[0]


def _dispatch_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    send, recv = ctx.saved_tensors
    return combine(grad, recv, send, ctx.num_rows, ctx.axis), None, None, None, None


def _combine_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    send, recv = ctx.saved_tensors
    return dispatch(grad, recv, send, ctx.num_rows, ctx.axis), None, None, None, None


dispatch = define(
    "dispatch(Tensor rows, Tensor send, Tensor recv, SymInt num_rows, str axis) -> Tensor",
    _dispatch,
    _dispatch_fake,
    setup=_exchange_setup,
    backward=_dispatch_backward,
)
combine = define(
    "combine(Tensor rows, Tensor send, Tensor recv, SymInt num_rows, str axis) -> Tensor",
    _combine,
    _combine_fake,
    setup=_exchange_setup,
    backward=_combine_backward,
)
