"""case-21: under `Plan(deterministic=True)` a run repeats itself to the last bit; the combine of experts adds in a fixed order anyway."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import moecompile as mc
from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.compilation import Request, compile_call
from moecompile.errors import CaptureError
from moecompile.plan import Plan
from tests.support.models import Config, build, tokens
from tests.support.parity import slice_for
from tests.support.pool import Ranks, parallel
from tests.support.thinned import thinned

pytestmark = pytest.mark.timeout(240)
CONFIG = Config("stacked", hidden=16, heads=4, inner=8, top_k=2, shared=True, aux=0.1, rotary=True, dtype=torch.float32)
ATOMIC = ("index_add", "scatter_add", "scatter_reduce", "index_put", "index_reduce", "embedding_bag")


def steps(rank: int, plan: Plan) -> list[float]:
    """Losses of ten steps."""
    with parallel(build(CONFIG), plan) as model:
        stepper, found = torch.optim.AdamW(model.parameters(), lr=0.05), []
        for seed in range(10):
            loss = model(**slice_for(tokens(4, 8, seed), plan, rank))["loss"]
            loss.backward()
            stepper.step()
            stepper.zero_grad()
            found.append(float(loss.detach()))
        return found


@pytest.mark.parametrize(
    "plan",
    thinned(
        {"ep": Plan(dp=2, ep=2, deterministic=True), "tp-ep": Plan(dp=1, tp=2, ep=2, deterministic=True)},
        keep=("tp-ep",),
    ),
)
def test_case_21_ten_steps_twice(ranks: Ranks, plan: Plan) -> None:
    first, second = (ranks.run(plan.world_size, steps, plan, timeout=200.0) for _ in range(2))
    assert first == second and len(set(first[0])) == 10
    assert all(found == first[0] for found in first)


@pytest.mark.parametrize("dispatch", ["alltoall", "allgather"])
def test_case_21_nothing_is_added_by_repeated_indices(dispatch: str) -> None:
    """From the choice of experts to the combine, forward and backward."""
    plan = Plan(dp=2, ep=2, dispatch=dispatch)
    program = compile_call(build(CONFIG), Request((), slice_for(tokens(4, 8, 0), plan, 0), plan))
    inside = [node for node in program.graph.nodes if ".moe" in meta.module_path(node)]
    assert {meta.direction(node) for node in inside} == set(meta.Direction)
    assert graphs.find(program.graph, ops.permute) or graphs.find(program.graph, ops.gather_rows)
    assert not [node for node in inside if any(word in str(node.target) for word in ATOMIC)]


class Watching(TorchDispatchMode):
    """Which ops of ours ran with deterministic algorithms, and which without."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[bool, set[str]] = {True: set(), False: set()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[torch.are_deterministic_algorithms_enabled()].add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("wanted", [True, False])
def test_a_step_runs_with_them_and_leaves_the_switch_alone(wanted: bool) -> None:
    model = mc.parallelize(build(CONFIG), Plan(dp=1, deterministic=wanted))
    batch = tokens(2, 8, 0)
    model(**batch)["loss"].backward()
    with Watching() as watching:
        model(**batch)["loss"].backward()
    assert not torch.are_deterministic_algorithms_enabled()
    computed = {name for name in watching.seen[wanted] if name.startswith("moe")}
    assert any("permute" in name for name in computed)
    assert not {name for name in watching.seen[not wanted] if name.startswith("moe")}


class NoLoss(nn.Module):
    """A product, of which the caller makes a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def test_what_the_caller_has_set_is_set_again() -> None:
    model = mc.parallelize(build(CONFIG), Plan(dp=1, deterministic=True))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        model(**tokens(2, 8, 0))["loss"].backward()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_backward_outside_the_step_is_refused() -> None:
    model = mc.parallelize(NoLoss(), Plan(dp=1, deterministic=True))
    with pytest.raises(CaptureError, match=r"call torch\.use_deterministic_algorithms\(True\) instead"):
        model(torch.randn(2, 4))
    with torch.no_grad():
        assert model(torch.randn(2, 4)).shape == (2, 4)
