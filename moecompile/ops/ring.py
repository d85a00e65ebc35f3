"""Attention over a sequence that is cut over ranks, hop by hop: rotate, attention_part, merge_attention.

Keys and values, side by side in one tensor ``kv``, go round the ring of ranks: after hop h a rank holds those of the rank h places before
it. `attention_part` attends to what is there, `merge_attention` joins two such results by the logarithms of their sums, so that
after all hops the softmax is the one over the whole sequence. The gradient of each is local again, and that of a rotation turns back:
gradients of keys and values go round the ring the other way, each hop adding its own, until they are home.

Sq, Sk positions of one rank; D width of a key, V of a value.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moecompile.ops import transport
from moecompile.ops.collectives import group_of
from moecompile.ops.fused import through
from moecompile.ops.registry import accumulation_dtype, define, require
from moecompile.ops.zigzag import pieces_of

# ---- rotate ------------------------------------------------------------------------------------------------


def _rotate(x: Tensor, group_size: int, steps: int, axis: str) -> Tensor:
    """x of the rank that stands ``steps`` places before this one in the ring."""
    group = group_of("rotate", axis, group_size)
    require(x.dim() >= 1, "moe::rotate: x is a scalar, but a dimension 0 is needed; reshape it to [1].")
    rows, x, out = x.shape[0], x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    ins, outs = [0] * group_size, [0] * group_size
    ins[(group.rank() + steps) % group_size] = outs[(group.rank() - steps) % group_size] = rows
    transport.all_to_all(out, x, group, outs, ins)
    return out


def _rotate_fake(x: Tensor, group_size: int, steps: int, axis: str) -> Tensor:
    return x.new_empty(x.shape)


def _rotate_setup(ctx: Any, inputs: tuple[Tensor, int, int, str], output: Tensor) -> None:
    _, ctx.group_size, ctx.steps, ctx.axis = inputs


def _rotate_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return rotate(grad, ctx.group_size, -ctx.steps, ctx.axis), None, None, None


rotate = define(
    "rotate(Tensor x, int group_size, int steps, str axis) -> Tensor",
    _rotate,
    _rotate_fake,
    setup=_rotate_setup,
    backward=_rotate_backward,
)

# ---- attention_part ----------------------------------------------------------------------------------------


class Block(NamedTuple):
    """Rows of queries that look at the first ``keys`` keys of a hop; ``causal`` row i only at those up to ``keys - rows + i``."""

    first: int
    rows: int
    keys: int
    causal: bool


def blocks_of(own: int, source: int, queries: int, keys: int, is_causal: bool, zigzag: bool) -> list[Block]:
    """What a rank computes of a hop with the keys of rank ``source``: rows in order, without keys that all come later than they.

    In zigzag both ranks hold an early and a late half. An early one sees no late one, a late one all early ones; of two early ones,
    or two late ones, the rank decides. So every hop is half a square, on whatever rank.
    """
    if not is_causal:
        return [Block(0, queries, keys, False)]
    if not zigzag:
        return [Block(0, queries, keys if source <= own else 0, source == own)]
    half = queries // 2
    if source == own:
        return [Block(0, half, half, True), Block(half, half, keys, True)]
    if source < own:
        return [Block(0, queries, half, False)]
    return [Block(0, half, 0, False), Block(half, half, keys, False)]


def _check(q: Tensor, kv: Tensor, mask: Tensor | None, ranks: int, zigzag: bool) -> None:
    require(
        q.dim() == kv.dim() >= 3 and kv.shape[-1] > q.shape[-1] and q.shape[-3] % kv.shape[-3] == 0,
        f"moe::attention_part: q has shape {list(q.shape)} and kv {list(kv.shape)}, but [..., heads, Sq, D] and [..., heads, Sk, D + V] "
        "are needed, with heads of q for each of kv; put keys and values side by side.",
    )
    require(
        mask is None or mask.shape[-1] in (1, ranks * kv.shape[-2]),
        f"moe::attention_part: mask has shape {list(mask.shape) if mask is not None else []}, but the columns of all {ranks} ranks are "
        "needed; do not cut it along the keys.",
    )
    require(
        not zigzag or q.shape[-2] % 2 == kv.shape[-2] % 2 == 0,
        f"moe::attention_part: there are {q.shape[-2]} queries and {kv.shape[-2]} keys, but in zigzag a rank has two pieces of as many; "
        "pad the sequence to a multiple of twice the ranks.",
    )


def _heads(q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in the type of sums, keys and values once for each head of queries."""
    dtype, group = accumulation_dtype(q), q.shape[-3] // kv.shape[-3]
    wide = kv.to(dtype)
    wide = wide if group == 1 else wide.repeat_interleave(group, -3)
    return q.to(dtype), wide[..., : q.shape[-1]], wide[..., q.shape[-1] :]


