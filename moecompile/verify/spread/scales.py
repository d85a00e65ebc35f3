"""Which numbers that a program calculates with stand in the model, and which were put in.

A value divided by 2 may be half of it, as the model says, or this rank's share of two. Before any pass cuts the model, every
number that it multiplies by, divides by or adds is written down with its line; afterwards what is more than that was put in, and has
to be a share. Differentiation brings numbers of its own, so all are written down once more behind it; later passes have none to
add, and no division to leave out.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
from torch.fx import Node

from ... import meta
from ...compat import OpOverload
from ...errors import VerifyError
from ...graph import ancestors
from ...pass_base import Fact
from ...program import Level, OutputKind, Program
from ..report import fault
from .table import CARRIERS, name_of

_MODEL, _DRAWS, _METRICS = "moe_model_factors", "moe_model_draws", "moe_model_metrics"
_ADDED = "moe_added_divisions"
_STEP, _DIVIDED = "moe_step_factors", "moe_step_divisions"
# the same value on other ranks; the first operand is what they move
_MOVERS = frozenset({"moe.all_gather", "moe.all_reduce", "moe.reduce_scatter", "moe.local_slice", "moe.local_place",
                     "moe.zigzag_slice", "moe.zigzag_place", "moe.zigzag_exchange"})  # fmt: skip
_KINDS = {
    **dict.fromkeys(("aten.mul", "aten.multiply"), "mul"),
    **dict.fromkeys(("aten.div", "aten.true_divide", "aten.divide"), "div"),
    **dict.fromkeys(("aten.add", "aten.sub", "aten.subtract", "aten.rsub"), "add"),
}
Key = tuple[str, str, float]


class Origin(enum.Enum):
    """Where a division comes from."""

    MODEL = "it stands in the model"
    ADDED = "a pass put it in"
    OPEN = "one of several on its line, of which some were put in, or nothing is known of the model"


def remember(program: Program) -> None:
    """Write down the model's numbers as long as no pass has cut it, then the divisions that passes put in, in lines where the model has
    none by that number, and the numbers of the step as soon as there is one.
    """
    kept = program.graph_module.meta
    if program.level is Level.STEP:
        if _STEP not in kept:
            kept[_STEP], kept[_DIVIDED] = _count(program), _divisions(program)
    elif not program.facts & {Fact.TOKENS_SHARDED, Fact.EXPERTS_SHARDED}:
        kept[_MODEL] = _count(program)
        kept[_METRICS] = any(item.kind is OutputKind.METRIC for item in program.outputs)
        kept[_DRAWS] = {meta.source(node) for node in program.graph.nodes if _draws(node)}
    elif _MODEL in kept:
        now = _count(program, forward=True).items()
        kept[_ADDED] = {key: count for key, count in now if key[1] == "div" and not kept[_MODEL][key]}


def _draws(node: Node) -> bool:
    """Whether a node draws random numbers; what it is replaced by has numbers of its own, such as the share that a dropout keeps."""
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def factor(node: Node) -> Any:
    """The number that a node multiplies, divides or adds to a tensor; None for any other node."""
    found = node.args[1] if len(node.args) > 1 else None
    if not isinstance(found, (int, float)) or node.op != "call_function" or not meta.is_tensor(node):
        return None
    return found if name_of(node.target) in _KINDS else None


def _key(node: Node) -> Key:
    return meta.source(node), _KINDS[name_of(node.target)], float(factor(node))


def _count(program: Program, *, forward: bool = False, among: Set[Node] | None = None) -> Counter[Key]:
    """Different calls with each number: one that is made of the whole and once more of a part of it counts once."""
    numbers = _numbered(program.graph.nodes, CARRIERS | _MOVERS)
    found = {
        (numbers[node], _key(node))
        for node in program.graph.nodes
        if factor(node) is not None
        and not _is_neutral(node)
        and (among is None or node in among)
        and not (forward and meta.direction(node) is meta.Direction.BACKWARD)
    }
    return Counter(key for _, key in found)


def _divisions(program: Program) -> Counter[Key]:
    """Divisions by a whole number that an output depends on; equal calls count once, for the first line, whatever views lie between."""
    live = ancestors(program.graph.output_node())
    nodes = [node for node in program.graph.nodes if node in live]
    numbers = _numbered(nodes, CARRIERS)
    found: dict[int, Key] = {}
    for node in nodes:
        if isinstance(factor(node), int) and factor(node) > 1 and _key(node)[1] == "div":
            found.setdefault(numbers[node], _key(node))
    return Counter(found.values())


def _numbered(nodes: Iterable[Node], through: Set[str]) -> dict[Node, int]:
    """A number for each value, the same for equal calls; ops named in ``through`` pass on that of what they move."""
    numbers: dict[Node, int] = {}
    for node in nodes:
        sources = node.all_input_nodes
        name = name_of(node.target) if node.op == "call_function" else ""
        moves = name in through
        if sources and ((moves and (len(sources) == 1 or name in _MOVERS)) or _is_neutral(node)):
            numbers[node] = numbers.get(sources[0], 0)
        elif moves or node.op != "call_function":
            numbers[node] = hash(node.name)
        else:
            called = (_signature(node.args, numbers), _signature(tuple(node.kwargs.items()), numbers))
            numbers[node] = hash((node.target, called, meta.direction(node)))
    return numbers


def _signature(args: Any, numbers: dict[Node, int]) -> Any:
    """Arguments as something that can be hashed, each node by its number."""
    if isinstance(args, Node):
        return numbers.get(args, 0)
    return tuple(_signature(item, numbers) for item in args) if isinstance(args, (list, tuple)) else str(args)


def _is_neutral(node: Node) -> bool:
    """Whether a node adds 0, or multiplies or divides by 1."""
    number = factor(node)
    return number in (0, 1) and bool(number == (0 if _KINDS[name_of(node.target)] == "add" else 1))


def _told(program: Program) -> set[Node]:
    """What a loss, a gradient or an output of the model depends on, not only what is recorded beside them."""
    outputs = zip(program.output_nodes(), program.outputs, strict=True)
    found = {node for node, item in outputs if isinstance(node, Node) and item.kind is not OutputKind.METRIC}
    return found | ancestors(*found)


class Scales:
    """The numbers of one program against those of its model, and of the step that was derived from it."""

    def __init__(self, program: Program) -> None:
        kept = program.graph_module.meta
        self._model: Counter[Key] | None = kept.get(_MODEL)
        self._added: Mapping[Key, int] = kept.get(_ADDED, {})
        self._draws: Set[str] = kept.get(_DRAWS, frozenset())
        self._step: Counter[Key] | None = kept.get(_STEP) if program.level is Level.STEP else None
        self._cut = Fact.TOKENS_SHARDED in program.facts
        self._exact = program.level is Level.MODEL  # later, ops are taken apart into others with numbers of their own
        self._told = _told(program)
        # of metrics that were recorded later nobody knows which of their numbers hold a share of a number of ranks
        self.metrics_known: bool = kept.get(_METRICS, True)
        known = self._model is not None or self._step is not None
        self._now = _count(program, among=self._told if self._exact else None) if known else Counter()
        self._forward = _count(program, forward=True) if self._model is not None else Counter()

    def origin(self, node: Node) -> Origin:
        """Where a division by a whole number comes from."""
        if self._model is None or meta.direction(node) is meta.Direction.BACKWARD:
            return Origin.OPEN
        key = _key(node)
        if self._forward[key] <= self._model[key]:
            return Origin.MODEL
        added = not self._model[key] and (self._exact or self._forward[key] <= self._added.get(key, 0))
        return Origin.ADDED if added else Origin.OPEN

    def check(self, node: Node) -> None:
        """A number that no pass has reason to put in: shares are made by dividing by a whole number."""
        if factor(node) is None or not self._cut:
            return
        key = _key(node)
        if self._step is not None and self._now[key] > self._step[key]:
            raise fault(
                node,
                f"has the number {factor(node)}, which the step did not have in that line when it was differentiated; leave the "
                f"scale as it is",
            )
        if self._model is None or not self._exact or (isinstance(factor(node), int) and key[1] == "div"):
            return
        if self._now[key] > self._model[key] and key[0] not in self._draws and node in self._told:
            raise fault(
                node,
                f"has the number {factor(node)}, which the model does not have in that line; leave the scale as it is",
            )

    def check_divisions(self, program: Program) -> None:
        """Every division that the step had when it was differentiated is still there."""
        divided: Counter[Key] = program.graph_module.meta.get(_DIVIDED, Counter())
        if self._step is None or not self._cut:
            return
        live = ancestors(program.graph.output_node())
        now = Counter(_key(node) for node in live if factor(node) is not None)
        for key, count in divided.items():
            if now[key] < count:
                raise VerifyError(
                    f"the step has lost a division by {key[2]:g} in {key[0] or 'a line without name'} since it was "
                    f"differentiated; leave the scale as it is."
                )
