"""split-stages: which stage computes what, which stage holds which weight, and what travels."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import moecompile as mc
from moecompile import meta
from moecompile.cli import inspect_model
from moecompile.compilation import Request, as_program, capture
from moecompile.errors import PassError, PlanError
from moecompile.plan import Plan
from moecompile.printer import graph_text
from moecompile.program import OutputKind, Program
from moecompile.stages import Stage, cut_stages, holders
from moecompile.tracing import stitch
from tests.support import buffer_models, golden
from tests.support import golden as golden_support
from tests.support.models import Config, build, tokens

CONFIG = Config("ops", layers=4, shared=True, tied=True, rotary=True, aux=0.1)
PLAN = Plan(dp=1, pp=2, microbatches=2)
BEFORE = "recognize-moe,shard-dense"
BATCH = tokens(4, 8, 0, ignored=0.2)


class Tied(nn.Module):
    """Two layers between a table that looks ids up and the same table as head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2)
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        scale = 1 + ids.unsqueeze(-1)  # from the batch alone: computed on both stages
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer(x) * scale
        out: Tensor = (x @ self.table.weight.t()).sum()
        return out


def test_golden(golden: golden.Golden) -> None:
    torch.manual_seed(0)
    request = Request((torch.randint(0, 4, (4,)),), {}, PLAN)
    model = Tied().double()
    found = golden_support.run(as_program(capture(model, request), request), BEFORE)
    before = graph_text(found)
    golden(
        "tied",
        golden_support.Rewrite(golden_support.run(found, "split-stages"), "split-stages", before, graph_text(found)),
    )


@functools.cache
def program(config: Config = CONFIG, plan: Plan = PLAN) -> Program:
    """Not to be changed."""
    return mc.trace(build(config), plan, BATCH)


def stages(config: Config = CONFIG, plan: Plan = PLAN) -> list[Stage]:
    return cut_stages(program(config, plan))