def _columns(mask: Tensor, source: int, keys: int, ranks: int, zigzag: bool) -> Tensor:
    """The columns of a mask that belong to the keys of rank ``source``."""
    if mask.shape[-1] == 1:
        return mask
    if not zigzag:
        return mask.narrow(-1, source * keys, keys)
    half = keys // 2
    return torch.cat([mask.narrow(-1, piece * half, half) for piece in pieces_of(source, ranks)], -1)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """[..., rows, keys]: what queries say to keys; minus infinity where they may not look."""
    found = q @ k.transpose(-1, -2) * scale
    if causal:
        rows, keys = found.shape[-2:]
        later = torch.ones(rows, keys, dtype=torch.bool, device=found.device).triu(1 + keys - rows)
        found = found.masked_fill(later, -torch.inf)
    if mask is not None:
        found = found.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else found + mask
    return found


def _of_block(block: Block, mask: Tensor | None) -> Tensor | None:
    """The rows and columns of a hop's mask that a block sees; a dim of size 1 stands for all."""
    if mask is None:
        return None
    rows = mask if mask.dim() < 2 or mask.shape[-2] == 1 else mask.narrow(-2, block.first, block.rows)
    return rows if rows.shape[-1] == 1 else rows.narrow(-1, 0, block.keys)


def _finite(lse: Tensor) -> Tensor:
    """The logarithm of a sum; 0 for a sum of nothing, so that nothing is what its terms are compared with."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _part(
    q: Tensor, kv: Tensor, mask: Tensor | None, index: Tensor, hop: int, ranks: int, is_causal: bool, scale: float, zigzag: bool = False
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of this rank's queries to the keys and values of the rank ``hop`` places before it, and the log of each sum.

    ``index`` is this rank's place in the ring of ``ranks``; ``mask`` has its rows and the columns of all, in the order of the whole
    sequence. ``zigzag`` says that ranks hold the sequence in that order. Queries that may not look at any of these keys get zeros, with
    minus infinity for the logarithm; nothing is computed for keys that all come later than causal queries.
    """
    _check(q, kv, mask, ranks, zigzag)
    own = int(index)
    source = (own - hop) % ranks
    query, k, v = _heads(q, kv)
    mask = None if mask is None else _columns(mask, source, kv.shape[-2], ranks, zigzag)
    outs, sums = [], []
    for block in blocks_of(own, source, q.shape[-2], kv.shape[-2], is_causal, zigzag):
        rows = query.narrow(-2, block.first, block.rows)
        if not block.keys:
            outs.append(rows.new_zeros([*rows.shape[:-1], v.shape[-1]]))
            sums.append(rows.new_full(rows.shape[:-1], -torch.inf))
            continue
        seen = _of_block(block, mask)
        scores = _scores(rows, k.narrow(-2, 0, block.keys), seen, block.causal, scale)
        sums.append(scores.logsumexp(-1))
        outs.append((scores - _finite(sums[-1]).unsqueeze(-1)).exp() @ v.narrow(-2, 0, block.keys))
    return torch.cat(outs, -2).contiguous(), torch.cat(sums, -1).contiguous()


