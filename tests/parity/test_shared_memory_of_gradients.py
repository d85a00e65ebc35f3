"""Equal gradients are computed once, and views cost nothing: what is handed out lies apart all the same, as in the plain loop."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecompile import aliases
from moecompile.plan import Plan
from tests.support.parity import difference, slice_for
from tests.support.pool import Ranks, parallel


class Sums(nn.Module):
    """Three biases with one gradient, a weight whose gradient is the weight, and one whose gradient is the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)  # in parallel, as attention and MLP in some models
        self.added = nn.Parameter(torch.randn(8))
        self.square, self.plain = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(4, 8))
        self.router, self.experts = nn.Linear(8, 4, bias=False), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        sums = self.left(x) + self.right(x) + self.added
        probs, ids = self.router(sums).softmax(-1).topk(2)
        out = torch.zeros_like(sums)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(ids == index)
            out.index_add_(0, token, probs[token, slot, None] * expert(sums[token]))
        loss = F.mse_loss(out + sums, y)
        return {"loss": loss + 0.5 * self.square.square().sum() + (self.plain.sum() * x).mean()}


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(4, 8, dtype=torch.float64, generator=generator) for name in ("x", "y")}


def accumulated(model: nn.Module, batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Weights after each step; in it, two scaled calls and a clip, which all change gradients in place."""
    stepper, found = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for at in range(0, len(batches), 2):
        for item in batches[at : at + 2]:
            before = {name: value.clone() for name, value in item.items()}
            (model(**item)["loss"] * 0.5).backward()
            assert all(torch.equal(before[name], value) for name, value in item.items())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        stepper.step()
        stepper.zero_grad(set_to_none=False)
        found.append({name: param.detach().clone() for name, param in model.named_parameters()})
    return found


BATCHES = [batch(seed) for seed in range(4)]


def on_rank(rank: int, plan: Plan) -> list[dict[str, Tensor]]:
    with parallel(Sums(), plan) as model:
        return accumulated(model, [slice_for(item, plan, rank) for item in BATCHES])


@pytest.mark.parametrize("plan", [Plan(dp=1), Plan(dp=2)], ids=str)
def test_steps_are_those_of_the_plain_loop(ranks: Ranks, plan: Plan) -> None:
    wanted = accumulated(Sums(), BATCHES)
    for found in ranks.run(plan.world_size, on_rank, plan):
        for here, there in zip(found, wanted, strict=True):
            for name, weight in there.items():
                assert difference(name, here[name], weight) < 1e-11


def test_what_overlaps_is_found() -> None:
    whole, other = torch.zeros(4, 6), torch.zeros(3)
    rows, columns = list(whole.unbind(0)), list(whole.split(3, 1))
    assert aliases.overlapping([*rows, other]) == set()
    assert aliases.overlapping([rows[0], rows[1], rows[0]]) == {2}
    assert len(aliases.overlapping(columns)) == 1  # holes count
    assert aliases.overlapping([other, torch.zeros(1).expand(5)]) == {1}
    assert aliases.overlapping([other, rows[3]], [whole]) == {1}
    assert aliases.overlapping([whole.new_empty(0), whole, whole.t()]) == {2}
