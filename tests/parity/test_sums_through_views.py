"""A sum over ranks that has not been taken yet goes through whatever only moves its elements."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from moecompile.plan import Plan
from tests.support.parity import LockStep, compare, plain

BATCH, WIDTH = 8, 4

MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "T": lambda x: x.T,
    "mT": lambda x: x.mT,
    "adjoint": lambda x: x.adjoint(),
    "swapdims": lambda x: x.swapdims(0, 1),
    "ravel": lambda x: x.ravel(),
    "tile": lambda x: x.tile(2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, -1),
    "tensor_split": lambda x: x.tensor_split(2, -1)[1],
    "unfold": lambda x: x.unfold(-1, 2, 2),
    "select_scatter": lambda x: x.select_scatter(x[..., 0] * 0.5, -1, 1),
    "slice_scatter": lambda x: x.slice_scatter(x[..., :2], -1, 2, 4),
    "view_as_complex": lambda x: torch.view_as_real(torch.view_as_complex(x.reshape(-1, 2))),
}


class Moved(nn.Module):
    """The mean of the batch, its elements moved, in something that is not linear."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.first = kind, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mean = self.first(x).mean(0, keepdim=True).expand(WIDTH, -1)
        moved = MOVES[self.kind](mean)
        return {"loss": (moved.tanh() * moved.cos()).sum()}


@pytest.mark.parametrize("kind", MOVES)
def test_as_one_process(kind: str) -> None:
    batches = [{"x": torch.randn(BATCH, WIDTH, dtype=torch.float64)} for _ in range(2)]
    run = LockStep(Moved(kind).double(), Plan(dp=2), batches[0])
    compare(run.run(batches), plain(Moved(kind).double(), batches))
