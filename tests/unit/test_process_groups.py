"""Process groups by mesh axis, bound graphs, the control exchange and the executor, on gloo ranks."""

import os
import resource
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moecompile import ops
from moecompile.errors import CaptureError, PlanError
from moecompile.mesh import Mesh
from moecompile.plan import Plan
from moecompile.program import Input, InputKind, Level, Output, OutputKind, Program
from moecompile.runtime import process_groups
from moecompile.runtime.control import agree
from moecompile.runtime.executor import Executor, tune_allocator, with_ranges
from moecompile.runtime.launcher import RankError, RankPool, launch
from moecompile.runtime.process_groups import ProcessGroups, axis_of, bind
from moecompile.runtime.simulator import simulate
from tests.support.hand_graphs import Builder, moe_graph, moe_inputs, moe_layer

PLAN = Plan(dp=4, ep=2, timeout=60)

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, timeout=60) as ranks:
        yield ranks


def program_of(graph_module: Any, plan: Plan) -> Program:
    inputs = [Input(InputKind.BATCH, n.name) for n in graph_module.graph.nodes if n.op == "placeholder"]
    outputs = [Output(OutputKind.USER) for _ in graph_module.graph.output_node().args[0]]
    return Program(graph_module, inputs, outputs, plan, Mesh(plan), level=Level.STEP)


# ---- groups ------------------------------------------------------------------------------------------------


def groups_of_two_plans(rank: int) -> dict[str, Any]:
    wide, flat = ProcessGroups(Mesh(PLAN)), ProcessGroups(Mesh(Plan(dp=4, ep=4)))
    names = {axis: wide.group_name(axis) for axis in ("ep", "edp", "dp", "world")}
    found = {axis: dist.get_process_group_ranks(wide.group(axis)) for axis in names}
    x = torch.tensor([float(rank)])
    sums = [ops.all_reduce(x, "sum", name).item() for name in (names["ep"], names["edp"], flat.group_name("ep"))]
    same = wide.group("dp") is wide.group("world"), wide.group("ep") is flat.group("ep")
    control = dist.get_backend(wide.control)
    wide.close()
    after = ops.all_reduce(x, "sum", flat.group_name("ep")).item()  # the other plan's groups are untouched
    flat.close()
    return {"ranks": found, "sums": sums, "same": same, "control": control, "after": after}