def test_each_stage_holds_its_layers_and_the_tied_weight_lies_on_both() -> None:
    held = holders(program())
    for name, _ in build(CONFIG).named_parameters():
        if "layers." in name:
            assert held[name] == (int(name.split("layers.")[1][0]) // 2,)
    assert [name for name, ranks in held.items() if ranks == (0, 1)] == ["embed.weight"]


def test_only_the_residual_stream_and_what_depends_on_weights_travels() -> None:
    """Position embeddings and masks are computed where they are read; the balance loss of the first layers goes to the loss."""
    first, last = stages()
    assert first.sent == last.received and first.received_grads == last.sent_grads
    shapes = sorted(item.shape for item in first.sent)
    assert shapes[-1] == (2, 8, CONFIG.hidden) and all(len(shape) == 0 or shape == shapes[-1] for shape in shapes)
    assert len(last.sent_grads) == len(first.sent)
    assert first.received == last.sent == first.sent_grads == last.received_grads == ()


def test_every_call_is_on_one_stage_and_every_output_comes_from_one() -> None:
    whole = program()
    parts = cut_stages(whole)
    for place, item in enumerate(whole.outputs):
        if item.kind is not OutputKind.USER and item.what != "num_valid":
            assert sum(place in stage.outputs for stage in parts) == 1, item
    made = [name for stage in parts for half in (stage.forward, stage.backward) if half for name in half.returns]
    assert len(made) == len(set(made))


def test_a_value_for_the_end_passes_through_stages_that_do_not_read_it() -> None:
    """The balance term of the first layer is added up before the loss, three stages on; a gradient comes back for it."""
    parts = stages(plan=Plan(dp=1, pp=4, microbatches=4))
    assert all(stage.backward is not None for stage in parts)
    assert [bool(stage.received) for stage in parts] == [False, True, True, True]
    for before, after in itertools.pairwise(parts):
        assert before.sent == after.received and before.received_grads == after.sent_grads


def test_a_rank_cuts_out_its_own_stages_alone() -> None:
    whole = program()
    every, (second,) = cut_stages(whole), cut_stages(whole, [1])
    assert second.forward.program.graph_module.code == every[1].forward.program.graph_module.code
    assert (second.outputs, second.received, second.saved) == (every[1].outputs, every[1].received, every[1].saved)


def test_nothing_changes_without_stages() -> None:
    plan = Plan(dp=1, microbatches=2)
    found = program(plan=plan)
    assert found.layout is None and not holders(found)
    assert not [node for node in found.graph.nodes if meta.stage(node) is not None]
    (entry,) = (entry for entry in found.history if entry.pass_text == "split-stages")
    assert entry.rewrites == 0 and entry.diff == ""
    with pytest.raises(PassError, match="no pipeline stages"):
        cut_stages(found)


class Step(nn.Module):
    """A linear that runs some times over, and a table of which one row is read."""

    def __init__(self, rows: int, times: int) -> None:
        super().__init__()
        self.linear, self.table, self.times = nn.Linear(4, 4), nn.Parameter(torch.ones(rows, 4)), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x + self.linear(x)
        return x + self.table[0]


class Unlike(nn.Module):
    """The first layer has the most weights, the last one computes the most."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Step(*sizes) for sizes in ((64, 1), (1, 1), (1, 1), (1, 1), (1, 7)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def test_equal_layers_of_several_stages_are_traced_once_for_all_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[int] = []
    original = stitch.trace
    monkeypatch.setattr(stitch, "trace", lambda *args: traced.append(len(args[0].nodes)) or original(*args))
    model = Unlike()
    model.layers = nn.ModuleList(Step(2, 1) for _ in range(6))
    counts, nodes = [], []
    for pp, microbatches in ((2, 2), (3, 3), (6, 6), (2, 8)):
        traced.clear()
        found = mc.trace(model, Plan(dp=1, pp=pp, microbatches=microbatches), (torch.randn(24, 4),))
        assert len({meta.stage(node) for node in found.graph.nodes if node.op == "call_function"}) == pp
        counts.append(len(traced))
        nodes.append(len(found.graph.nodes))
    assert counts == counts[:1] * 4 and counts[0] < 6
    assert nodes == nodes[:1] * 4


@pytest.mark.parametrize(
    ("layout", "found"), [("even", "Et*3|ttL"), ("balanced", "Et|t*4,L"), ("balanced-flops", "Et*4|tL")]
)
def test_layers_are_balanced_by_parameters_or_by_flops(layout: str, found: str) -> None:
    assert str(mc.trace(Unlike(), replace(PLAN, layout=layout), (torch.randn(4, 4),)).layout) == found


def test_experts_count_for_the_rows_that_they_take() -> None:
    """Their number is known at run time only: as many as the tokens choose. A layer of experts is dearer than two linears."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([*(nn.Linear(8, 8) for _ in range(3)), buffer_models.Layer()])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x.square().sum()

    found = mc.trace(Mixed().double(), replace(PLAN, layout="balanced-flops"), (buffer_models.batch()["x"],))
    assert str(found.layout) == "Et*3|tL"


class Bare(nn.Module):
    """Layers that are attributes of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(self.one(x)).sum()
        return out


class Backwards(nn.Module):
    """Layers that do not run in the order of their list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers[0](self.layers[1](x)).sum()
        return out


class Beside(nn.Module):
    """Layers beside lists of as many smaller modules."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = (nn.ModuleList(nn.LayerNorm(4) for _ in range(2)) for _ in range(2))
        self.gates = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for before, gate, layer, behind in zip(self.before, self.gates, self.layers, self.behind, strict=True):
            x = behind(x + gate(x) * layer(before(x)))
        return x.square().sum()


def test_of_lists_of_one_length_the_one_that_computes_more_holds_the_layers() -> None:
    """The same on every rank: not what a set happens to give first."""
    found = mc.trace(Beside(), replace(PLAN, layout="Ett|L"), (torch.randn(4, 4),))
    held = holders(found)
    assert held["layers.1.0.weight"] == held["layers.1.2.weight"] == held["gates.1.weight"] == (0,)
    assert held["behind.1.weight"] == (1,)


def test_layers_that_cannot_be_found_say_how_to_name_them() -> None:
    with pytest.raises(
        PassError, match=r"keep the layers in an nn.ModuleList, as in .*split-stages\{layers=model.layers\}"
    ):
        mc.trace(Bare(), PLAN, (torch.randn(4, 4),))
    named = replace(PLAN, passes="+split-stages{layers=blocks}")
    with pytest.raises(PassError, match="the list 'blocks' has no item that the graph runs; name one of layers, as in"):
        mc.trace(Backwards(), named, (torch.randn(4, 4),))


def test_a_batch_without_rows_is_refused_before_anything_is_captured() -> None:
    with pytest.raises(PlanError, match="each rank's batch has 0 rows, but microbatches=2 needs a positive multiple"):
        mc.trace(Bare(), PLAN, (torch.empty(0, 4),))


def test_layers_out_of_order() -> None:
    with pytest.raises(PassError, match="later stage 1"):
        mc.trace(Backwards(), PLAN, (torch.randn(4, 4),))


def test_more_stages_than_layers() -> None:
    with pytest.raises(PlanError, match="cannot be split evenly over 8"):
        program(plan=Plan(dp=1, pp=8, microbatches=8, schedule="gpipe"))


def test_a_layout_for_another_number_of_layers() -> None:
    with pytest.raises(PlanError, match=r"2 decoder layers \(t\) for a model of 4"):
        program(plan=replace(PLAN, layout="Et|tL"))


def test_stages_survive_saving_and_loading(tmp_path: Path) -> None:
    program().save(tmp_path / "step.py")
    loaded = mc.load(tmp_path / "step.py")
    assert loaded.layout == program().layout and str(loaded) == str(program())
    for mine, theirs in zip(stages(), cut_stages(loaded), strict=True):
        assert mine.outputs.keys() == theirs.outputs.keys() and len(mine.saved) == len(theirs.saved) > 0
        for there in ("received", "sent", "received_grads", "sent_grads"):
            assert [(item.shape, item.dtype) for item in getattr(mine, there)] == [
                (item.shape, item.dtype) for item in getattr(theirs, there)
            ]
        assert mine.forward.program.graph_module.code.count("\n") == theirs.forward.program.graph_module.code.count(
            "\n"
        )
    assert "stage" not in {meta.module_path(node) for node in loaded.graph.nodes}


def test_inspect_says_what_each_stage_holds_and_sends() -> None:
    found = inspect_model.report(build(CONFIG), program())["stages"]
    assert [(item["stage"], item["rank"], item["holds"]) for item in found] == [
        (0, 0, "embedding, 2 decoder"),
        (1, 1, "2 decoder, loss"),
    ]
    total = sum(param.numel() for param in build(CONFIG).parameters())
    tied = build(CONFIG).get_parameter("embed.weight").numel()
    assert sum(item["parameters"] for item in found) == total + tied  # both stages have the tied table
    assert f"float64[2, 8, {CONFIG.hidden}]" in found[0]["sends"] and found[1]["sends"] == []
    assert inspect_model._stage_lines({"stages": found})[0].startswith(
        "stage 0 on pipeline rank 0: embedding, 2 decoder; "
    )
