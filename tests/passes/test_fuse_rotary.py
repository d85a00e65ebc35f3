"""fuse-rotary: one op for a rotation of halves, whose loss and gradients stay what they were."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moecompile import graph as graphs
from moecompile import ops
from moecompile.passes.fuse_rotary import FuseRotary
from tests.support import golden
from tests.support.fusion import ALONE, SHARDED, same_step


class Turn(golden.Line):
    """x of [T, 2] spread to [T, heads, 2] and turned; ``form`` says how."""

    def __init__(self, form: str) -> None:
        super().__init__()
        del self.head
        self.form = form
        self.up = nn.Linear(golden.WIDTH, 8, bias=False)
        self.angle = nn.Parameter(torch.rand(4))
        self.register_buffer("angles", torch.rand(golden.TOKENS, 1, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).view(-1, 2, 4)
        angles = self.angle.expand(1, 1, 4) if self.form == "trained" else self.angles
        cos, sin = angles.cos(), angles.sin()  # the halves differ: no symmetry may be relied on
        if self.form == "transposed":
            heads, cos, sin = heads.transpose(0, 1), cos.transpose(0, 1), sin.transpose(0, 1)
        first, second = heads[..., :2], heads[..., 2:]
        turned = torch.cat((first, -second) if self.form == "other order" else (-second, first), -1)
        out = turned * sin + heads * cos if self.form == "sin first" else heads * cos + turned * sin
        return (out * torch.arange(1, 5)).square().sum()


def fused(form: str) -> golden.Rewrite:
    return golden.rewrite(SHARDED, "fuse-rotary", ALONE, Turn(form))


def test_golden(golden: golden.Golden) -> None:
    golden("halves", fused("plain"))


@pytest.mark.parametrize("form", ["plain", "transposed", "sin first"])
def test_applies(form: str) -> None:
    found = fused(form)
    assert found.rewrites == 1
    assert len(graphs.find(found.program.graph, ops.rotary)) == 1
    assert golden.run(found.program, "fuse-rotary").history[-1].rewrites == 0


@pytest.mark.parametrize("form", ["other order", "trained"])
def test_declines(form: str) -> None:
    found = fused(form)
    assert found.rewrites == 0
    assert found.before == found.after


@pytest.mark.parametrize("form", ["plain", "transposed", "sin first"])
@pytest.mark.parametrize("lowered", [False, True])
def test_same_loss_and_gradients(form: str, lowered: bool) -> None:
    same_step(Turn(form), "fuse-rotary", lowered)


def test_effect() -> None:
    def effect() -> None:
        assert graphs.find(fused("plain").program.graph, ops.rotary)

    golden.assert_needs(FuseRotary, effect)