def test_groups_follow_the_mesh_and_two_plans_coexist(pool: RankPool) -> None:
    found = pool.run(groups_of_two_plans)
    assert [item["ranks"]["ep"] for item in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [item["ranks"]["edp"] for item in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [item["ranks"]["world"] for item in found] == [[0, 1, 2, 3]] * 4
    assert [item["sums"] for item in found] == [[1, 2, 6], [1, 4, 6], [5, 2, 6], [5, 4, 6]]
    assert {item["same"] for item in found} == {(True, False)}
    assert {(item["control"], item["after"]) for item in found} == {("gloo", 6.0)}


def wrong_world(rank: int) -> str:
    try:
        ProcessGroups(Mesh(Plan(dp=2, ep=2)))
    except PlanError as error:
        return str(error)
    return ""


def test_a_wrong_world_size_says_which_torchrun_line_is_right(pool: RankPool) -> None:
    for said in pool.run(wrong_world):
        assert "the world size is 4" in said
        assert "torchrun --nproc-per-node=2" in said


def test_one_process_and_a_plan_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(PlanError, match="torchrun --nproc-per-node=2"):
        process_groups.start(Plan(dp=2))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PlanError, match="RANK, MASTER_ADDR, MASTER_PORT is not in the environment"):
        process_groups.start(Plan(dp=2))


def start_from_environment(rank: int) -> tuple[int, int, bool]:
    assert not dist.is_initialized()
    process_groups.start(Plan(timeout=30))
    return dist.get_rank(), process_groups.world_size(), ProcessGroups(Mesh(Plan(dp=2))).control is not None


def test_the_default_group_is_made_from_torchruns_environment() -> None:
    assert launch(start_from_environment, 2, timeout=60, backend=None) == [(0, 2, True), (1, 2, True)]


# ---- bind --------------------------------------------------------------------------------------------------


def test_one_rank_needs_no_process_group() -> None:
    groups = ProcessGroups(Mesh(Plan(dp=1)))
    assert (groups.control, groups.rank) == (None, 0)
    with pytest.raises(ValueError, match="axis ep has groups of one rank"):
        groups.group("ep")
    graph, inputs = moe_graph(4, ep=1), moe_inputs(0, 4, ep=1)
    bound = bind(graph, groups)
    left = [node.target for node in bound.graph.nodes if axis_of(node) is not None]
    assert left == []
    assert any(axis_of(node) == "ep" for node in graph.graph.nodes)  # the program itself is untouched
    (wanted,) = simulate(graph, [inputs], groups.mesh)
    for found, expected in zip(bound(*inputs), wanted, strict=True):
        assert torch.equal(found, expected)


def bound_axes(rank: int) -> bool:
    groups = ProcessGroups(Mesh(PLAN))
    graph = moe_graph(4, ep=2)
    bound = bind(graph, groups)
    pairs = zip(graph.graph.nodes, bound.graph.nodes, strict=True)
    fits = all(
        new.name == old.name
        and new.meta.get("nn_module_stack") == old.meta.get("nn_module_stack")
        and (axis_of(old) is None or axis_of(new) == groups.group_name(str(axis_of(old))))
        for old, new in pairs
    )
    groups.close()
    return fits


def test_bound_nodes_keep_names_and_meta_and_get_group_names(pool: RankPool) -> None:
    assert pool.run(bound_axes) == [True] * 4


# ---- executor ----------------------------------------------------------------------------------------------


def run_layer(rank: int, inputs: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    groups = ProcessGroups(Mesh(PLAN))
    outputs = Executor(program_of(moe_graph(4, ep=2), PLAN), groups)(inputs[rank])
    groups.close()
    return list(outputs)


def test_gloo_and_the_simulator_agree(pool: RankPool) -> None:
    inputs = [moe_inputs(rank, 4, 2) for rank in range(4)]
    wanted = simulate(moe_graph(4, ep=2), inputs, Mesh(PLAN))
    for (y, total), (expected, expected_total) in zip(pool.run(run_layer, inputs), wanted, strict=True):
        assert torch.equal(y, expected)
        torch.testing.assert_close(total, expected_total, rtol=1e-14, atol=0.0)  # gloo adds in another order


def test_a_step_program_runs_without_autograd_and_checks_its_inputs() -> None:
    plan = Plan(dp=1)
    run = Executor(program_of(moe_graph(4, ep=1), plan), ProcessGroups(Mesh(plan)))
    inputs = moe_inputs(0, 4, ep=1)
    inputs[0].requires_grad_()
    assert not run(inputs)[0].requires_grad
    with pytest.raises(ValueError, match="takes 4 inputs, but 3 were passed"):
        run(inputs[:3])


def test_an_error_in_a_node_names_layer_and_rank() -> None:
    plan = Plan(dp=1)
    run = Executor(program_of(moe_graph(4, ep=1), plan), ProcessGroups(Mesh(plan)))
    x, ids, probs, weight = moe_inputs(0, 4, ep=1)
    with pytest.raises(ValueError, match="weight holds 3 experts") as caught:
        run([x, ids, probs, weight[:3]])
    assert caught.value.__notes__ == ["rank 0, at grouped_linear in layers.0.mlp"]


def test_profiler_ranges_carry_module_names_and_change_nothing() -> None:
    build = Builder()
    x = build.input("x")
    for build.module in ("model", "model.layers.0", "model.layers.1"):
        x = build.call(torch.ops.aten.neg.default, x)
    graph = build.finish(x)
    for node in graph.graph.nodes:
        if path := node.meta.get("nn_module_stack"):
            node.meta["nn_module_stack"] = {"model": ("model", torch.nn.Module), **path}
    calls = [str(node.args[0]) for node in with_ranges(graph).graph.nodes if node.name.startswith("enter_range")]
    assert calls == ["forward model", "forward model.layers.0", "forward model.layers.1"]

    plan = Plan(dp=1)
    run = Executor(program_of(graph, plan), ProcessGroups(Mesh(plan)))
    quiet = run([torch.ones(2)])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loud = run([torch.ones(2)])
    assert torch.equal(quiet[0], loud[0])
    seen = {event.key: event.count for event in profile.key_averages()}
    assert [seen.get(name) for name in calls] == [1, 1, 1]
    off = Executor(program_of(graph, plan), ProcessGroups(Mesh(plan)), ranges=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        off([torch.ones(2)])
    assert "forward model" not in {event.key for event in profile.key_averages()}


def test_the_allocator_keeps_freed_memory() -> None:
    if not tune_allocator():
        pytest.skip("the C library is not glibc")

    def faults_of_work() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(4):
            torch.ones(1 << 24)  # 64 MiB, 16384 pages: glibc would map and unmap it each time
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    for _ in range(4):
        faults_of_work()  # the heap grows to what the work needs
    assert faults_of_work() < 4096


# ---- control -----------------------------------------------------------------------------------------------


def control_cases(rank: int) -> list[str]:
    groups = ProcessGroups(Mesh(PLAN))
    said = []
    for signature, error in (
        ("input_ids: int64[2, 8]", None),
        ("input_ids: int64[2, 8]", CaptureError("the model has no experts.") if rank == 2 else None),
        (f"mode: train\ninput_ids: int64[2, {9 if rank == 1 else 8}]", None),
        ("input_ids: int64[2, 8]", OSError("disk full") if rank in (1, 3) else None),
        ("input_ids: int64[2, 8]", None),
    ):
        try:
            agree(groups, signature, error)
            said.append("fine")
        except Exception as raised:
            said.append(f"{type(raised).__name__}: {raised}")
    groups.close()
    return said


def test_a_fault_of_one_rank_is_raised_on_all(pool: RankPool) -> None:
    found = pool.run(control_cases)
    assert [said[0] for said in found] == ["fine"] * 4
    others = "CaptureError: rank 2: the model has no experts."
    assert [said[1] for said in found] == [others, others, "CaptureError: the model has no experts.", others]
    assert {said[2] for said in found} == {
        "CaptureError: the ranks were not given the same call: rank 1 has input_ids: int64[2, 9], but rank "
        "0 has input_ids: int64[2, 8]; give every rank the same model and settings, and batches of one "
        "shape."
    }
    relayed = "RuntimeError: rank 1: disk full"
    assert [said[3] for said in found] == [relayed, "OSError: disk full", relayed, "OSError: disk full"]
    assert [said[4] for said in found] == ["fine"] * 4


def raise_before_agreeing(rank: int) -> None:
    groups = ProcessGroups(Mesh(PLAN))
    agree(groups, "call", PlanError("only rank 3 sees this.") if rank == 3 else None)


def test_the_launcher_shows_the_rank_that_raised_and_not_those_that_were_told(pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 3 of 4 failed: PlanError: only rank 3 sees this"):
        pool.run(raise_before_agreeing)


# ---- a peer that dies --------------------------------------------------------------------------------------


def vanish(x: torch.Tensor, rank: torch.Tensor, how: str) -> torch.Tensor:
    """What a node of rank 1 does in these tests: die, or not come back."""
    if int(rank) == 1:
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    return x


def two_layers(rank: int, how: str, timeout: float) -> None:
    plan = Plan(dp=4, ep=2, timeout=timeout)
    build = Builder("layers.0.mlp")
    x, ids, probs, weight, offset = map(build.input, ("x", "ids", "probs", "weight", "offset"))
    x = moe_layer(build, x, ids, probs, weight, 4, 2)
    build.module = "layers.1.mlp"
    x = build.call(vanish, x, offset, how)
    x = moe_layer(build, x, ids, probs, weight, 4, 2)
    total = build.call(ops.all_reduce, x, "sum", "world")
    inputs = [*moe_inputs(rank, 4, 2), torch.tensor(rank)]
    groups = ProcessGroups(Mesh(plan))
    Executor(program_of(build.finish(total), plan), groups)(inputs)


def test_a_rank_that_dies_in_layer_1_is_named_with_the_place(pool: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 of 4 failed: the process was killed by SIGKILL") as caught:
        pool.run(two_layers, "die", 60)
    assert time.monotonic() - start < 30
    said = str(caught.value)
    assert (
        "rank 0: exchange_counts_1 of layers.1.mlp (forward) failed on axis ep, ranks (0, 1): rank 1 is missing" in said
    )
    # Ranks 2 and 3 only meet rank 1 in the sum over all.
    assert (
        "rank 2: all_reduce of layers.1.mlp (forward) failed on axis world, ranks (0, 1, 2, 3): rank 1 is "
        "missing" in said
    )


def test_a_rank_that_does_not_come_is_named_after_the_timeout(pool: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(two_layers, "hang", 3)
    said = str(caught.value)
    assert "PeerError: rank 0: exchange_counts_1 of layers.1.mlp (forward) failed on axis ep, ranks (0, 1)" in said
    assert "rank 1 is missing (it died, or did not arrive within timeout=3 s)" in said
    assert "rank 1 was here:" in said and "in vanish" in said
