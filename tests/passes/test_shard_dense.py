"""shard-dense: one rank's graph means what one process over the global batch means."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moecompile as mc
from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile import pipeline as pipelines
from moecompile.compat import tree_flatten
from moecompile.compilation import Request, as_program, capture
from moecompile.errors import PassError
from moecompile.pass_base import Fact
from moecompile.passes import PASSES
from moecompile.passes.shard_dense import ShardDense
from moecompile.placement.types import PARTIAL, Shard
from moecompile.plan import Plan
from moecompile.program import InputKind, OutputKind, Program
from moecompile.runtime.simulator import simulate
from tests.support import golden, hf_models

IGNORED = -100
ROWS, LENGTH, WIDTH, EXPERTS, TOP_K = 8, 4, 6, 4, 2


# ---- the pass on the golden block --------------------------------------------------------------------------------


def test_golden(golden: golden.Golden) -> None:
    golden("block", _rewrite())


def test_golden_of_a_loss(golden: golden.Golden) -> None:
    golden("cross_entropy", _rewrite(model=scale()))


def test_golden_of_a_gather(golden: golden.Golden) -> None:
    golden("gathered", _rewrite(model=over_batch()))


def over_batch() -> nn.Module:
    return golden.OverBatch()


def scale() -> nn.Module:
    return golden.Scale()


def _rewrite(plan: Plan | None = None, model: nn.Module | None = None) -> golden.Rewrite:
    return golden.rewrite("recognize-moe", "shard-dense", plan or Plan(dp=2), model)


def assert_cut(program: Program) -> None:
    """Batch inputs have this rank's shape, the loss is a share, and nothing holds tokens of another rank."""
    assert dict(program.outputs[0].placements)["dp"] == PARTIAL
    for node, item in program.items():
        if item.kind is InputKind.BATCH:
            assert dict(item.placements)["dp"] == Shard(0)
            assert meta.tensor(node).shape[0] == item.shape[0] // program.mesh.size("dp")
    (permute,) = graphs.find(program.graph, ops.permute)
    assert meta.tensor(permute.args[0]).shape[0] == golden.TOKENS  # type: ignore[arg-type]


@pytest.mark.parametrize("dp", [2, 4])
def test_effect(dp: int) -> None:
    golden.assert_needs(ShardDense, lambda: assert_cut(_rewrite(Plan(dp=dp)).program))


def test_nothing_to_do_on_one_rank() -> None:
    found = _rewrite(Plan(dp=1))
    assert found.rewrites == 0 and found.before == found.after


def test_a_second_run_is_refused() -> None:
    with pytest.raises(PassError, match="'shard-dense' would run twice"):
        golden.run(_rewrite().program, "shard-dense")


# ---- parity of losses that look at the whole batch ---------------------------------------------------------------


