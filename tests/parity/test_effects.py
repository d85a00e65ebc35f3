"""Every pass does something that can be seen without comparing numbers, and the check turns red when the pass does nothing.

A program that shards nothing is exact, too: parity alone would not notice a pass that is switched off.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch.fx import Node

from moecompile import graph as graphs
from moecompile import meta, ops, pipeline
from moecompile.compilation import Request, as_program, capture, default_pipeline
from moecompile.passes import PASSES
from moecompile.placement.types import Shard
from moecompile.plan import Plan
from moecompile.program import InputKind, Level, OutputKind, Program
from moecompile.stages import holders
from tests.support.models import Config, build, tokens
from tests.support.parity import slice_for

aten = torch.ops.aten
CONFIG = Config("loop", aux=0.1, shared=True, dropout=0.5, rotary=True, dtype=torch.bfloat16)
STACKED = Config("stacked")  # float64, gate and up in one weight
PLAN = Plan(dp=4, ep=2, router_dtype="fp32", reduce_dtype="fp32", microbatches=2)
BATCH = tokens(16, 3, 0)
# what a data rank's batch is cut further for: passes that have nothing to do under the plan above
INNER = Plan(dp=1, cp=2, tp=2, ep=2, sequence_parallel=True)
INNER_BATCH = tokens(2, 8, 0)
STAGED = Plan(dp=1, pp=2, microbatches=2)
SHARDED = Plan(dp=4, ep=2, passes="+shard-params")


def calls(program: Program, *targets: object) -> list[Node]:
    return graphs.find(program.graph, *targets)


def elements(program: Program) -> int:
    """Elements of all parameters that one rank holds."""
    sizes = [
        torch.Size(item.local_shape(program.mesh)).numel()
        for _, item in program.items()
        if item.kind is InputKind.PARAM
    ]
    return sum(sizes)


def recognized(program: Program) -> None:
    assert len(calls(program, ops.permute)) == len(calls(program, ops.unpermute)) == CONFIG.layers
    assert len(calls(program, ops.grouped_linear)) == 3 * CONFIG.layers
    assert not calls(program, aten.where.default, aten.index_add.default, aten.nonzero.default)
    stacks = [item for item in program.inputs if item.stacked]
    assert [len(item.fqns) for item in stacks] == [CONFIG.experts] * 3 * CONFIG.layers
    assert len(program.layers) == CONFIG.layers


def router_cast(program: Program) -> None:
    for topk in calls(program, aten.topk.default):
        assert meta.tensor(topk.all_input_nodes[0]).dtype is torch.float32
    wide = [node for node in calls(program, aten.linear.default) if meta.tensor(node).dtype is torch.float32]
    assert len(wide) == CONFIG.layers


def randoms_seeded(program: Program) -> None:
    assert not calls(program, aten.dropout.default)
    assert len(calls(program, ops.uniform)) == CONFIG.layers
    assert sum(item.kind is InputKind.SEED for item in program.inputs) == 1


def loss_normalized(program: Program) -> None:
    assert sum(item.kind is InputKind.SCALE for item in program.inputs) == 1
    assert sum(item.what == "num_valid" for item in program.outputs) == 1


def metrics_recorded(program: Program) -> None:
    assert sum(item.what == "tokens_per_expert" for item in program.outputs) == CONFIG.layers


def batch_cut(program: Program) -> None:
    share = 16 // PLAN.microbatches // PLAN.num_data_ranks
    batch = [node for node, item in program.items() if item.kind is InputKind.BATCH]
    assert [meta.tensor(node).shape[0] for node in batch] == [share] * 2
    assert all(meta.tensor(node).shape[0] == share * 3 for node in calls(program, ops.unpermute))


def sequence_cut(program: Program) -> None:
    for node in calls(program, aten.embedding.default):
        assert meta.tensor(node).shape[1] == 8 // INNER.cp
    for node in calls(program, aten.scaled_dot_product_attention.default):
        assert [meta.tensor(item).shape[2] for item in node.args[:2]] == [8 // INNER.cp, 8]  # type: ignore[arg-type]
    assert len([node for node in calls(program, ops.all_gather) if node.args[2] == "cp"]) >= CONFIG.layers


def linears_cut(program: Program) -> None:
    """A layer's attention and shared expert; between them the sequence is cut over tp, as it is over cp."""
    every = sum(param.numel() for param in build(CONFIG).parameters())
    chains = CONFIG.layers * (4 * CONFIG.hidden**2 + 3 * CONFIG.hidden * CONFIG.inner)
    assert elements(program) == every - chains + chains // INNER.tp
    for node in calls(program, aten.native_layer_norm.default, aten.layer_norm.default):
        assert meta.tensor(node.args[0]).shape[1] == 8 // INNER.cp // INNER.tp  # type: ignore[arg-type]
    scattered = [node for node in calls(program, ops.reduce_scatter) if node.args[2] == "tp"]
    assert len(scattered) == 2 * CONFIG.layers
    assert all(meta.tensor(node).dim() < 2 for node in calls(program, ops.all_reduce))  # balance statistics


