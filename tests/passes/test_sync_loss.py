"""sync-loss: every rank reports the loss of the whole batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moecompile as mc
from moecompile import meta, ops
from moecompile.errors import PassError
from moecompile.passes.sync_loss import SyncLoss
from moecompile.placement.types import REPLICATE
from moecompile.plan import Plan
from moecompile.program import OutputKind, Program
from tests.support import golden

BEFORE = "recognize-moe,shard-dense,differentiate"


def rewrite(plan: Plan = Plan(dp=2)) -> golden.Rewrite:  # noqa: B008
    return golden.rewrite(BEFORE, "sync-loss", plan, golden.Line())


def test_golden(golden: golden.Golden) -> None:
    golden("sum", rewrite())


def assert_whole(program: Program) -> None:
    """The loss is the sum of the shares, and is described as such."""
    at = next(i for i, item in enumerate(program.outputs) if item.kind is OutputKind.LOSS)
    loss = program.output_nodes()[at]
    assert loss.target is ops.all_reduce and loss.args[1:] == ("sum", "dp")
    assert dict(program.outputs[at].placements)["dp"] == REPLICATE


def test_effect() -> None:
    golden.assert_needs(SyncLoss, lambda: assert_whole(rewrite().program))


def test_gradients_are_those_of_the_share() -> None:
    """The pass comes after differentiation and leaves the gradients alone."""
    program = golden.run(golden.captured(Plan(dp=2), golden.Line()), BEFORE)
    grads = program.output_nodes()[1:]
    golden.run(program, "sync-loss")
    assert program.output_nodes()[1:] == grads


class Narrow(nn.Module):
    """A bfloat16 model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(8, 32, dtype=torch.bfloat16)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), labels)


class Twice(Narrow):
    """The same where the rounded loss is not the last word."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return super().forward(x, labels) * 2


@pytest.mark.parametrize("grad", [True, False], ids=["step", "no grad"])
def test_shares_of_a_narrow_loss_are_rounded_once(grad: bool) -> None:
    """The rows' losses, added in float32 over all ranks and then rounded; the sum of rounded shares is another number."""
    model, drawn = Narrow(), torch.Generator().manual_seed(14)
    x, labels = torch.randn(16, 8, generator=drawn).bfloat16(), torch.randint(0, 32, (16,), generator=drawn)
    rows = F.cross_entropy(model.head(x), labels, reduction="none").detach().float()
    expected = (rows.sum() / 16).bfloat16()
    shares = [(part.sum() / 16).bfloat16() for part in rows.chunk(4)]
    assert not torch.equal(shares[0] + shares[1] + shares[2] + shares[3], expected)
    with torch.set_grad_enabled(grad):
        found = mc.simulate_ranks(model, Plan(dp=4), list(zip(x.chunk(4), labels.chunk(4), strict=True)))
    assert found.loss is not None and found.loss.dtype == torch.bfloat16
    assert torch.equal(found.loss, expected)


def test_shares_that_are_narrow_already_are_added_in_float32() -> None:
    model = Twice()
    program = mc.trace(model, Plan(dp=2), (torch.randn(4, 8).bfloat16(), torch.randint(0, 32, (4,))))
    loss = program.output_nodes()[0]
    reduce = loss.args[0]
    assert (loss.target, reduce.target) == (torch.ops.aten._to_copy.default, ops.all_reduce)
    assert meta.tensor(reduce).dtype == torch.float32 and meta.tensor(reduce.args[0].args[0]).dtype == torch.bfloat16


def test_nothing_to_do_on_one_rank() -> None:
    found = rewrite(Plan(dp=1))
    assert found.rewrites == 0 and found.before == found.after


def test_a_second_run_is_refused() -> None:
    with pytest.raises(PassError, match="'sync-loss' needs the fact LOSS_SHARES"):
        golden.run(rewrite().program, "sync-loss")
