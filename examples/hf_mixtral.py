"""Hugging Face's `MixtralForCausalLM`, small and with fresh weights; nothing is downloaded.  Needs ``pip install moecompile[hf]``.

torchrun --nproc-per-node=2 examples/hf_mixtral.py        # two ranks, four experts on each
python examples/hf_mixtral.py                             # one process: the same losses
"""

import os

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
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    plan = mc.Plan(dp=world_size, ep=world_size)
    model = mc.parallelize(build(), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with open(__file__, "rb") as source:
        text = torch.tensor(list(source.read()))
    for step in range(steps):
        start = (torch.arange(batch)[:, None] * 100 + step) % (len(text) - seq_len)
        ids = text[start + torch.arange(seq_len)]  # the global batch, the same on every rank
        ids = ids.chunk(plan.num_data_ranks)[plan.data_rank(rank)]
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        mc.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}  loss {out.loss.item():.6f}")


if __name__ == "__main__":
    main()
