"""Hugging Face's `MixtralForCausalLM`, small and with fresh weights; nothing is downloaded.  Needs ``pip install moecompile[hf]``.

    torchrun --nproc-per-node=2 examples/hf_mixtral.py        # two ranks, four experts on each
    python examples/hf_mixtral.py                             # one process: the same losses
"""

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import moecompile as mc

CONFIG = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "use_cache": False,
}


def build() -> MixtralForCausalLM:
    """The model with the same weights every time."""
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**CONFIG))


def main(steps: int = 10, batch: int = 8, seq_len: int = 64) -> None:
    model = build()
    world_size = mc.world_size() if hasattr(mc, "world_size") else 1
    raise NotImplementedError(world_size, model, steps, batch, seq_len)


if __name__ == "__main__":
    main()