class Model(nn.Module):
    """Token scores and whatever a subclass makes a loss of; rows of labels that are ignored stand unevenly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(EXPERTS + 5, WIDTH, dtype=torch.float64)
        self.gate = nn.Linear(WIDTH, EXPERTS, dtype=torch.float64)

    def forward(self, ids: Tensor, labels: Tensor, **more: Tensor) -> Tensor:
        scores = self.gate(self.embed(ids))
        loss: Tensor = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        return loss + self.extra(scores, labels, **more)

    def extra(self, scores: Tensor, labels: Tensor) -> Tensor:
        return scores.new_zeros(())


def batch(rows: int = ROWS) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(2)
    labels = torch.randint(0, EXPERTS, (rows, LENGTH), generator=drawn)
    labels[: rows // 2] = IGNORED
    labels[0, 0] = 1
    return {"ids": torch.randint(0, EXPERTS + 5, (rows, LENGTH), generator=drawn), "labels": labels}


def sharded(model: nn.Module, given: dict[str, Tensor], plan: Plan) -> tuple[Program, list[dict[str, Tensor]]]:
    """The program after shard-dense, and what each rank passes."""
    dp, dims = plan.num_data_ranks, dict(plan.batch_dims or {})
    local = [
        {k: v.chunk(dp, d)[r] if (d := dims.get(k, 0)) is not None else v for k, v in given.items()} for r in range(dp)
    ]
    request = Request((), local[0], plan)
    program = as_program(capture(model, request), request)
    program.facts = frozenset({Fact.MOE_OPS})
    return pipelines.run(program, pipelines.parse("shard-dense", PASSES), PASSES), local


def assert_parity(model: nn.Module, given: dict[str, Tensor], plan: Plan, rtol: float = 1e-12) -> Program:
    """The sum of the shares is the loss of one process, and the sum of their gradients its gradient."""
    program, local = sharded(model, given, plan)
    weights = dict(model.named_parameters()) | dict(model.named_buffers())
    leaves = {name: value.detach().clone().requires_grad_(value.is_floating_point()) for name, value in weights.items()}
    feeds: list[list[Any]] = []
    for rank, kwargs in enumerate(local):
        flat, feeds = tree_flatten(((), kwargs))[0], [*feeds, []]
        for item in program.inputs:
            if item.kind is InputKind.BATCH:
                feeds[-1].append(flat[item.leaf])
            elif item.kind is InputKind.OFFSET:
                feeds[-1].append(torch.tensor(program.mesh.axis_index("dp", rank) * item.stride))
            else:
                feeds[-1].append(leaves[item.fqns[0]] if item.fqns else program.constants[item.name])
    at = next(at for at, item in enumerate(program.outputs) if item.kind is OutputKind.LOSS)
    total = torch.stack([found[at] for found in simulate(program.graph_module, feeds, program.mesh)]).sum()
    loss = model(**given)
    torch.testing.assert_close(total, loss, rtol=rtol, atol=0)
    wanted = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    got = torch.autograd.grad(total, [leaves[name] for name, _ in model.named_parameters()], allow_unused=True)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=100 * rtol, atol=rtol / 100)
    return program


class Balanced(Model):
    """Load balancing written by hand: chosen experts times mean probability, both over every token."""

    def extra(self, scores: Tensor, labels: Tensor) -> Tensor:
        probs = scores.softmax(-1).reshape(-1, EXPERTS)
        chosen = F.one_hot(probs.topk(TOP_K, -1).indices, EXPERTS).sum(1)
        return 0.3 * EXPERTS * (probs.mean(0) * chosen.to(probs.dtype).mean(0)).sum()


class Counted(Model):
    """The same with counts scattered into a fresh tensor, over tokens with a label only."""

    def extra(self, scores: Tensor, labels: Tensor) -> Tensor:
        probs, valid = scores.softmax(-1).reshape(-1, EXPERTS), (labels.reshape(-1) != IGNORED).to(scores.dtype)
        ids = probs.topk(TOP_K, -1).indices
        share = torch.zeros(EXPERTS, dtype=scores.dtype).scatter_add(0, ids.reshape(-1), valid.repeat_interleave(TOP_K))
        mean = (probs * valid[:, None]).sum(0) / valid.sum()
        return EXPERTS * (mean * share / (TOP_K * valid.sum())).sum()


class PerSequence(Model):
    """Balance within each sequence, averaged over sequences; and a penalty on the size of the logits."""

    def extra(self, scores: Tensor, labels: Tensor) -> Tensor:
        probs = scores.softmax(-1)
        chosen = F.one_hot(probs.topk(TOP_K, -1).indices, EXPERTS).sum(2).to(probs.dtype)
        return EXPERTS * (probs.mean(1) * chosen.mean(1)).sum(-1).mean() + 0.1 * scores.logsumexp(-1).square().mean()


class Layers(Model):
    """Two layers' scores end to end along the tokens, as Hugging Face does it, and their squared variation."""

    def extra(self, scores: Tensor, labels: Tensor) -> Tensor:
        flat = scores.reshape(-1, EXPERTS)
        both = torch.cat([flat, flat.flip(-1)], 0).softmax(-1)
        load = both.sum(0)
        spread = ((load - load.mean()) ** 2).mean() / load.mean() ** 2
        return spread + both[: ROWS * LENGTH].mean() + both.max(-1).values.mean()


@pytest.mark.parametrize("dp", [2, 4, 8])
@pytest.mark.parametrize("kind", [Model, Balanced, Counted, PerSequence, Layers])
def test_parity(kind: type[Model], dp: int) -> None:
    assert_parity(kind(), batch(), Plan(dp=dp))


def test_a_loss_over_no_label_at_all_is_nan() -> None:
    given = batch()
    given["labels"][:] = IGNORED
    with pytest.raises(AssertionError, match="nan"):
        assert_parity(Model(), given, Plan(dp=2))


class HuggingFace(Model):
    """The balance loss of transformers, with and without its attention mask."""

    def extra(self, scores: Tensor, labels: Tensor, **more: Tensor) -> Tensor:
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        flat = scores.reshape(-1, EXPERTS)
        found: Tensor = load_balancing_loss_func((flat, 2 * flat), EXPERTS, TOP_K, more.get("attention_mask"))
        return found


@pytest.mark.parametrize("masked", [False, True])
def test_balance_loss_of_transformers(masked: bool) -> None:
    pytest.importorskip("transformers")
    given = batch()
    if masked:
        given["attention_mask"] = torch.ones_like(given["ids"])
        given["attention_mask"][0, :3] = given["attention_mask"][5, 2:] = given["attention_mask"][7, 1:] = 0
    for dp in (2, 8):
        assert_parity(HuggingFace(), given, Plan(dp=dp), rtol=2e-6)  # it counts in float32


