"""Pipelines: text both ways, order, history, dumps and the reproducer of a failure."""

from __future__ import annotations

import dataclasses
import re
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moecompile as mc
from moecompile import graph as graphs
from moecompile import pipeline as pipelines
from moecompile.errors import PassError, VerifyError
from moecompile.pass_base import Fact, Pass, PassContext
from moecompile.passes import ALL_PASSES, PASSES, STEP
from moecompile.passes.insert_dispatch import InsertDispatch
from moecompile.passes.shard_experts import ShardExperts
from moecompile.plan import Plan
from moecompile.printer import graph_text, saved_text
from moecompile.program import Level, Program
from tests.support import golden

MODEL = "recognize-moe,shard-dense,shard-experts,insert-dispatch"


# ---- text ------------------------------------------------------------------------------------------------------------


def values_of(field: dataclasses.Field[Any], kind: type[Pass]) -> st.SearchStrategy[Any]:
    """Values that an option may have."""
    found = field.default
    if isinstance(found, bool):
        return st.booleans()
    hint = typing.get_type_hints(kind)[field.name]
    if isinstance(found, int) and typing.get_origin(hint) is typing.Literal:
        return st.sampled_from(typing.get_args(hint))
    if isinstance(found, int):
        return st.integers(0, 10**6)
    accepted = re.findall(r"'([\w-]+)'", str(kind.__dataclass_fields__[field.name].type).replace('"', "'"))
    return st.sampled_from(accepted) if accepted else st.just(found)


@st.composite
def any_pass(draw: st.DrawFn) -> Pass:
    kind = draw(st.sampled_from(ALL_PASSES))
    return kind(**{field.name: draw(values_of(field, kind)) for field in dataclasses.fields(kind)})


@given(st.lists(any_pass(), max_size=6))
def test_text_round_trips(passes: list[Pass]) -> None:
    text = pipelines.to_text(passes)
    assert pipelines.parse(text, PASSES) == tuple(passes)
    assert pipelines.to_text(pipelines.parse(text, PASSES)) == text


@given(st.lists(any_pass(), min_size=1, max_size=4), st.data())
def test_spaces_do_not_matter(passes: list[Pass], data: st.DataObject) -> None:
    text = pipelines.to_text(passes)
    spaced = "".join(mark + (" " * data.draw(st.integers(0, 2)) if mark in ",{=" else "") for mark in text)
    assert pipelines.parse(spaced, PASSES) == tuple(passes)


