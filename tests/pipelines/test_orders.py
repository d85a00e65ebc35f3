"""Any legal order of the passes gives the same program up to names, and the same numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

import moecompile as mc
from moecompile import pipeline as pipelines
from moecompile.compilation import Request, as_program, capture
from moecompile.errors import PassError
from moecompile.pass_base import Fact, Pass
from moecompile.passes import PASSES, STEP
from moecompile.plan import Plan
from moecompile.printer import graph_text, saved_text
from moecompile.program import Level, Program
from tests.support import golden, models
from tests.support.parity import slice_for
from tests.support.thinned import thinned

PLAN = Plan(dp=4, ep=2)
CONFIG = models.Config(style="ops", layers=1, aux=0.1, shared=True, tied=True)
BATCH = models.tokens(4, 3, 0, ignored=0.2)
SLICES = [slice_for(BATCH, PLAN, rank) for rank in range(4)]
PRESET = pipelines.parse(STEP, PASSES)


def is_legal(item: Pass, facts: frozenset[Fact], level: Level) -> bool:
    try:
        pipelines.check_order((item,), PASSES, facts, level)
    except PassError:
        return False
    return True


def orders(
    left: tuple[Pass, ...], facts: frozenset[Fact] = frozenset(), level: Level = Level.MODEL
) -> Iterator[list[Pass]]:
    """All legal orders of exactly these passes."""
    if not left:
        yield []
    for item in left:
        if is_legal(item, facts, level):
            rest = tuple(other for other in left if other is not item)
            for tail in orders(rest, *_behind(item, facts, level)):
                yield [item, *tail]


def essential(passes: tuple[Pass, ...]) -> tuple[Pass, ...]:
    """Those that provide or end a fact; the others may stand in many places and are moved around apart."""
    return tuple(item for item in passes if item.provides or item.removes)


class Explorer:
    """Runs orders as paths through programs: two paths that meet in one text go on as one. Text is the snapshot."""

    def __init__(self, folder: Path, start: Program) -> None:
        self.folder, self.runs = folder, 0
        self.start = saved_text(start)
        self._after: dict[tuple[str, str], str] = {}

    def run(self, passes: list[Pass]) -> str:
        text = self.start
        for item in passes:
            text = self.step(text, item)
        return text

    def step(self, text: str, item: Pass) -> str:
        """The program after one more pass."""
        key = (_state(text), item.text)
        if key not in self._after:
            path = self.folder / f"{self.runs}.py"
            path.write_text(text)
            program = mc.load(path)
            pipelines.run(program, (item,), PASSES, check=False, record_text=False)
            self._after[key] = saved_text(program)
            self.runs += 1
        return self._after[key]


def _state(text: str) -> str:
    """A saved program without the record of how it came about."""
    return "\n".join(line for line in text.splitlines() if "pipeline" not in line)


@pytest.fixture(scope="module")
def reference() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = models.build(CONFIG)
    loss = model(**BATCH)["loss"]
    loss.backward()
    return loss.detach(), {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def captured() -> Program:
    request = Request((), SLICES[0], PLAN)
    return as_program(capture(models.build(CONFIG), request), request)


def check(text: str, folder: Path, reference: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> None:
    """Loss and gradients of a saved program against the plain model."""
    path = folder / "final.py"
    path.write_text(text)
    found = mc.simulate_ranks(models.build(CONFIG), PLAN, SLICES, program=mc.load(path))
    loss, grads = reference
    torch.testing.assert_close(found.loss, loss, rtol=1e-12, atol=0)
    assert found.grads.keys() == grads.keys()
    for name, grad in grads.items():
        assert grad.count_nonzero()
        torch.testing.assert_close(found.grads[name], grad, rtol=1e-10, atol=1e-15, msg=name)


def test_every_legal_order_of_the_passes_that_state_facts_gives_the_same_numbers(
    tmp_path: Path, reference: tuple[torch.Tensor, dict[str, torch.Tensor]]
) -> None:
    passes = essential(PRESET)
    assert len(passes) >= 7
    all_orders = list(orders(passes))
    assert len(all_orders) == 6
    explorer = Explorer(tmp_path, captured())
    finals = {_state(text): text for text in map(explorer.run, all_orders)}
    assert explorer.runs < 40  # the orders share most of their way
    for text in finals.values():
        check(text, tmp_path, reference)


def drawn(draw: random.Random) -> list[Pass]:
    """A legal order of the whole preset, each step among all those that leave a legal rest."""
    done: list[Pass] = []
    facts, level = frozenset[Fact](), Level.MODEL
    while len(done) < len(PRESET):
        ways = []
        for item in PRESET:
            if item not in done and is_legal(item, facts, level):
                after = _behind(item, facts, level)
                if _can_finish(frozenset([*done, item]), *after):
                    ways.append((item, *after))
        item, facts, level = draw.choice(ways)
        done.append(item)
    return done


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_legal_orders_of_the_whole_preset_give_the_same_numbers(
    tmp_path: Path, reference: tuple[torch.Tensor, dict[str, torch.Tensor]]
) -> None:
    """A few of the many thousands."""
    draw = random.Random(0)
    chosen = {tuple(item.text for item in order): order for order in (drawn(draw) for _ in range(40))}
    assert len(chosen) > 35
    explorer = Explorer(tmp_path, captured())
    finals = {_state(text): text for text in map(explorer.run, chosen.values())}
    for text in finals.values():
        check(text, tmp_path, reference)


@cache
def _can_finish(done: frozenset[Pass], facts: frozenset[Fact], level: Level) -> bool:
    """Whether the passes that are left have a legal order."""
    left = [item for item in PRESET if item not in done]
    ends = {fact for item in left for fact in item.removes}
    comes = {fact for item in left for fact in item.provides}
    for item in left:  # what no order brings back: without this look every order of the others would be tried
        late = item.level is Level.MODEL and level is Level.STEP
        if late or (item.excludes & facts) - ends or item.requires - facts - comes:
            return False
    return not left or any(
        is_legal(item, facts, level) and _can_finish(done | {item}, *_behind(item, facts, level)) for item in left
    )


def _behind(item: Pass, facts: frozenset[Fact], level: Level) -> tuple[frozenset[Fact], Level]:
    return (facts | item.provides) - item.removes, Level.STEP if Fact.DIFFERENTIATED in item.provides else level


@pytest.mark.parametrize("free", thinned({item.name: item for item in PRESET if item not in essential(PRESET)}))
def test_a_pass_without_facts_may_stand_wherever_it_is_legal(
    free: Pass, tmp_path: Path, reference: tuple[torch.Tensor, dict[str, torch.Tensor]]
) -> None:
    """Every place in the preset at which the order check lets it stand gives the same numbers."""
    rest = essential(PRESET)
    explorer = Explorer(tmp_path, captured())
    finals: dict[str, str] = {}
    for at in range(len(rest) + 1):
        order = [*rest[:at], free, *rest[at:]]
        try:
            pipelines.check_order(order, PASSES)
        except PassError:
            continue
        text = explorer.run(order)
        finals[_state(text)] = text
    assert finals
    for text in finals.values():
        check(text, tmp_path, reference)


def test_what_is_not_a_legal_order_raises_and_changes_nothing() -> None:
    """Every swap of two neighbours of the preset is either among the legal orders or refused as a whole."""
    legal = illegal = 0
    for at in range(len(PRESET) - 1):
        order = [*PRESET[:at], PRESET[at + 1], PRESET[at], *PRESET[at + 2 :]]
        try:
            pipelines.check_order(order, PASSES)
            legal += 1
        except PassError as error:
            illegal += 1
            assert "put it" in str(error) or "put '" in str(error)
            program = golden.captured()
            before = graph_text(golden.captured())
            with pytest.raises(PassError):
                pipelines.run(program, order, PASSES)
            assert not program.history and graph_text(program) == before
    assert legal and illegal


@pytest.mark.parametrize("item", PRESET, ids=lambda item: item.name)
def test_a_second_run_changes_nothing_or_is_refused(item: Pass) -> None:
    """Right after the first run, with all passes of the preset before it."""
    program = golden.run(golden.captured(PLAN), pipelines.to_text(PRESET[: PRESET.index(item) + 1]))
    before = saved_text(program)
    try:
        pipelines.check_order((item,), PASSES, program.facts, program.level)
    except PassError:
        return
    pipelines.run(program, (item,), PASSES)
    assert program.history[-1].rewrites == 0
    assert _state(saved_text(program)) == _state(before)
