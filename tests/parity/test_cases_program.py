"""Cases from the field about the program itself: 19, 25, 27, 39; what ranks compute together; what a collective is worth."""

from __future__ import annotations

import copy
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils.flop_counter import FlopCounterMode

import moecompile as mc
from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.errors import CaptureError, PlanError, VerifyError
from moecompile.plan import Plan
from moecompile.program import OutputKind
from tests.support.models import Config, LoopExperts, build, push_to, tokens
from tests.support.parity import LockStep, ParityError, compare, plain, slice_for

aten = torch.ops.aten


# ---- 25: changing counts -----------------------------------------------------------------------------------------------


COUNTS = [
    [97, 0, 1, 30], [0, 97, 30, 1], [128, 0, 0, 0], [0, 0, 0, 128], [1, 1, 1, 125], [2, 5, 24, 97], [5, 2, 97, 24],
    [32, 32, 32, 32], [64, 64, 0, 0], [0, 64, 0, 64], [1, 0, 127, 0], [0, 1, 0, 127], [41, 41, 41, 5], [97, 2, 2, 27],
    [0, 5, 0, 123], [7, 11, 13, 97], [60, 1, 2, 65], [3, 0, 97, 28], [126, 1, 0, 1], [19, 97, 5, 7],
]  # fmt: skip


def with_counts(counts: list[int], seed: int) -> dict[str, Tensor]:
    """128 tokens of which expert e gets exactly ``counts[e]``."""
    chosen = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
    chosen = chosen[torch.randperm(128, generator=torch.Generator().manual_seed(seed))]
    return tokens(8, 16, seed) | {"push": push_to(chosen.reshape(8, 16, 1), 4)}


def test_case_25_nothing_is_compiled_again_when_counts_change() -> None:
    """Twenty steps with 0, 1, 2, ... 128 tokens per expert: one capture, one program, and the plain model's numbers."""
    config = Config("loop", top_k=1, normalize=False, layers=1)
    batches = [with_counts(counts, seed) for seed, counts in enumerate(COUNTS)]
    model, reference = mc.parallelize(build(config), Plan(dp=1)), build(config)
    for batch in batches:
        out, expected = model(**batch)["loss"], reference(**batch)["loss"]
        assert abs(out.item() / expected.item() - 1) < 1e-12
    assert len(model._state.cache) == 1
    assert len(torch._dynamo.utils.counters["frames"]) == 0


def test_case_25_one_program_on_ranks_serves_all_counts() -> None:
    config = Config("stacked", top_k=1, normalize=False, layers=1)
    batches = [with_counts(counts, seed) for seed, counts in enumerate(COUNTS)]
    lock_step = LockStep(build(config), Plan(dp=2, ep=2), batches[0], optimizer="sgd")
    compare(lock_step.run(batches), plain(build(config), batches, optimizer="sgd"))


# ---- 27: sizes known only at run time ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dispatch", ["alltoall", "allgather"])
def test_case_27_runtime_sizes_stay_between_dispatch_and_combine(dispatch: str) -> None:
    """One symbol and one host read per layer; what has such a size is between dispatch and combine or their twins."""
    config = Config("loop", layers=3, shared=True, aux=0.1)
    batch = tokens(8, 5, 0)
    program = LockStep(build(config), Plan(dp=4, ep=2, dispatch=dispatch), batch).program
    nodes = list(program.graph.nodes)
    assert len(graphs.find(program.graph, ops.sizes_to_host)) == config.layers
    reads = graphs.find(program.graph, aten._local_scalar_dense.default, aten.item.default)
    assert len(reads) == config.layers
    for read in reads:  # of a tensor that is on the host already
        assert any(source.target is ops.sizes_to_host for source in graphs.ancestors(read))
    sized = [
        node for node in nodes if node.op == "call_function" and node not in reads
        and list(graphs.symbolic_sizes(node.meta["val"]))
    ]  # fmt: skip
    symbols = {
        symbol
        for node in sized
        for size in graphs.symbolic_sizes(node.meta["val"])
        for symbol in size.node.expr.free_symbols
    }
    assert len(symbols) == config.layers
    inside, outside = (ops.dispatch, ops.permute_local), (ops.combine, ops.unpermute, ops.cpu.unpermute)
    for node in sized:
        users = [user for user in node.users if user not in sized]
        for user in users:  # the ways out of the region: home again, or summed up to a weight's gradient
            assert meta.is_tensor(user) and not list(graphs.symbolic_sizes(meta.value(user))), user
        assert any(source in reads for source in graphs.ancestors(node)), node
    if dispatch == "alltoall":
        for node in graphs.find(program.graph, *inside):
            assert node in sized
        for node in graphs.find(program.graph, *outside):
            assert node not in sized
    for found in program.output_nodes():
        assert not list(graphs.symbolic_sizes(meta.value(found)))


