"""shard-params: each parameter is a shard, gathered before use; its gradient is scattered."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import moecompile as mc
from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.compilation import default_pipeline
from moecompile.errors import PassError, VerifyError
from moecompile.passes.shard_params import ShardParams, cut_dim
from moecompile.phases import split_phases
from moecompile.plan import Plan
from moecompile.program import InputKind, OutputKind, Program
from moecompile.stages import Part, cut_stages
from moecompile.verify import verify_program
from tests.support import golden
from tests.support.models import Config, build, tokens

BEFORE = "recognize-moe,shard-dense,shard-experts,insert-dispatch,differentiate"


class Odd(nn.Module):
    """Three rows of three, which two ranks do not divide, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.head(x) * self.scale).sum()
        return out

    @staticmethod
    def example() -> tuple[Tensor, ...]:
        return (torch.randn(golden.TOKENS, 3, dtype=torch.float64),)


def rewrite(item: str = "shard-params", plan: Plan = golden.PLAN, model: nn.Module | None = None) -> golden.Rewrite:
    return golden.rewrite(BEFORE, item, plan, model)


def gathers(program: Program, direction: meta.Direction | None = None) -> list[torch.fx.Node]:
    found = graphs.find(program.graph, ops.all_gather)
    return [node for node in found if direction is None or meta.direction(node) is direction]


def test_golden_dense(golden: golden.Golden) -> None:
    golden("dense", rewrite(plan=Plan(dp=2), model=line()))


def test_golden_uneven(golden: golden.Golden) -> None:
    """Three rows on two ranks travel as four; the scalar stays whole."""
    golden("uneven", rewrite(plan=Plan(dp=2), model=Odd()))


def line() -> golden.Line:
    return golden.Line()


def test_effect() -> None:
    def effect() -> None:
        program = rewrite(plan=Plan(dp=4, ep=2)).program
        shapes = {item.name: item.local_shape(program.mesh) for item in program.inputs if item.kind is InputKind.PARAM}
        assert shapes == {"gate_weight": (1, 2), "w1": (2, 1, 2), "w2": (2, 1, 2)}
        for node, item in program.items():
            assert tuple(meta.tensor(node).shape) == item.local_shape(program.mesh) or item.kind is not InputKind.PARAM
        for found, output in zip(program.output_nodes(), program.outputs, strict=True):
            if output.kind is OutputKind.GRAD:
                assert tuple(meta.tensor(found).shape) == shapes[output.name]

    golden.assert_needs(ShardParams, effect)


def test_each_half_of_the_step_gathers_for_itself() -> None:
    """No value that was gathered in the forward is read in the backward."""
    program = rewrite(plan=Plan(dp=2), model=golden.Stack()).program
    forward, backward = gathers(program, meta.Direction.FORWARD), gathers(program, meta.Direction.BACKWARD)
    assert len(forward) == len(backward) == 3  # one a block
    own = {node for node in program.graph.nodes if node.op == "placeholder"}
    moves = (torch.ops.aten.reshape.default, torch.ops.aten.split_with_sizes.default, torch.ops.aten.permute.default)
    for gather in forward:
        todo, wholes = list(gather.users), []
        while todo:
            node = todo.pop()
            if node.target in moves or getattr(node.target, "__name__", "") == "getitem":
                todo += node.users
            wholes.append(node)
        assert wholes and not own & set(wholes)
        assert all(meta.direction(node) is meta.Direction.FORWARD for node in wholes)


@pytest.mark.parametrize(("option", "count"), [("", 3), ("{bucket-mb=1}", 1)], ids=["a layer each", "one MiB"])
def test_buckets(option: str, count: int) -> None:
    program = rewrite("shard-params" + option, Plan(dp=2), golden.Stack()).program
    assert len(gathers(program, meta.Direction.FORWARD)) == count
    assert len(graphs.find(program.graph, ops.reduce_scatter)) == count


def test_prefetch_gathers_one_bucket_ahead() -> None:
    """The second gather stands before the first use of what the first one gathers; without the option behind it."""

    def gathered_before_the_first_linear(option: str) -> int:
        program = rewrite("shard-params" + option, Plan(dp=2), golden.Stack()).program
        order = list(program.graph.nodes)
        first = next(node for node in order if node.target is torch.ops.aten.mm.default or node.target is ops.permute)
        return sum(order.index(node) < order.index(first) for node in gathers(program))

    assert gathered_before_the_first_linear("") == 1
    assert gathered_before_the_first_linear("{prefetch=1}") == 2


