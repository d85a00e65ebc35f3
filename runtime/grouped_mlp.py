"""CPU kernels of `moe_cpu::grouped_mlp`: an expert's two products and its activation, block of rows by block of rows.

What lies between the products is read while it is still in the cache, and gate and up each lie dense. The activation is not kept for the
backward, which computes it again from `h`. Order of arithmetic is that of ATen's silu, mul and silu_backward.
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
    """y [R, H] and h [2, R, F], gate and up, of rows [R, H], w_in [E, 2F, H] and w_out [E, H, F]."""
    check_grouped_mlp(rows, tokens_per_expert, w_in, w_out)
    width = w_out.shape[2]
    y, h = rows.new_empty(rows.shape[0], w_out.shape[1]), rows.new_empty(2, rows.shape[0], width)
    step = _step(width)
    activated = rows.new_empty(min(step, rows.shape[0]), width)
    gates, ups, last = (w.transpose(1, 2).unbind(0) for w in (w_in[:, :width], w_in[:, width:], w_out))
    for expert, blocks in _blocks(tokens_per_expert, rows, step):
        for block in blocks:
            gate, up = h[:, block].unbind(0)
            act = activated[: block.stop - block.start]
            torch.mm(rows[block], gates[expert], out=gate)
            torch.mm(rows[block], ups[expert], out=up)
            aten.silu.out(gate, out=act)
            act.mul_(up)
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
    grad_rows = torch.empty_like(rows, memory_format=torch.contiguous_format)
    grad_in, grad_out = (torch.empty_like(w, memory_format=torch.contiguous_format) for w in (w_in, w_out))
    scratch = rows.new_empty(3, min(step, rows.shape[0]), width)
    gates, ups, last = (w.unbind(0) for w in (w_in[:, :width], w_in[:, width:], w_out))
    grad_gates, grad_ups = (part.unbind(0) for part in (grad_in[:, :width], grad_in[:, width:]))
    idle = set(range(w_in.shape[0]))
    for expert, blocks in _blocks(tokens_per_expert, rows, step):
        idle.remove(expert)
        for at, block in enumerate(blocks):
            gate, up = h[:, block].unbind(0)
            slope, act, grad_up = scratch[:, : block.stop - block.start].unbind(0)
            given, taken, returned = grad[block], rows[block], grad_rows[block]
            torch.mm(given, last[expert], out=slope)
            aten.silu.out(gate, out=act)
            torch.mul(slope, act, out=grad_up)
            act.mul_(up)
            grad_gate = slope.mul_(up)
            aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
            torch.mm(grad_gate, gates[expert], out=returned)
            returned.addmm_(grad_up, ups[expert])
            for sums, left, right in (
                (grad_out[expert], given, act),
                (grad_gates[expert], grad_gate, taken),
                (grad_ups[expert], grad_up, taken),
            ):
                if at == 0:
                    torch.mm(left.t(), right, out=sums)
                else:
                    sums.addmm_(left.t(), right)
    for expert in idle:
        grad_in[expert].zero_()
        grad_out[expert].zero_()
    return grad_rows, grad_in, grad_out
