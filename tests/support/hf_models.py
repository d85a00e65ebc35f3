"""Tiny random Hugging Face causal language models, one per shape of experts module. Nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 96

_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# name -> (model class, config class, what the config needs beyond the shared values)
_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {"intermediate_size": 24, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {"intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": 4, "head_dim": 8},
    ),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", {"intermediate_size": 24, "num_experts": 4}),
    # A dense first layer, shared experts, latent attention, sigmoid scores with a selection bias.
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            "intermediate_size": 48,
            "moe_intermediate_size": 24,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    # Biases, transposed and interleaved weights, a gate of its own, attention sinks.
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {"intermediate_size": 24, "num_local_experts": 4, "head_dim": 8, "sliding_window": 8},
    ),
    # Experts without a gate, beside a state-space layer.
    "nemotron_h": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            "layers_block_type": ["mamba", "moe", "attention"],
            "num_hidden_layers": None,
            "intermediate_size": 48,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 16,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "head_dim": 8,
            "ssm_state_size": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
    # Its own parallel experts over `split(counts.tolist())`, outside the experts interface.
    "jetmoe": (
        "JetMoeForCausalLM",
        "JetMoeConfig",
        {"intermediate_size": 24, "num_local_experts": 4, "kv_channels": 8, "num_key_value_heads": 2},
    ),
}
FAMILIES = tuple(_FAMILIES)


def build(name: str, *, seed: int = 0, **overrides: Any) -> nn.Module:
    """A model of the family in training mode, with weights large enough that every path carries gradient."""
    import transformers

    model_class, config_class, own = _FAMILIES[name]
    values = {**_SHARED, **own, **overrides}
    config = getattr(transformers, config_class)(**{key: value for key, value in values.items() if value is not None})
    config.use_cache = False
    torch.manual_seed(seed)
    config._experts_implementation = "eager"
    model = getattr(transformers, model_class)(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.1, generator=generator)
    return model.train()


def batch(*, size: int = 2, length: int = 12, seed: int = 0) -> dict[str, Tensor]:
    """Ids and independent labels, a fifth of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (size, length), generator=generator)
    labels = torch.randint(3, VOCAB, (size, length), generator=generator)
    labels[torch.rand(size, length, generator=generator) < 0.2] = -100
    return {"input_ids": ids, "labels": labels}
