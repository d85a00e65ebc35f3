"""The training loop, under torchrun: ten lines that a single-process script has too, and two that it has not.

    torchrun --nproc-per-node=4 examples/train.py             # experts spread over four ranks
    torchrun --nproc-per-node=4 examples/train.py --ep 2      # two copies of them
    python examples/train.py                                  # one process: the same losses

The model is `qwen3_moe_plain.py`, which knows nothing of ranks; the text is the source of Python's standard library.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
from qwen3_moe_plain import build

import moecompile as mc


def read_text(max_bytes: int = 2_000_000) -> torch.Tensor:
    """Bytes of the standard library's files, in order of name."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.tensor(list(b"".join(file.read_bytes() for file in files)[:max_bytes]))


def rows(text: torch.Tensor, step: int, batch: int, seq_len: int) -> torch.Tensor:
    """The global batch of a step, [batch, seq_len + 1]: it depends on the step alone, so every layout reads the same."""
    start = torch.arange(step * batch, (step + 1) * batch) * 10_007 % (len(text) - seq_len - 1)
    return text[start[:, None] + torch.arange(seq_len + 1)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--ep", type=int)
    options = parser.parse_args()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    text = read_text()

    plan = mc.Plan(dp=world_size, ep=options.ep or world_size)
    model = mc.parallelize(build(), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(options.steps):
        window = rows(text, step, options.batch, options.seq_len).chunk(plan.num_data_ranks)[plan.data_rank(rank)]
        out = model(window[:, :-1], labels=window[:, 1:])
        out.loss.backward()
        norm = mc.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}  loss {out.loss.item():.6f}  norm {norm:.4f}")


if __name__ == "__main__":
    main()
