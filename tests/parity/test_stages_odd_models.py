"""Pipeline stages of models whose values take uncommon ways: loss, gradients and results of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moecompile as mc
from moecompile.compat import tree_flatten
from moecompile.plan import Plan
from tests.support import odd_stages as models
from tests.support.parity import difference, slice_for
from tests.support.pool import Ranks, parallel
from tests.support.thinned import thinned

pytestmark = pytest.mark.timeout(200)
PP = Plan(dp=1, pp=2, microbatches=4)  # the second microbatch has no valid token
WIDER = {
    "interleaved": Plan(dp=1, pp=2, microbatches=4, schedule="interleaved-1f1b", layout="Et|t|t|tL"),
    "pp4": Plan(dp=1, pp=4, microbatches=4),
    "zero": Plan(dp=2, pp=2, microbatches=2, passes="+shard-params"),
}


def check(kind: type[models.Plain], plan: Plan) -> None:
    batch, model = models.batch(), models.made(kind)
    found = mc.simulate_ranks(
        models.made(kind), plan, [slice_for(batch, plan, rank) for rank in range(plan.world_size)]
    )
    out = model(**batch)
    out["loss"].backward()
    assert difference("loss", found.loss, out["loss"].detach()) < 1e-12
    check_gradients(found.grads, model)
    for leaf, value in enumerate(tree_flatten(out)[0]):
        have = [outputs[leaf] for outputs in found.outputs if leaf in outputs]
        if leaf > 0:  # the loss is no result
            assert have and difference(str(leaf), torch.cat(have[: plan.dp]), value.detach()) < 1e-12


def check_gradients(found: dict[str, Tensor], model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if param.grad is None:
            assert name not in found or not found[name].any()
        else:
            assert difference(name, found[name], param.grad, zero=not param.grad.any()) < 1e-10


@pytest.mark.parametrize(
    "kind",
    thinned({kind.__name__: kind for kind in models.KINDS}, keep=("Terms", "Streams", "FrozenFirst", "DictLayers")),
)
def test_a_step(kind: type[models.Plain]) -> None:
    check(kind, PP)


@pytest.mark.slow
@pytest.mark.parametrize("plan", list(WIDER.values()), ids=list(WIDER))
@pytest.mark.parametrize("kind", models.KINDS, ids=lambda kind: kind.__name__)
def test_a_step_under_other_plans(kind: type[models.Plain], plan: Plan) -> None:
    check(kind, plan)


CALLS = [(8, 6), (8, 9), (5, 6), (3, 4), (8, 6)]


def run(rank: int, kind: type[models.Plain], plan: Plan) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Steps over batches of other lengths and numbers of rows, each behind an evaluation of the same batch."""
    found = []
    with parallel(models.made(kind), plan) as model:
        for seed, (rows, length) in enumerate(CALLS):
            batch = slice_for(models.batch(seed, rows, length), plan, rank)
            with torch.no_grad():
                before: Any = model(**batch)["loss"]
            loss = model(**batch)["loss"]
            loss.backward()
            assert torch.equal(before, loss.detach())
            grads = {name: grad for name, grad in mc.full_grads(model).items() if grad is not None}
            found.append((loss.detach(), grads))
            model.zero_grad()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", [models.Plain, models.Skips, models.DeepLosses], ids=lambda kind: kind.__name__)
def test_batches_of_other_sizes_on_later_steps(ranks: Ranks, kind: type[models.Plain]) -> None:
    """Fewer rows than microbatches, rows that these do not divide, other lengths, and the first size again."""
    found = ranks.run(2, run, kind, PP, timeout=180.0)
    for seed, (rows, length) in enumerate(CALLS):
        model = models.made(kind)
        loss = model(**models.batch(seed, rows, length))["loss"]
        loss.backward()
        for steps in found:
            assert difference("loss", steps[seed][0], loss.detach()) < 1e-12
            check_gradients(steps[seed][1], model)
