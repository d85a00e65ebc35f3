"""Hugging Face's ``save_pretrained`` of a cut model writes the whole model, right way round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import moecompile as mc
from moecompile.plan import Plan
from tests.support.pool import Ranks, parallel
from tests.support.thinned import thinned

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.timeout(150)
PLAN = Plan(dp=2, ep=2)
IDS = torch.arange(24).reshape(4, 6) % 32


def mixtral(tie: bool) -> torch.nn.Module:
    """hidden == intermediate: a transposed weight would load without a word."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        num_local_experts=4, vocab_size=32, tie_word_embeddings=tie,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def train_and_write(rank: int, tie: bool, folder: str) -> tuple[dict[str, Tensor], bool]:
    with parallel(mixtral(tie), PLAN) as made:
        ids = IDS.chunk(2)[rank]
        opt = torch.optim.SGD(made.parameters(), lr=0.1)
        made(input_ids=ids, labels=ids).loss.backward()
        opt.step()
        made.save_pretrained(folder)
        others = hasattr(mc.parallelize(torch.nn.Linear(2, 2), PLAN), "save_pretrained")
        return mc.full_state_dict(made), others


@pytest.mark.parametrize("tie", thinned({"untied": False, "tied": True}, keep=("tied",)))
def test_case_35_export_and_reload(ranks: Ranks, tie: bool, tmp_path: Path) -> None:
    model = mixtral(tie)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=IDS, labels=IDS).loss.backward()
    opt.step()
    found = ranks.run(2, train_and_write, tie, str(tmp_path))
    again = transformers.MixtralForCausalLM.from_pretrained(tmp_path)
    assert list(tmp_path.glob("*.safetensors")) and again.config.tie_word_embeddings == tie
    for weights, others in found:
        assert list(weights) == list(again.state_dict())
        for name, value in again.state_dict().items():
            assert torch.equal(weights[name], value), name
        assert not others
    torch.testing.assert_close(again(input_ids=IDS).logits, model(input_ids=IDS).logits, rtol=1e-5, atol=1e-6)


def adapted() -> torch.nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    return peft.get_peft_model(mixtral(False), config)


def train_adapters(rank: int, folder: str) -> tuple[dict[str, Tensor], list[str]]:
    with parallel(adapted(), PLAN) as made:
        ids = IDS.chunk(2)[rank]
        opt = torch.optim.AdamW([param for param in made.parameters() if param.requires_grad], lr=0.1)
        for _ in range(2):
            made(input_ids=ids, labels=ids).loss.backward()
            opt.step()
            opt.zero_grad()
        made.save_pretrained(folder)
        return mc.full_state_dict(made), list(mc.optimizer_state_dict(made, opt)["state"])


def test_adapters_are_saved_alone_and_whole(ranks: Ranks, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    found = ranks.run(2, train_adapters, str(tmp_path))
    again = peft.PeftModel.from_pretrained(mixtral(False), tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.glob("*.safetensors")) < 10_000
    for weights, trained in found:
        assert len(trained) == 4 and all("lora_" in name for name in trained)
        for name, value in again.state_dict().items():
            assert torch.equal(weights[name], value), name
            assert "lora_" not in name or value.count_nonzero()
