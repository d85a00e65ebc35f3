"""Rows repeated as often as a tensor says: their number comes with the values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moecompile.errors import PassError
from moecompile.plan import Plan
from tests.support.models import VOCAB, tokens
from tests.support.parity import LockStep, compare, plain

WIDTH = 4


class Repeats(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.tokens, self.up = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, counts = self.up(self.tokens(ids)), torch.tensor([2, 0, 1])
        if self.way == "features":
            x = x.repeat_interleave(torch.tensor([1, 3, 0, 2]), -1)
        elif self.way == "sequence":
            x = torch.repeat_interleave(x, counts, dim=1)
        elif self.way == "known size":
            x = torch.repeat_interleave(x, counts, dim=1, output_size=3)
        elif self.way == "all alike":
            x = torch.repeat_interleave(x, torch.tensor([2]), dim=0)
        elif self.way == "by values":
            x = x.flatten(0, 1).repeat_interleave(ids.flatten() % 3, 0)
        elif self.way == "some of them":
            x = x.repeat_interleave(torch.tensor([1, 3, 0, 2]), -1)[..., :WIDTH] + x
        else:
            x = self.up(x.repeat_interleave(torch.tensor([1, 3, 0, 2]), -1)[..., :WIDTH])
        return {"loss": x.square().mean()}


@pytest.mark.parametrize("plan", [Plan(dp=1), Plan(dp=2)], ids=["one", "dp2"])
@pytest.mark.parametrize("way", ["features", "sequence", "known size", "all alike", "by values", "some of them"])
def test_two_steps(way: str, plan: Plan) -> None:
    batches = [tokens(4, 3, seed) for seed in range(2)]
    run = LockStep(Repeats(way).double(), plan, batches[0])
    compare(run.run(batches), plain(Repeats(way).double(), batches))


def test_a_number_that_is_needed_beforehand_is_refused_with_the_line() -> None:
    with pytest.raises(
        PassError, match=r"rows of repeat_interleave \(.*test_repeated_rows\.py:\d+\) is known at run time only"
    ):
        LockStep(Repeats("through a linear").double(), Plan(dp=1), tokens(4, 3, 0))
