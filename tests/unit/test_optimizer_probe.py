"""Whether an optimizer works element by element is found out along the dims in which its parameters are cut."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import moecompile as mc
from moecompile.optimizer_probe import is_elementwise
from moecompile.plan import Plan
from tests.support.models import Config, build, tokens
from tests.support.parity import slice_for
from tests.support.pool import Ranks, parallel


class RowScaled(torch.optim.Optimizer):
    """Divides each row of a matrix by its largest gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        step = param.grad if param.ndim < 2 else param.grad / param.grad.abs().amax(-1, keepdim=True)
                        param.sub_(step, alpha=group["lr"])


def test_the_probe_cuts_the_dim_that_is_cut() -> None:
    param = nn.Parameter(torch.randn(4, 3))
    opt = RowScaled([param])
    assert [is_elementwise(opt, opt.param_groups[0], param, 2, dim) for dim in range(2)] == [True, False]


def scaled_rows(rank: int, pattern: str) -> str:
    """Says what the optimizer said to the biases first, then to the parameters of that name."""
    plan = Plan(dp=1, tp=2, ep=2)
    with parallel(build(Config("loop")), plan) as model:
        model(**slice_for(tokens(4, 5, 0), plan, rank))["loss"].backward()
        named = sorted(model.named_parameters(), key=lambda item: item[1].ndim)
        opt = RowScaled([param for name, param in named if pattern in name])
        try:
            opt.step()
        except mc.PlanError as error:
            return str(error)
    return ""


def test_each_way_of_cutting_is_tried(ranks: Ranks) -> None:
    assert ranks.run(2, scaled_rows, "head") == ["", ""]
    for said in ranks.run(2, scaled_rows, ""):
        assert "RowScaled updates an element by what other elements are" in said and "ranks of tp" in said
