"""Adapters with a router each, layers in layers, routers over rows or the whole batch, loops over tokens: exact, or refused by name."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from moecompile import ops
from moecompile.compilation import Request, compile_call
from moecompile.errors import CaptureError
from moecompile.plan import Plan
from tests.support import moe_rare_kinds as kinds
from tests.support.moe_styles import WIDTH
from tests.support.parity import Batch, LockStep, compare, plain, slice_for

PLAN = Plan(dp=2, ep=2)


def made(kind: type[nn.Module], routed: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return kinds.Model(kind, routed).double()


def batch() -> Batch:
    shape = (2, 4, kinds.SEQUENCE, WIDTH)
    draw = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return {"x": draw[0], "labels": draw[1]}


def check(kind: type[nn.Module], plan: Plan, routed: bool = False) -> LockStep:
    reference = plain(made(kind, routed), [batch()])
    idle = [name for name, grad in reference.steps[0].grads.items() if not grad.any()]
    run = LockStep(made(kind, routed), plan, batch())
    compare(run.run([batch()]), reference, zero=idle)
    return run


@pytest.mark.parametrize("kind", list(kinds.RECOGNISED), ids=lambda kind: kind.__name__)
def test_recognised(kind: type[nn.Module]) -> None:
    run = check(kind, PLAN)
    assert len(run.program.layers) == kinds.RECOGNISED[kind]
    assert any(node.target is ops.dispatch for node in run.program.graph.nodes)


@pytest.mark.parametrize("kind", list(kinds.DATA_PARALLEL), ids=lambda kind: kind.__name__)
def test_runs_data_parallel_aloud(kind: type[nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "moecompile"):
        run = check(kind, PLAN, routed=True)
    (layer,) = run.program.layers
    assert layer["module"] == "routed" and kinds.DATA_PARALLEL[kind] in caplog.text and ".py:" in caplog.text
    alone = check(kind, Plan(dp=2))
    assert alone.program.layers == [] and kinds.DATA_PARALLEL[kind] in alone.program.unrouted[0]["reason"]


@pytest.mark.parametrize("plan", [PLAN, Plan(dp=2)], ids=["ep=2", "dp=2"])
@pytest.mark.parametrize("kind", list(kinds.REFUSED), ids=lambda kind: kind.__name__)
def test_refused_with_a_line(kind: type[nn.Module], plan: Plan) -> None:
    with pytest.raises(CaptureError, match=rf"\w\.py:\d+\)?:? .*{kinds.REFUSED[kind]}"):
        compile_call(made(kind), Request((), slice_for(batch(), plan, 0), plan))
