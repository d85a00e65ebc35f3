"""Collectives over a mesh axis whose gradient is the true adjoint: all_reduce, all_gather, reduce_scatter, all_to_all.

`axis` is a mesh axis name while a graph is rewritten and the name of a process group when it runs.  No op
changes its input.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moecompile.compat import reduce_scatter_single, resolve_process_group
from moecompile.ops import transport
from moecompile.ops.registry import define, require
from moecompile.ops.transport import REDUCTIONS


def group_of(where: str, axis: str, size: int | None = None) -> dist.ProcessGroup:
    """The process group named `axis`; with `size`, checked to have that many ranks."""
    try:
        group = resolve_process_group(axis)
    except (RuntimeError, ValueError, LookupError) as error:
        raise ValueError(
            f"moe::{where}: no process group is named '{axis}', but one is needed to run; bind the mesh "
            "axes of the program to process groups first, or run it in the simulator."
        ) from error
    if size is not None and group.size() != size:
        raise ValueError(
            f"moe::{where}: process group '{axis}' has {group.size()} ranks, but the arguments are made for "
            f"{size}; bind the program to the mesh it was built for."
        )
    return group


# ---- all_reduce --------------------------------------------------------------------------------------------


def _check_reduction(op: str) -> None:
    require(
        op in REDUCTIONS,
        f"moe::all_reduce: the reduction '{op}' is unknown, but one of {', '.join(REDUCTIONS)} is needed; "
        "write an average as a sum and a division.",
    )


def _all_reduce(x: Tensor, op: str, axis: str) -> Tensor:
    """The sum, maximum or minimum of x over the group, on every rank."""
    _check_reduction(op)
    group = group_of("all_reduce", axis)
    out = x.clone(memory_format=torch.contiguous_format)
    transport.all_reduce(out, op, group)
    return out


def _all_reduce_fake(x: Tensor, op: str, axis: str) -> Tensor:
    _check_reduction(op)
    return x.new_empty(x.shape)


def _all_reduce_setup(ctx: Any, inputs: tuple[Tensor, str, str], output: Tensor) -> None:
    _, ctx.op, ctx.axis = inputs


def _all_reduce_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    require(
        ctx.op == "sum",
        f"moe::all_reduce: the gradient of '{ctx.op}' was asked for, but only 'sum' has one; detach the reduced value.",
    )
    # Every rank's output holds every rank's input, so each input collects the gradients of all outputs.
    return all_reduce(grad, "sum", ctx.axis), None, None


all_reduce = define(
    "all_reduce(Tensor x, str op, str axis) -> Tensor",
    _all_reduce,
    _all_reduce_fake,
    setup=_all_reduce_setup,
    backward=_all_reduce_backward,
)

# ---- all_gather --------------------------------------------------------------------------------------------


def _check_dim0(where: str, x: Tensor) -> None:
    require(x.dim() >= 1, f"moe::{where}: x is a scalar, but a dimension 0 is needed; reshape it to [1].")


def _all_gather(x: Tensor, group_size: int, axis: str) -> Tensor:
    """x of all ranks, one after another along dimension 0: [n, ...] -> [S*n, ...]."""
    _check_dim0("all_gather", x)
    group = group_of("all_gather", axis, group_size)
    out = x.new_empty(group_size * x.shape[0], *x.shape[1:])
    transport.all_gather(out, x.contiguous(), group)
    return out


def _all_gather_fake(x: Tensor, group_size: int, axis: str) -> Tensor:
    _check_dim0("all_gather", x)
    return x.new_empty(group_size * x.shape[0], *x.shape[1:])


def _group_setup(ctx: Any, inputs: tuple[Tensor, int, str], output: Tensor) -> None:
    _, ctx.group_size, ctx.axis = inputs


def _all_gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return reduce_scatter(grad, ctx.group_size, ctx.axis), None, None


all_gather = define(
    "all_gather(Tensor x, int group_size, str axis) -> Tensor",
    _all_gather,
    _all_gather_fake,
    setup=_group_setup,
    backward=_all_gather_backward,
)

# ---- reduce_scatter ----------------------------------------------------------------------------------------


def _check_divisible(x: Tensor, group_size: int) -> None:
    _check_dim0("reduce_scatter", x)
    require(
        x.shape[0] % group_size == 0,
        f"moe::reduce_scatter: dimension 0 of x has size {x.shape[0]}, but a multiple of the group size "
        f"{group_size} is needed; pad it.",
    )


def _reduce_scatter(x: Tensor, group_size: int, axis: str) -> Tensor:
    """This rank's part, along dimension 0, of the sum of x over the group: [S*n, ...] -> [n, ...]."""
    _check_divisible(x, group_size)
    group = group_of("reduce_scatter", axis, group_size)
    x = x.contiguous()
    if dist.get_backend(group) == "gloo":
        # gloo's own is an all_reduce of everything; exchanging the parts moves half as much, and the order of
        # the sum is fixed.
        parts = torch.empty_like(x)
        transport.all_to_all(parts, x, group)
        first, *others = parts.chunk(group_size) if x.shape[0] else [parts]
        total = first.clone()
        for part in others:
            total += part
        return total
    out = x.new_empty(x.shape[0] // group_size, *x.shape[1:])
    reduce_scatter_single(out, x, group=group)
    return out


def _reduce_scatter_fake(x: Tensor, group_size: int, axis: str) -> Tensor:
    _check_divisible(x, group_size)
    return x.new_empty(x.shape[0] // group_size, *x.shape[1:])


def _reduce_scatter_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return all_gather(grad, ctx.group_size, ctx.axis), None, None


reduce_scatter = define(
    "reduce_scatter(Tensor x, int group_size, str axis) -> Tensor",
    _reduce_scatter,
    _reduce_scatter_fake,
    setup=_group_setup,
    backward=_reduce_scatter_backward,
)

# ---- all_to_all --------------------------------------------------------------------------------------------


def _turned_shape(x: Tensor, group_size: int, split_dim: int, concat_dim: int) -> list[int]:
    require(
        0 <= split_dim < x.dim() and 0 <= concat_dim < x.dim() and split_dim != concat_dim,
        f"moe::all_to_all: split_dim is {split_dim} and concat_dim is {concat_dim}, but two dims of {list(x.shape)}, counted from "
        "the front, are needed; pass them so.",
    )
    require(
        x.shape[split_dim] % group_size == 0,
        f"moe::all_to_all: dimension {split_dim} of x has size {x.shape[split_dim]}, but a multiple of the group size {group_size} "
        "is needed; pad it.",
    )
    shape = list(x.shape)
    shape[split_dim] //= group_size
    shape[concat_dim] *= group_size
    return shape


def _all_to_all(x: Tensor, group_size: int, split_dim: int, concat_dim: int, axis: str) -> Tensor:
    """From parts along `concat_dim` to parts along `split_dim`: part i of x goes to rank i, and what comes is joined in rank order."""
    _turned_shape(x, group_size, split_dim, concat_dim)
    group = group_of("all_to_all", axis, group_size)
    parts = torch.stack(x.tensor_split(group_size, split_dim))
    found = torch.empty_like(parts)
    transport.all_to_all(found, parts, group)
    return torch.cat(found.unbind(0), concat_dim)


def _all_to_all_fake(x: Tensor, group_size: int, split_dim: int, concat_dim: int, axis: str) -> Tensor:
    return x.new_empty(_turned_shape(x, group_size, split_dim, concat_dim))


def _all_to_all_setup(ctx: Any, inputs: tuple[Tensor, int, int, int, str], output: Tensor) -> None:
    _, ctx.group_size, ctx.split_dim, ctx.concat_dim, ctx.axis = inputs


def _all_to_all_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    return all_to_all(grad, ctx.group_size, ctx.concat_dim, ctx.split_dim, ctx.axis), None, None, None, None


all_to_all = define(
    "all_to_all(Tensor x, int group_size, int split_dim, int concat_dim, str axis) -> Tensor",
    _all_to_all,
    _all_to_all_fake,
    setup=_all_to_all_setup,
    backward=_all_to_all_backward,
)