# ---- 39: wrong degrees -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("degrees", "match"),
    [
        ({"dp": 4, "ep": 3}, r"ep.*3"),
        ({"dp": 0}, r"dp.*0"),
        ({"dp": 2, "ep": 0}, r"ep.*0"),
        ({"dp": 2, "ep": -1}, r"ep.*-1"),
        ({"dp": 3, "ep": 2}, r"ep.*2"),
    ],
    ids=["ep-3-of-4", "dp-0", "ep-0", "ep-negative", "ep-2-of-3"],
)
def test_case_39_bad_degrees_fail_before_anything_runs(degrees: dict[str, int], match: str) -> None:
    """Field, value and the nearest legal values are in the message; no model, process or group is needed."""
    with pytest.raises(PlanError, match=match) as caught:
        Plan(**degrees)
    assert re.search(r"legal|at least|multiple|choose|nearest", str(caught.value))


@pytest.mark.parametrize(("experts", "ep"), [(6, 4), (4, 8)], ids=["E6-ep4", "ep-above-E"])
def test_case_39_experts_that_ep_does_not_divide(experts: int, ep: int) -> None:
    """On the CPU, without ranks: the expert count, ep and its legal values."""
    config = Config("stacked", experts=experts, layers=1)
    legal = {4: 2, 8: 4}[ep]  # the largest divisor of the experts that also divides the ranks
    rule = rf"Plan\(ep={ep}\): ep must .*the {experts} experts of layers.0.moe.*; nearest legal value of ep: {legal}\."
    with pytest.raises(PlanError, match=rule):
        mc.trace(build(config), Plan(dp=ep, ep=ep), slice_for(tokens(ep, 4, 0), Plan(dp=ep), 0))


