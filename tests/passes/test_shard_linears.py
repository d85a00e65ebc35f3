"""shard-linears: chains of linears are cut by columns and rows, and what lies between them along the sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.compilation import Request, as_program, capture, default_pipeline
from moecompile.errors import PassError
from moecompile.passes.shard_linears import ShardLinears
from moecompile.placement.types import Shard
from moecompile.plan import Plan
from moecompile.printer import graph_text
from moecompile.program import InputKind, Program
from moecompile.simulate import simulate_ranks
from tests.support import golden, models
from tests.support.golden import Attentive, Gated
from tests.support.parity import LockStep, compare, plain

BEFORE = "recognize-moe,shard-dense"
aten = torch.ops.aten
TP = Plan(dp=1, tp=2)
SEQUENCE = replace(TP, sequence_parallel=True)


def rewrite(model: nn.Module | None = None, plan: Plan = TP) -> golden.Rewrite:
    return golden.rewrite(BEFORE, "shard-linears", plan, model or Gated())


def cuts(program: Program) -> dict[str, Shard]:
    """How parameters are cut over tp."""
    return {
        item.fqns[0]: placed
        for item in program.inputs
        if item.kind is InputKind.PARAM
        for axis, placed in item.placements
        if axis == "tp" and isinstance(placed, Shard)
    }


def declined(program: Program) -> str:
    return "\n".join(program.history[-1].declined)


def test_golden_gated(golden: golden.Golden) -> None:
    golden("gated", rewrite())


def headed() -> golden.Rewrite:
    return golden.rewrite(BEFORE, "shard-linears{vocab=true}", TP, golden.Scale())


def test_golden_head(golden: golden.Golden) -> None:
    golden("head", headed())


def test_effect_of_a_head() -> None:
    """Half the classes on each rank, and no score travels."""

    def effect() -> None:
        program = headed().program
        assert cuts(program) == {"head.weight": Shard(0)}
        (linear,) = graphs.find(program.graph, aten.linear.default)
        assert meta.tensor(linear).shape[1] == golden.EXPERTS // 2
        assert len(graphs.find(program.graph, ops.all_reduce)) == 2

    golden.assert_needs(ShardLinears, effect)
    assert cuts(rewrite(golden.Scale()).program) == {}  # only if asked for


ALONE = replace(TP, overrides={"gate": "replicate", "down": "column"})


def test_golden_overrides(golden: golden.Golden) -> None:
    """One linear cut by itself, its result gathered; the others whole."""
    golden("overrides", rewrite(plan=ALONE))


def test_effect_of_overrides() -> None:
    def effect() -> None:
        found = rewrite(plan=ALONE)
        assert cuts(found.program) == {"down.weight": Shard(0), "down.bias": Shard(0)}
        (gather,) = graphs.find(found.program.graph, ops.all_gather)
        assert gather.args[1:] == (2, "tp")

    golden.assert_needs(ShardLinears, effect)


class Fed(Attentive):
    """Two linears in place of attention: a shorter text."""

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.out(F.relu(self.qkv(self.embed(ids))))
        return out.square().sum()

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(golden.WIDTH, 4, bias=False), nn.Linear(4, golden.WIDTH, bias=False)


def test_golden_sequence_parallel(golden: golden.Golden) -> None:
    golden("sequence_parallel", rewrite(Fed(), SEQUENCE))


class Routed(golden.Experts):
    """The choice of experts given, for a number of tokens that two ranks divide."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return super().forward(torch.cat([x, -x]), torch.cat([ids, ids]))


def test_golden_experts(golden: golden.Golden) -> None:
    """Without sequence parallelism every rank routes a part of the tokens, and the results are gathered."""
    golden("experts", rewrite(Routed(), Plan(dp=1, tp=2, ep=2)))


