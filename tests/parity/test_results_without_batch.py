"""Results that are no part of the batch, such as a mean over it or a loss of another name: what all ranks derive from them counts once."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

import moecompile as mc
from moecompile.plan import Plan
from tests.support.models import VOCAB, Config, build, tokens
from tests.support.parity import difference, slice_for
from tests.support.pool import Ranks, of_data_rank, parallel
from tests.support.thinned import thinned

pytestmark = pytest.mark.timeout(240)
BATCH = tokens(4, 8, 0)


class Named(nn.Module):
    """Returns its loss as ``cost``, a mean over the batch, and the parts of another loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build(Config("ops", layers=1, aux=0.1))

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        out = self.inner(**batch)
        return {
            "cost": out["loss"],
            "mean": out["logits"].mean((0, 1)),
            "logits": out["logits"],
            "balance": out["balance"],
        }


def cost(out: dict[str, Tensor], labels: Tensor) -> Tensor:
    return out["cost"]


def of_a_mean(out: dict[str, Tensor], labels: Tensor) -> Tensor:
    return out["mean"].square().sum()


def rows_and_balance(out: dict[str, Tensor], labels: Tensor) -> Tensor:
    """This rank's share of a mean over rows, and the whole of a term of the batch."""
    logits = out["logits"].full_tensor() if hasattr(out["logits"], "full_tensor") else out["logits"]
    rows = F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), reduction="sum") / BATCH["labels"].numel()
    return rows + 0.1 * out["balance"]


LOSSES = (cost, of_a_mean, rows_and_balance)


def gradients(rank: int, plan: Plan) -> list[dict[str, Tensor | None]]:
    mine, found = slice_for(BATCH, plan, rank), []
    with parallel(Named(), plan) as model:
        for loss in LOSSES:
            out = model(**mine)
            assert of_data_rank(out["cost"]).shape == ()
            loss(out, mine["labels"]).backward()
            found.append(mc.full_grads(model))
            model.zero_grad()
    return found


PLANS = {
    "dp2-ep2": Plan(dp=2, ep=2),
    "dp2-tp2": Plan(dp=2, tp=2, ep=4, sequence_parallel=True),
    "dp2-cp2": Plan(dp=2, cp=2, ep=2),
}


@pytest.mark.parametrize("plan", thinned(PLANS, keep=("dp2-ep2", "dp2-tp2")))
def test_gradients_are_those_of_the_plain_model(ranks: Ranks, plan: Plan) -> None:
    wanted = []
    for loss in LOSSES:
        model = Named()
        loss(model(**BATCH), BATCH["labels"]).backward()
        wanted.append({name: param.grad for name, param in model.named_parameters()})
    for found in ranks.run(plan.world_size, gradients, plan):
        for loss, here, there in zip(LOSSES, found, wanted, strict=True):
            for name, grad in there.items():
                value = here[name]
                assert grad is not None and value is not None, (loss.__name__, name)
                assert difference(f"{loss.__name__}: {name}", value, grad) < 1e-11
