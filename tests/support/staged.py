"""What one process runs in place of a pipeline: the same microbatches."""

from __future__ import annotations

import torch
from torch import Tensor

from moecompile.plan import Plan


def microbatches(batch: dict[str, Tensor], plan: Plan) -> list[dict[str, Tensor]]:
    """Each the concatenation of all data ranks' slices; larger ones first, none without rows."""
    of, n = plan.num_data_ranks, plan.microbatches
    found = [
        {name: torch.cat([one.tensor_split(n)[at] for one in value.chunk(of)]) for name, value in batch.items()}
        for at in range(n)
    ]
    return [part for part in found if all(len(value) for value in part.values())]