def experts_cut(program: Program) -> None:
    every = sum(param.numel() for param in build(CONFIG).parameters())
    experts = CONFIG.layers * CONFIG.experts * 3 * CONFIG.hidden * CONFIG.inner
    assert elements(program) == every - experts + experts // PLAN.ep
    stacks = [node for node, item in program.items() if item.stacked]
    assert {meta.tensor(node).shape[0] for node in stacks} == {CONFIG.experts // PLAN.ep}


def tokens_dispatched(program: Program) -> None:
    for target in (ops.exchange_counts, ops.sizes_to_host, ops.dispatch, ops.combine):
        assert len(calls(program, target)) == CONFIG.layers, target
    for node in calls(program, ops.grouped_linear):
        assert any(source.target is ops.dispatch for source in graphs.ancestors(node))


def stages_split(program: Program) -> None:
    """Every call has one of two stages, and so has every weight."""
    found = {meta.stage(node) for node in program.graph.nodes if node.op == "call_function"}
    assert found == {0, 1} and program.layout is not None and str(program.layout) == "Et|tL"
    held = {name: ranks for name, ranks in holders(program).items() if ".0." in name or ".1." in name}
    assert {ranks for name, ranks in held.items() if "layers.0." in name} == {(0,)}
    assert {ranks for name, ranks in held.items() if "layers.1." in name} == {(1,)}


def differentiated(program: Program) -> None:
    assert program.level is Level.STEP
    trained = {item.name for item in program.inputs if item.requires_grad}
    assert {item.name for item in program.outputs if item.kind is OutputKind.GRAD} == trained
    assert len(calls(program, ops.grouped_linear_wgrad)) == 3 * CONFIG.layers
    assert any(meta.direction(node) is meta.Direction.BACKWARD for node in calls(program, ops.dispatch))


def loss_summed(program: Program) -> None:
    (at,) = (at for at, item in enumerate(program.outputs) if item.kind is OutputKind.LOSS)
    last = program.output_nodes()[at]
    if last.target is aten._to_copy.default:  # a narrow loss is added up in float32
        last = last.all_input_nodes[0]
    assert last.target is ops.all_reduce and last.args[1:] == ("sum", "dp")


def gradients_summed(program: Program) -> None:
    """The last thing that happens to a gradient is a sum over the ranks that hold its parameter."""
    inputs = {item.name: item for item in program.inputs}
    views = (aten.reshape.default, aten.view.default, aten.split_with_sizes.default, operator.getitem)
    for found, item in zip(program.output_nodes(), program.outputs, strict=True):
        if item.kind is not OutputKind.GRAD:
            continue
        while found.target in views:
            found = found.all_input_nodes[0]
        cut = any(isinstance(placed, Shard) for _, placed in inputs[item.name].placements)
        assert found.target is ops.all_reduce and found.args[2] == ("edp" if cut else "dp"), item.name


def gradients_cast(program: Program) -> None:
    found = [
        meta.tensor(node).dtype
        for node, item in zip(program.output_nodes(), program.outputs, strict=True)
        if item.kind is OutputKind.GRAD
    ]
    assert set(found) == {torch.float32}


def params_sharded(program: Program) -> None:
    """A rank holds a quarter of what is dense and half of its experts, and returns gradients of that size."""
    every = sum(param.numel() for param in build(CONFIG).parameters())
    experts = CONFIG.layers * CONFIG.experts * 3 * CONFIG.hidden * CONFIG.inner
    assert elements(program) == (every - experts) // 4 + experts // 2 // 2
    inputs = {item.name: item for item in program.inputs}
    for found, item in zip(program.output_nodes(), program.outputs, strict=True):
        if item.kind is OutputKind.GRAD:
            assert tuple(meta.tensor(found).shape) == inputs[item.name].local_shape(program.mesh)


def ops_lowered(program: Program) -> None:
    assert not calls(program, ops.grouped_linear, ops.grouped_linear_wgrad, ops.unpermute)
    assert len(calls(program, ops.cpu.grouped_linear)) >= 3 * CONFIG.layers


def experts_joined(program: Program) -> None:
    assert not calls(program, ops.cpu.grouped_linear, ops.cpu.grouped_linear_wgrad)
    assert (
        len(calls(program, ops.cpu.grouped_mlp)) == len(calls(program, ops.cpu.grouped_mlp_backward)) == STACKED.layers
    )


def attention_kept(program: Program) -> None:
    assert not calls(program, aten._scaled_dot_product_flash_attention_for_cpu.default)
    assert len(calls(program, ops.cpu.causal_attention_backward)) == STACKED.layers


def activations_fused(program: Program) -> None:
    """The experts and the shared expert of every layer."""
    assert not calls(program, aten.silu.default)
    assert len(calls(program, ops.silu_mul, ops.swiglu)) == 2 * CONFIG.layers


def norms_fused(program: Program) -> None:
    assert not calls(program, aten.rsqrt.default)
    assert len(calls(program, ops.rms_norm)) >= CONFIG.layers


def rotary_fused(program: Program) -> None:
    assert len(calls(program, ops.rotary)) == 2 * CONFIG.layers


def canonical(program: Program) -> None:
    returned = set(program.output_nodes())
    assert not [node for node in calls(program, aten.detach.default) if node not in returned]


EFFECTS: dict[str, Callable[[Program], None]] = {
    "recognize-moe": recognized,
    "cast-router": router_cast,
    "seed-random": randoms_seeded,
    "normalize-loss": loss_normalized,
    "record-metrics": metrics_recorded,
    "shard-dense": batch_cut,
    "shard-sequence": sequence_cut,
    "shard-linears": linears_cut,
    "shard-experts": experts_cut,
    "insert-dispatch": tokens_dispatched,
    "fuse-swiglu": activations_fused,
    "fuse-rms-norm": norms_fused,
    "fuse-rotary": rotary_fused,
    "split-stages": stages_split,
    "differentiate": differentiated,
    "sync-loss": loss_summed,
    "cast-grads": gradients_cast,
    "shard-params": params_sharded,
    "sync-grads": gradients_summed,
    "canonicalize": canonical,
    "lower-ops": ops_lowered,
    "fuse-experts": experts_joined,
    "keep-attention": attention_kept,
}


@dataclass
class Outcome:
    """What the effect check said after a run of the pass that did nothing, and after the real one."""

    idle: Exception | None
    real: Exception | None
    rewrites: int


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """Pipelines in which each pass first runs with an empty body and then for real."""
    apart = {"shard-sequence", "shard-linears", "split-stages", "fuse-experts", "keep-attention", "shard-params"}
    wide = {name: item for name, item in run_twice(PLAN, BATCH).items() if name not in apart}
    inner = run_twice(INNER, INNER_BATCH)
    deep = run_twice(STAGED, INNER_BATCH)["split-stages"]
    lowered = run_twice(replace(PLAN, passes="+keep-attention{least=1}"), BATCH, STACKED)
    flat = run_twice(SHARDED, BATCH)["shard-params"]
    joined = {name: lowered[name] for name in ("fuse-experts", "keep-attention")}
    narrow = {name: inner[name] for name in ("shard-sequence", "shard-linears")}
    return {**wide, **narrow, "split-stages": deep, **joined, "shard-params": flat}


def run_twice(plan: Plan, batch: dict[str, torch.Tensor], config: Config = CONFIG) -> dict[str, Outcome]:
    """The verdicts on every pass of one pipeline."""
    part = slice_for(batch, plan, 0)
    request = Request((), part, plan)
    program = as_program(capture(build(config), request), request)
    found = {}
    for item in pipeline.parse(default_pipeline(plan, step=True), PASSES):
        facts, level = program.facts, program.level
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(item), "run", lambda self, graph, ctx: 0)
            pipeline.run(program, (item,), PASSES, check=False, record_text=False)
        idle = verdict(item.name, program)
        program.facts, program.level = facts, level
        pipeline.run(program, (item,), PASSES, check=False, record_text=False)
        found[item.name] = Outcome(idle, verdict(item.name, program), program.history[-1].rewrites)
    return found


def verdict(name: str, program: Program) -> Exception | None:
    if name not in EFFECTS:
        return AssertionError(f"{name} has no effect test")
    try:
        EFFECTS[name](program)
    except (AssertionError, ValueError) as error:
        return error
    return None


def test_every_pass_has_an_effect_test(outcomes: dict[str, Outcome]) -> None:
    assert set(EFFECTS) == set(outcomes) == set(PASSES)


@pytest.mark.parametrize("name", EFFECTS)
def test_effect(name: str, outcomes: dict[str, Outcome]) -> None:
    if outcomes[name].real is not None:
        raise outcomes[name].real
    assert outcomes[name].rewrites > 0


@pytest.mark.parametrize("name", EFFECTS)
def test_effect_turns_red_when_the_pass_does_nothing(name: str, outcomes: dict[str, Outcome]) -> None:
    assert outcomes[name].idle is not None
