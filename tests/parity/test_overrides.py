"""What a plan says of single linears is done, exactly, or refused: `Plan(overrides=...)` on simulated ranks against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moecompile as mc
from moecompile import graph as graphs
from moecompile import ops
from moecompile.compilation import Request, compile_call
from moecompile.errors import PassError, PlanError
from moecompile.placement.types import Shard
from moecompile.plan import Plan
from moecompile.printer import graph_text
from moecompile.program import InputKind, Program
from tests.parity.test_chains import batch, check, made
from tests.support import models
from tests.support.chain_models import WIDTH, Attention, Layered, Mlp, Tied
from tests.support.parity import LockStep, compare, plain, slice_for


class Normed(Mlp):
    """A norm over all features lies between the linears: no chain is found."""

    def make(self) -> None:
        super().make()
        self.inner = nn.LayerNorm(24)

    def between(self, h: Tensor) -> Tensor:
        out: Tensor = self.inner(h)
        return out


class InARow(Mlp):
    """Tokens of all sequences one behind the other."""

    def body(self, x: Tensor) -> Tensor:
        return x + self.b(self.between(self.a(x.reshape(-1, WIDTH)))).reshape(x.shape)


class Raw(Mlp):
    """Weights that are parameters of the model itself."""

    def make(self) -> None:
        self.w1, self.w2 = nn.Parameter(torch.randn(WIDTH, 24)), nn.Parameter(torch.randn(24, WIDTH))

    def body(self, x: Tensor) -> Tensor:
        return x + torch.relu(x @ self.w1) @ self.w2


def cuts(program: Program) -> dict[str, int]:
    """The dim that tp cuts of each weight."""
    return {
        item.fqns[0].removesuffix(".weight"): placed.dim
        for item in program.inputs
        for axis, placed in item.placements
        if axis == "tp" and isinstance(placed, Shard) and item.kind is InputKind.PARAM
    }


def of(kind: type[Layered], overrides: dict[str, str], **fields: Any) -> Program:
    """One rank's program."""
    plan = Plan(**{"dp": 1, "tp": 2, **fields}, overrides=overrides)
    return compile_call(made(kind), Request((), batch(2), plan))


CASES: list[tuple[type[Layered], dict[str, str], dict[str, int]]] = [
    (Attention, {"q": "replicate"}, {}),
    (Attention, {"[qkv]": "column", "o": "row"}, {"q": 0, "k": 0, "v": 0, "o": 1}),
    (Attention, {"*": "replicate", "o": "row"}, {"o": 1}),
    (Attention, {"q": "row", "o": "column", "head": "column"}, {"q": 1, "o": 0, "head": 0}),
    (Mlp, {"a": "row"}, {"a": 1}),
    (Mlp, {"b": "column"}, {"b": 0}),
    (Mlp, {"head": "row"}, {"a": 0, "b": 1, "head": 1}),
    (Mlp, {"?": "replicate", "b": "row"}, {"b": 1}),
    (Normed, {"a": "column", "b": "row"}, {"a": 0, "b": 1}),
    (InARow, {"b": "column"}, {"b": 0}),
    (Raw, {"w1": "row"}, {"w1": 0}),
    (Tied, {"a": "replicate"}, {}),
]
PLANS: list[dict[str, Any]] = [{}, {"sequence_parallel": True}, {"dp": 2, "cp": 2, "sequence_parallel": True}]


@pytest.mark.parametrize("fields", PLANS, ids=["tp", "sp", "dp cp sp"])
@pytest.mark.parametrize(("kind", "overrides", "expected"), CASES, ids=lambda item: getattr(item, "__name__", None))
def test_it_is_done_and_exact(
    kind: type[Layered], overrides: dict[str, str], expected: dict[str, int], fields: dict[str, Any]
) -> None:
    program = check(kind, Plan(**{"dp": 1, "tp": 2, **fields}, overrides=overrides))
    assert cuts(program) == expected
    assert program.gathers == []


def test_what_the_graph_says_anyway_changes_nothing() -> None:
    assert graph_text(of(Mlp, {"a": "column", "b": "row"})) == graph_text(of(Mlp, {}))


def test_the_later_of_two_patterns_wins() -> None:
    assert cuts(of(Mlp, {"*": "replicate", "a": "column"})) == {"a": 0}
    assert cuts(of(Mlp, {"a": "column", "*": "replicate"})) == {}


def test_along_the_sequence_single_linears_exchange_features_for_tokens() -> None:
    """A norm over all features between a linear cut by columns and one cut by rows sees this rank's tokens."""
    program = of(Normed, {"a": "column", "b": "row"}, sequence_parallel=True)
    turned = [node.args[2:4] for node in graphs.find(program.graph, ops.all_to_all)]
    assert sorted(turned) == [(1, 2), (1, 2), (2, 1), (2, 1)]