def test_a_gradient_is_scattered_as_soon_as_its_layer_is_done() -> None:
    """Scattering of the last block comes before the backward of the first one."""
    program = rewrite(plan=Plan(dp=2), model=golden.Stack()).program
    order = {node: at for at, node in enumerate(program.graph.nodes)}
    scatters = sorted(order[node] for node in graphs.find(program.graph, ops.reduce_scatter))
    wgrads = sorted(order[node] for node in graphs.find(program.graph, ops.grouped_linear_wgrad))
    assert scatters[0] < wgrads[-1] and scatters[1] < wgrads[-1] < scatters[2]


@pytest.mark.parametrize(
    ("shape", "ranks", "first", "dim"),
    [
        ((8, 6), 4, 0, 0),
        ((7, 8), 4, 0, 1),
        ((7, 5), 4, 0, 0),  # 2, 2, 2 and 1 rows
        ((4, 7, 8), 2, 1, 2),
        ((4, 7, 5), 2, 1, 1),
        ((3,), 4, 0, None),
        ((), 2, 0, None),
        ((4,), 2, 1, None),
        ((0, 4), 2, 0, 1),
    ],
)
def test_which_dim_is_cut(shape: tuple[int, ...], ranks: int, first: int, dim: int | None) -> None:
    assert cut_dim(shape, ranks, first) == dim


@pytest.mark.parametrize(
    ("shape", "taken", "dim"),
    [((8, 6), {0}, 1), ((8, 7), {1}, 0), ((7, 8), {1}, 0), ((8, 7), {0}, 0), ((7, 5), {0}, None), ((8,), {0}, None)],
)
def test_a_dim_that_another_axis_cuts_comes_last(shape: tuple[int, ...], taken: set[int], dim: int | None) -> None:
    """A bias whose only dim is taken stays whole."""
    assert cut_dim(shape, 2, 0, frozenset(taken)) == dim


def test_what_stays_whole_is_said() -> None:
    found = rewrite(plan=Plan(dp=2), model=Odd())
    assert found.program.history[-1].declined == ("shard-params: scale [] stays whole on the 2 ranks of dp",)


def test_nothing_to_do_on_one_rank() -> None:
    found = rewrite(plan=Plan(dp=1))
    assert found.rewrites == 0 and found.before == found.after


def test_a_second_run_is_refused() -> None:
    with pytest.raises(PassError, match="'shard-params' would run twice, since PARAMS_SHARDED holds"):
        golden.run(rewrite().program, "shard-params")


@pytest.mark.parametrize(
    ("pipeline", "advice"),
    [
        ("recognize-moe,shard-dense,shard-params,differentiate", "put it before 'shard-params'"),
        (BEFORE + ",sync-grads,shard-params", "put it before 'sync-grads'"),
    ],
)
def test_where_it_may_not_stand(pipeline: str, advice: str) -> None:
    with pytest.raises(PassError, match=advice):
        golden.run(golden.captured(Plan(dp=2)), pipeline)


# ---- pipeline stages ---------------------------------------------------------------------------------------------------

DEEP = Config("ops", layers=2, hidden=8, inner=8, heads=2, tied=True, shared=True)


@functools.cache
def staged(level: int, prefetch: int = 0) -> Program:
    """Two stages of two ranks. Not to be changed."""
    passes = f"+shard-params{{level={level},prefetch={prefetch}}}"
    return mc.trace(build(DEEP), Plan(dp=2, pp=2, microbatches=2, passes=passes), tokens(4, 4, 0))


def held(program: Program, stage: int) -> set[str]:
    """The inputs that are shards and that a stage reads."""
    return {
        item.name
        for node, item in program.items()
        if item.kind is InputKind.PARAM and meta.stage(node) == stage and "dp" in dict(item.placements)
    }


def collectives(part: Part | None) -> list[object]:
    assert part is not None
    return [node.target for node in part.program.graph.nodes if node.target in (ops.all_gather, ops.reduce_scatter)]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_each_stage_gathers_and_scatters_its_own(prefetch: int) -> None:
    """Level 3: in the stage's own graphs, and nothing whole is kept from one to the other or sent."""
    program = staged(3, prefetch)
    for stage in cut_stages(program):
        backward = stage.backward
        assert backward is not None
        assert held(program, stage.index) <= {item.name for item in stage.forward.program.inputs}
        assert ops.all_gather in collectives(stage.forward) and ops.reduce_scatter not in collectives(stage.forward)
        assert {ops.all_gather, ops.reduce_scatter} == set(collectives(backward))
        made = {node.name: node for node in stage.forward.program.graph.nodes}
        for name in {*stage.saved, *(item.name for item in stage.sent)} & made.keys():
            read = {node.name for node in graphs.ancestors(made[name]) if node.op == "placeholder"}
            assert made[name].op == "placeholder" or not read <= held(program, stage.index), name


