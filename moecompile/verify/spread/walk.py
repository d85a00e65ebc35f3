"""The walk over a program: readings of every value on every digit, and what the outputs have to be."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations, product
from typing import Any

import torch
from torch.fx import Node

from ...errors import VerifyError
from ...pass_base import Fact
from ...placement.types import Partial, Placement, Shard
from ...program import Input, InputKind, Output, OutputKind, Program
from ..expand import expanded
from ..report import fault
from .call import Call, flat
from .coverage import Coverage
from .digits import Digits, digits_of
from .experts import numbers_of
from .joins import packed
from .layout import noted_ends, shapes_of
from .readings import FILLED, RINGS, SAME, SUM, UNKNOWN, ZERO, ConflictError, Kind, Options, Reading, cut
from .rings import TAKES
from .scales import Origin, Scales
from .table import CARRIERS, name_of, rule_of
from .views import MOVES, RESHAPES

# what a value may be on all digits at once
Value = tuple[tuple[Reading, ...], ...]
_MOST = 64  # ways of reading a value; beyond, it counts as not known
_STAGE = "moe_spread_stage"
_BEYOND = (LookupError, TypeError, ValueError, ArithmeticError)  # arguments that a rule was not written for
_DIVISIONS = ("aten.div", "aten.true_divide", "aten.divide")


def check_spread(program: Program) -> Coverage:
    """Raise a VerifyError at the first value that is not what its ops need, or at an output that is not what it should be."""
    program = expanded(program)
    halfway = (
        Fact.EXPERTS_SHARDED in program.facts
        and Fact.TOKENS_DISPATCHED not in program.facts
        and program.plan.ep * program.plan.etp > 1
    )
    if halfway or Fact.TOKENS_SHARDED not in program.facts or _cut_twice(program):
        return Coverage(checked=False)
    digits = digits_of(program.mesh)
    if digits is None or any(item.kind is InputKind.TANGENT for item in program.inputs):
        return Coverage(checked=False)
    if not digits.sizes:
        return Coverage()
    walk = _Walk(program, digits)
    try:
        walk.run()
    except VerifyError:
        if len(digits.sizes) == 1:
            raise
        other = _Walk(program, digits, outermost_first=False)
        with suppress(VerifyError):
            other.run()
            return other.coverage
        if walk.turned and not _is_usual(program):
            return Coverage(checked=False)
        raise
    return walk.coverage


def _is_usual(program: Program) -> bool:
    """Whether the sequence was cut over cp before linears and what lies between them were over tp."""
    names = [item.partition("{")[0] for item in program.pipeline.split(",")]
    return "shard-sequence" in names and "shard-linears" not in names[: names.index("shard-sequence")]


def _cut_twice(program: Program) -> bool:
    """Whether a parameter is held as shards of a dim that another axis has cut first, which no reading can say."""
    for item in program.inputs:
        dims = [placed.dim for _, placed in item.placements if isinstance(placed, Shard)]
        if item.kind is InputKind.PARAM and Fact.PARAMS_SHARDED in program.facts and len(set(dims)) < len(dims):
            return True
    return False


def is_due(program: Program) -> bool:
    """Whether a pass has cut, sent away or differentiated something since this was last asked."""
    now = program.facts & {Fact.TOKENS_SHARDED, Fact.TOKENS_DISPATCHED, Fact.DIFFERENTIATED}
    before = program.graph_module.meta.get(_STAGE)
    program.graph_module.meta[_STAGE] = now
    return bool(now != before)


class _Walk:
    """``outermost_first``: a dim that is cut on several digits is cut on the most significant one first, as one who cuts over dp, then
    cp, then tp does; a program that was cut in another order means the same, if it is so everywhere.
    """

    def __init__(self, program: Program, digits: Digits, *, outermost_first: bool = True) -> None:
        self.program, self.digits, self.coverage = program, digits, Coverage()
        self.outermost_first, self.turned = outermost_first, False
        self.shapes, self.scales = shapes_of(program), Scales(program)
        self.noted, self.values = noted_ends(program, self.shapes), dict[Node, Value]()
        self.items: dict[Node, list[Value]] = {}
        self.offsets = {node.name for node, item in program.items() if item.kind is InputKind.OFFSET and item.stride}

    def run(self) -> None:
        for node, item in self.program.items():
            self.values[node] = (self._input(item),)
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self._visit(node)
        self.scales.check_divisions(self.program)
        self._outputs()

    # -- the interface ---------------------------------------------------------------------------------------------------
    def _placed(self, placements: Mapping[str, Placement]) -> tuple[Reading, ...]:
        found = [SAME] * len(self.digits.sizes)
        for axis, placed in placements.items():
            for digit in self.digits.axis(axis):
                if isinstance(placed, Shard):
                    found[digit] = UNKNOWN if placed.rows else cut(placed.dim, placed.outer, placed.zigzag)
                elif isinstance(placed, Partial):
                    found[digit] = SUM
        return tuple(found)

    def _input(self, item: Input) -> tuple[Reading, ...]:
        if item.kind is not InputKind.OFFSET:
            return self._placed(dict(item.placements))
        mine = self.digits.axis(item.axis) if item.stride else ()
        offset = Reading(Kind.OFFSET, item.stride, tag=item.axis)
        return tuple(offset if at in mine else SAME for at in range(len(self.digits.sizes)))

    def _outputs(self) -> None:
        inputs = {item.name: item for item in self.program.inputs}
        for node, item in zip(self.program.output_nodes(), self.program.outputs, strict=True):
            if not isinstance(node, Node) or node not in self.values or item.kind is OutputKind.SAVED:
                continue
            wanted = self._wanted(item, inputs)
            ways = self.values[node]
            if any(all(_is(reading, due) for reading, due in zip(way, wanted, strict=True)) for way in ways):
                if _is_unknown(ways):
                    self.coverage.unproved.append(f"{item.kind.value} {item.name}")
                continue
            if item.kind is OutputKind.METRIC and not self.scales.metrics_known:
                self.coverage.unproved.append(f"{item.kind.value} {item.name}")
                continue
            at = next(at for at, due in enumerate(wanted) if not _is(ways[0][at], due))
            what = (
                f"the gradient of {item.name}"
                if item.kind is OutputKind.GRAD
                else f"an output ({item.kind.value} {item.name})".rstrip()
            )
            raise fault(node, f"is {what} and on {self.digits.names[at]} {ways[0][at]}, where it must be {wanted[at]}")

    def _wanted(self, item: Output, inputs: Mapping[str, Input]) -> tuple[Reading, ...]:
        """A gradient is cut as its parameter is; elsewhere it is whole, or this rank's share before it is reduced."""
        if item.kind is not OutputKind.GRAD:
            return self._placed(dict(item.placements))
        whole = SAME if Fact.GRADS_SYNCED in self.program.facts else SUM
        placed = self._placed(dict(inputs[item.name].placements))
        return tuple(reading if reading.kind is Kind.CUT else whole for reading in placed)

    # -- one call --------------------------------------------------------------------------------------------------------
    def _visit(self, node: Node) -> None:
        found = node.meta.get("val")
        if node.target is operator.getitem:
            source, index = node.args
            if source in self.items:
                self.values[node] = self.items[source][index]  # type: ignore[index]
            return
        if not isinstance(found, (torch.Tensor, tuple, list)):
            return  # a number for the host
        operands = list(
            dict.fromkeys(
                item
                for item in flat((node.args, tuple(node.kwargs.values())))
                if isinstance(item, Node) and item in self.values
            )
        )
        operands += [item for item in numbers_of(node) if not _is_unknown(self.values.get(item, ()))]
        rule = rule_of(node.target)
        if (
            name_of(node.target) == "aten.cat"
            and len(self.shapes[node]) == 1
            and any(len(self.values[item]) > 1 for item in operands)
        ):
            self.values[node] = (self._packed(node.args[0]), *self._whole(node.args[0]))
            self.coverage.ops += 1
            self.coverage.proved += not _is_unknown(self.values[node])
            return
        outs = len(found) if isinstance(found, (tuple, list)) else 1
        made: list[list[tuple[Reading, ...]]] = [[] for _ in range(outs)]
        self.turned |= self._turns(node)
        if rule is None:
            self._without_rule(node, operands, made)
        else:
            call = Call(node, name_of(node.target), self.shapes, self.digits, offsets=self.offsets, noted=self.noted)
            self.scales.check(node)
            self._ways(call, rule, operands, made)
        values = [tuple(dict.fromkeys(ways)) for ways in made]
        values = [ways if len(ways) <= _MOST else (self._nothing(),) for ways in values]
        self.coverage.ops += 1
        self.coverage.proved += not _is_unknown(values[0])
        if isinstance(found, (tuple, list)):
            self.items[node] = values
        else:
            self.values[node] = values[0]
        if _writes(node):
            self.values[node.args[0]] = values[0]  # type: ignore[index]

    def _packed(self, items: Any) -> tuple[Reading, ...]:
        """Flat values in a row keep their own ways of being read, whose combinations would be too many."""
        parts = [
            [(self.shapes[item][0], tuple(dict.fromkeys(way[at] for way in self.values[item]))) for item in items]
            for at in range(len(self.digits.sizes))
        ]
        return tuple(packed(part) for part in parts)

    def _whole(self, items: Any) -> Value:
        """They are whole together where each may be."""
        may_be = all(any(all(part.kind is Kind.SAME for part in way) for way in self.values[item]) for item in items)
        return ((SAME,) * len(self.digits.sizes),) if may_be else ()

    def _nothing(self) -> tuple[Reading, ...]:
        return (UNKNOWN,) * len(self.digits.sizes)

    def _turns(self, node: Node) -> bool:
        """Whether a rank takes its part of a dim that is cut on a less significant digit already."""
        if name_of(node.target) not in ("moe.local_slice", "moe.zigzag_slice"):
            return False
        source, index, dim = node.args[:3]
        mine = [at for at, reading in enumerate(self.values[index][0]) if reading.kind is Kind.OFFSET]  # type: ignore[index]
        return (
            bool(mine)
            and any(
                reading.kind is Kind.CUT and reading.dim == dim
                for way in self.values[source]  # type: ignore[index]
                for reading in way[max(mine) + 1 :]
            )
        )

    def _without_rule(self, node: Node, operands: list[Node], made: list[list[tuple[Reading, ...]]]) -> None:
        """Whole operands give a whole result whatever the op; anything else is not known."""
        ways = product(*(self.values[item] for item in operands))
        known = False
        for way in ways:
            columns = [{reading.kind for reading in column} for column in zip(*way, strict=True)] if way else []
            readings = tuple(SAME if kinds <= {Kind.SAME, Kind.ZERO} else UNKNOWN for kinds in columns) or (
                FILLED,
            ) * len(self.digits.sizes)
            known = known or UNKNOWN not in readings
            for ways_out in made:
                ways_out.append(readings)
        if not known:
            self.coverage.unknown_ops[name_of(node.target)] += 1

    def _ways(self, call: Call, rule: Any, operands: list[Node], made: list[list[tuple[Reading, ...]]]) -> None:
        """All ways of reading the results, given those of the operands; a VerifyError where there are none."""
        if math.prod(len(self.values[item]) for item in operands) > _MOST**2:
            self.coverage.unknown_ops[call.name] += 1
            for ways_out in made:
                ways_out.append(self._nothing())
            return
        problem: tuple[int, ConflictError] | None = None
        known: dict[tuple[Any, ...], Any] = {}
        sided = call.name.startswith("moe.") or call.name in MOVES or call.name in RESHAPES  # which digits has an axis?
        for way in product(*(self.values[item] for item in operands)):
            columns: list[list[Options]] = []
            for at in range(len(self.digits.sizes)):
                readings = tuple(column[at] for column in way)
                key = (at if sided else self.digits.sizes[at], readings)
                if any(reading.kind is Kind.UNKNOWN for reading in readings):
                    columns.append([(UNKNOWN,)] * len(made))
                    continue
                if key not in known and call.name not in CARRIERS and any(map(_out_of_order, readings)):
                    known[key] = ConflictError("reads parts of a sum before they are where they belong")
                if key not in known and call.name not in TAKES and any(reading.kind in RINGS for reading in readings):
                    known[key] = ConflictError("reads what has not been all the way round its ring")
                if key not in known:
                    call.at, call.now = at, dict(zip(operands, readings, strict=True))
                    try:
                        known[key] = rule(call)
                    except ConflictError as conflict:
                        known[key] = conflict
                    except _BEYOND:
                        known[key] = call.each((UNKNOWN,))
                    if not isinstance(known[key], ConflictError):
                        self._note(call, known[key])
                found = known[key]
                if isinstance(found, ConflictError):
                    problem = problem or (at, found)
                    break
                columns.append(found if isinstance(found, list) else [found])
            else:
                for index, ways_out in enumerate(made):
                    for option in self._choices([column[index] for column in columns]):
                        ways_out += self._shares(call, self._in_order(call, way, option))
        if all(made):
            return
        if problem is None:
            raise fault(
                call.node,
                f"divides by {call['other']}, which the model does not do there, and no share of so many ranks is due",
            )
        raise fault(call.node, f"{problem[1]}, on {self.digits.names[problem[0]]}")

    def _choices(self, columns: Sequence[Options]) -> Iterator[tuple[Reading, ...]]:
        """One option for each digit. Digits of one axis on which a cut may be read in the same ways are cut alike."""
        if all(len(options) == 1 for options in columns):
            yield tuple(options[0] for options in columns)
            return
        tied: dict[Any, list[int]] = {}
        for at, options in enumerate(columns):
            alike = len(options) > 1 and all(option.kind is Kind.CUT for option in options)
            axis = self.digits.names[at].partition("/")[0]
            tied.setdefault((options, axis) if alike else at, []).append(at)
        for chosen in product(*(columns[members[0]] for members in tied.values())):
            found = [UNKNOWN] * len(columns)
            for members, option in zip(tied.values(), chosen, strict=True):
                for at in members:
                    found[at] = option
            yield tuple(found)

    def _note(self, call: Call, found: Any) -> None:
        """Count an op whose rule gives up on operands that are known."""
        if any(UNKNOWN in options for options in (found if isinstance(found, list) else [found])):
            self.coverage.unknown_ops[call.name] += 1

    def _in_order(
        self, call: Call, way: Sequence[tuple[Reading, ...]], option: tuple[Reading, ...]
    ) -> tuple[Reading, ...]:
        """Where ranks came to stand beside those of another digit, or went away from there, the one cut first stays in front."""
        if call.front < 0 or len(way) != 1:
            return option
        before, found = way[0], list(option)
        for at, reading in enumerate(option):
            here, there = before[at], reading
            moved_in = here.kind is Kind.FRONT and there.kind is Kind.SAME
            moved_out = here.kind is there.kind is Kind.SUM and here.outer < there.outer
            for other in range(at) if self.outermost_first else range(at + 1, len(found)):
                order = found[other].zigzag
                if moved_in and found[other] == cut(call.front + 1, zigzag=order):
                    found[other] = cut(call.front, zigzag=order)
                stood = before[other] == cut(call.front, zigzag=order)
                if moved_out and stood and found[other] == cut(0, zigzag=order):
                    found[other] = cut(call.front + 1, zigzag=order)
        return tuple(found)

    def _shares(self, call: Call, option: tuple[Reading, ...]) -> Iterator[tuple[Reading, ...]]:
        """A whole value divided by a number of ranks may be this rank's share of it."""
        by = call["other"] if call.name in _DIVISIONS else None
        if not isinstance(by, int) or by < 2 or ZERO in option:  # any share of zero is zero
            yield option
            return
        origin = self.scales.origin(call.node)
        free = [at for at, reading in enumerate(option) if reading.kind in (Kind.SAME, Kind.MEAN)]
        if origin is not Origin.ADDED or UNKNOWN in option or (not free and _is_loss(call["self"])):
            yield option  # not a share
        if origin is Origin.MODEL:
            return
        for count in range(1, len(free) + 1):
            for chosen in combinations(free, count):
                if math.prod(self.digits.sizes[at] for at in chosen) == by:
                    yield tuple(SUM if at in chosen else reading for at, reading in enumerate(option))


