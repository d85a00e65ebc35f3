"""A Hugging Face router that samples its experts and has a gradient estimator of its own (a custom autograd function)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecompile.plan import Plan
from tests.support.parity import Batch, LockStep, compare, plain

transformers = pytest.importorskip("transformers")
PLAN = Plan(dp=2, ep=2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = transformers.PhimoeConfig(
            vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32,
            router_jitter_noise=0.8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        config.use_cache, config._experts_implementation = False, "eager"
        self.inner = transformers.PhimoeForCausalLM(config)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Any]:
        logits = self.inner(input_ids=input_ids).logits
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def made(train: bool) -> nn.Module:
    torch.manual_seed(0)
    model = Model().double().train(train)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.normal_(0, 0.2, generator=generator)
    return model


def batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(3, 64, (2, 4, 8), generator=generator)
    return {"input_ids": ids, "labels": labels}


def test_without_sampling_it_equals_one_process() -> None:
    batches = [batch(0), batch(1)]
    compare(LockStep(made(False), PLAN, batches[0]).run(batches), plain(made(False), batches))


def test_with_sampling_every_layout_gives_the_same() -> None:
    """Random numbers are the program's own, so the reference is the program of one rank."""
    batches = [batch(0), batch(1)]
    reference = LockStep(made(True), Plan(dp=1), batches[0]).run(batches)
    found = LockStep(made(True), PLAN, batches[0]).run(batches)
    compare(found, reference)
    assert all(grad.any() for name, grad in found.steps[0].grads.items() if "router" in name)
