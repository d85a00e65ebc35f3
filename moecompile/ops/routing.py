"""Rows in expert order and back: permute, permute_local, gather_rows, unpermute.

T tokens, K experts chosen per token, H width, E experts, R rows.  A row map is int64 [R]: `row_map[r]` is the
flat index t*K + k of the choice that row r serves, -1 for a padding row.  Indices in a row map are distinct.
"""

from typing import Any

import torch
from torch import Tensor

from moecompile.ops.registry import (
    accumulation_dtype,
    define,
    require,
    require_index_tensor,
    require_matrix,
)


def may_have_padding(row_map: Tensor) -> bool:
    """Whether a row map can hold -1; answered exactly on the CPU and without a host read elsewhere."""
    if row_map.device.type == "cpu":
        return row_map.numel() > 0 and int(row_map.min()) < 0
    return True


def rows_of_choices(row_map: Tensor, num_choices: int) -> tuple[Tensor, Tensor]:
    """The inverse of a row map.

    For each flat t*K + k: the row that serves it (0 where none does), and whether one does.
    """
    num_rows = row_map.shape[0]
    # One slot more than there are choices: padding rows all land there and are cut off.
    slots = torch.full((num_choices + 1,), -1, dtype=torch.int64, device=row_map.device)
    target = torch.where(row_map < 0, num_choices, row_map)
    slots.scatter_(0, target, torch.arange(num_rows, device=row_map.device))
    inverse = slots[:num_choices]
    return inverse.clamp(min=0), inverse >= 0


# ---- permute -----------------------------------------------------------------------------------------------


def _check_tokens(where: str, x: Tensor, topk_ids: Tensor) -> None:
    require_matrix(where, "x", x)
    require_matrix(where, "topk_ids", topk_ids)
    require_index_tensor(where, "topk_ids", topk_ids)
    require(
        x.shape[0] == topk_ids.shape[0],
        f"moe::{where}: x has {x.shape[0]} tokens and topk_ids {topk_ids.shape[0]}, but they must agree; "
        "flatten batch and sequence of both in the same order.",
    )


