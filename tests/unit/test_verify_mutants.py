"""Programs with a planted error: every one is caught before it runs, or by a lock-step run, or is shown to be no error.

A mutant counts as caught statically if `check_spread` or one of the other checks of the verifier refuses it. The others are run on all
ranks in lock step and compared with the plain model. What neither minds must be the same program by another name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile import pipeline as pipelines
from moecompile.compat import without_autocast
from moecompile.compilation import Request, as_program, capture, default_pipeline
from moecompile.errors import VerifyError
from moecompile.passes import PASSES
from moecompile.plan import Plan
from moecompile.program import Program
from moecompile.verify import verify_program
from moecompile.verify.spread import check_spread
from moecompile.verify.spread.table import name_of
from tests.support.models import Config, build, tokens
from tests.support.mutants import Mutant, compensating, mutants, mutated
from tests.support.parity import LockStep, Run, compare, plain, slice_for

CONFIG = Config("ops", layers=1, hidden=16, heads=4, inner=8, shared=True, aux=0.1, rotary=True)
pytestmark = pytest.mark.usefixtures("proving")
SEQUENCE = Plan(dp=2, tp=2, ep=4, sequence_parallel=True)
WIDTH = Plan(dp=4, ep=2, etp=2)
RING = Plan(dp=1, cp=4, ep=4, passes="+shard-sequence{attention=ring}")
ZIGZAG = Plan(dp=1, cp=4, ep=4, passes="+shard-sequence{attention=ring,order=zigzag}")


@dataclass
class Score:
    """How many mutants of each kind there were and who caught them; ``missed`` were not, though they are errors."""

    found: Counter[tuple[str, str]] = field(default_factory=Counter)
    lock_step: list[str] = field(default_factory=list)
    equivalent: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = sorted({kind for kind, _ in self.found})
        rows = [f"{'kind':12} {'all':>4} {'static':>6} {'lock step':>9} {'equal':>5}"]
        for kind in [*kinds, "total"]:
            counts = [
                sum(self.found[one, who] for one in ([kind] if kind != "total" else kinds))
                for who in ("static", "lock step", "equal")
            ]
            rows.append(f"{kind:12} {sum(counts):4} {counts[0]:6} {counts[1]:9} {counts[2]:5}")
        return "\n".join(rows)


def _apart(plan: Plan) -> str:
    """The pipeline of a step without fuse-experts: its ops are read written out again, so errors are planted in the parts."""
    return default_pipeline(plan, step=True).replace(",fuse-experts", "")


class Laboratory:
    """One model under one plan, its reference run, and its programs before and after differentiation."""

    def __init__(self, plan: Plan, config: Config = CONFIG) -> None:
        self.plan, self.config = plan, config
        self.batches = [tokens(2 * (plan.dp or 1), 8, 0, ignored=0.3)]
        self.lock_step = LockStep(build(config), plan, self.batches[0], pipeline=_apart(plan))
        self.step = self.lock_step.program
        self.reference: Run = plain(build(config), self.batches)
        assert self.runs_right(self.step)

    def model(self) -> Program:
        """The program as it is before differentiation."""
        head = default_pipeline(self.plan, step=True).partition(",differentiate")[0]
        model = build(self.config)
        request = Request((), slice_for(self.batches[0], self.plan, 0), self.plan)
        program = as_program(capture(model, request), request)
        with without_autocast():
            return pipelines.run(program, pipelines.parse(head, PASSES), PASSES, record_text=False)

    def finished(self, program: Program) -> Program:
        """The rest of the pipeline, unverified."""
        tail = "differentiate" + _apart(self.plan).partition(",differentiate")[2]
        with without_autocast():
            return pipelines.run(program, pipelines.parse(tail, PASSES), PASSES, check=False, record_text=False)

    def runs_right(self, program: Program) -> bool:
        """Whether all ranks together compute what the plain model does."""
        self.lock_step.program = program
        self.lock_step.reset()
        try:
            compare(self.lock_step.run(self.batches), self.reference)
        except Exception:  # a deadlock, a shape that does not fit, another result: all are noticed
            return False
        return True


def refused(program: Program) -> bool:
    """Whether a static check raises."""
    for check in (check_spread, verify_program):
        try:
            check(program)
        except VerifyError:
            return True
    return False


def score(laboratory: Laboratory, program: Program, changes: Sequence[tuple[Mutant, ...]]) -> Score:
    found = Score()
    differentiated = program is laboratory.step
    assert not refused(mutated(program)), "the program itself must pass"
    for change in changes:
        made = mutated(program, *change)
        name, kind = " and ".join(map(str, change)), change[0].kind if len(change) == 1 else "pair"
        if refused(made):
            found.found[kind, "static"] += 1
        elif not laboratory.runs_right(made if differentiated else laboratory.finished(made)):
            found.found[kind, "lock step"] += 1
            found.lock_step.append(name)
        else:
            found.found[kind, "equal"] += 1
            found.equivalent.append(name)
    return found


# Mutants that are no errors: another name for the same groups of ranks.
EQUIVALENT = {
    Plan(dp=2, ep=2): [
        "axis exchange_counts ep -> dp",
        "axis all_reduce dp -> ep",
        "axis all_reduce_2 dp -> ep",
        "axis all_reduce_4 dp -> ep",
        "axis dispatch ep -> dp and axis combine_1 ep -> dp",
        "axis combine ep -> dp and axis dispatch_1 ep -> dp",
    ],
    SEQUENCE: [
        "axis exchange_counts ep -> dp+tp",
        "axis all_reduce_7 dp+tp -> ep",
        "axis dispatch ep -> dp+tp and axis combine_1 ep -> dp+tp",
        "axis combine ep -> dp+tp and axis dispatch_1 ep -> dp+tp",
    ],
    WIDTH: ["axis all_reduce dp -> ep+etp", "axis all_reduce_2 dp -> ep+etp", "axis all_reduce_4 dp -> ep+etp"],
    RING: [
        "axis exchange_counts ep -> cp",
        "axis all_reduce cp -> ep",
        "axis all_reduce_2 cp -> ep",
        "axis all_reduce_4 cp -> ep",
        "offset cp_index axis cp -> ep",
        "axis rotate cp -> ep and axis rotate_5 cp -> ep",
        "axis rotate_1 cp -> ep and axis rotate_4 cp -> ep",
        "axis rotate_2 cp -> ep and axis rotate_3 cp -> ep",
        "axis dispatch ep -> cp and axis combine_1 ep -> cp",
        "axis combine ep -> cp and axis dispatch_1 ep -> cp",
    ],
}


def is_the_same(program: Program, name: str) -> bool:
    """Whether a mutant only names the same groups of ranks by another axis."""
    before, arrow, after = name.rpartition(" -> ")
    return bool(arrow) and program.mesh.groups(before.split()[-1]) == program.mesh.groups(after)


def check(laboratory: Laboratory, program: Program, changes: Sequence[tuple[Mutant, ...]]) -> Score:
    """Score the mutants: one that is not refused has to be no error, and to run right."""
    found = score(laboratory, program, changes)
    print(f"\n{laboratory.plan}\n{found}\nonly in lock step: {found.lock_step}\nequivalent: {found.equivalent}")
    assert all(is_the_same(program, name) for name in found.equivalent), found.equivalent
    return found


@pytest.mark.timeout(240)
def test_every_error_of_an_order_is_refused() -> None:
    """The wrong order on one side of an op, in a hop, or on the way out; parts of another axis."""
    laboratory = Laboratory(ZIGZAG, replace(CONFIG, aux=0.0, shared=False))
    changes = [change for change in every_change(laboratory.step) if _is_of_order(laboratory.step, change)]
    found = check(laboratory, laboratory.step, changes)
    assert found.lock_step == [] and len(changes) - len(found.equivalent) >= 20
    assert all(name.endswith("cp -> ep") for name in found.equivalent)


def _is_of_order(program: Program, change: tuple[Mutant, ...]) -> bool:
    named = {node.name for node in graphs.find(program.graph, ops.zigzag_slice, ops.zigzag_place, ops.zigzag_exchange)}
    return any(mutant.kind in ("order", "ring") or mutant.node in named for mutant in change)


def every_change(program: Program) -> list[tuple[Mutant, ...]]:
    return [*((mutant,) for mutant in mutants(program)), *compensating(program)]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("plan", "at_least"),
    [(Plan(dp=2, ep=2), 90), (SEQUENCE, 185), (WIDTH, 115), pytest.param(RING, 121, marks=pytest.mark.slow)],
    ids=str,
)
def test_every_error_of_a_step_is_refused(plan: Plan, at_least: int) -> None:
    """Also two that make up for each other. What is not refused is listed by name, and is no error."""
    laboratory = Laboratory(plan)
    changes = every_change(laboratory.step)
    found = check(laboratory, laboratory.step, changes)
    assert found.lock_step == []
    assert found.equivalent == EQUIVALENT[plan]
    assert len(changes) - len(found.equivalent) >= at_least


@pytest.mark.slow
@pytest.mark.parametrize("plan", [Plan(dp=2, ep=2), SEQUENCE], ids=str)
def test_errors_before_differentiation(plan: Plan) -> None:
    """Where the model itself divides by a number of ranks, one division more or less may be its own: fused ops swallow some, so that no
    count tells."""
    laboratory = Laboratory(plan)
    program = laboratory.model()
    found = check(laboratory, program, [(mutant,) for mutant in mutants(program)])
    request = Request((), slice_for(laboratory.batches[0], plan, 0), plan)
    own = divisions(as_program(capture(build(CONFIG), request), request)).values()
    ambiguous = {name for name, place in divisions(program).items() if place in set(own)}
    assert {name.split()[1] for name in found.lock_step} <= ambiguous
    assert all(name.startswith("scale") for name in found.lock_step)


def divisions(program: Program) -> dict[str, tuple[str, int]]:
    """Line and number of every division by a whole number."""
    found = [node for node in program.graph.nodes if name_of(node.target) == "aten.div"]
    return {node.name: (meta.source(node), node.args[1]) for node in found if isinstance(node.args[1], int)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp=2, ep=2, dispatch="allgather"),
        Plan(dp=1, cp=2, ep=2),
        Plan(dp=1, cp=2, ep=2, dispatch="allgather"),
        Plan(dp=4, ep=2),
        Plan(dp=4, ep=2, dispatch="allgather"),
        Plan(dp=1, tp=4, ep=2),
        Plan(dp=2, cp=2, tp=2, ep=4, sequence_parallel=True),
        Plan(dp=4, ep=2, etp=2, dispatch="allgather"),
        ZIGZAG,
    ],
    ids=str,
)
def test_errors_under_other_plans(plan: Plan) -> None:
    laboratory = Laboratory(plan)
    found = check(laboratory, laboratory.step, every_change(laboratory.step))
    assert found.lock_step == []