def test_only_options_that_differ_are_written() -> None:
    assert InsertDispatch().text == "insert-dispatch"
    assert InsertDispatch(probs="fc2").text == "insert-dispatch{probs=fc2}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("recognise-moe", "there is no pass 'recognise-moe'; did you mean recognize-moe"),
        ("shard-dense;shard-experts", "cannot read 'shard-dense;shard-experts' at position 0; write name"),
        ("shard-dense,", "cannot read 'shard-dense,' at position 0"),
        ("insert-dispatch{backend=nccl}", "backend=nccl is not one of alltoall, allgather; choose one of these"),
        ("insert-dispatch{backend}", "option 'backend' has no value; write backend=VALUE"),
        ("insert-dispatch{speed=1}", "option 'speed' is not known; the options of this pass are: backend, probs"),
        ("insert-dispatch{probs=fc2,probs=combine}", "option 'probs' is given twice; keep one of fc2 and combine"),
        ("differentiate{templates=1}", "templates=1 must be true or false"),
        ("sync-grads{bucket-mb=big}", "bucket-mb=big is not of type int; give a value like 0"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused(text: str, told: str) -> None:
    with pytest.raises(PassError, match=re.escape(told)):
        pipelines.parse(text, PASSES)


# ---- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("shard-dense", f"'shard-dense' needs the fact MOE_OPS ({Fact.MOE_OPS.value}), which does not hold there; put 'recognize-moe'"),
        ("recognize-moe,insert-dispatch", "'insert-dispatch' needs the fact EXPERTS_SHARDED"),
        ("recognize-moe,shard-experts,insert-dispatch", "'insert-dispatch' needs the fact TOKENS_SHARDED"),
        ("recognize-moe,differentiate", "'differentiate' needs the fact LOSS_SHARES"),
        ("recognize-moe,shard-dense,sync-grads", "'sync-grads' works on the step graph; put it after 'differentiate'"),
        ("recognize-moe,shard-dense,differentiate,shard-experts", "'shard-experts' works on the model graph; put it before"),
        ("recognize-moe,shard-dense,shard-dense", "'shard-dense' would run twice, since LOSS_SHARES holds"),
        ("recognize-moe,shard-dense,lower-ops,differentiate", "'differentiate' needs the fact MOE_OPS"),
        ("recognize-moe,shard-dense,sync-loss,differentiate", "'differentiate' needs the fact LOSS_SHARES"),
        ("recognize-moe,shard-experts,shard-dense", "'shard-dense' cannot run once the fact EXPERTS_SHARDED holds"),
        (
            "recognize-moe,shard-dense,shard-experts,differentiate",
            "'differentiate' stands where the experts are cut but the fact TOKENS_DISPATCHED",
        ),
        ("recognize-moe,shard-dense,normalize-loss", "'normalize-loss' cannot run once the fact TOKENS_SHARDED holds"),
    ],
)  # fmt: skip
def test_an_illegal_order_is_refused_before_anything_runs(text: str, told: str) -> None:
    program = golden.captured()
    before = saved_text(program)
    with pytest.raises(PassError, match=re.escape(told)):
        golden.run(program, text)
    assert not program.history
    assert graph_text(program) == graph_text(golden.captured()) and len(saved_text(program)) == len(before)


def test_the_preset_is_legal() -> None:
    pipelines.check_order(pipelines.parse(STEP, PASSES), PASSES)


def test_a_fact_nobody_provides() -> None:
    without = {name: kind for name, kind in PASSES.items() if name != "shard-experts"}
    with pytest.raises(PassError, match=r"EXPERTS_SHARDED .*; put a pass that provides it before it"):
        pipelines.check_order((InsertDispatch(),), without, frozenset({Fact.MOE_OPS, Fact.TOKENS_SHARDED}))


def test_order_goes_on_from_what_a_program_has() -> None:
    held = frozenset({Fact.MOE_OPS, Fact.TOKENS_SHARDED, Fact.EXPERTS_SHARDED})
    pipelines.check_order((InsertDispatch(),), PASSES, held)
    with pytest.raises(PassError, match="works on the model graph"):
        pipelines.check_order((ShardExperts(),), PASSES, frozenset({Fact.MOE_OPS}), Level.STEP)


# ---- history ---------------------------------------------------------------------------------------------------------


def test_history_tells_what_each_pass_did() -> None:
    program = golden.run(golden.captured(), MODEL)
    assert [entry.pass_text for entry in program.history] == MODEL.split(",")
    assert program.pipeline == MODEL
    dispatch = program.history[-1]
    assert dispatch.rewrites == 1 and dispatch.nodes_after - dispatch.nodes_before == 9
    assert dict(dispatch.ops)["moe.dispatch.default"] == 1
    assert dispatch.text == graph_text(program)
    added = [line for line in dispatch.diff.splitlines() if line.startswith("+    ")]
    assert any("torch.ops.moe.dispatch" in line for line in added)
    for entry, following in zip(program.history, program.history[1:], strict=False):
        assert entry.nodes_after == following.nodes_before
    for entry in program.history:
        assert 0 < entry.verify_seconds < entry.seconds


def test_a_pass_that_does_nothing_leaves_the_text_identical() -> None:
    program = golden.run(golden.captured(Plan(dp=1)), MODEL)
    for entry in program.history:
        assert (entry.rewrites > 0) == bool(entry.diff), entry.pass_text