def _sort_by_expert(keys: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Stable order of `keys` and how often each of 0..num_experts-1 occurs; counted without atomics."""
    ordered, order = torch.sort(keys, stable=True)
    edges = torch.searchsorted(ordered, torch.arange(num_experts + 1, device=keys.device))
    return order, edges.diff()


def _permute(x: Tensor, topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """One row per choice, sorted by expert and within an expert by t*K + k.

    x [T, H], topk_ids int64 [T, K] -> rows [T*K, H], tokens_per_expert int64 [E], row_map int64 [T*K].
    """
    _check_tokens("permute", x, topk_ids)
    ids = topk_ids.reshape(-1)
    # An id out of range is in no expert's count; elsewhere than on the CPU this check would be a host read.
    order, counts = _sort_by_expert(ids, num_experts)
    if ids.device.type == "cpu" and int(counts.sum()) != ids.shape[0]:
        raise ValueError(
            f"moe::permute: topk_ids spans {int(ids.min())}..{int(ids.max())}, but ids must lie in "
            f"0..{num_experts - 1}; check num_experts against the router's width."
        )
    return x.index_select(0, order // max(topk_ids.shape[1], 1)), counts, order


def _permute_fake(x: Tensor, topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    _check_tokens("permute", x, topk_ids)
    num_rows = topk_ids.shape[0] * topk_ids.shape[1]
    return x.new_empty(num_rows, x.shape[1]), topk_ids.new_empty(num_experts), topk_ids.new_empty(num_rows)


def _permute_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, topk_ids = inputs[:2]
    ctx.save_for_backward(output[2])
    ctx.num_tokens, ctx.top_k, ctx.num_inputs = x.shape[0], topk_ids.shape[1], len(inputs)
    # Rows nobody differentiates must not become a tensor of zeros in a traced graph.
    ctx.set_materialize_grads(False)


def _permute_backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    (row_map,) = ctx.saved_tensors
    grad_x = None if grad is None else unpermute(grad, row_map, ctx.num_tokens, ctx.top_k)
    return (grad_x, *[None] * (ctx.num_inputs - 1))


permute = define(
    "permute(Tensor x, Tensor topk_ids, int num_experts) -> (Tensor rows, Tensor tokens_per_expert, Tensor row_map)",
    _permute,
    _permute_fake,
    setup=_permute_setup,
    backward=_permute_backward,
)


def _permute_local(
    x: Tensor, topk_ids: Tensor, first_expert: Tensor, num_local_experts: int, num_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """permute for the experts first_expert .. first_expert + num_local_experts - 1 only: the allgather form.

    first_expert is a 0-d int64 tensor, so that all ranks share one graph; num_rows says how many choices fall on these
    experts.  Rows and row_map have num_rows entries, tokens_per_expert has num_local_experts.
    """
    _check_tokens("permute_local", x, topk_ids)
    local = topk_ids.reshape(-1) - first_expert
    elsewhere = (local < 0) | (local >= num_local_experts)
    # Choices of other ranks' experts sort behind all local ones and are then cut off.
    order, counts = _sort_by_expert(local.masked_fill(elsewhere, num_local_experts), num_local_experts)
    if num_rows > order.shape[0] or (x.device.type == "cpu" and int(counts.sum()) != num_rows):
        raise ValueError(
            f"moe::permute_local: {int(counts.sum())} choices fall on the local experts, but num_rows is "
            f"{num_rows}; count the same topk_ids for num_rows."
        )
    row_map = order[:num_rows].clone()
    return x.index_select(0, row_map // max(topk_ids.shape[1], 1)), counts, row_map


def _permute_local_fake(
    x: Tensor, topk_ids: Tensor, first_expert: Tensor, num_local_experts: int, num_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    _check_tokens("permute_local", x, topk_ids)
    return (
        x.new_empty(num_rows, x.shape[1]),
        topk_ids.new_empty(num_local_experts),
        topk_ids.new_empty(num_rows),
    )


permute_local = define(
    "permute_local(Tensor x, Tensor topk_ids, Tensor first_expert, int num_local_experts, SymInt num_rows)"
    " -> (Tensor rows, Tensor tokens_per_expert, Tensor row_map)",
    _permute_local,
    _permute_local_fake,
    setup=_permute_setup,
    backward=_permute_backward,
)

# ---- gather_rows -------------------------------------------------------------------------------------------


def _check_row_map(where: str, row_map: Tensor) -> None:
    require_index_tensor(where, "row_map", row_map)
    require(
        row_map.dim() == 1,
        f"moe::{where}: row_map has shape {list(row_map.shape)}, but one dimension is needed; "
        "pass the row_map that permute returned.",
    )


def _gather_rows(x: Tensor, row_map: Tensor, top_k: int) -> Tensor:
    """x[row_map // top_k], and 0 for padding rows: the adjoint of unpermute without probs.  [T, H] -> [R, H]."""
    require_matrix("gather_rows", "x", x)
    _check_row_map("gather_rows", row_map)
    if x.shape[0] == 0:
        return x.new_zeros(row_map.shape[0], x.shape[1])
    if not may_have_padding(row_map):
        return x.index_select(0, row_map // top_k)
    rows = x.index_select(0, row_map.clamp(min=0) // top_k)
    return rows.masked_fill_((row_map < 0).unsqueeze(1), 0)


def _gather_rows_fake(x: Tensor, row_map: Tensor, top_k: int) -> Tensor:
    require_matrix("gather_rows", "x", x)
    _check_row_map("gather_rows", row_map)
    return x.new_empty(row_map.shape[0], x.shape[1])


def _gather_rows_setup(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.num_tokens, ctx.top_k = inputs[0].shape[0], inputs[2]


def _gather_rows_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (row_map,) = ctx.saved_tensors
    return unpermute(grad, row_map, ctx.num_tokens, ctx.top_k), None, None


gather_rows = define(
    "gather_rows(Tensor x, Tensor row_map, int top_k) -> Tensor",
    _gather_rows,
    _gather_rows_fake,
    setup=_gather_rows_setup,
    backward=_gather_rows_backward,
)

# ---- unpermute ---------------------------------------------------------------------------------------------


def check_unpermute(
    where: str, rows: Tensor, row_map: Tensor, num_tokens: int, top_k: int, probs: Tensor | None
) -> None:
    """What unpermute and its gradient demand of their arguments, as far as it is known while tracing."""
    require_matrix(where, "rows", rows)
    _check_row_map(where, row_map)
    if probs is not None:
        require(
            tuple(probs.shape) == (num_tokens, top_k),
            f"moe::{where}: probs has shape {list(probs.shape)}, but [{num_tokens}, {top_k}] is needed; "
            "pass one probability per token and choice.",
        )


def check_rows(where: str, rows: Tensor, row_map: Tensor, num_choices: int) -> None:
    """What can be checked only when sizes, and on the CPU values, are known."""
    if rows.shape[0] != row_map.shape[0]:
        raise ValueError(
            f"moe::{where}: there are {rows.shape[0]} rows, but row_map has {row_map.shape[0]} entries; "
            "pass the row_map of the permute that made these rows."
        )
    if row_map.device.type == "cpu" and row_map.numel() > 0 and int(row_map.max()) >= num_choices:
        raise ValueError(
            f"moe::{where}: row_map names choice {int(row_map.max())}, but tokens times top_k is "
            f"{num_choices}; pass the num_tokens and top_k of the permute that made this row_map."
        )


def _unpermute(rows: Tensor, row_map: Tensor, num_tokens: int, top_k: int, probs: Tensor | None = None) -> Tensor:
    """y[t] = sum over k of probs[t, k] * (the row of choice t*K + k), a missing row counting 0.  [R, H] -> [T, H].

    Sums are taken in k order and at least in float32; the result has the dtype of rows.
    """
    check_unpermute("unpermute", rows, row_map, num_tokens, top_k, probs)
    check_rows("unpermute", rows, row_map, num_tokens * top_k)
    dtype = accumulation_dtype(rows, probs)
    total = rows.new_zeros(num_tokens, rows.shape[1], dtype=dtype)
    if rows.shape[0] == 0:
        return total.to(rows.dtype)
    inverse, present = (t.view(num_tokens, top_k) for t in rows_of_choices(row_map, num_tokens * top_k))
    for k in range(top_k):  # a fixed order of summation, whatever order the rows are in
        part = rows.index_select(0, inverse[:, k]).to(dtype)
        if probs is not None:
            part = part * probs[:, k, None]
        # A choice without a row counts 0 even where the row read in its place holds inf or NaN.
        total += torch.where(present[:, k, None], part, 0)
    return total.to(rows.dtype)


def _unpermute_fake(rows: Tensor, row_map: Tensor, num_tokens: int, top_k: int, probs: Tensor | None = None) -> Tensor:
    check_unpermute("unpermute", rows, row_map, num_tokens, top_k, probs)
    return rows.new_empty(num_tokens, rows.shape[1])


def _unpermute_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, row_map, _, ctx.top_k, probs = inputs
    ctx.weighted = probs is not None
    # Without probs nothing of the experts' output is kept for the backward.
    ctx.save_for_backward(*((row_map, rows, probs) if ctx.weighted else (row_map,)))


def _unpermute_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, Tensor | None]:
    if not ctx.weighted:
        return gather_rows(grad, ctx.saved_tensors[0], ctx.top_k), None, None, None, None
    row_map, rows, probs = ctx.saved_tensors
    grad_rows, grad_probs = unpermute_backward(grad, rows, row_map, probs)
    return grad_rows, None, None, None, grad_probs


unpermute = define(
    "unpermute(Tensor rows, Tensor row_map, SymInt num_tokens, int top_k, Tensor? probs=None) -> Tensor",
    _unpermute,
    _unpermute_fake,
    setup=_unpermute_setup,
    backward=_unpermute_backward,
)


def check_unpermute_backward(grad: Tensor, rows: Tensor, row_map: Tensor, probs: Tensor) -> None:
    require_matrix("unpermute_backward", "grad", grad)
    require_matrix("unpermute_backward", "probs", probs)
    check_unpermute("unpermute_backward", rows, row_map, grad.shape[0], probs.shape[1], probs)


def _unpermute_grads(grad: Tensor, rows: Tensor, row_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """grad [T, H] -> grad_rows like rows, grad_probs like probs; 0 for padding rows and for choices without a row."""
    check_unpermute_backward(grad, rows, row_map, probs)
    check_rows("unpermute_backward", rows, row_map, probs.numel())
    num_choices = probs.numel()
    dtype = accumulation_dtype(rows, probs)
    if num_choices == 0:
        return torch.zeros_like(rows, memory_format=torch.contiguous_format), torch.zeros_like(probs)
    padding = row_map < 0
    choice = row_map.clamp(min=0)
    grad_of_row = grad.index_select(0, choice // probs.shape[1]).to(dtype)
    weight = probs.reshape(-1).index_select(0, choice).unsqueeze(1)
    grad_rows = torch.where(padding.unsqueeze(1), 0, grad_of_row * weight).to(rows.dtype)
    # Padding rows all write to one slot behind the last choice, which is cut off.
    grad_probs = grad.new_zeros(num_choices + 1, dtype=dtype)
    grad_probs.scatter_(0, torch.where(padding, num_choices, row_map), (grad_of_row * rows).sum(1))
    return grad_rows, grad_probs[:num_choices].view(probs.shape).to(probs.dtype, copy=True)


def _unpermute_grads_fake(grad: Tensor, rows: Tensor, row_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    check_unpermute_backward(grad, rows, row_map, probs)
    return rows.new_empty(rows.shape), probs.new_empty(probs.shape)


def _unpermute_grads_setup(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _unpermute_grads_backward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, None, Tensor]:
    # unpermute_backward is linear in each of grad, rows and probs, and so is every term here.
    grad, rows, row_map, probs = ctx.saved_tensors
    size = grad.shape[0], probs.shape[1]
    grad_grad = unpermute(a, row_map, *size, probs) + unpermute(rows, row_map, *size, b)
    grad_rows, _ = unpermute_backward(grad, rows, row_map, b)
    _, grad_probs = unpermute_backward(grad, a, row_map, probs)
    return grad_grad, grad_rows, None, grad_probs


unpermute_backward = define(
    "unpermute_backward(Tensor grad, Tensor rows, Tensor row_map, Tensor probs) -> (Tensor grad_rows, "
    "Tensor grad_probs)",
    _unpermute_grads,
    _unpermute_grads_fake,
    setup=_unpermute_grads_setup,
    backward=_unpermute_grads_backward,
)
