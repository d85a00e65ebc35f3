"""Pipeline stages of Hugging Face models; evaluation, live microbatches, what each rank holds, and faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moecompile as mc
from moecompile.errors import VerifyError
from moecompile.plan import Plan
from tests.support import hf_models
from tests.support.models import Config, build, tokens
from tests.support.parity import difference, slice_for
from tests.support.pool import Ranks, parallel
from tests.support.staged import microbatches
from tests.support.thinned import thinned

pytestmark = pytest.mark.timeout(260)
PP = Plan(dp=1, pp=2, microbatches=2)
SMALL = Config("ops", layers=2, tied=True, shared=True)
BATCH, WIDE = tokens(4, 8, 0, ignored=0.2), tokens(8, 8, 1, ignored=0.2)


def one_step(rank: int, name: str, plan: Plan, batch: dict[str, Tensor]) -> dict[str, Any]:
    with parallel(hf_models.build(name, num_hidden_layers=3).double(), plan) as model:
        out = model(**slice_for(batch, plan, rank))
        out.loss.backward()
        grads = {key: grad for key, grad in mc.full_grads(model).items() if grad is not None}
        logits = None if out.logits is None else tuple(out.logits.shape)
        return {"loss": out.loss.detach(), "grads": grads, "logits": logits}


FOLDED = Plan(dp=2, pp=2, ep=2, microbatches=2)
MODELS = {
    "mixtral-pp2-dp2-ep2": ("mixtral", FOLDED),
    "mixtral-pp2": ("mixtral", PP),
    "deepseek_v3-pp2": ("deepseek_v3", PP),
    "deepseek_v3-pp2-dp2-ep2": ("deepseek_v3", FOLDED),
}


@pytest.mark.parametrize(("name", "plan"), thinned(MODELS))
def test_hugging_face_models(ranks: Ranks, name: str, plan: Plan) -> None:
    """A stage with dense layers only, shared experts; the loss over the valid tokens of the step."""
    batch = hf_models.batch(size=4)
    model = hf_models.build(name, num_hidden_layers=3).double()
    parts = microbatches(batch, plan)
    valid = [int((part["labels"][:, 1:] != -100).sum()) for part in parts]
    total = sum(model(**part).loss * count for part, count in zip(parts, valid, strict=True)) / sum(valid)
    assert isinstance(total, Tensor) and len(set(valid)) > 1
    total.backward()
    for rank, found in enumerate(ranks.run(plan.world_size, one_step, name, plan, batch, timeout=230.0)):
        torch.testing.assert_close(found["loss"], total.detach(), rtol=1e-6, atol=0)
        for key, param in model.named_parameters():
            if param.grad is not None and param.grad.count_nonzero():
                error = float((found["grads"][key] - param.grad).norm())
                assert error <= 1e-6 * float(param.grad.norm()) + 1e-13, key
        rows = 4 // plan.num_data_ranks
        last = plan.coordinates(rank).pp == plan.pp - 1
        assert found["logits"] == ((rows, 12, hf_models.VOCAB) if last else None)


def evaluated(rank: int, plan: Plan) -> dict[str, Any]:
    with parallel(build(SMALL), plan) as model:
        mine = slice_for(BATCH, plan, rank)
        model(**mine)["loss"].backward()
        with torch.no_grad():
            out = model.eval()(**mine)
            wide = model(**slice_for(WIDE, plan, rank))["loss"]
        held = {name: param.numel() for name, param in model.named_parameters()}
        live = [stage.most_live for stage in model._state.cache[next(iter(model._state.cache))].pipeline.stages]
        return {"loss": out["loss"], "wide": wide, "logits": out["logits"], "held": held, "live": live}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_evaluation_live_microbatches_and_what_a_rank_holds(ranks: Ranks, schedule: str) -> None:
    """1F1B keeps ``pp - rank`` microbatches alive, GPipe all of them; evaluation takes batches of any size that they divide."""
    plan = Plan(dp=1, pp=2, microbatches=4, schedule=schedule)
    model = build(SMALL).eval()
    logits = model(**BATCH)["logits"]
    parts = microbatches(BATCH, plan)
    valid = sum(int((part["labels"] != -100).sum()) for part in parts)
    loss = sum(
        nn.functional.cross_entropy(model(**part)["logits"].flatten(0, 1), part["labels"].flatten(), reduction="sum")
        for part in parts
    )
    found = ranks.run(2, evaluated, plan, timeout=230.0)
    for rank, item in enumerate(found):
        assert isinstance(loss, Tensor) and difference("loss", item["loss"], loss / valid) < 1e-11
        assert difference("loss", item["wide"], model(**WIDE)["loss"]) < 1e-11
        assert item["live"] == [2 - rank if schedule == "1f1b" else 4]
    assert found[0]["logits"] is None and difference("logits", found[1]["logits"], logits) < 1e-11
    for name, param in model.named_parameters():
        sizes = [item["held"][name] for item in found]
        wanted = [param.numel()] * 2
        if name != "embed.weight":
            wanted[1 - int("layers.1." in name or "layers." not in name)] = 0
        assert sizes == wanted, name


def lose_a_gradient(rank: int, plan: Plan) -> str:
    with parallel(build(SMALL), plan) as model:
        compiled = model.prepare((), slice_for(BATCH, plan, rank))
        stage = compiled.pipeline.stages[0]
        take = stage.backward_one_chunk

        def without(chunk: int, *args: Any, **kwargs: Any) -> None:
            take(chunk, *args, **kwargs)
            stage._grads[chunk] = dict.fromkeys(stage._grads[chunk])

        if stage.is_last:
            stage.backward_one_chunk = without
        try:
            model(**slice_for(BATCH, plan, rank))["loss"].backward()
        except VerifyError as error:
            model._state.groups.hang_up()
            return f"own {error}"
        except RuntimeError as error:
            return f"peer {error}"
    return "nothing"


def test_a_gradient_that_is_not_there_is_no_zero(ranks: Ranks) -> None:
    """The stage that lost it says which, the other one what it was waiting for."""
    other, own = ranks.run(2, lose_a_gradient, Plan(dp=1, pp=2, microbatches=2, timeout=8.0), timeout=230.0)
    assert own.startswith("own") and "its graph gave None" in own and "stage 1 should hand on" in own
    assert other.startswith("peer") and "stage 0" in other and "the backward of microbatch" in other
