"""Linear layers of many experts over rows that are grouped by expert.

R rows, S sources, E experts.  `tokens_per_expert` is int64 [E], or [S, E] when the rows are source-major (all
rows of source 0 in expert order, then those of source 1, ...); it may live on the CPU whatever the rows'
device.  `weight` is [E, out, in].
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moecompile.ops.registry import (
    LIBRARY,
    Op,
    accumulation_dtype,
    define,
    require,
    require_index_tensor,
    require_matrix,
    require_same_dtype,
)


def segments(where: str, tokens_per_expert: Tensor, num_rows: int) -> Iterator[tuple[int, int, int]]:
    """Yield (expert, first row, row after the last) for every group that has rows, in row order.

    The counts are checked against `num_rows` before anything is yielded.
    """
    counts = tokens_per_expert.reshape(-1).tolist()
    if sum(counts) != num_rows or any(n < 0 for n in counts):
        raise ValueError(
            f"moe::{where}: tokens_per_expert adds up to {sum(counts)} (smallest {min(counts, default=0)}), "
            f"but there are {num_rows} rows; pass the counts that permute or sizes_to_host returned for them."
        )
    num_experts = tokens_per_expert.shape[-1]
    spans, start = [], 0
    for i, n in enumerate(counts):
        if n:
            spans.append((i % num_experts, start, start + n))
            start += n
    return iter(spans)


def rows_by_expert(where: str, tokens_per_expert: Tensor, rows: Tensor) -> Iterator[tuple[int, list[slice]]]:
    """For every expert that has rows, its slices of `rows`: one per source."""
    spans: dict[int, list[slice]] = {}
    for expert, start, stop in segments(where, tokens_per_expert, rows.shape[0]):
        spans.setdefault(expert, []).append(slice(start, stop))
    return iter(spans.items())


def _joined(rows: Tensor, spans: list[slice]) -> Tensor:
    return rows[spans[0]] if len(spans) == 1 else torch.cat([rows[span] for span in spans])


def check_counts(where: str, tokens_per_expert: Tensor) -> None:
    require_index_tensor(where, "tokens_per_expert", tokens_per_expert)
    require(
        tokens_per_expert.dim() in (1, 2),
        f"moe::{where}: tokens_per_expert has shape {list(tokens_per_expert.shape)}, but [E] or [S, E] is "
        "needed; reshape it with the sources first.",
    )


# ---- grouped_linear ----------------------------------------------------------------------------------------


def check_grouped_linear(rows: Tensor, tokens_per_expert: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """What grouped_linear demands of its arguments, except that the counts add up to the rows."""
    where = "grouped_linear"
    require_matrix(where, "rows", rows)
    check_counts(where, tokens_per_expert)
    require(
        weight.dim() == 3,
        f"moe::{where}: weight has shape {list(weight.shape)}, but [E, out, in] is needed; stack the experts in dim 0.",
    )
    require(
        weight.shape[0] == tokens_per_expert.shape[-1],
        f"moe::{where}: weight holds {weight.shape[0]} experts, but tokens_per_expert "
        f"{tokens_per_expert.shape[-1]}; cut both for the same experts.",
    )
    require(
        weight.shape[2] == rows.shape[1],
        f"moe::{where}: weight [E, out, in] = {list(weight.shape)} takes width {weight.shape[2]}, but rows "
        f"have {rows.shape[1]}; transpose the last two dimensions of weight if it is [E, in, out].",
    )
    require_same_dtype(where, "rows", rows, "weight", weight)
    if bias is not None:
        require(
            bias.shape == weight.shape[:2],
            f"moe::{where}: bias has shape {list(bias.shape)}, but [E, out] = {list(weight.shape[:2])} is "
            "needed; stack one bias per expert.",
        )
        require_same_dtype(where, "rows", rows, "bias", bias)


def _grouped_linear(rows: Tensor, tokens_per_expert: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows [R, in] -> [R, out]: each row times its expert's weight [out, in], plus its expert's bias [out]."""
    check_grouped_linear(rows, tokens_per_expert, weight, bias)
    out = rows.new_zeros(rows.shape[0], weight.shape[1])
    for expert, start, stop in segments("grouped_linear", tokens_per_expert, rows.shape[0]):
        expert_bias = None if bias is None else bias[expert]
        out[start:stop] = torch.nn.functional.linear(rows[start:stop], weight[expert], expert_bias)
    return out


def _grouped_linear_fake(rows: Tensor, tokens_per_expert: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    check_grouped_linear(rows, tokens_per_expert, weight, bias)
    return rows.new_empty(rows.shape[0], weight.shape[1])


def _grouped_linear_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, tokens_per_expert, weight, _ = inputs
    ctx.save_for_backward(rows, tokens_per_expert, weight)


def _grouped_linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, Tensor | None]:
    rows, tokens_per_expert, weight = ctx.saved_tensors
    # Torch leaves arguments at their default out: there are three entries when no bias was given.
    needs_rows, _, needs_weight, *needs_bias = ctx.needs_input_grad
    return (
        grouped_linear(grad, tokens_per_expert, weight.transpose(1, 2)) if needs_rows else None,
        None,
        grouped_linear_wgrad(grad, rows, tokens_per_expert) if needs_weight else None,
        grouped_sum(grad, tokens_per_expert) if any(needs_bias) else None,
    )