def _is_loss(source: Any) -> bool:
    """Whether a value is a sum over targets, whose number a mean divides by."""
    return isinstance(source, Node) and "loss" in name_of(source.target)


def _writes(node: Node) -> bool:
    """Whether an op changes its first operand in place."""
    name = name_of(node.target)
    return name.endswith("_") and not name.endswith("__") and isinstance(node.args[0], Node)


def _is_unknown(ways: Value) -> bool:
    """Whether each way of reading a value leaves something open."""
    return all(UNKNOWN in way for way in ways)


def _out_of_order(reading: Reading) -> bool:
    return reading.kind is Kind.SUM and (reading.outer > 1 or reading.zigzag)


def _is(reading: Reading, due: Reading) -> bool:
    """Whether a result may be called what it should be."""
    if reading.kind in (Kind.UNKNOWN, Kind.ZERO) or due.kind is Kind.UNKNOWN:
        return True
    if reading.kind is Kind.PACKED:
        return due.kind is not Kind.CUT and all(any(_is(way, due) for way in options) for _, options in reading.tag)
    if due.kind is Kind.SUM:
        return reading == SUM or reading.kind is Kind.COUNTS
    if due.kind is Kind.CUT:
        return reading == due or (reading.kind is Kind.SAME and bool(reading.dim >> due.dim & 1))
    return reading.kind is due.kind
