"""shard-sequence: each rank of a cp group computes its part of the sequence, and attention reads all keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.errors import PassError
from moecompile.passes.shard_sequence import ShardSequence
from moecompile.placement.types import Shard
from moecompile.plan import Plan
from moecompile.printer import graph_text
from moecompile.program import InputKind, OutputKind, Program
from tests.support import golden

BEFORE = "recognize-moe,shard-dense"
aten = torch.ops.aten
CP = Plan(dp=1, cp=2)


def rewrite(model: nn.Module | None = None, plan: Plan = CP) -> golden.Rewrite:
    return golden.rewrite(BEFORE, "shard-sequence", plan, model or golden.Attentive())


class Short(golden.Attentive):
    """One projection for queries, keys and values: a shorter text."""

    def forward(self, ids: Tensor) -> Tensor:
        seen = self.out(self.embed(ids))
        out: Tensor = F.scaled_dot_product_attention(seen, 2 * seen, -seen, is_causal=True).sum()
        return out


def test_golden(golden: golden.Golden) -> None:
    golden("attention", rewrite(Short()))


class Heads(nn.Module):
    """Embedded tokens as queries, keys and values of two heads of one feature each."""

    LENGTH = 4

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(golden.Attentive.VOCAB, golden.WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        seen = self.embed(ids).unsqueeze(-1).transpose(1, 2)
        out: Tensor = F.scaled_dot_product_attention(seen, 2 * seen, -seen, is_causal=True).sum()
        return out


def turned(plan: Plan = CP) -> golden.Rewrite:
    return golden.rewrite(BEFORE, "shard-sequence{attention=alltoall}", plan, _Attentive(Heads()))


def ringed(plan: Plan = CP) -> golden.Rewrite:
    return golden.rewrite(BEFORE, "shard-sequence{attention=ring}", plan, _Attentive(Heads()))


class _Attentive(golden.Attentive):
    """Gives a module the batch that the golden harness passes to an `Attentive`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        del self.embed, self.qkv, self.out
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.inner(ids)
        return out


def test_golden_turned(golden: golden.Golden) -> None:
    golden("turned", turned())


def test_effect_turned() -> None:
    """Half the heads see the whole sequence."""

    def effect() -> None:
        program = turned().program
        (attention,) = graphs.find(program.graph, aten.scaled_dot_product_attention.default)
        assert {tuple(meta.tensor(item).shape) for item in attention.args[:3]} == {(1, 1, 4, 1)}  # type: ignore[arg-type]
        assert len(graphs.find(program.graph, ops.all_to_all)) == 4

    golden.assert_needs(ShardSequence, effect)


def test_golden_ring(golden: golden.Golden) -> None:
    golden("ring", ringed())


def test_effect_of_a_ring() -> None:
    """Keys and values come from the rank before; what has been seen of them is joined."""

    def effect() -> None:
        program = ringed().program
        assert not graphs.find(program.graph, aten.scaled_dot_product_attention.default, ops.all_gather)
        (turn,) = graphs.find(program.graph, ops.rotate)
        assert turn.args[1:] == (2, 1, "cp") and tuple(meta.tensor(turn).shape) == (1, 2, 2, 2)
        first, second = graphs.find(program.graph, ops.attention_part)
        assert [node.args[4] for node in (first, second)] == [0, 1] and second.args[1] is turn
        assert len(graphs.find(program.graph, ops.merge_attention)) == 1

    golden.assert_needs(ShardSequence, effect)


def zigzagged(plan: Plan = CP) -> golden.Rewrite:
    return golden.rewrite(BEFORE, "shard-sequence{attention=ring,order=zigzag}", plan, _Attentive(Heads()))


def test_golden_zigzag(golden: golden.Golden) -> None:
    golden("zigzag", zigzagged())


def test_effect_of_a_zigzag() -> None:
    """Tokens are cut in that order, every value of them says so, and the hops know."""

    def effect() -> None:
        program = zigzagged().program
        assert not graphs.find(program.graph, ops.local_slice)
        (part,) = graphs.find(program.graph, ops.zigzag_slice)
        assert part.args[2:] == (1, 1, 2)
        (lookup,) = graphs.find(program.graph, aten.embedding.default)
        assert meta.placements(lookup)["cp"] == Shard(1, zigzag=True)
        assert [node.args[8] for node in graphs.find(program.graph, ops.attention_part)] == [True, True]

    golden.assert_needs(ShardSequence, effect)


