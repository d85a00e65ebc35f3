"""Layers that are no top-k MoE beside one that is: exact under dp and ep, named aloud, refused by a strict plan."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from torch import nn

from moecompile.compilation import Request, compile_call
from moecompile.errors import CaptureError
from moecompile.plan import Plan
from tests.support import unrouted_models as models
from tests.support.moe_styles import WIDTH
from tests.support.parity import Batch, LockStep, compare, plain, slice_for

PLAN = Plan(dp=2, ep=2)
KINDS = list(models.UNROUTED)


def made(kind: type[nn.Module], routed: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return models.Mixed(kind, routed).double()


def batch(seed: int) -> Batch:
    draw = torch.randn(2, 4, models.SEQUENCE, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {"x": draw[0], "labels": draw[1]}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_exact_and_named(kind: type[nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    batches = [batch(0), batch(1)]
    reference = plain(made(kind), batches)
    idle = [name for name, grad in reference.steps[0].grads.items() if not grad.any()]
    with caplog.at_level(logging.WARNING, "moecompile"):
        run = LockStep(made(kind), PLAN, batches[0])
    (layer,) = run.program.layers
    assert layer["module"] == "routed"
    reasons = [item["reason"] for item in run.program.unrouted]
    wanted = models.UNROUTED[kind]
    assert any(wanted in reason for reason in reasons)
    said = [record.message for record in caplog.records if "run data-parallel" in record.message]
    assert said and re.search(r"_\w+\.py:\d+ \(mixture", said[0]) and wanted in said[0]
    compare(run.run(batches), reference, zero=idle)


def test_rows_that_tokens_look_up_are_experts_enough_for_an_expert_parallel_plan() -> None:
    """Product keys: nothing to cut over ep, and so the whole model runs data-parallel, aloud; a strict plan refuses."""
    batches = [batch(0), batch(1)]
    reference = plain(made(models.ProductKeys, routed=False), batches)
    idle = [name for name, grad in reference.steps[0].grads.items() if not grad.any()]
    run = LockStep(made(models.ProductKeys, routed=False), PLAN, batches[0])
    assert run.program.layers == [] and run.program.unrouted
    compare(run.run(batches), reference, zero=idle)
    strict = Plan(dp=2, ep=2, strict=True)
    with pytest.raises(CaptureError, match="tokens pick rows of"):
        compile_call(made(models.ProductKeys, routed=False), Request((), slice_for(batch(0), strict, 0), strict))


REFUSED = [kind for kind in KINDS if kind is not models.ProductKeys]


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_without_any_layer_an_expert_parallel_plan_is_refused(kind: type[nn.Module]) -> None:
    request = Request((), slice_for(batch(0), PLAN, 0), PLAN)
    with pytest.raises(CaptureError, match=r"no MoE layer, and ep=2 needs one; .*\w+_\w+.py:\d+"):
        compile_call(made(kind, routed=False), request)
    alone = compile_call(made(kind, routed=False), Request((), slice_for(batch(0), Plan(dp=2), 0), Plan(dp=2)))
    assert alone.layers == [] and alone.unrouted


def test_a_strict_plan_refuses() -> None:
    strict = Plan(dp=2, ep=2, strict=True)
    request = Request((), slice_for(batch(0), strict, 0), strict)
    with pytest.raises(CaptureError, match=r"1 layers that are none.*use ep=1 or strict=False"):
        compile_call(made(models.SlotMixture), request)


def test_ordinary_models_have_nothing_to_name() -> None:
    class Tower(nn.Module):
        """Layers one after the other are not side by side."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            for layer in self.layers:
                x = x + layer(x).relu()
            return {"loss": (x - labels).square().mean()}

    program = compile_call(Tower().double(), Request((), slice_for(batch(0), Plan(dp=2), 0), Plan(dp=2)))
    assert program.unrouted == []
