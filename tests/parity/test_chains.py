"""Which linears tensor parallelism cuts, and that whatever it decides is exact: styles of layers on tp, sp and cp, all ranks simulated."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import moecompile as mc
from moecompile.placement.types import Shard
from moecompile.plan import Plan
from moecompile.program import InputKind
from tests.support.chain_models import CUT, LENGTH, VOCAB, Layered

PLANS = [
    Plan(dp=1, tp=2),
    Plan(dp=1, tp=2, sequence_parallel=True),
    Plan(dp=1, cp=2),
    Plan(dp=2, cp=2, tp=2, sequence_parallel=True),
]
FEW = [Plan(dp=1, tp=4), Plan(dp=2, tp=2)]


def name_of(plan: Plan) -> str:
    return f"dp{plan.dp}-cp{plan.cp}-tp{plan.tp}{'s' if plan.sequence_parallel else ''}"


def made(kind: type[Layered]) -> Layered:
    torch.manual_seed(0)
    return kind().double()


def batch(rows: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(0, VOCAB, (rows, LENGTH), generator=source) for _ in range(2))
    labels[0, :3] = -100
    return {"ids": ids, "labels": labels}


def check(kind: type[Layered], plan: Plan) -> mc.Program:
    """Loss and every gradient of simulated ranks against the plain model."""
    model, whole = made(kind), batch(2 * plan.num_data_ranks)
    parts = [
        {name: value.chunk(plan.num_data_ranks)[at] for name, value in whole.items()}
        for at in range(plan.num_data_ranks)
    ]
    found = mc.simulate_ranks(model, plan, [parts[plan.data_rank(rank)] for rank in range(plan.world_size)])
    loss = model(**whole)["loss"]
    loss.backward()
    torch.testing.assert_close(found.loss, loss.detach(), rtol=1e-12, atol=0)
    for name, param in model.named_parameters():
        assert param.grad is not None and param.grad.count_nonzero()
        torch.testing.assert_close(found.grads[name], param.grad, rtol=1e-10, atol=1e-14)
    return found.program


@pytest.mark.parametrize("kind", CUT, ids=lambda kind: kind.__name__)
def test_what_is_cut(kind: type[Layered]) -> None:
    program = check(kind, Plan(dp=1, tp=2))
    cut = {
        item.fqns[0].removesuffix(".weight")
        for item in program.inputs
        for axis, placed in item.placements
        if axis == "tp"
        and isinstance(placed, Shard)
        and item.kind is InputKind.PARAM
        and not item.fqns[0].endswith(".bias")
    }
    assert cut == CUT[kind]
    assert program.gathers == []


@pytest.mark.parametrize("plan", PLANS[1:], ids=name_of)
@pytest.mark.parametrize("kind", CUT, ids=lambda kind: kind.__name__)
def test_every_style_is_exact(kind: type[Layered], plan: Plan) -> None:
    check(kind, plan)


@pytest.mark.slow
@pytest.mark.parametrize("plan", FEW, ids=name_of)
@pytest.mark.parametrize("kind", CUT, ids=lambda kind: kind.__name__)
def test_other_degrees_are_exact(kind: type[Layered], plan: Plan) -> None:
    check(kind, plan)
