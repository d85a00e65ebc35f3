"""The models the demo can train: the files of ``examples/``, and how each is called."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from moecompile.errors import CaptureError


@dataclass(frozen=True)
class Model:
    """One example: its file, what it is, and whether the labels are shifted inside the model."""

    file: str
    what: str
    shifts_labels: bool = False

    def build(self) -> nn.Module:
        """The model, the same weights every time."""
        folder = str(examples_folder())
        if folder not in sys.path:
            sys.path.insert(0, folder)
        made: nn.Module = importlib.import_module(self.file).build()
        return made

    def call(self, window: Tensor) -> dict[str, Tensor]:
        """Keyword arguments for rows of text. window [B, S + 1]."""
        ids = window[:, :-1].contiguous()
        return {"input_ids": ids, "labels": ids if self.shifts_labels else window[:, 1:].contiguous()}


MODELS = {
    "qwen3": Model("qwen3_moe_plain", "Qwen3-MoE-like, experts as stacked parameters"),
    "module-list": Model("module_list_experts", "experts in an nn.ModuleList, a loop with where and index_add"),
    "hf-mixtral": Model("hf_mixtral", "Hugging Face MixtralForCausalLM", shifts_labels=True),
}


def examples_folder() -> Path:
    """``examples/`` of the checkout this package runs from, else of the current folder."""
    for root in (Path(__file__).resolve().parents[2], Path.cwd()):
        if (root / "examples" / "qwen3_moe_plain.py").is_file():
            return root / "examples"
    raise CaptureError(
        "the demo trains the models in the examples/ folder of a checkout, which is neither beside this package nor in the "
        "current folder; run it from a clone of the repository."
    )


def loss_of(output: Any) -> Tensor:
    """The loss in a model's return value: its field ``loss``, else its first element."""
    found: Tensor = output.loss if hasattr(output, "loss") else output[0]
    return found
