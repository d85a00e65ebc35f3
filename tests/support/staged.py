"""What one process runs in place of a pipeline: the same microbatches."""

from __future__ import annotations

import torch
from torch import Tensor

from moecompile.plan import Plan


def microbatches(batch: dict[str, Tensor], plan: Plan) -> list[dict[str, Tensor]]:
    """Each the concatenation of all data ranks' slices."""
    of, n = plan.num_data_ranks, plan.microbatches
    return [
        {name: torch.cat([one.chunk(n)[at] for one in value.chunk(of)]) for name, value in batch.items()}
        for at in range(n)
    ]
