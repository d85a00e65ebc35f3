"""Which tensor of a model's return value is its loss."""

from __future__ import annotations

from typing import Any

import torch


def find_loss(output: Any) -> torch.Tensor | None:
    """``output.loss``, ``output["loss"]``, a bare 0-d floating tensor, or a 0-d floating first element; else None."""
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, dict):
        found = output.get("loss")
    if found is None and isinstance(output, (tuple, list)) and output:
        found = output[0]
    if found is None:
        found = output
    return found if _is_scalar(found) else None


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()
