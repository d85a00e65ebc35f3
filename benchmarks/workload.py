"""What every variant of the step benchmark trains: one small Qwen3-MoE, the same weights, the same tokens, the same loss."""

from __future__ import annotations

import os
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Said before transformers is imported: its notes would drown the figures.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
warnings.filterwarnings("ignore")

HIDDEN, LAYERS, HEADS = 256, 4, 8
EXPERTS, TOP_K, EXPERT_WIDTH = 16, 4, 256
VOCABULARY, SEQUENCE, GLOBAL_BATCH = 2048, 256, 8
LEARNING_RATE = 1e-3


class WithLoss(nn.Module):
    """A language model whose call returns the loss: what each variant wraps, shards or compiles."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(input_ids=ids).logits
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1))


def build(
    experts: str = "grouped_mm", layers: int = LAYERS, attention: str = "sdpa", num_experts: int = EXPERTS
) -> nn.Module:
    """The Hugging Face model with seeded weights. ``experts``: the experts implementation of transformers."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=EXPERT_WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HIDDEN // HEADS,
        max_position_embeddings=SEQUENCE,
        num_experts=num_experts,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=EXPERT_WIDTH,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        output_router_logits=False,
        router_aux_loss_coef=0.0,
        tie_word_embeddings=False,
        attn_implementation=attention,
        experts_implementation=experts,
        use_cache=False,
    )
    model = Qwen3MoeForCausalLM(config).float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:  # norms stay at one
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02)
    return model.train()


def batch(step: int, rank: int = 0, ranks: int = 1) -> tuple[Tensor, Tensor]:
    """Ids and labels of one rank, independent of each other, so that mixing them up would show in the loss."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, SEQUENCE), generator=generator)
    labels = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, SEQUENCE), generator=generator)
    return ids.chunk(ranks)[rank], labels.chunk(ranks)[rank]


def adamw(parameters) -> torch.optim.Optimizer:
    """The one optimizer of all variants: AdamW with the fused kernel."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
