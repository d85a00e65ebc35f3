"""Dropout inside experts draws the same numbers for a token's choice wherever the choice is computed."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from moecompile import ops
from moecompile.errors import PassError
from moecompile.plan import Plan
from tests.support import moe_styles as styles
from tests.support.parity import Batch, LockStep, Run, compare


class Dropped(styles.Layer):
    """Experts that drop features twice."""

    def make(self) -> None:
        def expert() -> nn.Module:
            first = nn.Sequential(nn.Linear(styles.WIDTH, styles.INNER), nn.GELU(), nn.Dropout(0.3))
            return nn.Sequential(first, nn.Linear(styles.INNER, styles.WIDTH), nn.Dropout(0.1))

        self.experts = nn.ModuleList([expert() for _ in range(styles.EXPERTS)])


class Trained(nn.Module):
    """Tokens ``[batch, sequence]``; with ``turned`` the batch is the second axis of what the layer flattens."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned = turned
        self.embed, self.before, self.layer = nn.Embedding(9, styles.WIDTH), nn.LayerNorm(styles.WIDTH), Dropped()

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        rows = self.before(x)
        rows = rows.transpose(0, 1) if self.turned else rows
        made = self.layer(rows.reshape(-1, styles.WIDTH)).reshape(rows.shape)
        out = x + (made.transpose(0, 1) if self.turned else made)
        return {"loss": (out - labels).square().mean(), "out": out}


def batch() -> Batch:
    source = torch.Generator().manual_seed(1)
    labels = torch.randn(8, 4, styles.WIDTH, generator=source, dtype=torch.float64)
    return {"ids": torch.randint(0, 9, (8, 4), generator=source), "labels": labels}


def model_of(turned: bool) -> Trained:
    torch.manual_seed(0)
    return Trained(turned).double()


@cache
def on_one_rank(turned: bool) -> Run:
    return LockStep(model_of(turned), Plan(dp=1), batch()).run([batch()])


PLANS = [
    Plan(dp=2),
    Plan(dp=2, ep=2),
    Plan(dp=4, ep=2),
    Plan(dp=4, ep=4),
    Plan(dp=1, tp=2, ep=2),
    Plan(dp=1, cp=2, ep=2),
    Plan(dp=2, tp=2, ep=4, sequence_parallel=True),
    Plan(dp=1, cp=2, tp=2, ep=2, sequence_parallel=True),
    Plan(dp=1, cp=2, ep=2, passes="+shard-sequence{attention=ring,order=zigzag}"),
]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_layout_drops_the_same(plan: Plan, turned: bool) -> None:
    run = LockStep(model_of(turned), plan, batch())
    assert len([node for node in run.program.graph.nodes if node.target is ops.uniform_rows]) == 2
    compare(run.run([batch()]), on_one_rank(turned))


def test_something_is_dropped() -> None:
    """Without dropout the loss is another one."""
    plain = model_of(False).eval()(**batch())
    assert abs(float(on_one_rank(False).steps[0].loss - plain["loss"].detach())) > 1e-3


def test_numbers_do_not_depend_on_the_order_of_rows() -> None:
    rows, seed, order = torch.zeros(6, 5), torch.tensor(3), torch.tensor([4, 0, 5, 2, 1, 3])
    drawn = ops.uniform_rows(rows, seed, order)
    straight = ops.uniform(rows, seed, [], [], [], [])
    assert torch.equal(drawn, straight[order])


def test_places_of_a_cut_batch() -> None:
    """Two ranks that hold ``[outer, rank, inner]`` of 12 choices name all of them, each once."""
    own = torch.arange(6)
    ranks = [ops.global_rows(own, [torch.tensor(rank)], [6], [3], [2]).tolist() for rank in range(2)]
    assert ranks == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
    assert ops.global_rows(torch.tensor([1, -1]), [torch.tensor(1)], [2], [1], [2]).tolist() == [3, -1]


def test_the_gathering_backend_refuses() -> None:
    pipeline = "recognize-moe,seed-random,normalize-loss,shard-dense,shard-experts,insert-dispatch{backend=allgather}"
    with pytest.raises(PassError, match=r"use backend=alltoall, or set the experts' dropout to 0"):
        LockStep(model_of(False), Plan(dp=2, ep=2), batch(), pipeline=pipeline)
