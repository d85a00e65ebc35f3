"""Tiny random causal language models of 32 Hugging Face MoE families. Nothing is downloaded.

A configuration takes from one table of small sizes whatever fields it has, and a few values of its family's own.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

VOCAB, WIDTH, EXPERTS, LENGTH = 128, 32, 4, 16

_SIZES: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 64, "moe_intermediate_size": 16},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False},
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], EXPERTS),
    **dict.fromkeys(["num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"], 2),
    **dict.fromkeys(["n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "n_group", "topk_group"], 1),
    **dict.fromkeys(["shared_expert_intermediate_size", "shared_intermediate_size"], 16),
    **{"shared_experts_intermediate_size": 16, "first_k_dense_replace": 1, "num_dense_layers": 1},
    # latent attention and indexers
    **dict.fromkeys(["kv_lora_rank", "q_lora_rank"], 16),
    **dict.fromkeys(["qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"], 8),
    **{"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2, "sliding_window": 8},
    # random routers would need the same draws on both sides
    **dict.fromkeys(["router_jitter_noise", "input_jitter_noise"], 0.0),
    # linear attention and state spaces
    **{"linear_conv_kernel_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_num_heads": 4},
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"], 8),
    **{"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_heads": 8, "mamba_d_head": 8},
    **{"mamba_n_groups": 1, "mamba_chunk_size": 8, "use_mamba_kernels": False, "mamba_dt_rank": 4},
}
_DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse"]}
_HEADS = {"num_key_value_heads": 4}

# family -> (its folder in transformers, the class, values of its own; a value of None leaves the field to the class)
_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "afmoe": ("afmoe", "AfmoeForCausalLM", {"global_attn_every_n_layers": 2}),
    "bailing_hybrid": (
        "bailing_hybrid",
        "BailingHybridForCausalLM",
        {**_DENSE_FIRST, **_HEADS, "layer_group_size": 2, "num_mtp_layers": 0, "q_lora_rank": None},
    ),
    "cohere2_moe": (
        "cohere2_moe",
        "Cohere2MoeForCausalLM",
        {"sliding_window_pattern": 2, "prefix_dense_sliding_window_pattern": 1},
    ),
    "dbrx": (
        "dbrx",
        "DbrxForCausalLM",
        {
            **{"d_model": WIDTH, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": EXPERTS, "moe_top_k": 2, "hidden_size": WIDTH},
        },
    ),
    "deepseek_v2": ("deepseek_v2", "DeepseekV2ForCausalLM", _HEADS),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3ForCausalLM", {**_HEADS, "n_group": 2, "num_mtp_layers": 0}),
    "deepseek_v32": ("deepseek_v32", "DeepseekV32ForCausalLM", _HEADS),
    "doge": (
        "doge",
        "DogeForCausalLM",
        {"is_moe": True, "num_experts": 16, "num_experts_per_tok": 4, "sliding_window": None, "keep_window_size": 64},
    ),
    "dots1": ("dots1", "Dots1ForCausalLM", {}),
    "ernie4_5_moe": ("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", {}),
    "exaone_moe": ("exaone_moe", "ExaoneMoeForCausalLM", {"sliding_window_pattern": 2}),
    "gemma4_moe": (
        "gemma4",
        "Gemma4ForCausalLM",
        {
            **{"enable_moe_block": True, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8},
            **{"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 8},
        },
    ),
    "glm4_moe": ("glm4_moe", "Glm4MoeForCausalLM", {"num_mtp_layers": 0}),
    "gpt_oss": ("gpt_oss", "GptOssForCausalLM", {}),
    "granitemoe": ("granitemoe", "GraniteMoeForCausalLM", {}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", {"eod_token_id": 3, "sep_token_id": 4}),
    "jamba": (
        "jamba",
        "JambaForCausalLM",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    ),
    "jetmoe": ("jetmoe", "JetMoeForCausalLM", {"kv_channels": 16}),
    "lfm2_moe": ("lfm2_moe", "Lfm2MoeForCausalLM", {"layer_types": ["conv", "full_attention"]}),
    "llama4_text": (
        "llama4",
        "Llama4ForCausalLM",
        {
            **{"num_experts_per_tok": 1, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2},
            **{"attention_chunk_size": 8, "intermediate_size": 16},
        },
    ),
    "longcat_flash": (
        "longcat_flash",
        "LongcatFlashForCausalLM",
        {**_HEADS, "num_layers": 2, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 16, "zero_expert_num": 2},
    ),
    "minimax_m2": ("minimax_m2", "MiniMaxM2ForCausalLM", {}),
    "mistral4": ("mistral4", "Mistral4ForCausalLM", _HEADS),
    "mixtral": ("mixtral", "MixtralForCausalLM", {}),
    "nemotron_h": (
        "nemotron_h",
        "NemotronHForCausalLM",
        {
            **{"layers_block_type": ["mamba", "moe", "attention", "moe"], "num_hidden_layers": None, "n_groups": 2},
            **{"ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "chunk_size": 8},
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "olmoe": ("olmoe", "OlmoeForCausalLM", {}),
    "phimoe": ("phimoe", "PhimoeForCausalLM", {}),
    "qwen2_moe": ("qwen2_moe", "Qwen2MoeForCausalLM", {}),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM", {}),
    "qwen3_next": ("qwen3_next", "Qwen3NextForCausalLM", {"layer_types": ["linear_attention", "full_attention"]}),
    "solar_open": ("solar_open", "SolarOpenForCausalLM", {}),
    "zaya": ("zaya", "ZayaForCausalLM", {"num_experts_per_tok": 1, "router_hidden_size": 8}),
}
FAMILIES = tuple(_FAMILIES)


def build(name: str, *, seed: int = 0, experts: str = "eager") -> nn.Module:
    """A model of the family in fp64 and training mode, with weights large enough that every path carries gradient."""
    folder, kind, own = _FAMILIES[name]
    made: Any = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), kind)
    fields = {field.name for field in dataclasses.fields(made.config_class)}
    values = {key: value for key, value in _SIZES.items() if key in fields} | own
    left = {"num_hidden_layers"} if values.get("num_hidden_layers", 1) is None else set()
    config = made.config_class(**{key: value for key, value in values.items() if key not in left})
    config._attn_implementation, config._experts_implementation = "eager", experts
    torch.manual_seed(seed)
    model: nn.Module = made(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2 and float(parameter.std()) < 0.1:
                parameter.normal_(0, 0.08, generator=generator)
    return model.double().train()


def batch(seed: int, *, size: int = 4) -> dict[str, Tensor]:
    """Ids and independent labels, some ignored; the first sequence has a single label, which weighs it otherwise."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (size, LENGTH), generator=generator)
    labels = torch.randint(3, VOCAB, (size, LENGTH), generator=generator)
    labels[torch.rand(size, LENGTH, generator=generator) < 0.2] = -100
    labels[0, :-1] = -100
    labels[0, -1] = 5
    return {"input_ids": ids, "labels": labels}


def crowded(seed: int) -> list[dict[str, Tensor]]:
    """Batches whose tokens pile up: one word everywhere, one word but for a single other, one word on the first rank alone."""
    same, one_other, first = batch(seed), batch(seed + 1), batch(seed + 2)
    same["input_ids"][:] = 7 + seed
    one_other["input_ids"][:] = 8 + seed
    one_other["input_ids"][-1, -1] = 90
    first["input_ids"][:2] = 9 + seed
    return [same, one_other, first]


class WideFloats(TorchFunctionMode):
    """What a model computes in fp32 on purpose (norms, routers, the loss) is computed in fp64: only the order of sums is left."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        kwargs = {key: self._wide(value) for key, value in (kwargs or {}).items()}
        return func(*[self._wide(item) for item in args], **kwargs)

    @staticmethod
    def _wide(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value