def assert_cut(program: Program) -> None:
    """Columns of gate and up, rows of down, each half; the bias of down is whole, and its result is summed once."""
    assert cuts(program) == {"gate.weight": Shard(0), "up.weight": Shard(0), "down.weight": Shard(1)}
    for node, item in program.items():
        if item.kind is InputKind.PARAM:
            assert list(meta.tensor(node).shape) == list(item.local_shape(program.mesh))
    for node in graphs.find(program.graph, aten.linear.default):
        assert Gated.INNER // 2 in (meta.tensor(node).shape[-1], meta.tensor(node.args[0]).shape[-1])  # type: ignore[arg-type]
    (total,) = graphs.find(program.graph, ops.all_reduce)
    assert total.args[1:] == ("sum", "tp")


def test_effect() -> None:
    golden.assert_needs(ShardLinears, lambda: assert_cut(rewrite().program))


def assert_on_sequences(program: Program) -> None:
    """Nothing outside the chain is whole: its input is gathered and its result scattered."""
    assert not graphs.find(program.graph, ops.all_reduce)
    assert len(graphs.find(program.graph, ops.all_gather)) == len(graphs.find(program.graph, ops.reduce_scatter)) == 1
    (lookup,) = graphs.find(program.graph, aten.embedding.default)
    assert meta.tensor(lookup).shape[1] == Attentive.LENGTH // 2


def test_effect_with_sequence_parallelism() -> None:
    golden.assert_needs(ShardLinears, lambda: assert_on_sequences(rewrite(Attentive(), SEQUENCE).program))


def test_nothing_to_do_without_tensor_parallelism() -> None:
    found = rewrite(plan=Plan(dp=2))
    assert found.rewrites == 0 and found.before == found.after


@pytest.mark.parametrize("inner", [Gated.INNER, 3], ids=["cut", "whole"])
def test_a_second_run_changes_nothing(inner: int) -> None:
    program = rewrite(Gated(inner)).program
    before = graph_text(program)
    golden.run(program, "shard-linears")
    assert program.history[-1].rewrites == 0 and graph_text(program) == before


def test_it_comes_before_the_experts_are_cut() -> None:
    with pytest.raises(PassError, match=r"'shard-linears'.*EXPERTS_SHARDED"):
        golden.run(golden.captured(Plan(dp=1, tp=2, ep=2)), f"{BEFORE},shard-experts,shard-linears")


# ---- which linears form a chain -----------------------------------------------------------------------------------------


class Chained(nn.Module):
    """``between`` stands between two linears."""

    def __init__(self, between: Callable[[Tensor], Tensor], width: int = 4, inner: int = 4) -> None:
        super().__init__()
        self.between = between
        self.first, self.last = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.between(self.first(x)))
        return out.square().sum()


def of(model: nn.Module, *shape: int, plan: Plan = TP) -> Program:
    """The model on one float tensor, up to and with the pass."""
    request = Request((torch.randn(shape, dtype=torch.float64),), {}, plan)
    return golden.run(as_program(capture(model.double(), request), request), f"{BEFORE},shard-linears")


COLUMNS = {"first.weight": Shard(0), "first.bias": Shard(0), "last.weight": Shard(1)}


@pytest.mark.parametrize(
    "between",
    [
        F.relu,
        F.gelu,
        lambda x: x * 2 + 1,
        lambda x: F.dropout(x, 0.0),
        lambda x: x.unflatten(-1, (2, 2)).tanh().flatten(-2),
        lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True)),
    ],
    ids=["relu", "gelu", "affine", "no dropout", "heads", "statistics over all features"],
)
def test_ops_within_features_stand_in_a_chain(between: Callable[[Tensor], Tensor]) -> None:
    assert cuts(of(Chained(between), 2, 4)) == COLUMNS


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x.softmax(-1),
        lambda x: F.layer_norm(x, (4,)),
        lambda x: x.flip(-1),
        lambda x: x.sort(-1).values,
    ],
    ids=["softmax", "norm", "flip", "sort"],
)
def test_ops_across_features_end_it(between: Callable[[Tensor], Tensor]) -> None:
    """Whatever mixes features needs them whole: both linears are left alone, and named."""
    program = of(Chained(between), 2, 4)
    assert cuts(program) == {}
    assert declined(program).count("no chain of linears that 2 ranks can cut") == 2
    assert not graphs.find(program.graph, ops.all_reduce, ops.all_gather, ops.reduce_scatter)


