"""fuse-rms-norm: one op for an RMS norm, whose loss and gradients stay what they were; roundings are never moved."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moecompile import graph as graphs
from moecompile import ops
from moecompile.passes.fuse_rms_norm import FuseRmsNorm
from tests.support import golden
from tests.support.fusion import ALONE, SHARDED, same_step


class Norm(golden.Line):
    """A norm as models write it; ``form`` says which way."""

    def __init__(self, form: str) -> None:
        super().__init__()
        del self.head
        self.form = form
        self.weight = nn.Parameter(torch.tensor([0.5, -1.5]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(x) * torch.arange(1, 3)).sum()

    def norm(self, x: Tensor) -> Tensor:
        mean = x.square().mean(-1, keepdim=True) if self.form == "square" else x.pow(2).mean(-1, keepdim=True)
        if self.form == "product":
            mean = (x * x).mean(-1, keepdim=True)
        if self.form == "through float32":  # narrower than float64: a rounding that has to stay
            wide = x.to(torch.float32)
            normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
            return self.weight * normed.to(x.dtype)
        if self.form == "composite":
            return torch.rms_norm(x, [2], self.weight, 1e-6)
        if self.form == "first dim":
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6))
        if self.form == "root used twice":
            root = torch.rsqrt(mean + 1e-6)
            return self.weight * (x * root) + root
        normed = x * torch.rsqrt(mean + 1e-6)
        return normed * self.weight if self.form == "weight last" else self.weight * normed


def fused(form: str) -> golden.Rewrite:
    return golden.rewrite(SHARDED, "fuse-rms-norm", ALONE, Norm(form))


APPLIES = ["pow", "square", "product", "weight last", "composite"]


def test_golden(golden: golden.Golden) -> None:
    golden("by_hand", fused("pow"))


@pytest.mark.parametrize("form", APPLIES)
def test_applies(form: str) -> None:
    found = fused(form)
    assert found.rewrites == 1
    (node,) = graphs.find(found.program.graph, ops.rms_norm)
    assert node.args[2] == 1e-6
    assert golden.run(found.program, "fuse-rms-norm").history[-1].rewrites == 0


@pytest.mark.parametrize("form", ["through float32", "first dim", "root used twice"])
def test_declines(form: str) -> None:
    found = fused(form)
    assert found.rewrites == 0
    assert found.before == found.after


@pytest.mark.parametrize("form", APPLIES)
@pytest.mark.parametrize("lowered", [False, True])
def test_same_loss_and_gradients(form: str, lowered: bool) -> None:
    same_step(Norm(form), "fuse-rms-norm", lowered)


def test_effect() -> None:
    def effect() -> None:
        assert graphs.find(fused("pow").program.graph, ops.rms_norm)

    golden.assert_needs(FuseRmsNorm, effect)
