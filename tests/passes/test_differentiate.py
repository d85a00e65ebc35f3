"""differentiate: one joint graph, the same with and without templates."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moecompile as mc
from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.errors import PassError
from moecompile.passes.differentiate import Differentiate
from moecompile.plan import Plan
from moecompile.program import Level, OutputKind, Program
from moecompile.runtime.simulator import simulate
from tests.support import golden

BEFORE = "recognize-moe,shard-dense,shard-experts,insert-dispatch"


def rewrite(item: str = "differentiate", model: nn.Module | None = None, plan: Plan = golden.PLAN) -> golden.Rewrite:
    return golden.rewrite(BEFORE, item, plan, model)


def test_golden(golden: golden.Golden) -> None:
    golden("experts", rewrite(model=golden_experts()))


def golden_experts() -> nn.Module:
    return golden.Experts()


def assert_differentiated(program: Program) -> None:
    """A gradient for each parameter, of its shape; a backward that is the transpose of the forward."""
    assert program.level is Level.STEP
    params = {node.name: meta.tensor(node).shape for node in program.placeholders() if node.name != "x"}
    grads = {
        item.name: meta.tensor(found).shape
        for found, item in zip(program.output_nodes(), program.outputs, strict=True)
        if item.kind is OutputKind.GRAD
    }
    assert grads == params and len(grads) == 3
    backward = {node.target for node in program.graph.nodes if meta.direction(node) is meta.Direction.BACKWARD}
    assert {ops.dispatch, ops.grouped_linear_wgrad, ops.unpermute_backward} <= backward


def test_effect() -> None:
    golden.assert_needs(Differentiate, lambda: assert_differentiated(rewrite().program))


def test_layers_of_one_structure_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three equal blocks: templates give the numbers of one piece, bit for bit, from one trace of the block."""
    from moecompile.tracing import stitch

    traced: list[int] = []
    original = stitch.trace
    monkeypatch.setattr(stitch, "trace", lambda *args: traced.append(len(args[0].nodes)) or original(*args))
    templates = rewrite(model=golden.Stack(), plan=Plan(dp=1)).program
    in_pieces = len(traced)
    whole = rewrite("differentiate{templates=false}", golden.Stack(), Plan(dp=1)).program
    assert len(traced) - in_pieces == 1
    assert in_pieces < 7  # blocks and what is between them are seven segments
    torch.manual_seed(2)
    inputs = [torch.randn(node.meta["val"].shape, dtype=torch.float64) for node in whole.placeholders()]
    (first,), (second,) = (simulate(found.graph_module, [inputs], found.mesh) for found in (templates, whole))
    assert len(first) == len(second) == 10
    for here, there in zip(first, second, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-14, atol=1e-300)


def test_twins_are_forward_nodes_of_the_same_layer() -> None:
    program = rewrite(model=golden.Stack(), plan=Plan(dp=1)).program
    by_name = {node.name: node for node in program.graph.nodes}
    twins = [(node, by_name[name]) for node in program.graph.nodes if (name := meta.twin(node)) is not None]
    assert twins
    for node, twin in twins:
        assert meta.direction(twin) is meta.Direction.FORWARD
        assert meta.layer(node) == meta.layer(twin)


def test_frozen_parameters_have_no_gradient() -> None:
    model = golden.Block()
    model.w1.requires_grad_(False)
    program = rewrite(model=model).program
    assert {item.name for item in program.outputs if item.kind is OutputKind.GRAD} == {"w2", "gate_weight"}
    assert len(graphs.find(program.graph, ops.grouped_linear_wgrad)) == 1


class NoLoss(golden.Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).reshape(1)


def test_a_model_without_loss_is_refused() -> None:
    with pytest.raises(PassError, match="the model returns no loss; return one"):
        rewrite(model=NoLoss())


def test_a_second_run_is_refused() -> None:
    with pytest.raises(PassError, match="'differentiate' works on the model graph"):
        golden.run(rewrite().program, "differentiate")


class Turned(nn.Module):
    """softplus_backward keeps the order of the transposed gradient that it reads, although its fake rule promises another."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(golden.WIDTH, golden.WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        turned = F.softplus(self.head(x.reshape(-1, 3, golden.WIDTH))).transpose(-1, -2).exp()
        return (turned * torch.arange(3)).sum()


@pytest.mark.parametrize("dp", [1, 2])
def test_views_of_what_lies_otherwise_than_promised(dp: int) -> None:
    model, x = Turned(), torch.randn(12, golden.WIDTH, dtype=torch.float64)
    found = mc.simulate_ranks(model, Plan(dp=dp), [(part,) for part in x.chunk(dp)])
    loss = model(x)
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    for (name, _), grad in zip(model.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(found.grads[name], grad, rtol=1e-12, atol=1e-13)


class Filled(nn.Module):
    """Layers whose gradients torch computes by writing into a tensor of its own: ``new_zeros`` and a copy into a part of it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.head = how, nn.Linear(golden.WIDTH, golden.WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.head(x.reshape(-1, 3, golden.WIDTH))
        if self.how == "fft":
            mixed = torch.fft.irfft(torch.fft.rfft(rows, dim=1), n=3, dim=1).exp()
        else:
            mixed = F.adaptive_avg_pool1d(rows.transpose(1, 2), 1).transpose(1, 2).square()
        return (mixed * torch.arange(mixed.shape[1], 0, -1)[:, None]).sum()


@pytest.mark.parametrize("how", ["fft", "pool"])
@pytest.mark.parametrize("dp", [1, 2])
def test_gradients_that_write_in_place(how: str, dp: int) -> None:
    """Elimination of dead code took the copies away, and with them the gradient."""
    model, x = Filled(how), torch.randn(12, golden.WIDTH, dtype=torch.float64)
    found = mc.simulate_ranks(model, Plan(dp=dp), [(part,) for part in x.chunk(dp)])
    wanted = torch.autograd.grad(model(x), list(model.parameters()))
    for (name, _), grad in zip(model.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(found.grads[name], grad, rtol=1e-12, atol=1e-13)
