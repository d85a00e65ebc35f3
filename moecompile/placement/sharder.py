"""The sharder: re-interprets a graph of global shapes as one rank's graph.

Every node is visited once, in order. A rule says, per mesh axis, where the node's outputs live and what it needs its operands to
be; the sharder inserts the conversions (the only collectives of the data axes) and calls the op on local values. Rules are
plain functions in the ``rules_*`` modules, found by op in one table. What no rule can place is gathered, runs whole on every
rank and is recorded, or is refused: under ``strict``, and where gathering cannot make it right. A decision that cannot be
right whatever the op counts as none: an operand overlooked, a partial value that vanishes, a cut that leaves no trace.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .. import graph as graphs
from .. import meta
from ..compat import FakeTensorMode, OpOverload
from ..errors import PassError
from ..graph import arguments
from ..ops import AXIS_ARGUMENT
from . import convert as conversions
from .call import Call, Decision, Emitter, NoRuleError, Rule
from .gather import Ledger, gathered_bytes, whole
from .shapes import local_shape
from .types import REPLICATE, Partial, Placement, Replicate, Shard


class Sharder:
    """Builds the local graph. ``axes`` maps the mesh axes being placed to their sizes.

    ``absorbs`` are ops that may read a partial or a cut operand and still give a whole result: their emitter sees to it, or
    they read nothing but the operand's shape. ``shares`` are rules for ops that go back to parts when all operands are whole
    because something before was gathered. ``strict`` refuses what would have to be gathered; ``ledger`` holds what was.
    """

    def __init__(
        self,
        source: Graph,
        axes: Mapping[str, int],
        mode: FakeTensorMode,
        rules: Mapping[Any, Rule],
        emitters: Mapping[Any, Emitter],
        fallback: Callable[[Any], Rule | None],
        absorbs: frozenset[Any] = frozenset(),
        shares: Mapping[Any, Rule] = MappingProxyType({}),
        strict: bool = False,
    ) -> None:
        self.source, self.axes, self.mode = source, dict(axes), mode
        self.rules, self.emitters, self.fallback, self.absorbs = rules, emitters, fallback, absorbs
        self.shares = shares
        self.strict, self.ledger, self.whole = strict, Ledger(), set[Node]()
        self.graph = Graph()
        self.env: dict[Node, Node] = {}
        self.offsets: dict[tuple[str, int], Node] = {}
        self.new_offsets: list[tuple[str, int, Node]] = []
        # what a pass asks for beyond the rules: a value's placement once it is made, and how a call is to read an operand
        self.stand_ins: set[Node] = set()  # values that come from outside the walk
        self.shares_whole = False  # whole operands of the ops in ``shares`` are shared out, too
        self.wants: dict[Node, dict[str, Placement]] = {}
        self.reads: dict[Node, dict[Node, dict[str, Placement]]] = {}
        self._converted: dict[tuple[Node, str, Placement], Node] = {}
        self._placed: dict[Node, dict[str, Placement]] = {}
        self._tuples: dict[Node, dict[str, Decision]] = {}

    @property
    def differentiated(self) -> set[Node]:
        """Global values that gradients flow through; the pass that walks says which."""
        return self.ledger.differentiated

    # -- placements of the global graph's nodes ---------------------------------------------------------------------
    def place(self, node: Node, axis: str) -> Placement:
        return self._placed.get(node, {}).get(axis, REPLICATE)

    def add_placeholder(self, node: Node, placed: Mapping[str, Placement]) -> Node:
        """Copy a placeholder with its value cut to this rank's shape."""
        made = self.graph.placeholder(node.name)
        self.stand_ins.add(node)
        made.meta = meta.copy_meta(node)
        found = node.meta.get("val")
        if isinstance(found, torch.Tensor):
            shape = self.local_shape(node, found.shape, placed)
            with self.mode:
                made.meta["val"] = torch.empty(shape, dtype=found.dtype, device=found.device, requires_grad=False)
        self._record(node, made, placed)
        return made

    def _record(self, node: Node, made: Node, placed: Mapping[str, Placement]) -> None:
        kept = _cut_or_partial(placed)
        others = {axis: item for axis, item in meta.placements(node).items() if axis not in self.axes}
        self.env[node] = made
        self._placed[node] = kept
        meta.set_placements(made, others | kept)

    # -- the walk ----------------------------------------------------------------------------------------------------
    def visit(self, node: Node) -> None:
        """Shard one call."""
        if node.target is operator.getitem:
            self._visit_getitem(node)
            return
        decisions, since = self.decide(node), self.ledger.mark()
        try:
            made = self._emit_decided(node, decisions)
        except NoRuleError as reason:  # an emitter found out
            calls = [Call(node, axis, ranks, self.place) for axis, ranks in self.axes.items()]
            decisions = {call.axis: self._gathered(call, str(reason)) for call in calls}
            made = self._emit_decided(node, decisions)
        self.finish(node, made, decisions)
        self.ledger.record(node, made, decisions, since)
        if any(decision.gathered for decision in decisions.values()) or not self.whole.isdisjoint(node.all_input_nodes):
            self.whole.add(node)
        if meta.is_tensor(node):
            self._cut_again(node, {axis: decision.cuts[0] for axis, decision in decisions.items() if decision.cuts})
        self._want(node)

    def _emit_decided(self, node: Node, decisions: dict[str, Decision]) -> Node:
        emitter = self.emitters.get(node.target)
        made = emitter(self, node, decisions) if emitter is not None else None
        return made if made is not None else self.emit(node, node.args, node.kwargs, decisions)

    def place_as(self, node: Node, made: Node, placed: Mapping[str, Placement]) -> None:
        """Take ``made``, which a pass has computed by itself, for this rank's part of ``node``."""
        self._record(node, made, placed)

    def _visit_getitem(self, node: Node) -> None:
        source, index = node.args
        assert isinstance(source, Node) and isinstance(index, int)
        found = self._tuples.get(source, {})
        made = self.graph.call_function(operator.getitem, (self.env[source], index))
        made.meta = meta.copy_meta(node)
        made.meta["val"] = meta.value(self.env[source])[index]
        self._record(node, made, {axis: decision.outs[index] for axis, decision in found.items()})
        if source in self.whole:
            self.whole.add(node)
        self._cut_again(node, {axis: decision.cuts[index] for axis, decision in found.items() if decision.cuts})
        self._want(node)

    def _want(self, node: Node) -> None:
        """Convert a value at once to what a pass asked for."""
        for axis, want in self.wants.get(node, {}).items():
            have = self.place(node, axis)
            if have != want:
                part = self.convert(self.env[node], node, axis, have, want)
                self._record(node, part, {**self._placed[node], axis: want})

    def _cut_again(self, node: Node, cuts: Mapping[str, Shard | None]) -> None:
        """Give a whole value this rank's part for its readers; those that want it whole find it without moving anything."""
        for axis, cut in cuts.items():
            if cut is not None:
                made = self.env[node]
                part = self.convert(made, node, axis, REPLICATE, cut)
                self._converted[part, axis, REPLICATE] = made
                self._record(node, part, {**self._placed[node], axis: cut})

    def keep(self, node: Node, operand: Callable[[Node], Node]) -> Node:
        """Copy a call as it is, reading its operands through ``operand``; its placements on other axes stay."""
        made = self.graph.node_copy(node, operand)
        made.meta = meta.copy_meta(node)
        self.env[node] = made
        return made

    def decide(self, node: Node) -> dict[str, Decision]:
        """Ask the op's rule on every axis. What it cannot place is gathered; writes in place and random draws are refused."""
        _refuse_stateful(node)
        decisions: dict[str, Decision] = {}
        asked = self.reads.get(node, {})
        for axis, ranks in self.axes.items():
            read = {item: found[axis] for item, found in asked.items() if axis in found}
            call = Call(node, axis, ranks, self._reading(read))
            operands = {item: call.place(item, axis) for item in call.tensors()}
            if all(isinstance(placed, Replicate) for placed in operands.values()):
                whole = self.shares_whole or not self.whole.isdisjoint(operands)
                share = self.shares.get(node.target) if whole else None
                decisions[axis] = share(call) if share is not None else call.decide(REPLICATE, read)
                continue
            rule = self.rules.get(node.target) or self.fallback(node.target)
            try:
                if rule is None:
                    raise NoRuleError(
                        f"there is no placement rule for it on {axis}; add one to moecompile/placement or rewrite the line with a "
                        f"supported op."
                    )
                decisions[axis] = rule(call)
                self._check_decision(call, operands, decisions[axis])
                decisions[axis].need = {**read, **decisions[axis].need}
            except NoRuleError as reason:
                decisions[axis] = self._gathered(call, str(reason))
        return decisions

    def _reading(self, read: Mapping[Node, Placement]) -> Callable[[Node, str], Placement]:
        """Placements as a call sees them that reads some operands as asked."""
        return lambda item, axis: read.get(item) or self.place(item, axis)

    def _gathered(self, call: Call, reason: str) -> Decision:
        """Run the call whole on every rank of the axis; a PassError under ``strict``, or where that cannot be right."""
        operands = {item: self.place(item, call.axis) for item in call.tensors()}
        if all(isinstance(placed, Replicate) for placed in operands.values()):
            return call.decide(REPLICATE)
        shown = ", ".join(f"{item.name}: {placed}{list(call.shape(item))}" for item, placed in operands.items())
        refused = f"shard-dense: {meta.where(call.node)} calls {call.node.target} on operands {shown}: {reason}"
        try:
            decision = whole(call, operands, reason)
        except NoRuleError:
            raise PassError(refused) from None
        if self.strict:
            moved = gathered_bytes(operands.items(), call.ranks)
            raise PassError(
                f"{refused.removesuffix('.')}; or leave strict=True out, and it is gathered for {moved:,} B per forward over "
                f"{call.axis}."
            )
        return decision

    def _check_decision(self, call: Call, operands: Mapping[Node, Placement], decision: Decision) -> None:
        """What no rule may answer. These are faults of a rule, found before they become wrong numbers."""
        found = meta.value(call.node)
        count = len(found) if isinstance(found, (tuple, list)) else None
        if isinstance(decision.out, Placement) is (count is not None) or (count or 1) != len(decision.outs):
            raise NoRuleError(f"its rule gives {len(decision.outs)} placements for {count or 1} results.")
        for item, out in zip(found if count is not None else [found], decision.outs, strict=True):
            if isinstance(out, Partial) and isinstance(item, torch.Tensor) and item.dtype == torch.bool:
                raise NoRuleError("a sum over ranks of booleans has no meaning; cast to int64 first.")
        for item, placed in operands.items():
            placed = decision.need.get(item, placed)
            if isinstance(placed, Replicate) or call.node.target in self.absorbs:
                continue
            if item not in call.seen:
                raise NoRuleError(f"its rule does not look at {item.name}, which is {placed}.")
            if isinstance(placed, Partial) and not all(isinstance(out, Partial) for out in decision.outs):
                raise NoRuleError(f"its rule lets the partial sum {item.name} into a result that is not one.")
            if isinstance(placed, Shard) and any(isinstance(out, Replicate) for out in decision.outs):
                raise NoRuleError(f"its rule gives a whole result although {item.name} is cut.")

    def given(self, arg: Node, axis: str, decisions: Mapping[str, Decision]) -> Placement:
        """Placement of an operand once it is converted to what the decisions need."""
        return decisions[axis].need.get(arg, self.place(arg, axis))

    def operand(self, arg: Node, decisions: Mapping[str, Decision]) -> Node:
        """The local value of ``arg``, converted to what the decisions need."""
        made = self.env[arg]
        for axis, decision in decisions.items():
            wanted = decision.need.get(arg)
            if wanted is not None:
                made = self.convert(made, arg, axis, self.place(arg, axis), wanted)
        return made

    def emit(self, node: Node, args: Any, kwargs: Any, decisions: Mapping[str, Decision], target: Any = None) -> Node:
        """Call ``target`` (the node's own by default) on the local operands."""
        local_args = map_arg(args, lambda arg: self.operand(arg, decisions))
        local_kwargs = map_arg(kwargs, lambda arg: self.operand(arg, decisions))
        return self.call(target or node.target, *local_args, like=node, **local_kwargs)

    def call(self, target: Any, *args: Any, like: Node, **kwargs: Any) -> Node:
        """Insert a call on local values, with the module and source of ``like``."""
        try:
            made = graphs.call(self.graph, target, *args, like=like, mode=self.mode, **kwargs)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            first = str(error).strip().splitlines()[0]
            raise PassError(
                f"shard-dense: {meta.where(like)}: on this rank's part {target} fails with '{first}'; its rule does not localise "
                f"the call, rewrite the line with another op."
            ) from error
        if target in AXIS_ARGUMENT:
            self.ledger.note(made, like)
        return made

    def finish(self, node: Node, made: Node, decisions: Mapping[str, Decision]) -> None:
        """Record placements, and check the local shape against the global one."""
        found, local = meta.value(node), meta.value(made)
        if isinstance(found, (tuple, list)):
            self._tuples[node] = dict(decisions)
            self._record(node, made, {})
            each = [{axis: decision.outs[index] for axis, decision in decisions.items()} for index in range(len(found))]
            for index, placed in enumerate(each):
                self._check_shape(node, found[index], local[index], placed)
            meta.clear_placements(made)
            meta.set_item_placements(made, [_cut_or_partial(placed) for placed in each])
            return
        placed = {axis: decision.outs[0] for axis, decision in decisions.items()}
        self._record(node, made, placed)
        self._check_shape(node, found, local, placed)

    def _check_shape(self, node: Node, found: Any, local: Any, placed: Mapping[str, Placement]) -> None:
        if not isinstance(found, torch.Tensor):
            return
        wanted = self.local_shape(node, found.shape, placed)
        if not _same_shape(wanted, local.shape) or found.dtype != local.dtype:
            raise PassError(
                f"shard-dense: {meta.where(node)} ({node.target}) gives a local {local.dtype}{list(local.shape)} where the placement "
                f"asks for {found.dtype}{wanted}; the rule of this op does not localise its arguments."
            )

    def local_shape(self, node: Node, shape: Sequence[int], placed: Mapping[str, Placement]) -> list[int]:
        """This rank's part of a global shape of ``node``."""
        cuts = [(item, self.axes[axis]) for axis, item in placed.items() if isinstance(item, Shard)]
        try:
            return local_shape(shape, cuts)
        except ValueError as error:
            raise PassError(
                f"shard-dense: {meta.where(node)}: {error}; choose a batch that the ranks divide."
            ) from None

    def out_local_shape(self, node: Node, decisions: Mapping[str, Decision]) -> list[int]:
        """Local shape of the output of ``node``."""
        placed = {axis: item.out for axis, item in decisions.items() if isinstance(item.out, Placement)}
        return self.local_shape(node, meta.tensor(node).shape, placed)

    # -- conversions -------------------------------------------------------------------------------------------------
    def convert(self, made: Node, like: Node, axis: str, have: Placement, want: Placement) -> Node:
        """Change the placement of a local value on one axis; each conversion is made once."""
        if have == want:
            return made
        key = (made, axis, want)
        if key not in self._converted:
            # beside the value itself and not where it is first needed: layers that read it stay equal
            with self.graph.inserting_before(_after(made)):
                self._converted[key] = conversions.convert(self, made, like, axis, have, want)
        return self._converted[key]

    def offset(self, axis: str, stride: int = 1) -> Node:
        """A graph input that holds this rank's index on ``axis`` times ``stride``, so that all ranks share one text."""
        key = (axis, stride)
        if key not in self.offsets:
            first = next(iter(self.graph.nodes))
            with self.graph.inserting_before(first):
                node = self.graph.placeholder(f"{axis}_index" if stride == 1 else f"{axis}_offset_{stride}")
            with self.mode:
                node.meta["val"] = torch.empty((), dtype=torch.int64)
            self.offsets[key] = node
            self.new_offsets.append((axis, stride, node))
        return self.offsets[key]

    def drop_dead(self) -> None:
        """Erase what nothing reads: whole values of which only parts are used, and offsets without a reader."""
        graphs.eliminate_dead(self.graph)
        unused = [item for item in self.new_offsets if not item[2].users]
        for item in unused:
            self.new_offsets.remove(item)
            self.graph.erase_node(item[2])