grouped_linear = define(
    "grouped_linear(Tensor rows, Tensor tokens_per_expert, Tensor weight, Tensor? bias=None) -> Tensor",
    _grouped_linear,
    _grouped_linear_fake,
    setup=_grouped_linear_setup,
    backward=_grouped_linear_backward,
)


def _autocast_grouped_linear(device_type: str) -> Op:
    """grouped_linear under autocast: like linear, it computes in autocast's dtype unless in float64."""

    def kernel(rows: Tensor, tokens_per_expert: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        dtype = torch.get_autocast_dtype(device_type)
        with torch.autocast(device_type, enabled=False):
            if rows.dtype != torch.float64:
                rows, weight = rows.to(dtype), weight.to(dtype)
                bias = None if bias is None else bias.to(dtype)
            out: Tensor = grouped_linear(rows, tokens_per_expert, weight, bias)
            return out

    return kernel


for _device_type, _key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
    LIBRARY.impl("grouped_linear", _autocast_grouped_linear(_device_type), _key)  # type: ignore[no-untyped-call]

# ---- grouped_linear_wgrad ----------------------------------------------------------------------------------


def check_grouped_linear_wgrad(grad: Tensor, rows: Tensor, tokens_per_expert: Tensor) -> None:
    where = "grouped_linear_wgrad"
    require_matrix(where, "grad", grad)
    require_matrix(where, "rows", rows)
    check_counts(where, tokens_per_expert)
    require_same_dtype(where, "grad", grad, "rows", rows)


def check_same_rows(where: str, grad: Tensor, rows: Tensor) -> None:
    if grad.shape[0] != rows.shape[0]:
        raise ValueError(
            f"moe::{where}: grad has {grad.shape[0]} rows and rows has {rows.shape[0]}, but they must agree; "
            "pass the rows that the forward op took."
        )


def _grouped_linear_wgrad(grad: Tensor, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """Gradient [E, out, in] of the weight from grad [R, out] and rows [R, in]; exactly 0 for an idle expert."""
    check_grouped_linear_wgrad(grad, rows, tokens_per_expert)
    check_same_rows("grouped_linear_wgrad", grad, rows)
    out = grad.new_zeros(tokens_per_expert.shape[-1], grad.shape[1], rows.shape[1])
    for expert, spans in rows_by_expert("grouped_linear_wgrad", tokens_per_expert, rows):
        # One product over all sources: summing them one by one would round between the sources.
        out[expert] = _joined(grad, spans).t() @ _joined(rows, spans)
    return out


def _grouped_linear_wgrad_fake(grad: Tensor, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
    check_grouped_linear_wgrad(grad, rows, tokens_per_expert)
    return grad.new_empty(tokens_per_expert.shape[-1], grad.shape[1], rows.shape[1])


def _grouped_linear_wgrad_setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_linear_wgrad_backward(ctx: Any, grad_weight: Tensor) -> tuple[Tensor, Tensor, None]:
    # The op is linear in grad and in rows; the other one stands in for the rows of a linear layer.
    grad, rows, tokens_per_expert = ctx.saved_tensors
    return (
        grouped_linear(rows, tokens_per_expert, grad_weight),
        grouped_linear(grad, tokens_per_expert, grad_weight.transpose(1, 2)),
        None,
    )


grouped_linear_wgrad = define(
    "grouped_linear_wgrad(Tensor grad, Tensor rows, Tensor tokens_per_expert) -> Tensor",
    _grouped_linear_wgrad,
    _grouped_linear_wgrad_fake,
    setup=_grouped_linear_wgrad_setup,
    backward=_grouped_linear_wgrad_backward,
)

# ---- grouped_sum -------------------------------------------------------------------------------------------


def _grouped_sum(grad: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """Gradient [E, out] of the bias from grad [R, out]: the sum of each expert's rows, taken at least in float32."""
    require_matrix("grouped_sum", "grad", grad)
    check_counts("grouped_sum", tokens_per_expert)
    dtype = accumulation_dtype(grad)
    out = grad.new_zeros(tokens_per_expert.shape[-1], grad.shape[1])
    for expert, spans in rows_by_expert("grouped_sum", tokens_per_expert, grad):
        out[expert] = _joined(grad, spans).sum(0, dtype=dtype)
    return out


def _grouped_sum_fake(grad: Tensor, tokens_per_expert: Tensor) -> Tensor:
    require_matrix("grouped_sum", "grad", grad)
    check_counts("grouped_sum", tokens_per_expert)
    return grad.new_empty(tokens_per_expert.shape[-1], grad.shape[1])


def _grouped_sum_setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.num_rows = inputs[0].shape[0]


def _grouped_sum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    # Every row gets its expert's gradient: a linear layer with one input that is always 1.
    (tokens_per_expert,) = ctx.saved_tensors
    return grouped_linear(grad.new_ones(ctx.num_rows, 1), tokens_per_expert, grad.unsqueeze(2)), None


grouped_sum = define(
    "grouped_sum(Tensor grad, Tensor tokens_per_expert) -> Tensor",
    _grouped_sum,
    _grouped_sum_fake,
    setup=_grouped_sum_setup,
    backward=_grouped_sum_backward,
)
