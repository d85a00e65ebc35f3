"""Hops of attention round a ring: all of them together are attention over the whole sequence, gradients included."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import opcheck

from moecompile import ops
from tests.support.ops_oracle import rand

B, HEADS, LENGTH, WIDTH, VALUES = 2, 4, 12, 6, 4


def around(
    query: Tensor, key: Tensor, value: Tensor, ranks: int, *, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Attention as the ranks of a ring compute it, one after another."""
    kv = torch.cat([key, value], -1).chunk(ranks, -2)
    found = []
    for own, part in enumerate(query.chunk(ranks, -2)):
        rows = mask if mask is None or mask.shape[-2] == 1 else mask.chunk(ranks, -2)[own]
        index, out = torch.tensor(own), ()
        for hop in range(ranks):
            options = (rows, index, hop, ranks, causal, 1 / math.sqrt(query.shape[-1]))
            here = ops.attention_part(part, kv[(own - hop) % ranks], *options)
            out = ops.merge_attention(*out, *here) if out else here
        found.append(out[0])
    return torch.cat(found, -2)


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


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", [*MASKS, "causal"])
@pytest.mark.parametrize("kv_heads", [HEADS, 2, 1])
def test_all_hops_are_attention_to_all_keys(ranks: int, name: str, kv_heads: int) -> None:
    """Values of another width, grouped queries, masks with rows of which nothing is seen."""
    inputs, mask, causal = operands(kv_heads), MASKS.get(name), name == "causal"
    found = around(*inputs, ranks, mask=mask, causal=causal)
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


@pytest.mark.parametrize("causal", [False, True])
def test_opcheck(causal: bool) -> None:
    query, key, value = operands(2)
    kv = torch.cat([key, value], -1).detach().requires_grad_()
    options = (torch.tensor(1), 1, 2, causal, 0.5)
    opcheck(ops.attention_part, (query, kv, None, *options))
    opcheck(ops.attention_part, (query, kv, torch.ones(LENGTH, 2 * LENGTH, dtype=torch.bool), *options))
    out, lse = ops.attention_part(query, kv, None, *options)
    other, other_lse = ops.attention_part(query, kv, None, torch.tensor(1), 0, 2, causal, 0.5)
    parts = [item.detach().requires_grad_() for item in (out, lse, other, other_lse)]
    opcheck(ops.merge_attention, tuple(parts))
    grads = (rand(*out.shape, seed=3), rand(*lse.shape, seed=4))
    assert torch.autograd.gradcheck(lambda *item: ops.merge_attention(*item), parts)
    small = (query[:, :2, :3], kv[:, :1, :3])
    assert torch.autograd.gradcheck(lambda q, kv: ops.attention_part(q, kv, None, *options), small)
    assert torch.autograd.gradgradcheck(lambda q, kv: ops.attention_part(q, kv, None, *options), small)
    opcheck(ops.merge_attention_backward, (*grads, *parts, *ops.merge_attention(*parts)), test_utils="test_faketensor")


def test_errors_say_what_to_do() -> None:
    query, key, value = operands()
    kv = torch.cat([key, value], -1)
    options = (torch.tensor(0), 0, 2, False, 1.0)
    with pytest.raises(ValueError, match="put keys and values side by side"):
        ops.attention_part(query, key, None, *options)
    with pytest.raises(ValueError, match="do not cut it along the keys"):
        ops.attention_part(query, kv, torch.ones(LENGTH, LENGTH, dtype=torch.bool), *options)
