"""recognize-moe: every way of writing the layer becomes the same ops with the same meaning; look-alikes are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moecompile import graph as graphs
from moecompile import ops
from moecompile import pipeline as pipelines
from moecompile.capture import capture_model
from moecompile.compilation import Request, as_program
from moecompile.errors import CaptureError
from moecompile.pass_base import PassContext
from moecompile.passes import PASSES
from moecompile.passes.recognize_moe import RecognizeMoe
from moecompile.plan import Plan
from moecompile.printer import graph_text
from moecompile.program import InputKind, Program
from moecompile.recognition import match
from tests.support import moe_look_alikes as look_alikes
from tests.support import moe_odd_styles as odd
from tests.support import moe_stacked_styles as stacked
from tests.support import moe_styles as styles
from tests.support import moe_wider_styles as wider
from tests.support.golden import Block, Golden, Rewrite, assert_needs

ONE = Plan(dp=1)
TOKENS = 13
ACCEPTED = [*styles.SEPARATE, *stacked.STACKED, *wider.WIDER, *odd.ODD]


def program_of(model: nn.Module, *args: Tensor, plan: Plan = ONE) -> Program:
    """The captured model, before any pass."""
    program = as_program(capture_model(model, args, {}), Request(args, {}, plan))
    graphs.tidy_names(program.graph)  # as every pipeline does
    return program


def recognised(model: nn.Module, *args: Tensor, plan: Plan = ONE) -> Program:
    return recognise(program_of(model, *args, plan=plan))


def recognise(program: Program) -> Program:
    return pipelines.run(program, pipelines.parse("recognize-moe", PASSES), PASSES)


def tokens(count: int = TOKENS, width: int = styles.WIDTH) -> Tensor:
    return torch.randn(count, width, dtype=torch.float64)


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def values_of(program: Program, model: nn.Module, batch: tuple[Tensor, ...]) -> list[Any]:
    """What the program's placeholders hold: parameters by name, stacked where the input is."""
    known = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    call = iter(batch)
    found: list[Any] = []
    for item in program.inputs:
        if item.kind is InputKind.BATCH:
            found.append(next(call))
        elif item.kind is InputKind.CONSTANT:
            found.append(program.constants[item.name])
        else:
            parts = [known[name] for name in item.fqns]
            found.append(torch.stack(parts) if item.stacked else parts[0])
    return found


def difference(program: Program, model: nn.Module, x: Tensor) -> float:
    """The largest difference of result and gradients, relative to the largest value of each."""
    x = x.clone().requires_grad_()
    got = torch.fx.Interpreter(program.graph_module).run(*values_of(program, model, (x,)))[0]
    wanted = model(x)
    weights = [x, *(item for item in model.parameters() if item.requires_grad)]
    factor = torch.randn_like(wanted)
    sides = [
        [side, *torch.autograd.grad((side * factor).sum(), weights, allow_unused=True, materialize_grads=True)]
        for side in (got, wanted)
    ]
    worst = 0.0
    for one, other in zip(*sides, strict=True):
        assert one.shape == other.shape and bool(torch.isfinite(other).all())
        one, other = one.detach(), other.detach()
        worst = max(worst, float((one - other).abs().max() / other.abs().max().clamp(min=1e-30)))
    return worst


# Applies ----------------------------------------------------------------------------------------------------------


@cache
def style(kind: type[styles.Layer]) -> tuple[nn.Module, Program]:
    """A model in this style and its recognised program, which the tests only read."""
    model = made(kind)
    return model, recognised(model, tokens())


@pytest.mark.parametrize("kind", ACCEPTED, ids=lambda kind: kind.__name__)
def test_same_meaning(kind: type[styles.Layer]) -> None:
    """Result and every gradient, on several batches: experts in use, all tokens alike, experts with one token."""
    model, program = style(kind)
    assert program.history[-1].rewrites == kind.regions
    crowd = tokens(1).repeat(TOKENS, 1)
    crowd[0] = tokens(1)
    for batch in (tokens(), tokens(1).repeat(TOKENS, 1), crowd):
        assert difference(program, model, batch) < 1e-12


@pytest.mark.parametrize("kind", ACCEPTED, ids=lambda kind: kind.__name__)
def test_canonical_form(kind: type[styles.Layer]) -> None:
    """One permute, grouped linears, one unpermute; the old way is gone, and with it every unknown size."""
    model, program = style(kind)
    permutes = graphs.find(program.graph, ops.permute)
    assert len(permutes) == len(graphs.find(program.graph, ops.unpermute)) == kind.regions
    assert graphs.find(program.graph, ops.grouped_linear) and permutes[0].args[2] == styles.EXPERTS
    assert not any(list(graphs.symbolic_sizes(node.meta.get("val"))) for node in program.graph.nodes)
    picks = [node for node in program.graph.nodes if "index" in str(node.target) or "nonzero" in str(node.target)]
    assert not picks

    assert len(program.layers) == kind.regions
    for record in program.layers:
        assert (record["num_experts"], record["top_k"]) == (styles.EXPERTS, kind.top_k)
        assert re.search(r"moe_(\w+_)?styles\.py:\d+$", record["source"]) and record["how"]
    names = {name for item in program.inputs for name in item.fqns}
    assert (
        {name for record in program.layers for name in record["params"]}
        <= names
        == set(dict(model.named_parameters())) | {"bias"} & names
    )


