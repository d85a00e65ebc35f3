"""normalize-loss: the loss of a microbatch becomes its part of the step's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moecompile import graph as graphs
from moecompile.errors import PassError
from moecompile.passes.normalize_loss import NUM_VALID, NormalizeLoss
from moecompile.plan import Plan
from moecompile.printer import graph_text
from moecompile.program import InputKind, OutputKind, Program
from moecompile.runtime.simulator import simulate
from tests.support import golden

aten = torch.ops.aten
TWO = Plan(dp=2, microbatches=2)


def rewrite(plan: Plan = TWO, model: golden.Scale | None = None) -> golden.Rewrite:
    return golden.rewrite("recognize-moe", "normalize-loss", plan, model or golden.Scale())


def test_golden(golden: golden.Golden) -> None:
    golden("cross_entropy", rewrite())


def assert_normalized(program: Program) -> None:
    """The mean is a sum over an input, and the count of this microbatch comes out."""
    (scale,) = [item for item in program.inputs if item.kind is InputKind.SCALE]
    (count,) = [item for item in program.outputs if item.what == NUM_VALID]
    assert count.name == scale.name and count.kind is OutputKind.METRIC
    (loss,) = graphs.find(program.graph, aten.cross_entropy_loss.default)
    reduction = loss.args[3] if len(loss.args) > 3 else loss.kwargs.get("reduction", 1)
    assert reduction == 2


def test_effect() -> None:
    golden.assert_needs(NormalizeLoss, lambda: assert_normalized(rewrite().program))


def test_parts_add_up_to_the_mean_over_all_valid_tokens() -> None:
    """Uneven valid tokens, one microbatch nearly all ignored."""
    program = rewrite(Plan(dp=1, microbatches=2)).program
    torch.manual_seed(3)
    weight, x = torch.randn(4, 2, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    labels = torch.tensor([0, -100, -100, 1, 2, 3])
    wanted = F.cross_entropy(x @ weight.T, labels)
    values = {"head_weight": weight, "num_valid_0": (labels != -100).sum().double() / 2}
    parts = []
    for part in range(2):
        values |= {"x": x[3 * part :][:3], "labels": labels[3 * part :][:3]}
        inputs = [values[node.name] for node in program.placeholders()]
        ((loss, count),) = simulate(program.graph_module, [inputs], program.mesh)
        assert count == (values["labels"] != -100).sum()
        parts.append(loss)
    torch.testing.assert_close(parts[0] + parts[1], wanted, rtol=1e-14, atol=0)


class OwnMean(golden.Scale):
    """A mean over valid tokens, written by hand."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        total = F.cross_entropy(self.head(x), labels, reduction="sum")
        return total / (labels != -100).sum()


def test_a_division_by_a_count_is_a_mean_too() -> None:
    program = rewrite(model=OwnMean()).program
    (scale,) = [node for node, item in program.items() if item.kind is InputKind.SCALE]
    (reader,) = scale.users
    assert reader.target in (aten.div.Tensor, aten.true_divide.Tensor) and reader.args[1] is scale


def test_nothing_to_do_with_one_microbatch() -> None:
    found = rewrite(Plan(dp=2))
    assert found.rewrites == 0 and found.before == found.after


def test_it_counts_the_tokens_of_the_whole_batch() -> None:
    """After the batch is cut it would count a rank's tokens: refused before anything runs."""
    program = golden.captured(TWO, golden.Scale())
    before = graph_text(program)
    with pytest.raises(
        PassError, match=r"'normalize-loss' cannot run once the fact TOKENS_SHARDED holds .* before 'shard-dense'"
    ):
        golden.run(program, "recognize-moe,shard-dense,normalize-loss")
    assert graph_text(program) == before and not program.history