def test_what_no_pass_has_changed_is_not_verified_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a pass says of itself does not count: a change without a rewrite is found."""

    @dataclasses.dataclass(frozen=True)
    class Silent(Pass):
        name = "silent"

        def run(self, graph: Any, ctx: PassContext) -> int:
            with graph.graph.inserting_before(graph.graph.output_node()):
                graphs.call(graph.graph, torch.ops.aten.neg.default, ctx.program.placeholders()[0], mode=ctx.mode)
            return 0

    @dataclasses.dataclass(frozen=True)
    class Idle(Pass):
        name = "idle"

        def run(self, graph: Any, ctx: PassContext) -> int:
            return 0

    seen: list[str] = []
    verify = pipelines.verify_program

    def counted(program: Program) -> Program:
        seen.append(program.pipeline)
        return verify(program)

    monkeypatch.setattr(pipelines, "verify_program", counted)
    table: dict[str, type[Pass]] = {**PASSES, "idle": Idle, "silent": Silent}
    pipelines.run(golden.captured(), [PASSES["recognize-moe"](), Idle(), Idle(), Silent()], table)
    assert seen == ["", "recognize-moe,idle,idle"]


def test_without_text_and_checks() -> None:
    program = golden.run(golden.captured(), MODEL, record_text=False, check=False)
    assert all(not entry.text and not entry.diff for entry in program.history)


def test_a_callback_sees_every_pass() -> None:
    seen: list[tuple[str, int]] = []
    golden.run(golden.captured(), MODEL, on_pass=lambda program, item: seen.append((item.name, len(program.history))))
    assert seen == [(name, at + 1) for at, name in enumerate(MODEL.split(","))]


# ---- dumps -----------------------------------------------------------------------------------------------------------


def test_dumps_are_programs_one_for_each_pass_that_changed_something(tmp_path: Path) -> None:
    program = golden.run(golden.captured(), f"{MODEL},differentiate", dump_dir=tmp_path / "dumps")
    names = sorted(path.name for path in (tmp_path / "dumps").iterdir())
    assert names == [
        "00-captured.py", "02-shard-dense.py", "03-shard-experts.py", "04-insert-dispatch.py", "05-differentiate.py",
    ]  # fmt: skip
    last = tmp_path / "dumps" / names[-1]
    assert last.read_text() == saved_text(program)
    assert saved_text(mc.load(last)) == saved_text(program)


def _fail(self: Pass, graph: Any, ctx: PassContext) -> int:
    """Break the graph, then give up."""
    graph.graph.output_node().args = ((),)
    raise PassError("insert-dispatch: something does not fit; try something else.")


def _break(self: Pass, graph: Any, ctx: PassContext) -> int:
    ctx.program.inputs.pop()
    return 1


def _crash(self: Pass, graph: Any, ctx: PassContext) -> int:
    raise ZeroDivisionError("a bug")


@pytest.mark.parametrize(("how", "kind"), [(_fail, PassError), (_break, VerifyError), (_crash, ZeroDivisionError)])
def test_a_failure_leaves_all_that_is_needed_to_see_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Any, kind: type[Exception]
) -> None:
    monkeypatch.setattr(InsertDispatch, "run", how)
    with pytest.raises(kind) as error:
        golden.run(golden.captured(), f"{MODEL},differentiate", dump_dir=tmp_path)
    folder = tmp_path / "04-insert-dispatch-failed"
    said = str(error.value) + "".join(getattr(error.value, "__notes__", []))
    assert str(folder) in said
    assert Plan.from_toml((folder / "plan.toml").read_text()) == golden.PLAN
    rest = (folder / "pipeline.txt").read_text().strip()
    assert rest == "insert-dispatch,differentiate"
    assert kind.__name__ in (folder / "error.txt").read_text()
    with pytest.raises(kind):  # the replay fails in the same way
        golden.run(mc.load(folder / "before.py"), rest)
    monkeypatch.undo()
    golden.run(mc.load(folder / "before.py"), rest)


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(InsertDispatch, "run", _fail)
    with pytest.raises(PassError) as error:
        golden.run(golden.captured(), MODEL)
    assert str(error.value) == "insert-dispatch: something does not fit; try something else."
    assert not list(tmp_path.iterdir())