def test_stacked_input_names_its_experts() -> None:
    program = recognised(made(styles.BackwardLoop), tokens())
    (item,) = [item for item in program.inputs if item.name == "experts_w1_weight"]
    assert item.kind is InputKind.PARAM and item.requires_grad
    assert item.fqns == tuple(f"experts.{e}.w1.weight" for e in range(styles.EXPERTS))
    assert item.shape == (styles.EXPERTS, styles.INNER, styles.WIDTH)
    node = next(node for node, found in program.items() if found is item)
    assert tuple(node.meta["val"].shape) == item.shape and node.meta["val"].requires_grad


def test_swapped_experts_are_seen() -> None:
    """The comparison of these tests can fail."""
    model = made(styles.WhereLoop)
    program = recognised(model, tokens())
    at = next(index for index, item in enumerate(program.inputs) if item.name == "experts_w2_weight")
    names = list(program.inputs[at].fqns)
    names[0], names[1] = names[1], names[0]
    program.inputs[at] = type(program.inputs[at])(**{**vars(program.inputs[at]), "fqns": tuple(names)})
    assert difference(program, model, tokens()) > 1e-3


@pytest.mark.parametrize(
    ("kind", "limit"), [(wider.MissingExpert, TOKENS), (wider.DroppedLoop, wider.DroppedLoop.limit)]
)
def test_choices_without_an_expert_are_not_counted(kind: type[styles.Layer], limit: int) -> None:
    """The recorded tokens per expert are those that an expert served, whatever rows the layer moves."""
    model, x = made(kind), tokens()
    program = program_of(model, x)
    pipelines.run(program, pipelines.parse("recognize-moe,record-metrics", PASSES), PASSES)
    model.requires_grad_(False)
    counts = torch.fx.Interpreter(program.graph_module).run(*values_of(program, model, (x,)))[-1]
    chosen = model.route(x)[1].flatten().bincount(minlength=styles.EXPERTS + 1)[: styles.EXPERTS]  # type: ignore[operator]
    assert counts.tolist() == chosen.clamp(max=limit).tolist() and int(counts.sum()) < 2 * TOKENS


class Deep(nn.Sequential):
    """Layers with a norm before and a residual connection around each."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = x + layer(nn.functional.rms_norm(x, (styles.WIDTH,)))
        return x


@pytest.mark.parametrize("kind", [nn.Sequential, Deep])
def test_layers_of_a_deep_model(kind: type[nn.Sequential]) -> None:
    model = kind(styles.WhereLoop(), nn.LayerNorm(styles.WIDTH), stacked.DenseBmm(), styles.SortUnsort()).double()
    program = recognised(model, tokens())
    assert [(record["module"], record["how"].split()[0]) for record in program.layers] == [
        ("0", "loop"),
        ("2", "stacked"),
        ("3", "tokens"),
    ]
    assert difference(program, model, tokens()) < 1e-12


def test_low_precision_experts() -> None:
    """bf16 experts behind an fp32 router: within bf16 rounding, and the result has the plain model's type."""
    model = styles.WhereLoopShared()
    model.experts.bfloat16(), model.shared.bfloat16()  # type: ignore[operator]
    model.gate.weight = nn.Parameter(model.gate.weight.float())
    model.route = lambda x: styles.Layer.route(model, x.float())  # type: ignore[method-assign]
    x = torch.randn(TOKENS, styles.WIDTH, dtype=torch.bfloat16)
    program = recognised(model, x)
    model.requires_grad_(False)
    got = torch.fx.Interpreter(program.graph_module).run(*values_of(program, model, (x,)))[0]
    wanted = model(x)
    assert got.dtype == wanted.dtype == torch.bfloat16
    assert torch.allclose(got.float(), wanted.float(), atol=0.02, rtol=0.02) and float(wanted.abs().max()) > 0.02


def test_autocast() -> None:
    model = styles.WhereLoopShared()
    x = torch.randn(TOKENS, styles.WIDTH)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        program = recognised(model, x)
        wanted = model(x)
    got = torch.fx.Interpreter(program.graph_module).run(*values_of(program, model, (x,)))[0]
    assert {node.meta["val"].dtype for node in graphs.find(program.graph, ops.grouped_linear)} == {torch.bfloat16}
    assert got.dtype == wanted.dtype and torch.allclose(got, wanted, atol=0.02, rtol=0.02)


