"""Hugging Face's balance loss over router logits means the global batch, and is not taken for a router itself."""

from __future__ import annotations

import copy

import pytest
import torch

import moecompile as mc
from tests.support import hf_models
from tests.support.parity import slice_for
from tests.support.thinned import thinned

CALLS = {
    "all tokens": (False, mc.Plan(dp=2, ep=2)),
    "padding mask": (True, mc.Plan(dp=2, ep=2)),
    "padding mask, sequence parallel": (True, mc.Plan(dp=2, tp=2, ep=4, sequence_parallel=True)),
}


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("masked", "plan"), thinned(CALLS, keep=tuple(CALLS)[:2]))
def test_balance_loss_of_the_global_batch(family: str, masked: bool, plan: mc.Plan) -> None:
    """case 10: padding is in no statistic and in no gradient, and its mask is cut with the tokens."""
    model = hf_models.build(family).double()
    batch = hf_models.batch(size=4)
    if masked:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, -5:] = 0
        batch["attention_mask"][3, -2:] = 0
    plain = copy.deepcopy(model)
    plain.config._experts_implementation = "eager"
    out = plain(**batch, output_router_logits=True)
    out.loss.backward()
    assert out.aux_loss > 0
    parts = [slice_for(batch, plan, rank) for rank in range(plan.world_size)]
    found = mc.simulate_ranks(model, plan, [{**part, "output_router_logits": True} for part in parts])
    torch.testing.assert_close(found.loss, out.loss.detach(), rtol=1e-6, atol=0)  # computed in fp32 by the model
    for name, param in plain.named_parameters():
        if "router" in name or "mlp.gate." in name or "block_sparse_moe.gate" in name:
            assert param.grad is not None
            torch.testing.assert_close(found.grads[name], param.grad, rtol=1e-5, atol=1e-9)
