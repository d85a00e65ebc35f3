"""Hugging Face's `Trainer` with a parallel model.  Needs ``pip install moecompile[hf]``; docs/hugging_face_trainer.md explains it.

torchrun --nproc-per-node=2 examples/hf_trainer.py        # two ranks, four experts on each
python examples/hf_trainer.py                             # one process: the same losses and norms
"""

import os

import torch
from hf_mixtral import build
from torch import Tensor
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import moecompile as mc

GLOBAL_BATCH = 8


class Text(Dataset[dict[str, Tensor]]):
    """Pieces of this file."""

    def __init__(self, seq_len: int = 32) -> None:
        with open(__file__, "rb") as source:
            text = torch.tensor(list(source.read()))
        self.rows = text[: len(text) // seq_len * seq_len].view(-1, seq_len)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main(steps: int = 6) -> None:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    model = mc.parallelize(build(), mc.Plan(dp=world_size, ep=world_size))
    model._is_accelerate_prepared = True  # Accelerate must not wrap it in DistributedDataParallel
    model.accepts_loss_kwargs = False  # the loss is that of the global batch already
    arguments = TrainingArguments(
        output_dir="out/hf_trainer",
        per_device_train_batch_size=GLOBAL_BATCH // world_size,
        max_steps=steps,
        learning_rate=1e-3,
        logging_steps=1,
        remove_unused_columns=False,  # the columns are looked up in the signature, which is that of any call
        save_strategy="no",  # afterwards: mc.full_state_dict(model)
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        report_to=[],
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Text())
    trainer.train()
    if int(os.environ.get("RANK", "0")) == 0:
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']}  loss {entry['loss']:.6f}  norm {entry['grad_norm']:.5f}")


if __name__ == "__main__":
    main()