def test_large_layers_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No expert weight is ever computed with, and a large batch is tried on few tokens."""
    with torch.device("meta"):
        model = styles.WhereLoop()
        model.experts = nn.ModuleList([styles.MLP(styles.WIDTH, 2**20) for _ in range(styles.EXPERTS)])
    scales = []
    choose = match.choose_scale
    monkeypatch.setattr(match, "choose_scale", lambda *args: scales.append(choose(*args)) or scales[-1])
    program = recognised(model, torch.randn(2**16, styles.WIDTH))
    assert len(program.layers) == 1
    assert scales[0].size(2**16) < 64


# Declines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [look_alikes.NoMoe, look_alikes.SoftMixture])
def test_nothing_to_recognise(kind: type[nn.Module]) -> None:
    program = program_of(made(kind), tokens())
    before = graph_text(program)
    recognise(program)
    assert (program.history[-1].rewrites, program.layers, graph_text(program)) == (0, [], before)


def test_no_moe_cannot_be_expert_parallel() -> None:
    with pytest.raises(CaptureError, match=r"no MoE layer, and ep=2 needs one; use ep=1"):
        recognised(made(look_alikes.NoMoe), tokens(), plan=Plan(dp=2, ep=2))


@pytest.mark.parametrize("kind", [look_alikes.WideNorm, look_alikes.SparseFeatures])
def test_a_choice_without_experts_is_named(kind: type[nn.Module]) -> None:
    with pytest.raises(
        CaptureError, match=r"moe_look_alikes\.py:\d+\): this choice among \d+ leads to no experts; use ep=1"
    ):
        recognised(made(kind), tokens(), plan=Plan(dp=2, ep=2))
    assert recognised(made(kind), tokens(), plan=Plan(dp=2)).layers == []


def test_layer_in_moe_ops_is_recorded() -> None:
    program = program_of(made(Block), tokens(3, 2))
    before = graph_text(program)
    recognise(program)
    assert program.history[-1].rewrites == 0 and graph_text(program) == before
    (record,) = program.layers
    assert (record["how"], record["num_experts"], record["top_k"]) == ("moe ops", 4, 1)
    assert record["params"] == ["w1", "w2"] and "golden.py" in record["source"]


def test_runs_twice() -> None:
    program = recognised(made(styles.WhereLoop), tokens())
    before, layers = graph_text(program), list(program.layers)
    again = RecognizeMoe().run(program.graph_module, PassContext(program, graphs.mode_of(program.graph)))
    assert (again, graph_text(program), program.layers) == (0, before, layers)


# Rejects ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", look_alikes.REFUSED, ids=lambda kind: kind.__name__)
def test_refused(kind: type[styles.Layer]) -> None:
    """The sentence says where, what, and what to try."""
    with pytest.raises(CaptureError) as refused:
        recognised(made(kind), tokens())
    message = str(refused.value)
    assert look_alikes.REFUSED[kind] in message and message.endswith(".") and message.count("recognize-moe") == 1
    assert re.search(r"moe_\w+\.py:\d+|experts\.\d", message)
    assert any(advice in message for advice in ("accepted forms", "freeze all", "parameter of its own"))


def test_capacity_is_seen_in_a_large_batch() -> None:
    """A limit far above the size of the usual probe: more tokens are tried, so that it is seen and kept."""
    model = made(wider.DroppedLoop)
    model.limit = 100  # type: ignore[assignment]
    program = recognised(model, tokens(1024))
    assert [node.args[1] for node in graphs.find(program.graph, torch.ops.aten.le.Scalar)] == [100]
    assert difference(program, model, tokens(1024)) < 1e-12


# Golden texts -----------------------------------------------------------------------------------------------------


class Smallest(styles.Layer):
    """Top-1 routing over two experts of one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(2, 2, bias=False)
        self.experts = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        prob, ids = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t = torch.where(ids == e)[0]
            y.index_add_(0, t, expert(x[t]) * prob[t, None])
        return y


class SmallestStacked(Smallest):
    """Every expert on all tokens: batched products with weights ``[E, in, out]``."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList()
        self.w = nn.Parameter(torch.randn(2, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        probs = self.gate(x).softmax(-1)
        probs = probs * torch.zeros_like(probs).scatter(1, probs.argmax(-1, keepdim=True), 1.0)
        return (torch.einsum("th,eho->teo", x, self.w).relu() * probs.unsqueeze(-1)).sum(1)


@pytest.mark.parametrize(("case", "kind"), [("loop", Smallest), ("stacked", SmallestStacked), ("moe_ops", Block)])
def test_golden(golden: Golden, case: str, kind: type[nn.Module]) -> None:
    program = program_of(made(kind), tokens(3, 2))
    before = graph_text(program)
    recognise(program)
    golden(case, Rewrite(program, "recognize-moe", before, graph_text(program)))


def test_effect() -> None:
    def effect() -> None:
        program = recognised(made(styles.WhereLoop), tokens())
        assert len(graphs.find(program.graph, ops.permute)) == 1

    assert_needs(RecognizeMoe, effect)
