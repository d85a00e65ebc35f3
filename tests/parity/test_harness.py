"""The parity harness itself: it passes what is right, and each kind of mistake makes it fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

from moecompile import ops
from moecompile.capture import Captured, capture_model
from moecompile.compilation import default_pipeline
from moecompile.errors import VerifyError
from moecompile.mesh import Mesh
from moecompile.plan import Plan
from moecompile.program import OutputKind
from tests.support import capture_memo
from tests.support.models import Config, build, tokens
from tests.support.parity import LockStep, ParityError, Run, Step, assemble, compare, difference, plain

CONFIG = Config("ops", aux=0.1)
PLAN = Plan(dp=4, ep=2)
BATCHES = [tokens(8, 6, seed, ignored=0.2) for seed in range(2)]


@pytest.fixture(scope="module")
def reference() -> Run:
    return plain(build(CONFIG), BATCHES)


@pytest.fixture(scope="module")
def first_step() -> Run:
    return plain(build(CONFIG), BATCHES[:1])


@pytest.fixture(scope="module")
def compiled() -> LockStep:
    return LockStep(build(CONFIG), PLAN, BATCHES[0])


@pytest.fixture
def lock_step(compiled: LockStep) -> Iterator[LockStep]:
    """With fresh weights; the graph is as it was afterwards."""
    compiled.reset()
    source = compiled.program.graph_module.graph
    yield compiled
    compiled.program.graph_module.graph = source


def test_what_is_right_passes(lock_step: LockStep, reference: Run) -> None:
    assert max(compare(lock_step.run(BATCHES), reference).values()) < 1e-13


# ---- what cannot be compared -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "expected", "match"),
    [
        (torch.tensor([1.0, float("nan")]), torch.ones(2), "the found holds NaN or inf"),
        (torch.ones(2), torch.tensor([1.0, float("inf")]), "the reference holds NaN or inf"),
        (torch.ones(2), torch.ones(2, 1), r"shape \(2,\) is compared with .* \(2, 1\)"),
        (torch.ones(2), torch.ones(2).double(), "float32 .*float64"),
        (torch.zeros(2), torch.zeros(2), "the reference is all zero"),
    ],
    ids=["nan", "inf", "shape", "dtype", "zero"],
)
def test_unfit_tensors_are_refused(found: Tensor, expected: Tensor, match: str) -> None:
    with pytest.raises(ParityError, match=match):
        difference("x", found, expected)


def test_expected_zeros_must_be_exact_zeros() -> None:
    assert difference("x", torch.zeros(2), torch.zeros(2), zero=True) == 0.0
    with pytest.raises(ParityError, match=r"exact zeros were expected, 1.000e-30 was found"):
        difference("x", torch.tensor([0.0, 1e-30]), torch.zeros(2), zero=True)
    with pytest.raises(ParityError, match="not all zero"):
        difference("x", torch.zeros(2), torch.ones(2), zero=True)


def test_missing_values_and_steps_are_refused() -> None:
    one = torch.ones(1)
    step = Step(one, {}, {"a": one, "b": one}, one)
    with pytest.raises(ParityError, match=r"only one side has \['b'\]"):
        compare(Run([Step(one, {}, {"a": one}, one)]), Run([step]))
    with pytest.raises(ParityError, match="0 steps are compared with 1"):
        compare(Run(), Run([step]))
    with pytest.raises(ParityError, match="0 steps are compared with 0"):
        compare(Run(), Run())


def test_drifting_copies_and_missing_parts_are_found() -> None:
    mesh = Mesh(Plan(dp=4, ep=2))
    whole = torch.arange(4.0, dtype=torch.float64)
    parts = [whole[:2], whole[2:], whole[:2], whole[2:]]
    assert torch.equal(assemble("w", parts, whole.shape, mesh), whole)
    with pytest.raises(ParityError, match="not bitwise equal"):
        assemble("w", [*parts[:3], parts[3] + 1e-6], whole.shape, mesh)
    with pytest.raises(ParityError, match="not bitwise equal"):
        assemble("w", [whole, whole, whole, whole + 1e-6], whole.shape, mesh)
    with pytest.raises(ParityError, match="make up"):
        assemble("w", [part[:1] for part in parts], whole.shape, mesh)
    with pytest.raises(ParityError, match="in 1 copies"):
        assemble("w", [whole, *[torch.empty(0)] * 3], whole.shape, mesh)


# ---- mistakes in a program ---------------------------------------------------------------------------------------------


def fit(rows: Tensor, num_rows: int) -> Tensor:
    """This rank's own rows in place of those that should have come."""
    return torch.cat([rows, rows.new_zeros(max(num_rows - rows.shape[0], 0), rows.shape[1])])[:num_rows]