def _part_fake(
    q: Tensor, kv: Tensor, mask: Tensor | None, index: Tensor, hop: int, ranks: int, is_causal: bool, scale: float, zigzag: bool = False
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check(q, kv, mask, ranks, zigzag)
    dtype = accumulation_dtype(q)
    return (
        q.new_empty([*q.shape[:-1], kv.shape[-1] - q.shape[-1]], dtype=dtype),
        q.new_empty(q.shape[:-1], dtype=dtype),
    )


def _part_grads(
    grad: Tensor, grad_lse: Tensor, q: Tensor, kv: Tensor, mask: Tensor | None, index: Tensor, out: Tensor, lse: Tensor,
    hop: int, ranks: int, is_causal: bool, scale: float, zigzag: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """With p = exp(scores - lse): grad_scores = p * (grad v^T - sum(grad * out) + grad_lse), and from there to q, keys and values."""
    own = int(index)
    source = (own - hop) % ranks
    query, k, v = _heads(q, kv)
    mask = None if mask is None else _columns(mask, source, kv.shape[-2], ranks, zigzag)
    behind = (grad_lse - (grad * out).sum(-1)).unsqueeze(-1)
    grad_q, grad_k, grad_v = torch.zeros_like(query), torch.zeros_like(k), torch.zeros_like(v)
    for block in blocks_of(own, source, q.shape[-2], kv.shape[-2], is_causal, zigzag):
        if not block.keys:
            continue
        rows, part_grad, part_lse, part_behind = (
            item.narrow(-2, block.first, block.rows) for item in (query, grad, _finite(lse).unsqueeze(-1), behind)
        )
        keys, values = k.narrow(-2, 0, block.keys), v.narrow(-2, 0, block.keys)
        p = (_scores(rows, keys, _of_block(block, mask), block.causal, scale) - part_lse).exp()
        slope = p * (part_grad @ values.transpose(-1, -2) + part_behind) * scale
        grad_q.narrow(-2, block.first, block.rows).copy_(slope @ keys)
        grad_k.narrow(-2, 0, block.keys).add_(slope.transpose(-1, -2) @ rows)
        grad_v.narrow(-2, 0, block.keys).add_(p.transpose(-1, -2) @ part_grad)
    grad_kv = torch.cat([grad_k, grad_v], -1)
    if grad_kv.shape != kv.shape:  # several heads of queries read one of keys
        grad_kv = grad_kv.reshape(*kv.shape[:-2], -1, *kv.shape[-2:]).sum(-3)
    return grad_q.to(q.dtype).contiguous(), grad_kv.to(kv.dtype).contiguous()


def _part_grads_fake(
    grad: Tensor, grad_lse: Tensor, q: Tensor, kv: Tensor, mask: Tensor | None, index: Tensor, out: Tensor, lse: Tensor,
    hop: int, ranks: int, is_causal: bool, scale: float, zigzag: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), kv.new_empty(kv.shape)


def _part_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, kv, mask, index, *ctx.rest = inputs
    ctx.save_for_backward(q, kv, mask, index, *output)


def _part_backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    return (*attention_part_backward(grad, grad_lse, *ctx.saved_tensors, *ctx.rest), *[None] * 7)


def _grads_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    grad, grad_lse, q, kv, mask, index, _, _, *ctx.rest = inputs
    ctx.save_for_backward(grad, grad_lse, q, kv, mask, index)


def _part_second(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    grad, grad_lse, q, kv, mask, index = ctx.saved_tensors

    def formula(grad: Tensor, grad_lse: Tensor, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = _part(q, kv, mask, index, *ctx.rest)
        return _part_grads(grad, grad_lse, q, kv, mask, index, out, lse, *ctx.rest)

    return (*through(formula, (grad, grad_lse, q, kv), grads), *[None] * 9)


attention_part_backward = define(
    "attention_part_backward(Tensor grad, Tensor grad_lse, Tensor q, Tensor kv, Tensor? mask, Tensor index, Tensor out, Tensor lse, "
    "int hop, int ranks, bool is_causal, float scale, bool zigzag=False) -> (Tensor grad_q, Tensor grad_kv)",
    _part_grads,
    _part_grads_fake,
    setup=_grads_setup,
    backward=_part_second,
)
attention_part = define(
    "attention_part(Tensor q, Tensor kv, Tensor? mask, Tensor index, int hop, int ranks, bool is_causal, float scale, "
    "bool zigzag=False) -> (Tensor out, Tensor lse)",
    _part,
    _part_fake,
    setup=_part_setup,
    backward=_part_backward,
)

# ---- merge_attention ---------------------------------------------------------------------------------------


def _merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to the keys of both parts: their results weighted by exp(lse - lse of both)."""
    lse = torch.logaddexp(lse_a, lse_b)
    first, second = ((part - _finite(lse)).exp().unsqueeze(-1) for part in (lse_a, lse_b))
    return (first * out_a + second * out_b).contiguous(), lse.contiguous()


def _merge_fake(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


def _merge_grads(
    grad: Tensor, grad_lse: Tensor, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """With w = exp(lse_a - lse): grad_out_a = w * grad, grad_lse_a = w * (grad_lse + sum(grad * (out_a - out)))."""
    found: list[Tensor] = []
    for part, part_lse in ((out_a, lse_a), (out_b, lse_b)):
        weight = (part_lse - _finite(lse)).exp()
        found += [weight.unsqueeze(-1) * grad, weight * (grad_lse + (grad * (part - out)).sum(-1))]
    return found[0], found[1], found[2], found[3]


def _merge_grads_fake(
    grad: Tensor, grad_lse: Tensor, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    outs, lses = out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)
    return outs, lses, torch.empty_like(outs), torch.empty_like(lses)


def _merge_setup(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _merge_backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = merge_attention_backward(grad, grad_lse, *ctx.saved_tensors)
    return found


def _merge_grads_setup(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:6])


def _merge_second(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    def formula(
        grad: Tensor, grad_lse: Tensor, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
    ) -> tuple[Tensor, ...]:
        parts = (out_a, lse_a, out_b, lse_b)
        return _merge_grads(grad, grad_lse, *parts, *_merge(*parts))

    return (*through(formula, ctx.saved_tensors, grads), None, None)


merge_attention_backward = define(
    "merge_attention_backward(Tensor grad, Tensor grad_lse, Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor out, "
    "Tensor lse) -> (Tensor grad_a, Tensor grad_lse_a, Tensor grad_b, Tensor grad_lse_b)",
    _merge_grads,
    _merge_grads_fake,
    setup=_merge_grads_setup,
    backward=_merge_second,
)
merge_attention = define(
    "merge_attention(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor out, Tensor lse)",
    _merge,
    _merge_fake,
    setup=_merge_setup,
    backward=_merge_backward,
)
