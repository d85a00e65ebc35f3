"""Low-rank adapters of peft on attention and on expert weights, over frozen weights, against one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import moecompile as mc
from tests.support import hf_models

ATTENTION = {"target_modules": ["q_proj", "v_proj"]}
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


def _adapted(targets: dict[str, Any]) -> nn.Module:
    model = hf_models.build("qwen3_moe")
    model.config._experts_implementation = "eager"
    made = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, **targets)).double()
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, param in made.named_parameters():
            if "lora_B" in name:  # zero at first, which would hide the adapters' gradients
                param.copy_(0.05 * torch.randn(param.shape, generator=source, dtype=param.dtype))
    return made


@pytest.mark.parametrize("targets", [ATTENTION, EXPERTS], ids=["attention", "experts"])
@pytest.mark.parametrize("plan", [mc.Plan(dp=2, ep=2), mc.Plan(dp=4, ep=2)], ids=["dp2-ep2", "dp4-ep2"])
def test_adapters_train_and_frozen_weights_have_no_gradient(targets: dict[str, Any], plan: mc.Plan) -> None:
    model, batch = _adapted(targets), hf_models.batch(size=4)
    plain = copy.deepcopy(model)
    loss = plain(**batch).loss
    loss.backward()
    wanted = {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}
    assert wanted and all("lora" in name for name in wanted)
    share = 4 // plan.num_data_ranks
    found = mc.simulate_ranks(
        model,
        plan,
        [
            {name: item[rank * share : (rank + 1) * share] for name, item in batch.items()}
            for rank in range(plan.num_data_ranks)
        ],
    )
    torch.testing.assert_close(found.loss, loss.detach(), rtol=1e-6, atol=0)  # Hugging Face computes the loss in fp32
    assert found.grads.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert grad is not None and grad.abs().max() > 0, name
        torch.testing.assert_close(found.grads[name], grad, rtol=1e-9, atol=1e-12)


def test_frozen_expert_weights_are_cut_all_the_same() -> None:
    program = mc.trace(_adapted(EXPERTS), mc.Plan(dp=2, ep=2), hf_models.batch(size=2))
    cut = {item.fqns[0]: item for item in program.inputs if dict(item.placements).get("ep") is not None}
    frozen = [name for name in cut if "lora" not in name]
    assert len(frozen) == 2 * 2, "gate_up and down of two layers"
    assert all(item.local_shape(program.mesh)[0] * 2 == item.shape[0] for item in cut.values())
