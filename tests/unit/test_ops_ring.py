"""Hops of attention round a ring: all of them together are attention over the whole sequence, gradients included."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from moecompile import ops
from moecompile.ops.ring import _part, _part_grads
from tests.support.ops_oracle import rand

B, HEADS, LENGTH, WIDTH, VALUES = 2, 4, 12, 6, 4


def parts(x: Tensor, ranks: int, zigzag: bool) -> list[Tensor]:
    """Rows of each rank."""
    cut = ops.zigzag_slice if zigzag else ops.local_slice
    return [cut(x, torch.tensor(rank), x.dim() - 2, 1, ranks) for rank in range(ranks)]


def around(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ranks: int,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    zigzag: bool = False,
) -> Tensor:
    """Attention as the ranks of a ring compute it, one after another; rows in the order of the whole."""
    kv = parts(torch.cat([key, value], -1), ranks, zigzag)
    found = []
    for own, part in enumerate(parts(query, ranks, zigzag)):
        rows = mask if mask is None or mask.shape[-2] == 1 else parts(mask, ranks, zigzag)[own]
        index, out = torch.tensor(own), ()
        for hop in range(ranks):
            options = (rows, index, hop, ranks, causal, 1 / math.sqrt(query.shape[-1]), zigzag)
            here = ops.attention_part(part, kv[(own - hop) % ranks], *options)
            out = ops.merge_attention(*out, *here) if out else here
        place = ops.zigzag_place if zigzag else ops.local_place
        found.append(place(out[0], index, query.dim() - 2, 1, ranks))
    return torch.stack(found).sum(0)


def operands(kv_heads: int = HEADS) -> list[Tensor]:
    return [
        rand(B, heads, LENGTH, width, seed=seed, grad=True)
        for seed, (heads, width) in enumerate([(HEADS, WIDTH), (kv_heads, WIDTH), (kv_heads, VALUES)])
    ]


def documents() -> Tensor:
    """Who may look at whom where sequences of 5 and 7 tokens lie one behind the other."""
    place, document = torch.arange(LENGTH), torch.arange(LENGTH) >= 5
    return (place[:, None] >= place) & (document[:, None] == document)


MASKS = {
    "none": None,
    "documents": documents(),
    "columns": torch.arange(LENGTH).expand(B, 1, 1, LENGTH) >= torch.tensor([0, 3]).reshape(B, 1, 1, 1),
    "added": rand(B, HEADS, LENGTH, LENGTH, seed=9),
    "nobody": torch.zeros(LENGTH, LENGTH, dtype=torch.bool).index_fill(0, torch.arange(6, LENGTH), True),
}


@pytest.mark.parametrize(("ranks", "zigzag"), [(2, False), (3, False), (4, False), (1, True), (2, True), (3, True)])
@pytest.mark.parametrize("name", [*MASKS, "causal"])
@pytest.mark.parametrize("kv_heads", [HEADS, 2, 1])
def test_all_hops_are_attention_to_all_keys(ranks: int, name: str, kv_heads: int, zigzag: bool) -> None:
    """Values of another width, grouped queries, masks with rows of which nothing is seen."""
    inputs, mask, causal = operands(kv_heads), MASKS.get(name), name == "causal"
    found = around(*inputs, ranks, mask=mask, causal=causal, zigzag=zigzag)
    wanted = F.scaled_dot_product_attention(*inputs, attn_mask=mask, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)
    weights = rand(*wanted.shape, seed=5)
    grads = torch.autograd.grad((found * weights).sum(), inputs)
    due = torch.autograd.grad((wanted * weights).sum(), inputs)
    for here, there in zip(grads, due, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-11, atol=1e-13)


def test_narrow_types_are_summed_in_float32() -> None:
    inputs = [item.detach().bfloat16() for item in operands()]
    found = around(*inputs, 4, causal=True)
    assert found.dtype == torch.float32
    wide = F.scaled_dot_product_attention(*[item.float() for item in inputs], is_causal=True)
    torch.testing.assert_close(found, wide, rtol=1e-5, atol=1e-6)


def test_keys_that_come_later_are_not_looked_at() -> None:
    """Zeros, and a sum of nothing: the values are not read at all."""
    query, kv = rand(1, 1, 2, 4), torch.full((1, 1, 2, 8), float("nan"), dtype=torch.float64)
    out, lse = ops.attention_part(query, kv, None, torch.tensor(0), 1, 4, True, 0.5)
    assert not out.count_nonzero() and torch.isneginf(lse).all()


def work(ranks: int, zigzag: bool) -> list[tuple[int, int]]:
    """Floating-point operations of all hops on each rank, forward and backward, as torch counts them."""
    query, kv = rand(1, 1, 8, 4), rand(1, 1, 8, 8)
    found = []
    for own in range(ranks):
        counts = []
        with FlopCounterMode(display=False) as forward:
            hops = [_part(query, kv, None, torch.tensor(own), hop, ranks, True, 0.5, zigzag) for hop in range(ranks)]
        counts.append(forward.get_total_flops())
        with FlopCounterMode(display=False) as backward:
            for hop, (out, lse) in enumerate(hops):
                _part_grads(out, lse, query, kv, None, torch.tensor(own), out, lse, hop, ranks, True, 0.5, zigzag)
        counts.append(backward.get_total_flops())
        found.append((counts[0], counts[1]))
    return found


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_in_zigzag_all_ranks_have_as_much_to_do(ranks: int) -> None:
    """In squares of a quarter of a hop: 2 n + 1 on each rank; else 4 on the first and 4 n on the last, for which all others wait."""
    product = 2 * 4 * 4 * 4  # one product of [4, 4] and [4, 4]: a square of scores, or what it gives of the values
    plain, zigzag = work(ranks, False), work(ranks, True)
    assert plain == [(2 * 4 * (own + 1) * product, 5 * 4 * (own + 1) * product) for own in range(ranks)]
    assert zigzag == [(2 * (2 * ranks + 1) * product, 5 * (2 * ranks + 1) * product)] * ranks


def test_late_keys_are_not_looked_at_in_zigzag() -> None:
    """Of the keys of an earlier rank the late half, of those of a later rank all by the early queries."""
    query, kv = rand(1, 1, 4, 4), rand(1, 1, 4, 8)
    kv[..., 2:, :] = float("nan")
    out, lse = ops.attention_part(query, kv, None, torch.tensor(2), 1, 4, True, 0.5, True)
    assert out.isfinite().all() and lse.isfinite().all()
    out, lse = ops.attention_part(query, kv, None, torch.tensor(0), 1, 4, True, 0.5, True)
    assert not out[..., :2, :].count_nonzero() and torch.isneginf(lse[..., :2]).all() and lse[..., 2:].isnan().all()


@pytest.mark.parametrize(("causal", "zigzag"), [(False, False), (True, False), (True, True)])
def test_opcheck(causal: bool, zigzag: bool) -> None:
    query, key, value = operands(2)
    kv = torch.cat([key, value], -1).detach().requires_grad_()
    options = (torch.tensor(1), 1, 2, causal, 0.5, zigzag)
    opcheck(ops.attention_part, (query, kv, None, *options))
    opcheck(ops.attention_part, (query, kv, torch.ones(LENGTH, 2 * LENGTH, dtype=torch.bool), *options))
    out, lse = ops.attention_part(query, kv, None, *options)
    other, other_lse = ops.attention_part(query, kv, None, torch.tensor(1), 0, 2, causal, 0.5, zigzag)
    parts = [item.detach().requires_grad_() for item in (out, lse, other, other_lse)]
    opcheck(ops.merge_attention, tuple(parts))
    grads = (rand(*out.shape, seed=3), rand(*lse.shape, seed=4))
    assert torch.autograd.gradcheck(lambda *item: ops.merge_attention(*item), parts)
    small = (query[:, :2, :4], kv[:, :1, :4])
    assert torch.autograd.gradcheck(lambda q, kv: ops.attention_part(q, kv, None, *options), small)
    assert torch.autograd.gradgradcheck(lambda q, kv: ops.attention_part(q, kv, None, *options), small)
    opcheck(ops.merge_attention_backward, (*grads, *parts, *ops.merge_attention(*parts)), test_utils="test_faketensor")


def test_errors_say_what_to_do() -> None:
    query, key, value = operands()
    kv = torch.cat([key, value], -1)
    options = (torch.tensor(0), 0, 2, False, 1.0)
    with pytest.raises(ValueError, match="put keys and values side by side"):
        ops.attention_part(query, key, None, *options)
    with pytest.raises(
        ValueError, match=r"3 queries and 12 keys, but in zigzag a rank has two pieces.*twice the ranks"
    ):
        ops.attention_part(query[..., :3, :], kv, None, *options, True)
    with pytest.raises(ValueError, match="do not cut it along the keys"):
        ops.attention_part(query, kv, torch.ones(LENGTH, LENGTH, dtype=torch.bool), *options)