class Whole(nn.Module):
    """A Hugging Face model as a function of tensors to its loss, which includes the balance loss."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.inner = hf_models.build(family).double()

    def forward(self, **given: Tensor) -> Tensor:
        found: Tensor = self.inner(**given, output_router_logits=True, use_cache=False).loss
        return found


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_padding_and_positions_of_transformers(family: str) -> None:
    """Left and right padding and positions that differ by row, one sequence per rank."""
    pytest.importorskip("transformers")
    drawn = torch.Generator().manual_seed(3)
    ids, labels = (torch.randint(3, hf_models.VOCAB, (4, 10), generator=drawn) for _ in range(2))
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[2, 7:] = mask[3, 1:] = 0
    labels[mask == 0] = IGNORED
    positions = (torch.arange(10)[None] + torch.arange(4)[:, None]).contiguous()
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "labels": labels}
    assert_parity(Whole(family), given, Plan(dp=4), rtol=2e-6)  # it counts and turns positions in float32


# ---- inputs ------------------------------------------------------------------------------------------------------


class Weighted(Model):
    """A second input of any layout, added up with the scores."""

    def extra(self, scores: Tensor, labels: Tensor, **more: Tensor) -> Tensor:
        weight = more["weight"]
        weight = weight.T if weight.shape[0] != ROWS or weight.shape[1] == ROWS else weight
        return (scores.sum(-1) * weight[..., :LENGTH]).sum() / scores.numel()


def test_batch_dims_say_which_dim_is_split() -> None:
    weight = torch.randn(LENGTH, ROWS, dtype=torch.float64)
    program = assert_parity(Weighted(), {**batch(), "weight": weight}, Plan(dp=4, batch_dims={"weight": 1}))
    (node,) = [node for node, item in program.items() if item.name == "weight"]
    assert list(meta.tensor(node).shape) == [LENGTH, ROWS // 4]


def test_an_input_that_is_the_same_on_all_ranks_is_sliced() -> None:
    weight = torch.randn(ROWS, ROWS, dtype=torch.float64)
    assert_parity(Weighted(), {**batch(), "weight": weight}, Plan(dp=2, batch_dims={"weight": None}))


class Masked(Model):
    """A causal mask made for the whole batch, of which a rank needs its own rows only."""

    def extra(self, scores: Tensor, labels: Tensor) -> Tensor:
        rows, length = labels.shape
        at = torch.arange(length)
        mask = (at[None, :] <= at[:, None])[None].expand(rows, length, length)
        bias = torch.zeros(rows, length, length, dtype=scores.dtype).masked_fill(~mask, -torch.inf)
        return (torch.bmm(scores, scores.mT) + bias).softmax(-1)[..., 0].mean()


def test_no_rank_makes_a_mask_for_the_others() -> None:
    program = assert_parity(Masked(), batch(), Plan(dp=4))
    largest = max(meta.tensor(node).numel() for node in program.graph.nodes if node.op == "call_function")
    assert largest <= ROWS // 4 * LENGTH * max(LENGTH, WIDTH)


# ---- what is gathered --------------------------------------------------------------------------------------------


class Line(Model):
    """Runs ``line`` on the scores."""

    def __init__(self, line: Any) -> None:
        super().__init__()
        self.line = line

    def extra(self, scores: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = self.line(scores)
        return (found * torch.arange(found.numel(), dtype=found.dtype).reshape(found.shape)).mean()


WHOLE = {
    "softmax over the batch": (lambda x: x.softmax(0), "it runs along the batch, .* run it along another dim"),
    "sort along the batch": (lambda x: x.sort(0).values, "it runs along the batch"),
    "one sequence": (lambda x: x[0], "it picks one element of the batch, .* select along another dim"),
    "the first half": (lambda x: x[: ROWS // 2], "it takes a part of the batch"),
    "largest of the batch": (lambda x: x.max(), "it reduces over the batch, .* use a sum or a mean"),
    "variance of the batch": (lambda x: x.var(0), "it reduces over the batch"),
    "batch cut in two": (lambda x: x.reshape(2, -1), "would mix the ranks' parts; keep the batch dim first"),
    "next sequence": (lambda x: x.roll(1, 0), "it runs along the batch"),
    "shuffled": (lambda x: x[torch.arange(ROWS).flip(0)], "it indexes along the batch"),
    "distances": (lambda x: torch.cdist(x[:, 0], x[:, 1]), "no placement rule for it on dp; add one to moecompile/placement"),
    "next to its own": (lambda x: x + x.logcumsumexp(0), "it runs along the batch"),
    "through a residual": (lambda x: (x + x.flip(0).exp()).sin() + x, "it runs along the batch"),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_gathered_is_exact(name: str) -> None:
    assert_parity(Line(WHOLE[name][0]), batch(), Plan(dp=2))
    program = assert_parity(Line(WHOLE[name][0]), batch(), Plan(dp=4))
    assert program.gathers and all(item.axis == "dp" and f"{__file__}:" in item.source for item in program.gathers)


@pytest.mark.parametrize("name", WHOLE)
def test_strict_names_the_line_and_the_way_out(name: str) -> None:
    line, advice = WHOLE[name]
    with pytest.raises(
        PassError, match=f"{advice}.*; or leave strict=True out, and it is gathered for [0-9,]+ B"
    ) as found:
        sharded(Line(line), batch(), Plan(dp=4, strict=True))
    assert str(found.value).startswith("shard-dense: ")
    assert f"{__file__}:" in str(found.value)


class ExpertChoice(Model):
    """Every expert takes the tokens of the whole batch that want it most; the result is added to what was there."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(EXPERTS, EXPERTS, EXPERTS, dtype=torch.float64))

    def extra(self, scores: Tensor, labels: Tensor) -> Tensor:
        flat = scores.reshape(-1, EXPERTS)
        weight, chosen = flat.softmax(-1).t().topk(ROWS * LENGTH // EXPERTS, -1)
        made = torch.bmm(flat[chosen], self.experts).relu() * weight[..., None]
        out = torch.zeros_like(flat).index_add(0, chosen.reshape(-1), made.reshape(-1, EXPERTS))
        return (flat + out).reshape(scores.shape).logsumexp(-1).mean()


class SoftMoE(ExpertChoice):
    """Every expert takes one mean of all tokens of the batch, and every token one mean of all experts' results."""

    def extra(self, scores: Tensor, labels: Tensor) -> Tensor:
        flat = scores.reshape(-1, EXPERTS)
        given = flat.softmax(0).t() @ flat
        made = torch.bmm(given[:, None], self.experts)[:, 0].relu()
        return (flat + flat.softmax(-1) @ made).square().mean()


class Ranked(Model):
    """Sequences in the order of their mean score, each weighed by its place."""

    def extra(self, scores: Tensor, labels: Tensor) -> Tensor:
        order = scores.mean((1, 2)).argsort()
        return (scores[order].mean((1, 2)) * torch.arange(ROWS)).sum() / ROWS


@pytest.mark.parametrize("dp", [2, 4, 8])
@pytest.mark.parametrize("kind", [ExpertChoice, SoftMoE, Ranked])
def test_routing_over_the_whole_batch(kind: type[Model], dp: int) -> None:
    program = assert_parity(kind(), batch(), Plan(dp=dp))
    assert {item.op for item in program.gathers} & {"aten.topk.default", "aten.softmax.int", "aten.argsort.default"}


def test_bytes_are_those_of_a_step() -> None:
    """Forward and backward of all microbatches: what the step graph's own collectives move."""
    program, _ = sharded(ExpertChoice(), batch(), Plan(dp=4))
    before = sum(item.step_bytes for item in program.gathers)
    known = (ops.all_gather, ops.reduce_scatter)
    run = pipelines.run(program, pipelines.parse("differentiate", PASSES), PASSES)
    moved = [meta.tensor(node.args[0]) for node in graphs.find(run.graph, *known)]  # type: ignore[arg-type]
    assert before == sum(value.numel() * value.element_size() for value in moved) > 0
    twice, _ = sharded(ExpertChoice(), batch(2 * ROWS), Plan(dp=4, microbatches=2))
    assert sum(item.step_bytes for item in twice.gathers) == 2 * before


# ---- what is refused ---------------------------------------------------------------------------------------------

REFUSED = {
    "random": (lambda x: x * torch.rand_like(x), "random numbers would differ .* or use dp=1"),
    "dropout": (lambda x: F.dropout(x, 0.5), "set its probability to 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_line_and_the_way_out(name: str) -> None:
    line, advice = REFUSED[name]
    with warnings.catch_warnings(), pytest.raises(PassError, match=advice) as found:
        warnings.simplefilter("ignore")
        sharded(Line(line), batch(), Plan(dp=4))
    assert str(found.value).startswith("shard-dense: ")
    assert f"{__file__}:" in str(found.value)


class Looked(nn.Module):
    """A table whose gradient torch would keep as rows and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4, sparse=True, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).square().sum()


@pytest.mark.parametrize("dp", [1, 2])
def test_sparse_gradients_are_dense(dp: int) -> None:
    model, ids = Looked(), torch.arange(8) % 5
    found = mc.simulate_ranks(model, Plan(dp=dp), [(part,) for part in ids.chunk(dp)])
    (wanted,) = torch.autograd.grad(model(ids), [model.table.weight])
    torch.testing.assert_close(found.grads["table.weight"], wanted.to_dense(), rtol=1e-12, atol=0)