def _cut_or_partial(placed: Mapping[str, Placement]) -> dict[str, Placement]:
    """Without the axes on which a value is whole."""
    return {axis: item for axis, item in placed.items() if not isinstance(item, Replicate)}


def _after(made: Node) -> Node:
    """The place behind a value, and behind all placeholders."""
    place = made.next
    while place.op == "placeholder":
        place = place.next
    return place


def _same_shape(wanted: Sequence[Any], found: Sequence[Any]) -> bool:
    """Sizes known only at run time have a name of their own in each graph."""
    known = [(one, other) for one, other in zip(wanted, found, strict=False) if isinstance(one, int)]
    return len(wanted) == len(found) and all(isinstance(other, int) and one == other for one, other in known)


def _refuse_stateful(node: Node) -> None:
    """In-place writes and random draws have no meaning that placements could keep; lists are read through getitem only."""
    target = node.target
    for item in node.all_input_nodes:
        if isinstance(meta.value(item), (tuple, list)):
            raise PassError(
                f"shard-dense: {meta.where(node)} reads all results of {item.name} at once, whose placements may differ; take "
                f"them one by one."
            )
    if not isinstance(target, OpOverload):
        return
    if target._schema.is_mutable:
        raise PassError(
            f"shard-dense: {meta.where(node)} calls {target}, which writes into its operand; capture removes such writes, so "
            f"this graph was made otherwise: use the functional form."
        )
    if torch.Tag.nondeterministic_seeded in target.tags and not _draws_nothing(node):
        raise PassError(
            f"shard-dense: {meta.where(node)} calls {target}, whose random numbers would differ from those of one process; "
            f"set its probability to 0, draw the numbers outside the model, or use dp=1."
        )


def _draws_nothing(node: Node) -> bool:
    """Whether a random op is switched off by its arguments: dropout with p=0 or outside training."""
    found = arguments(node)
    rates = [found[name] for name in ("dropout_p", "p", "dropout") if name in found]  # the last one of recurrent layers
    if "dropout_p" in found:
        return not found["dropout_p"]
    return (bool(rates) and not any(rates)) or not found.get("train", found.get("training", True))