def test_features_that_tp_does_not_divide_stay_whole() -> None:
    program = of(Chained(F.relu, inner=3), 2, 4)
    assert cuts(program) == {} and "test_shard_linears.py" in declined(program)
    assert cuts(of(Chained(F.relu, inner=3), 2, 4, plan=Plan(dp=1, tp=3))) == COLUMNS


def test_without_a_chain_only_the_loss_becomes_a_share() -> None:
    program = rewrite(Gated(inner=3)).program
    assert cuts(program) == {} and not graphs.find(program.graph, ops.all_reduce, ops.all_gather, ops.reduce_scatter)
    (loss,) = program.output_nodes()
    assert loss.target is aten.div.Tensor and loss.args[1] == 2


class ReadTwice(Chained):
    """Somebody beside the chain reads what would be cut."""

    def forward(self, x: Tensor) -> Tensor:
        inner = self.between(self.first(x))
        return super().forward(x) + inner.square().sum() + self.last(inner).sum()


class SharedWeight(Chained):
    """One weight, used twice."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.between(self.first(x)))
        return (out + self.last(self.between(self.first(out)))).square().sum()


@pytest.mark.parametrize("kind", [ReadTwice, SharedWeight])
def test_what_others_read_stays_whole(kind: type[Chained]) -> None:
    assert cuts(of(kind(F.relu), 2, 4)) == {}


class Joined(nn.Module):
    """``parts`` projections side by side in one weight."""

    def __init__(self, join: Callable[..., Tensor], parts: int) -> None:
        super().__init__()
        self.join, self.parts = join, parts
        self.first, self.last = nn.Linear(4, 4 * parts), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.join(*self.first(x).chunk(self.parts, -1)))
        return out.square().sum()


@pytest.mark.parametrize(
    ("join", "parts"),
    [(lambda gate, up: F.silu(gate) * up, 2), (lambda query, key, value: query * key.sigmoid() + value, 3)],
    ids=["gate and up", "three"],
)
def test_projections_side_by_side_are_cut_in_stripes(join: Callable[..., Tensor], parts: int) -> None:
    found = cuts(of(Joined(join, parts), 2, 4))
    assert found == {"first.weight": Shard(0, parts), "first.bias": Shard(0, parts), "last.weight": Shard(1)}


class FewKeys(nn.Module):
    """Heads of queries that share fewer heads of keys and values."""

    def __init__(self, heads: int = 4, keys: int = 1) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(8, 2 * heads), nn.Linear(2 * heads, 8)
        self.key, self.value = nn.Linear(8, 2 * keys), nn.Linear(8, 2 * keys)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        out: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return out.square().sum()


@pytest.mark.parametrize(("heads", "keys", "ranks"), [(4, 1, 2), (8, 2, 4), (12, 3, 2), (12, 2, 3), (6, 3, 6)], ids=str)
def test_few_heads_of_keys_stay_whole_beside_cut_queries(heads: int, keys: int, ranks: int) -> None:
    """Each rank picks the keys and values that its queries read; loss and gradients are those of one process."""
    torch.manual_seed(0)
    model, x = FewKeys(heads, keys).double(), torch.randn(2, 4, 8, dtype=torch.float64)
    loss = model(x)
    loss.backward()
    found = simulate_ranks(model, Plan(dp=1, tp=ranks), [(x,)] * ranks)
    assert cuts(found.program) == {"query.weight": Shard(0), "query.bias": Shard(0), "out.weight": Shard(1)}
    torch.testing.assert_close(found.loss, loss.detach(), rtol=1e-12, atol=0)
    for name, param in model.named_parameters():
        torch.testing.assert_close(found.grads[name], param.grad, rtol=1e-9, atol=1e-12)


class FusedFewKeys(FewKeys):
    """Queries and the fewer keys and values in one weight: parts of several widths side by side."""

    def __init__(self, heads: int, keys: int) -> None:
        super().__init__(heads, keys)
        self.sizes = [2 * heads, 2 * keys, 2 * keys]
        del self.query, self.key, self.value
        self.qkv = nn.Linear(8, sum(self.sizes))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).split(self.sizes, -1)
        query, key, value = (part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        out: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return out.square().sum()


@pytest.mark.parametrize("overrides", [{}, {"qkv": "column", "out": "row"}], ids=["found", "told"])
@pytest.mark.parametrize(("heads", "keys", "ranks"), [(4, 2, 2), (4, 1, 2), (4, 2, 4), (6, 3, 3)], ids=str)
def test_uneven_parts_of_one_weight_stay_whole_and_are_named(
    heads: int, keys: int, ranks: int, overrides: dict[str, str]
) -> None:
    """No equal stripes give each rank heads that belong together. Told to cut it, the heads are put together behind it."""
    torch.manual_seed(0)
    model, x = FusedFewKeys(heads, keys).double(), torch.randn(2, 4, 8, dtype=torch.float64)
    loss = model(x)
    loss.backward()
    found = simulate_ranks(model, Plan(dp=1, tp=ranks, overrides=overrides), [(x,)] * ranks)
    (done,) = [item for item in found.program.history if item.pass_text == "shard-linears"]
    told = {"qkv.weight": Shard(0), "qkv.bias": Shard(0), "out.weight": Shard(1)}
    assert cuts(found.program) == (told if overrides else {})
    assert sum("no chain of linears that" in line for line in done.declined) == (0 if overrides else 2)
    torch.testing.assert_close(found.loss, loss.detach(), rtol=1e-12, atol=0)
    for name, param in model.named_parameters():
        torch.testing.assert_close(found.grads[name], param.grad, rtol=1e-9, atol=1e-12)


# ---- what is refused ----------------------------------------------------------------------------------------------------


def test_a_sequence_that_tp_does_not_divide_is_refused() -> None:
    model = models.build(models.Config("ops", layers=1))
    request = Request((), models.tokens(2, 7, 0), SEQUENCE)
    program = as_program(capture(model, request), request)
    with pytest.raises(
        PassError, match=r"models.py:\d+\) has a sequence of 7.*pad or cut it to a multiple of 2, such as 6 or 8"
    ):
        golden.run(program, f"{BEFORE},shard-linears")


def test_tokens_that_tp_does_not_divide_are_refused() -> None:
    with pytest.raises(
        PassError, match="routes 3 tokens, which are shared out over tp=2 ranks; choose a batch whose tokens"
    ):
        rewrite(golden.Block(), Plan(dp=1, tp=2, ep=2))


class Rows(golden.Experts):
    """Hands out what the experts compute, before it is back in the order of the tokens."""

    def forward(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        rows, counts, row_map = ops.permute(torch.cat([x, -x]), torch.cat([ids, ids]).reshape(-1, 1), golden.EXPERTS)
        rows = ops.grouped_linear(rows, counts, self.w)
        return {"loss": ops.unpermute(rows, row_map, 2 * x.shape[0], 1).sum(), "rows": rows}


def test_rows_of_experts_are_no_result() -> None:
    with pytest.raises(
        PassError, match=r"holds rows of experts, each rank of tp those of its own tokens; return the result"
    ):
        rewrite(Rows(), Plan(dp=1, tp=2, ep=2))


# ---- beside the cut of the sequence over cp -----------------------------------------------------------------------------


@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])
def test_it_may_come_before_the_sequence_is_cut(sequence: bool) -> None:
    """Both orders of the two passes give the numbers of one process, outputs included."""
    config, plan = models.Config("ops", layers=1, hidden=8, heads=2, shared=True, aux=0.1), Plan(dp=1, cp=2, tp=2, ep=2)
    plan, batches = replace(plan, sequence_parallel=sequence), [models.tokens(2, 8, 0, ignored=0.3)]
    usual = default_pipeline(plan, step=True)
    swapped = usual.replace("shard-sequence,shard-linears", "shard-linears,shard-sequence")
    assert swapped != usual
    for text in (usual, swapped):
        lock_step = LockStep(models.build(config), plan, batches[0], pipeline=text)
        compare(lock_step.run(batches), plain(models.build(config), batches))