def test_a_layer_of_experts_whose_attention_stays_whole() -> None:
    """The mixture's own linears follow the plan, its experts the degrees of experts; the words hold through three steps."""
    config = models.Config("stacked", hidden=16, heads=4, inner=8, shared=True, aux=0.1, rotary=True)
    overrides = {
        "layers.*": "replicate",
        "layers.*.moe.*": "replicate",
        "layers.0.out": "row",
        "layers.1.qkv": "column",
    }
    plan = Plan(dp=1, tp=2, ep=2, overrides=overrides)
    batches = [models.tokens(2, 8, seed, ignored=0.3) for seed in range(3)]
    lock_step = LockStep(models.build(config), plan, batches[0])
    compare(lock_step.run(batches), plain(models.build(config), batches))
    assert cuts(lock_step.program) == {"layers.0.out": 1, "layers.1.qkv": 0}
    (done,) = [item for item in lock_step.program.history if item.pass_text == "shard-linears"]
    kept = [line for line in done.declined if "overrides keep it whole" in line]
    assert len(kept) == 2 * config.layers - 2 + config.layers * 5  # router, shared gate, three of the shared expert


def test_with_the_vocabulary_cut() -> None:
    """The head follows the plan's word, which may be against it."""
    vocab = {"passes": "+shard-linears{vocab=true}"}
    assert cuts(of(Mlp, {"head": "column"}, **vocab)) == cuts(of(Mlp, {}, **vocab)) == {"a": 0, "b": 1, "head": 0}
    assert cuts(of(Mlp, {"head": "replicate"}, **vocab)) == {"a": 0, "b": 1}
    for role in ("row", "replicate"):
        program = check(Mlp, Plan(dp=1, tp=2, overrides={"head": role}, **vocab))
        assert ("head" in cuts(program)) is (role == "row")


def test_it_is_saved_with_the_program(tmp_path: Path) -> None:
    overrides = {"*": "replicate", "a": "column"}
    program = mc.trace(made(Mlp), Plan(dp=1, tp=2, overrides=overrides), batch(2))
    program.save(tmp_path / "program.py")
    again = mc.load(tmp_path / "program.py")
    assert again.plan == program.plan and dict(again.plan.overrides) == overrides
    assert cuts(again) == {"a": 0}


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        (Mlp, {"layers.*.c": "row"}, r"pattern 'layers\.\*\.c' matches no module of the model"),
        (Mlp, {"a.bias": "column"}, "pattern 'a.bias' matches no module of the model; one is called 'norm'"),
        (Mlp, {"*": "column"}, r"\{'\*': 'column'\}\): the pattern matches 'embed', which is no linear; write a pattern"),
        (Mlp, {"norm": "replicate"}, "the pattern matches 'norm', in which there is no linear; tp cuts nothing there"),
        (Tied, {"a": "row"}, r"linear in a \(.*chain_models.py:\d+\) is read in several places.*write replicate"),
    ],
    ids=["nothing", "a bias", "no linear", "nothing to keep", "tied"],
)  # fmt: skip
def test_what_it_cannot_mean_is_refused(kind: type[Layered], overrides: dict[str, str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        of(kind, overrides)


def test_sizes_that_tp_does_not_divide_are_refused() -> None:
    batch_of_three = {name: item[:, :6] for name, item in batch(2).items()}
    for overrides, message in (
        ({"head": "column"}, "head .* has 32 outputs, which tp=3 does not divide; write row or replicate"),
        ({"head": "row"}, "head .* has 16 inputs, which tp=3 does not divide; write column or replicate"),
    ):
        with pytest.raises(PlanError, match=message):
            compile_call(made(Mlp), Request((), batch_of_three, Plan(dp=1, tp=3, overrides=overrides)))


def test_rows_of_tokens_in_a_row_are_refused_along_the_sequence() -> None:
    with pytest.raises(
        PassError, match=r"to be cut by rows as .* says, but it reads the tokens .* write column or replicate"
    ):
        of(InARow, {"a": "row"}, sequence_parallel=True)


def test_a_pipeline_that_would_not_read_it_is_refused() -> None:
    with pytest.raises(PlanError, match="a whole pipeline without shard-linears"):
        of(Mlp, {"a": "row"}, passes="recognize-moe,shard-dense,differentiate")


def test_experts_are_cut_by_other_degrees() -> None:
    model = models.build(models.Config("stacked"))
    plan = Plan(dp=1, tp=2, ep=2, overrides={"layers.*.moe.experts*": "column"})
    given = slice_for(models.tokens(2, 8, 0), plan, 0)
    with pytest.raises(PlanError, match=r"matches 'layers\.0\.moe\.experts', which is no linear"):
        compile_call(model, Request((), given, plan))
