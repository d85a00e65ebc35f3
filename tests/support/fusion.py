"""What a fusing pass must keep: the loss and every gradient, in float64, of a one-rank step with and without it."""

from __future__ import annotations

import torch
from torch import nn

import moecompile.runtime.cpu_kernels  # noqa: F401  # the kernels that a lowered graph calls
from moecompile.plan import Plan
from moecompile.program import InputKind, Program
from tests.support import golden

ALONE = Plan(dp=1)
SHARDED = "recognize-moe,normalize-loss,shard-dense,shard-experts,insert-dispatch"
TOLERANCE = 1e-13  # float64, sums of a few terms in another order


def step_outputs(model: nn.Module, passes: str) -> list[torch.Tensor]:
    """Loss and gradients of one step of the captured model under a pipeline."""
    program = golden.run(golden.captured(ALONE, model), f"{SHARDED},{passes}")
    torch.manual_seed(1)
    with torch.no_grad():
        return list(program.graph_module(*inputs_of(program, model)))


def inputs_of(program: Program, model: nn.Module) -> list[torch.Tensor]:
    found = []
    for node, item in program.items():
        if item.kind is InputKind.PARAM:
            found.append(model.get_parameter(item.fqns[0]).detach())
        elif item.kind is InputKind.BUFFER:
            found.append(model.get_buffer(item.fqns[0]))
        elif item.kind is InputKind.CONSTANT:
            found.append(program.constants[item.name])
        else:
            value = node.meta["val"]
            whole = not value.dtype.is_floating_point  # numbers of experts
            draw = torch.randint(golden.EXPERTS, value.shape) if whole else torch.randn(value.shape, dtype=value.dtype)
            found.append(draw)
    return found


def same_step(model: nn.Module, item: str, lowered: bool) -> None:
    """The step with pass ``item`` gives the loss and gradients of the step without it."""
    same_as_plain(model, f"{item},differentiate" + (",lower-ops" if lowered else ""))


def same_as_plain(model: nn.Module, passes: str) -> int:
    """The step under a pipeline gives the loss and gradients of the step that is differentiated alone; returns how many they are."""
    plain, fused = step_outputs(model, "differentiate"), step_outputs(model, passes)
    assert len(plain) == len(fused) > 1
    for a, b in zip(plain, fused, strict=True):
        assert a.norm() > 0
        assert (a - b).norm() <= TOLERANCE * a.norm()
    return len(plain)
