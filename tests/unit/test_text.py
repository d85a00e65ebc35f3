"""Saving a program as Python and loading it back, also after edits by hand."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import moecompile as mc
from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.compiled import CompiledCall
from moecompile.errors import CaptureError
from moecompile.placement.types import text as placement_text
from moecompile.plan import Plan
from moecompile.printer import graph_text, saved_text, tensor_text
from moecompile.program import Program
from moecompile.text import _tensor
from tests.support import golden, models
from tests.support.parity import slice_for
from tests.support.pool import Ranks, held_grads, parallel

PLAN = Plan(dp=2, ep=2)
CONFIG = models.Config(style="ops", layers=1, aux=0.1)
BATCH = models.tokens(4, 3, 0, ignored=0.2)
SLICES = [slice_for(BATCH, PLAN, rank) for rank in range(2)]


@functools.cache
def program() -> Program:
    """A whole training step of a small model; not to be changed."""
    return mc.trace(models.build(CONFIG), PLAN, SLICES[0])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "step.py"
    program().save(path)
    return path


def edit(path: Path, pattern: str, new: str) -> Path:
    """Replace what the pattern matches, exactly once."""
    text, count = re.subn(pattern, new, path.read_text(), flags=re.MULTILINE)
    assert count == 1, f"{pattern} is there {count} times"
    path.write_text(text)
    return path


def worst(found: Program) -> float:
    """Largest relative error of loss and gradients against the plain model."""
    model = models.build(CONFIG)
    loss = model(**BATCH)["loss"]
    loss.backward()
    result = mc.simulate_ranks(models.build(CONFIG), PLAN, SLICES, program=found)
    assert result.loss is not None
    errors = [float(((result.loss - loss) / loss).detach().abs())]
    for name, param in model.named_parameters():
        assert param.grad is not None
        errors.append(float((result.grads[name] - param.grad).norm() / param.grad.norm()))
    return max(errors)


# ---- round trip ------------------------------------------------------------------------------------------------------


def test_a_loaded_program_has_the_same_text_and_the_same_numbers(saved: Path) -> None:
    loaded = mc.load(saved)
    assert saved_text(loaded) == saved.read_text()
    assert worst(loaded) < 1e-12
    here, there = (mc.simulate_ranks(models.build(CONFIG), PLAN, SLICES, program=item) for item in (program(), loaded))
    assert torch.equal(here.loss, there.loss)  # type: ignore[arg-type]
    assert all(torch.equal(here.grads[name], there.grads[name]) for name in here.grads)


def placed(node: Any) -> list[dict[str, Any]]:
    """Where a value lives, or each element of a tuple. Rows do not say in the text whose they are: no pass of this level asks."""
    return meta.item_placements(node) or [meta.placements(node)]


def test_values_directions_modules_and_interface_survive(saved: Path) -> None:
    loaded, original = mc.load(saved), program()
    assert (loaded.inputs, loaded.outputs, loaded.plan, loaded.level) == (
        original.inputs, original.outputs, original.plan, original.level,
    )  # fmt: skip
    assert (loaded.facts, loaded.layers, loaded.out_spec) == (original.facts, original.layers, original.out_spec)
    for here, there in zip(loaded.graph.nodes, original.graph.nodes, strict=True):
        if here.op == "output":
            continue
        assert (here.name, here.target) == (there.name, there.target)
        assert meta.direction(here) is meta.direction(there)
        assert meta.module_path(here) == meta.module_path(there)
        for one, other in zip(placed(here), placed(there), strict=True):
            assert placement_text(one) == placement_text(other)


def test_passes_go_on_with_a_loaded_program(tmp_path: Path) -> None:
    """Half the pipeline, through text, the other half: the same text as in one go."""
    first, second = (
        "recognize-moe,record-metrics,shard-dense",
        "shard-experts,insert-dispatch,differentiate,sync-loss,sync-grads",
    )
    whole = golden.run(golden.captured(), f"{first},{second}")
    half = golden.run(golden.captured(), first)
    half.save(tmp_path / "half.py")
    assert graph_text(golden.run(mc.load(tmp_path / "half.py"), second)) == graph_text(whole)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3, 2), (0, 4)])
def test_constants_survive_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 100).to(dtype)
    found = _tensor(*tensor_text(tensor))
    assert found.dtype is dtype and found.shape == tensor.shape and torch.equal(found, tensor)


# ---- edits -----------------------------------------------------------------------------------------------------------


def test_a_deleted_reduction_of_gradients_loads_runs_and_breaks_parity(saved: Path) -> None:
    """The text is the program: what is not written there is not done."""
    edited = mc.load(edit(saved, r"= torch\.ops\.moe\.all_reduce\.default\((cat\w*), 'sum', 'dp'\).*$", r"= \1"))
    assert len(list(edited.graph.nodes)) == len(list(program().graph.nodes)) - 1
    assert worst(edited) > 1e-3


def test_a_deleted_reduction_of_the_loss_breaks_parity(saved: Path) -> None:
    """Here the line goes and its user reads what the line read."""
    line = re.search(
        r"^    (\w+) = torch\.ops\.moe\.all_reduce\.default\((add\w*), 'sum', 'dp'\).*\n", saved.read_text(), re.M
    )
    assert line is not None
    edit(saved, re.escape(line.group(0)), "")
    edited = mc.load(edit(saved, rf"return \({line.group(1)},", f"return ({line.group(2)},"))
    assert worst(edited) > 1e-3


def test_a_line_written_in_plain_torch_is_a_node(saved: Path) -> None:
    edited = mc.load(
        edit(saved, r"    return \((\w+),", r"    twice = 2 * torch.add(\1, torch.zeros(()))\n    return (twice,")
    )
    added = [node.name for node in edited.graph.nodes if node.name not in {one.name for one in program().graph.nodes}]
    assert len(added) == 3 and added[-1] == "twice"
    assert worst(edited) > 0.5


@pytest.mark.parametrize(
    ("pattern", "new", "told"),
    [
        (r"^PROGRAM = ", "OTHER = ", "there is no PROGRAM; give a file that Program.save wrote"),
        (r"'format': 1", "'format': 99", "the format is 99, this version reads 1"),
        (r"^def forward\(", "def backward(", "there is no function 'forward'"),
        (r"^def forward\(", "def forward((", "this is not Python"),
        (r"    return \(\w+, ", "    return (", "keep both in step"),
        (r"^    ids,  # batch.*\n", "", "keep both in step"),
        (r"= torch\.ops\.aten\.embedding\.default\(\w+, ids\)", "= missing", "this line cannot be run"),
        (r"= torch\.ops\.aten\.embedding\.default\(\w+, ids\)", "= ids.float()", "call torch.ops"),
        (r"= torch\.ops\.aten\.embedding\.default\(", "= torch.ops.aten.mm.default(", "'embedding' cannot be computed"),
    ],
)
def test_a_broken_text_is_refused_with_its_place(saved: Path, pattern: str, new: str, told: str) -> None:
    with pytest.raises(CaptureError, match=re.escape(told)) as error:
        mc.load(edit(saved, pattern, new))
    assert str(saved) in str(error.value)


def test_the_error_names_the_line(saved: Path) -> None:
    edit(saved, r"= torch\.ops\.aten\.embedding\.default\(", "= torch.ops.aten.mm.default(")
    at = next(i for i, line in enumerate(saved.read_text().splitlines(), 1) if " embedding = " in line)
    with pytest.raises(CaptureError, match=f":{at}: "):
        mc.load(saved)


def test_what_has_no_text_form_is_refused_when_saving(tmp_path: Path) -> None:
    odd = golden.captured()
    odd.out_template = (object(),)
    with pytest.raises(CaptureError, match="which has no text form; return tensors"):
        odd.save(tmp_path / "odd.py")


# ---- on processes ----------------------------------------------------------------------------------------------------


def _train_on_loaded(rank: int, path: str) -> dict[str, Any]:
    """One step of the compiled program and one of the loaded one, on the same model."""
    found: dict[str, Any] = {}
    with parallel(models.build(CONFIG), PLAN, example=SLICES[rank]) as model:
        state = model._state
        for kind in ("compiled", "loaded"):
            if kind == "loaded":
                loaded = CompiledCall(mc.load(path), state.groups, state.weights)
                state.cache.update(dict.fromkeys(state.cache, loaded))
            loss = model(**SLICES[rank])["loss"]
            loss.backward()
            found[kind] = (loss.detach(), held_grads(model))
            model.zero_grad()
    return found


def test_a_loaded_program_runs_through_the_parallel_model(saved: Path, ranks: Ranks) -> None:
    model = models.build(CONFIG)
    model(**BATCH)["loss"].backward()
    for found in ranks.run(2, _train_on_loaded, str(saved)):
        (loss, grads), (loaded_loss, loaded_grads) = found["compiled"], found["loaded"]
        assert torch.equal(loss, loaded_loss)
        assert grads.keys() == loaded_grads.keys() and grads
        for name, grad in grads.items():
            assert torch.equal(grad, loaded_grads[name])
        wanted: Tensor = model.head.weight.grad  # type: ignore[assignment]
        torch.testing.assert_close(loaded_grads["head.weight"], wanted, rtol=1e-11, atol=0)


def test_no_collective_is_lost_in_the_text(saved: Path) -> None:
    """Every collective of the graph is a line of the file, with its axis."""
    text = saved.read_text()
    for node in graphs.find(program().graph, *ops.COLLECTIVES):
        line = next(line for line in text.splitlines() if line.strip().startswith(f"{node.name} = "))
        assert f"'{node.args[ops.AXIS_ARGUMENT[node.target]]}'" in line and "moves " in line  # type: ignore[index]