def assert_cut(program: Program) -> None:
    """Half the queries see all keys and values, gathered once; everything before and behind is half as long."""
    length = golden.Attentive.LENGTH
    (lookup,) = graphs.find(program.graph, aten.embedding.default)
    assert meta.tensor(lookup).shape[1] == length // 2
    (attention,) = graphs.find(program.graph, aten.scaled_dot_product_attention.default)
    query, key, value = attention.args[:3]
    assert [meta.tensor(item).shape[2] for item in (query, key, value)] == [length // 2, length, length]  # type: ignore[arg-type]
    assert len(graphs.find(program.graph, ops.all_gather)) in (1, 2)
    assert {item.axis for item in program.inputs if item.kind is InputKind.OFFSET} == {"cp"}


def test_effect() -> None:
    golden.assert_needs(ShardSequence, lambda: assert_cut(rewrite().program))


def test_parameters_stay_whole() -> None:
    assert all(not item.placements for item in rewrite().program.inputs if item.kind is InputKind.PARAM)


def test_nothing_to_do_without_context_parallelism() -> None:
    found = rewrite(plan=Plan(dp=2))
    assert found.rewrites == 0 and found.before == found.after


def test_a_second_run_changes_nothing() -> None:
    program = rewrite().program
    before = graph_text(program)
    golden.run(program, "shard-sequence")
    assert program.history[-1].rewrites == 0 and graph_text(program) == before


def test_it_comes_before_the_experts_are_cut() -> None:
    with pytest.raises(PassError, match=r"'shard-sequence'.*EXPERTS_SHARDED"):
        golden.run(golden.captured(Plan(dp=1, cp=2, ep=2)), f"{BEFORE},shard-experts,shard-sequence")


def test_a_model_that_embeds_no_sequence_is_refused() -> None:
    with pytest.raises(
        PassError, match=r"embeds no \[batch, sequence\] of tokens, which is where cp=2 begins.*use cp=1"
    ):
        rewrite(golden.Gated())


class Long(golden.Attentive):
    """A sequence of five."""

    LENGTH = 5


def test_a_length_that_cp_does_not_divide_is_refused() -> None:
    with pytest.raises(
        PassError, match=r"embeds a sequence of 5, which cp=2 cuts.*pad or cut it to a multiple of 2, such as 4 or 6"
    ):
        rewrite(Long())


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        ("allgather", "attention=allgather computes all of a causal mask's scores in any order"),
        ("alltoall", "attention=alltoall gives all ranks equal shares of a causal mask already"),
    ],
)
def test_a_zigzag_without_a_ring_is_refused(attention: str, reason: str) -> None:
    options = f"shard-sequence{{attention={attention},order=zigzag}}"
    with pytest.raises(PassError, match=f"{reason}; write attention=ring,order=zigzag, or leave order out"):
        golden.rewrite(BEFORE, options, CP, golden.Attentive())


class Six(golden.Attentive):
    """A sequence of six."""

    LENGTH = 6


def test_a_length_that_a_zigzag_does_not_divide_is_refused() -> None:
    with pytest.raises(
        PassError,
        match=r"embeds a sequence of 6, which cp=2 with order=zigzag cuts into 4 equal parts; pad.* of 4, such as 4 or 8",
    ):
        golden.rewrite(BEFORE, "shard-sequence{attention=ring,order=zigzag}", CP, Six())


# ---- ops along the sequence ---------------------------------------------------------------------------------------------


class Along(golden.Attentive):
    """``op`` instead of attention."""

    def __init__(self, op: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.op = op

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.out(self.op(self.qkv(self.embed(ids))[..., : golden.WIDTH]))
        return out.square().sum()


@pytest.mark.parametrize(
    "op",
    [torch.tanh, lambda x: x.softmax(-1), lambda x: x - x.mean(1, keepdim=True)],
    ids=["tanh", "softmax over features", "mean over the sequence"],
)
def test_what_a_rank_can_do_on_its_part_moves_nothing_whole(op: Callable[[Tensor], Tensor]) -> None:
    program = rewrite(Along(op)).program
    assert program.gathers == [] and not graphs.find(program.graph, ops.all_gather)


SORTS = {"sort": lambda x: x.sort(1).values, "flip": lambda x: x.flip(1)}


@pytest.mark.parametrize("op", SORTS.values(), ids=SORTS.keys())
def test_ops_along_the_sequence_are_gathered_and_named(op: Callable[[Tensor], Tensor]) -> None:
    program = rewrite(Along(op)).program
    (found,) = program.gathers
    assert found.axis == "cp" and found.bytes > 0 and "test_shard_sequence.py" in found.source


@pytest.mark.parametrize("op", SORTS.values(), ids=SORTS.keys())
def test_strict_refuses_them(op: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(
        PassError,
        match=r"test_shard_sequence.py:\d+.*leave strict=True out, and it is gathered for .* B per forward over cp",
    ):
        rewrite(Along(op), replace(CP, strict=True))


class Convolved(golden.Attentive):
    """A causal convolution over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(golden.WIDTH, golden.WIDTH, 2, padding=1, groups=golden.WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        out: Tensor = self.out(F.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2))
        return out.square().sum()


def test_a_convolution_over_the_sequence_is_gathered() -> None:
    program = rewrite(Convolved()).program
    assert "conv" in program.gathers[0].op and program.gathers[0].axis == "cp"


class Logits(golden.Attentive):
    """Returns its result beside the loss."""

    def forward(self, ids: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        seen = self.out(self.embed(ids))
        return {"loss": seen.square().sum(), "logits": seen}


def test_results_are_in_the_order_of_the_sequence() -> None:
    """A rank's part of them is what it would be without the zigzag."""
    pipeline = "shard-sequence{attention=ring,order=zigzag}"
    program = golden.rewrite(BEFORE, pipeline, CP, Logits()).program
    (item,) = (item for item in program.outputs if item.kind is OutputKind.USER)
    assert dict(item.placements)["cp"] == Shard(1)
    (turn,) = graphs.find(program.graph, ops.zigzag_exchange)
    assert turn.args[1:] == (2, 1, 1, False, "cp") and turn in program.output_nodes()


def test_other_results_stay_this_ranks_part() -> None:
    program = rewrite(Logits()).program
    (item,) = (item for item in program.outputs if item.kind is OutputKind.USER)
    assert dict(item.placements)["cp"] == Shard(1)
