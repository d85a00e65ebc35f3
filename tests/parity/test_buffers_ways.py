"""Buffers that a forward writes, called in ways that move them more than once, or that cannot be."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moecompile as mc
from moecompile import graph as graphs
from moecompile import ops
from moecompile.capture import capture_model
from moecompile.capture.compare import compare_capture
from moecompile.compilation import Request, compile_call
from moecompile.plan import Plan
from moecompile.program import OutputKind
from moecompile.weights import Weights
from tests.support import buffer_models as models
from tests.support.parity import LockStep, ParityError, compare, difference, plain, slice_for


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_buffers()}


def check(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys() and wanted
    for name, value in wanted.items():
        assert difference(name, found[name], value) < 1e-11


@pytest.mark.parametrize("rows", [4, 5], ids=["even", "uneven"])
def test_each_microbatch_moves_a_buffer_once(rows: int) -> None:
    """As in one process that runs the microbatches one after the other; the larger ones come first."""
    batch = models.batch(rows=rows)
    parallel = mc.parallelize(models.made(models.MeanReassigned, layers=1), Plan(dp=1, microbatches=2))
    parallel(**batch)["loss"].backward()
    alone = models.made(models.MeanReassigned, layers=1)
    parts = [value.tensor_split(2) for value in batch.values()]
    for x, labels in zip(*parts, strict=True):
        alone(x, labels)
    check(buffers(parallel), buffers(alone))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_forward_moves_a_buffer_once(reentrant: bool) -> None:
    """Torch runs the forward again in the backward, and would count twice."""
    kind = type("Kind", (models.Checkpointed,), {"reentrant": reentrant})
    model = models.made(kind, layers=1)
    captured = capture_model(model, (), models.batch())
    assert [item.name for item in captured.outputs if item.kind is OutputKind.BUFFER] == ["layers.0.calls"]
    left_out = compare_capture(model, captured, (), models.batch(), 1)
    assert ("use_reentrant=True" in left_out) if reentrant else left_out == ""
    parallel = mc.parallelize(model, Plan(dp=1))
    parallel(**models.batch())["loss"].backward()
    assert parallel.layers[0].calls.tolist() == [0, 1, 1]


def test_a_model_on_meta() -> None:
    with torch.device("meta"):
        model = models.Model(models.Norm, layers=1)
    torch.manual_seed(3)
    parallel = mc.parallelize(model, Plan(dp=1))
    batch = {name: value.float() for name, value in models.batch().items()}
    parallel(**batch)["loss"].backward()
    norm: Any = parallel.layers[0].norm
    assert norm.num_batches_tracked == 1 and norm.running_mean.abs().max() > 0
    assert (norm.running_var - 1).abs().max() > 0


def test_the_comparison_sees_a_buffer_that_is_not_written() -> None:
    model = models.made(models.Norm, layers=1)
    captured = capture_model(model, (), models.batch())
    before = copy.deepcopy(model.state_dict())
    assert compare_capture(model, captured, (), models.batch(), 1) == ""
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    at = next(at for at, item in enumerate(captured.outputs) if item.name.endswith("running_var"))
    output = captured.graph_module.graph.output_node()
    output.args = (tuple(node for place, node in enumerate(output.args[0]) if place != at),)
    del captured.outputs[at]
    captured.graph_module.recompile()
    with pytest.raises(mc.CaptureError, match=r"lacks what .* does to buffer 'layers\.0\.norm\.running_var'"):
        compare_capture(model, captured, (), models.batch(), 1)


def test_without_the_write_back_the_difference_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Weights, "write", lambda self, values: None)
    parallel = mc.parallelize(models.made(models.Load, layers=1), Plan(dp=1))
    parallel(**models.batch())["loss"].backward()
    alone = models.made(models.Load, layers=1)
    alone(**models.batch())
    with pytest.raises(AssertionError):
        check(buffers(parallel), buffers(alone))


def test_without_the_sum_over_ranks_the_difference_is_seen() -> None:
    """Each rank would have the counts of its own rows."""
    run = LockStep(models.made(models.Load, layers=1), Plan(dp=2, ep=2), models.batch())
    reference = plain(models.made(models.Load, layers=1), [models.batch()])
    compare(run.run([models.batch()]), reference)
    at = [item.kind for item in run.program.outputs].index(OutputKind.BUFFER)
    written = run.program.output_nodes()[at]
    sums = [node for node in graphs.ancestors(written) if node.target is ops.all_reduce]
    assert len(sums) == 1
    graphs.replace(sums[0], sums[0].args[0])
    run.program.graph_module.recompile()
    run.reset()
    with pytest.raises(ParityError, match=r"layers\.0\.load: copies on different ranks are not bitwise equal"):
        run.run([models.batch()])


def test_a_program_says_what_it_writes_and_is_read_back(tmp_path: Any) -> None:
    plan = Plan(dp=2, ep=2)
    model = models.made(models.Steps, layers=1)
    program = mc.trace(model, plan, slice_for(models.batch(), plan, 0))
    assert "buffer layers.0.steps" in str(program)
    program.save(tmp_path / "program.py")
    again = mc.load(tmp_path / "program.py")
    assert again.outputs == program.outputs and str(again) == str(program)
    calls = [slice_for(models.batch(), plan, rank) for rank in range(2)]
    found = mc.simulate_ranks(model, plan, calls, program=again)
    assert found.buffers == {"layers.0.steps": torch.tensor(1)} and model.layers[0].steps == 0


@pytest.mark.parametrize("plan", [Plan(dp=2, ep=2), Plan(dp=2)], ids=["ep2", "dp2"])
@pytest.mark.parametrize("kind", list(models.REFUSED), ids=lambda kind: kind.__name__)
def test_rows_of_one_expert_are_refused(kind: type[models.Layer], plan: Plan) -> None:
    with pytest.raises(mc.CaptureError, match=r"buffer_models.py:\d+.*" + models.REFUSED[kind]):
        compile_call(models.made(kind, layers=1), Request((), slice_for(models.batch(), plan, 0), plan))
