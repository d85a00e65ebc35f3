"""CPU kernels of `moe_cpu::grouped_mlp`: an expert's two products and its activation, block of rows by block of rows.

What lies between the products is read while it is still in the cache, and the activation is not kept for the backward, which computes
it again from `h`. Order of arithmetic is that of ATen's silu, mul and silu_backward.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from moecompile.ops.cpu import check_grouped_mlp
from moecompile.ops.experts import check_same_rows, rows_by_expert

aten = torch.ops.aten

# A block's rows times width, at least; fewer rows would read an expert's weights more often than its rows.
BLOCK_ELEMENTS, LEAST_ROWS = 1 << 17, 128


def _step(width: int) -> int:
    return max(LEAST_ROWS, BLOCK_ELEMENTS // max(width, 1))


def _blocks(tokens_per_expert: Tensor, rows: Tensor, step: int) -> Iterator[tuple[int, list[slice]]]:
    """For every expert that has rows, slices of about equal length, none longer than ``step``."""
    for expert, spans in rows_by_expert("grouped_mlp", tokens_per_expert, rows):
        found: list[slice] = []
        for span in spans:
            parts = -(-(span.stop - span.start) // step)
            length = -(-(span.stop - span.start) // parts)
            found += [slice(at, min(at + length, span.stop)) for at in range(span.start, span.stop, length)]
        yield expert, found


def grouped_mlp(rows: Tensor, tokens_per_expert: Tensor, w_in: Tensor, w_out: Tensor) -> tuple[Tensor, Tensor]:
    """y [R, H] and h = [gate|up] [R, 2F] of rows [R, H], w_in [E, 2F, H] and w_out [E, H, F]."""
    check_grouped_mlp(rows, tokens_per_expert, w_in, w_out)
    width = w_out.shape[2]
    y, h = rows.new_empty(rows.shape[0], w_out.shape[1]), rows.new_empty(rows.shape[0], 2 * width)
    step = _step(width)
    activated = rows.new_empty(min(step, rows.shape[0]), width)
    first, last = w_in.transpose(1, 2).unbind(0), w_out.transpose(1, 2).unbind(0)
    for expert, blocks in _blocks(tokens_per_expert, rows, step):
        for block in blocks:
            both, act = h[block], activated[: block.stop - block.start]
            torch.mm(rows[block], first[expert], out=both)
            act.copy_(both[:, :width])  # dense: silu is not vectorized on the halves of a wider tensor
            aten.silu_.default(act)
            act.mul_(both[:, width:])
            torch.mm(act, last[expert], out=y[block])
    return y, h


def grouped_mlp_backward(
    grad: Tensor, rows: Tensor, tokens_per_expert: Tensor, w_in: Tensor, w_out: Tensor, h: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of rows, w_in and w_out; those of an idle expert's weights are exactly 0."""
    check_grouped_mlp(rows, tokens_per_expert, w_in, w_out)
    check_same_rows("grouped_mlp_backward", grad, rows)
    width = w_out.shape[2]
    step = _step(width)
    length = min(step, rows.shape[0])
    grad_rows = torch.empty_like(rows, memory_format=torch.contiguous_format)
    grad_in, grad_out = (torch.empty_like(w, memory_format=torch.contiguous_format) for w in (w_in, w_out))
    scratch, grad_h = rows.new_empty(3, length, width), rows.new_empty(length, 2 * width)
    first, last = w_in.unbind(0), w_out.unbind(0)
    idle = set(range(w_in.shape[0]))
    for expert, blocks in _blocks(tokens_per_expert, rows, step):
        idle.remove(expert)
        for at, block in enumerate(blocks):
            size = block.stop - block.start
            slope, gate, act = (part[:size] for part in scratch)
            up, both, given = h[block][:, width:], grad_h[:size], grad[block]
            torch.mm(given, last[expert], out=slope)
            gate.copy_(h[block][:, :width])
            aten.silu.out(gate, out=act)
            torch.mul(slope, act, out=both[:, width:])
            act.mul_(up)
            slope.mul_(up)
            aten.silu_backward.grad_input(slope, gate, grad_input=slope)
            both[:, :width].copy_(slope)
            torch.mm(both, first[expert], out=grad_rows[block])
            for sums, left, right in ((grad_out[expert], given, act), (grad_in[expert], both, rows[block])):
                if at == 0:
                    torch.mm(left.t(), right, out=sums)
                else:
                    sums.addmm_(left.t(), right)
    for expert in idle:
        grad_in[expert].zero_()
        grad_out[expert].zero_()
    return grad_rows, grad_in, grad_out