@pytest.mark.parametrize("level", [1, 2])
def test_what_is_gathered_once_is_no_part_of_a_stage(level: int) -> None:
    """A rank gathers the parameters of its stages, and reduces at level 1 the gradients of its stages."""
    program = staged(level)
    for at in (0, 1):
        phases = split_phases(program, [at])
        assert phases.head is not None and {item.name for item in phases.head.inputs} == held(program, at)
        (stage,) = cut_stages(phases.body, [at])
        assert collectives(stage.forward) == []
        if level == 1:
            assert phases.tail is not None and {item.name for item in phases.tail.outputs} == held(program, at)
            assert collectives(stage.backward) == [] and ops.reduce_scatter in collectives(Part(phases.tail, ()))
        else:
            assert phases.tail is None and set(collectives(stage.backward)) == {ops.reduce_scatter}


def test_outputs_of_all_parts_are_those_of_the_program() -> None:
    """Level 1: each output comes from the body or from the tail of one stage."""
    program = staged(1)
    parts = [split_phases(program, [at]) for at in (0, 1)]
    places = [place for part in parts for place in part.reduced]
    assert sorted([*parts[0].kept, *places]) == list(range(len(program.outputs)))
    for part in parts:
        assert len(part.body.outputs) == len(part.kept) + len(part.late)
        values = part.finish(
            [*part.kept, *("saved" for _ in part.late)], lambda given: [f"{at} reduced" for at in given]
        )
        wanted = {**{at: at for at in part.kept}, **dict.fromkeys(part.reduced, "saved reduced")}
        assert values == [wanted.get(at) for at in range(len(program.outputs))]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (ops.all_gather, "of which this rank holds a shard over dp"),
        (ops.reduce_scatter, "one scattered sum over dp is due"),
    ],
    ids=["gather", "scatter"],
)
def test_a_stage_that_lacks_one_is_found(target: object, said: str) -> None:
    program = mc.trace(build(DEEP), staged(3).plan, tokens(4, 4, 0))
    found = graphs.find(program.graph, target)[-1]
    found.replace_all_uses_with(found.all_input_nodes[0])
    program.graph.erase_node(found)
    with pytest.raises(VerifyError, match=said):
        verify_program(program)


def test_a_shard_that_is_read_without_a_gather_is_found() -> None:
    program = rewrite(plan=Plan(dp=2), model=line()).program
    gather = gathers(program)[0]
    source = gather.all_input_nodes[0]
    for user in list(gather.users):
        user.replace_input_with(gather, source)
    program.graph.erase_node(gather)
    with pytest.raises(VerifyError, match="of which this rank holds a shard over dp; gather it there first"):
        verify_program(program)


def test_a_gradient_that_is_not_scattered_is_found() -> None:
    program = golden.run(rewrite(plan=Plan(dp=2), model=line()).program, "sync-grads")
    scatter = graphs.find(program.graph, ops.reduce_scatter)[0]
    scatter.replace_all_uses_with(scatter.all_input_nodes[0])
    program.graph.erase_node(scatter)
    with pytest.raises(VerifyError, match="not reduced, one scattered sum over dp is due"):
        verify_program(program)


# ---- asking for it -----------------------------------------------------------------------------------------------------


def test_a_plan_adds_the_pass_to_the_preset() -> None:
    text = default_pipeline(Plan(dp=2, passes="+shard-params{bucket-mb=4}", dispatch="allgather"), step=True)
    assert "sync-loss,shard-params{bucket-mb=4},sync-grads" in text and "insert-dispatch{backend=allgather}" in text


def test_an_added_pass_takes_the_place_of_one_of_its_name() -> None:
    text = default_pipeline(Plan(dp=2, passes="+ lower-ops{backend=reference}, sync-grads{bucket-mb=2}"), step=True)
    assert text.endswith(
        "sync-grads{bucket-mb=2},canonicalize,lower-ops{backend=reference},fuse-experts,keep-attention"
    )
    assert text.count("sync-grads") == text.count("lower-ops") == 1