class NeverCaptured(nn.Module):
    """Six experts, and a forward that must not run."""

    def __init__(self, name: str = "experts") -> None:
        super().__init__()
        setattr(self, name, nn.ModuleList(nn.Linear(4, 4) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the model was captured although the plan does not fit it")


class Configured(NeverCaptured):
    """The same number in a config, inside that of a text model."""

    def __init__(self) -> None:
        super().__init__("shared_experts")
        text = types.SimpleNamespace(num_local_experts=6, to_dict=dict)
        self.config = types.SimpleNamespace(text_config=text)


@pytest.mark.parametrize("model", [NeverCaptured, Configured])
def test_case_39_experts_are_counted_before_capture(model: type[nn.Module]) -> None:
    with pytest.raises(
        PlanError, match=r"Plan\(ep=4\): ep must divide the 6 experts .*; nearest legal value of ep: 2\."
    ):
        mc.trace(model(), Plan(dp=4, ep=4), (torch.zeros(2, 4),))
    with pytest.raises(PlanError, match="must divide the 6 experts"):
        mc.trace(model(), Plan(ep=4), (torch.zeros(2, 4),), world_size=8)
    with pytest.raises(CaptureError, match="the model was captured"):
        mc.trace(model(), Plan(dp=6, ep=3), (torch.zeros(2, 4),))


def test_experts_that_are_shared_are_not_counted() -> None:
    with pytest.raises(CaptureError, match="the model was captured"):
        mc.trace(NeverCaptured("shared_experts"), Plan(dp=4, ep=4), (torch.zeros(2, 4),))


def test_case_39_a_wrong_world_names_the_torchrun_line() -> None:
    with pytest.raises(PlanError, match=r"torchrun --nproc[-_]per[-_]node[= ]4"):
        Plan(dp=4, ep=2).resolve(2)


def test_case_39_degrees_of_later_releases_are_refused() -> None:
    with pytest.raises(PlanError, match="pp=2"):
        mc.trace(build(Config("stacked")), Plan(dp=1, pp=2), tokens(2, 4, 0))


# ---- 19: the router's type -----------------------------------------------------------------------------------------------


PRODUCTS = (aten.linear.default, aten.mm.default, ops.cpu.mm, aten.addmm.default)


def gate_of(topk: Node) -> Node:
    """The product nearest above a choice of experts."""
    above = [node for node in graphs.ancestors(topk) if node.target in PRODUCTS]
    return max(above, key=list(topk.graph.nodes).index)


def test_case_19_the_router_runs_in_fp32_under_autocast() -> None:
    """Gate product, scores and top-k in fp32; experts and attention stay bf16."""
    config = Config("loop", layers=1, hidden=32, inner=16, experts=8, dtype=torch.float32)
    model, batch = build(config), tokens(4, 8, 0)
    with torch.autocast("cpu", torch.bfloat16):
        program = mc.trace(model, Plan(dp=1, router_dtype="fp32"), batch)
        without = mc.trace(model, Plan(dp=1), batch)
    (topk,) = graphs.find(program.graph, aten.topk.default)
    gate = gate_of(topk)
    values = [gate, *gate.all_input_nodes, *topk.all_input_nodes]
    assert {meta.tensor(item).dtype for item in values} == {torch.float32}
    grouped = graphs.find(program.graph, ops.cpu.grouped_linear)
    assert grouped and {meta.tensor(node).dtype for node in grouped} == {torch.bfloat16}
    dense = [node for node in graphs.find(program.graph, *PRODUCTS) if node is not gate and meta.layer(node)]
    forward = [node for node in dense if meta.direction(node) is meta.Direction.FORWARD]
    assert forward and {meta.tensor(node).dtype for node in forward} == {torch.bfloat16}
    (other,) = graphs.find(without.graph, aten.topk.default)
    assert meta.tensor(gate_of(other)).dtype is torch.bfloat16  # what the plan's field is for


class RouterOnly(nn.Module):
    """One layer that hands out which experts it chose."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(config.hidden, config.experts, bias=False)
        self.experts = LoopExperts(config)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        probs, ids = self.router(x).softmax(-1).topk(self.config.top_k, -1)
        return {"loss": self.experts(x, ids, probs).square().mean(), "ids": ids}


def test_case_19_experts_are_those_of_an_fp32_router() -> None:
    """4096 random tokens: the sets chosen under autocast equal those of the fp32 model; without the field some do not."""
    torch.manual_seed(0)
    model = RouterOnly(Config("loop", hidden=64, inner=4, experts=16, top_k=4))
    x = torch.randn(4096, 64)
    reference = model(x)["ids"].sort(-1)[0]
    chosen = {}
    for dtype in (None, "fp32"):
        parallel = mc.parallelize(copy.deepcopy(model), Plan(dp=1, router_dtype=dtype))
        with torch.autocast("cpu", torch.bfloat16):
            chosen[dtype] = parallel(x)["ids"].sort(-1)[0]
    assert (chosen[None] != reference).any()
    assert torch.equal(chosen["fp32"], reference)


# ---- what all ranks compute together -------------------------------------------------------------------------------------


def grouped_flops(rows: Any, counts: Any, weight: Any, *rest: Any, out_shape: Any = None, **_: Any) -> int:
    return 2 * rows[0] * weight[1] * weight[2]


def grouped_wgrad_flops(grad: Any, rows: Any, *rest: Any, out_shape: Any = None, **_: Any) -> int:
    return 2 * grad[0] * grad[1] * rows[1]


def mm_flops(a: Any, b: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * a[0] * a[1] * b[1]


def mlp_flops(rows: Any, counts: Any, w_in: Any, w_out: Any, *rest: Any, out_shape: Any = None, **_: Any) -> int:
    return 2 * rows[0] * (w_in[1] * w_in[2] + w_out[1] * w_out[2])


def mlp_backward_flops(grad: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * mlp_flops(*args, **kwargs)


COUNTED = {
    torch.ops.moe_cpu.grouped_mlp: mlp_flops,
    torch.ops.moe_cpu.grouped_mlp_backward: mlp_backward_flops,
    torch.ops.moe_cpu.grouped_linear: grouped_flops,
    torch.ops.moe_cpu.grouped_linear_wgrad: grouped_wgrad_flops,
    torch.ops.moe_cpu.mm: mm_flops,
}


@pytest.mark.parametrize("plan", [Plan(dp=1), Plan(dp=2, ep=2), Plan(dp=4, ep=2), Plan(dp=4)], ids=str)
def test_ranks_together_compute_what_one_process_computes(plan: Plan) -> None:
    """Matmul operations of a step, summed over the ranks, equal those of the plain model exactly: nothing is done twice."""
    config, batch = Config("loop", shared=True), tokens(8, 5, 0)
    model = build(config)
    with FlopCounterMode(display=False) as alone:
        model(**batch)["loss"].backward()
    lock_step = LockStep(build(config), plan, batch)
    lock_step.step(batch)  # the harness asks the plain model for shapes, once
    with FlopCounterMode(display=False, custom_mapping=COUNTED) as together:
        lock_step.step(batch)
    assert together.get_total_flops() == alone.get_total_flops() > 0


# ---- the text is the program ---------------------------------------------------------------------------------------------


def test_a_collective_deleted_from_the_saved_text_breaks_parity(tmp_path: Path) -> None:
    """A loaded program runs as it did; with one line edited away it does not."""
    config, batches = Config("stacked", aux=0.1), [tokens(8, 5, 0)]
    reference = plain(build(config), batches)
    lock_step = LockStep(build(config), Plan(dp=4, ep=2), batches[0])
    file = tmp_path / "program.py"
    lock_step.program.save(file)
    lock_step.program = mc.load(file)
    compare(lock_step.run(batches), reference)
    lines = file.read_text().splitlines()
    sums = [at for at, line in enumerate(lines) if "moe.all_reduce" in line]
    assert sums
    for at in sums:
        edited = re.sub(r"= torch\.ops\.moe\.all_reduce\.default\((\w+),.*?\)", r"= \1", lines[at])
        assert edited != lines[at]
        file.write_text("\n".join([*lines[:at], edited, *lines[at + 1 :]]))
        lock_step.program = mc.load(file)
        lock_step.reset()
        with pytest.raises((ParityError, VerifyError)):
            compare(lock_step.run(batches), reference)
            pytest.fail(f"nothing noticed that line {at} is gone")


def test_gradients_are_outputs_of_the_program_printed() -> None:
    """Every trained parameter has a gradient among the program's outputs, in its text, by name."""
    config, batch = Config("loop"), tokens(8, 5, 0)
    program = mc.trace(build(config), Plan(dp=4, ep=2), slice_for(batch, Plan(dp=4), 0))
    grads = {item.name for item in program.outputs if item.kind is OutputKind.GRAD}
    assert grads == {item.name for item in program.inputs if item.requires_grad}
    assert all(name in str(program) for name in grads)