def own_counts(counts: Tensor, group_size: int) -> Tensor:
    return counts.reshape(group_size, -1)


def drop(node: Node) -> None:
    """Take a collective out: its result becomes what the rank has itself, in the right shape."""
    if node.target is ops.all_reduce:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        return
    wanted: dict[Any, tuple[Callable[..., Tensor], int]] = {
        ops.dispatch: (fit, 3),
        ops.combine: (fit, 3),
        ops.exchange_counts: (own_counts, 1),
    }
    stand_in, size = wanted[node.target]
    with node.graph.inserting_before(node):
        made = node.graph.call_function(stand_in, (node.args[0], node.args[size]))
    node.replace_all_uses_with(made)


def test_every_dropped_collective_is_found(lock_step: LockStep, first_step: Run) -> None:
    source = lock_step.program.graph_module.graph
    collectives = [node for node in source.nodes if is_collective(node)]
    assert {node.target for node in collectives} == {ops.all_reduce, ops.exchange_counts, ops.dispatch, ops.combine}
    for gone in collectives:
        lock_step.reset()
        copied, env = torch.fx.Graph(), {}
        copied.output(copied.graph_copy(source, env))
        drop(env[gone])
        copied.erase_node(env[gone])
        lock_step.program.graph_module.graph = copied
        with pytest.raises((ParityError, VerifyError)):
            compare(lock_step.run(BATCHES[:1]), first_step)
            pytest.fail(f"nothing noticed that {gone.name} is gone")


def is_collective(node: Node) -> bool:
    return node.op == "call_function" and node.target in ops.COLLECTIVES


def test_swapped_experts_are_found(lock_step: LockStep, reference: Run) -> None:
    """Two experts of one rank change places everywhere: weights, moments and gradients agree with each other."""
    for held in lock_step.ranks:
        for name, weight in held.items():
            if "experts" in name:
                with torch.no_grad():
                    weight[:2] = weight[:2].flip(0)
    with pytest.raises(ParityError, match=r"outputs|grads"):
        compare(lock_step.run(BATCHES), reference)


@pytest.mark.parametrize("name", ["sync-grads", "sync-loss"])
def test_a_skipped_reduction_is_found(name: str, reference: Run) -> None:
    pipeline = ",".join(part for part in default_pipeline(PLAN, step=True).split(",") if part != name)
    with pytest.raises(ParityError, match=r"not bitwise equal|differ by more"):
        compare(LockStep(build(CONFIG), PLAN, BATCHES[0], pipeline=pipeline).run(BATCHES), reference)


def test_a_gradient_off_by_a_thousandth_is_found_and_named(lock_step: LockStep, first_step: Run) -> None:
    names = [item.name for item in lock_step.program.outputs if item.kind is OutputKind.GRAD]
    assert len(names) == len(first_step.weights)
    for name in names:

        def scale(grads: dict[str, Tensor], name: str = name) -> None:
            grads[name] = grads[name] * 1.001

        lock_step.reset()
        with pytest.raises(ParityError, match=r"off by a factor alone: \S+ by 1\.001"):
            compare(lock_step.run(BATCHES[:1], change=scale), first_step)


# ---- captures that are remembered --------------------------------------------------------------------------------------


def _changed(model: nn.Module, how: str) -> nn.Module:
    layer = model.get_submodule("layers.0.moe")
    if how == "attribute":
        layer.config = replace(CONFIG, top_k=1)
    elif how == "hook":
        layer.register_forward_hook(lambda module, args, out: (out[0] * 2, out[1]))
    elif how == "frozen":
        layer.router.weight.requires_grad_(False)
    elif how == "shared":
        model.get_submodule("layers.1.moe").router.weight = layer.router.weight
    elif how == "eval":
        model.eval()
    return model


def test_a_call_is_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[nn.Module] = []

    def counted(model: nn.Module, *args: Any, **kwargs: Any) -> Captured:
        taken.append(model)
        return capture_model(model, *args, **kwargs)

    monkeypatch.setattr(capture_memo, "capture_model", counted)
    other = replace(PLAN, dp=1, ep=1)
    first, second, third = (LockStep(build(CONFIG), plan, BATCHES[0]) for plan in (PLAN, PLAN, other))
    assert len(taken) <= 1 and first.program.graph_module is not second.program.graph_module
    assert third.program.graph_module is not second.program.graph_module
    for how in ("attribute", "hook", "frozen", "shared", "eval"):
        taken.clear()
        LockStep(_changed(build(CONFIG), how), PLAN, BATCHES[0])
        assert taken, f"a model with another {how} was answered from memory"
