"""The sharder: re-interprets a graph of global shapes as one rank's graph.

Every node is visited once, in order. A rule says, per mesh axis, where the node's outputs live and what it needs its operands to
be; the sharder inserts the conversions (the only collectives of the data axes) and calls the op on local values. Rules are
plain functions in the ``rules_*`` modules, found by op in one table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .. import graph as graphs
from .. import meta, ops
from ..compat import FakeTensorMode
from ..errors import PassError
from .shapes import local_shape
from .types import REPLICATE, Partial, Placement, Replicate, Shard

aten = torch.ops.aten


class NoRule(Exception):
    """A rule cannot place this call; the text says why and what would help."""


@dataclass
class Call:
    """A node of the global graph as a rule sees it on one axis."""

    node: Node
    axis: str
    ranks: int
    place: Callable[[Node, str], Placement]

    @property
    def args(self) -> tuple[Any, ...]:
        return self.node.args

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        """Argument by position or keyword."""
        if index < len(self.node.args):
            return self.node.args[index]
        return self.node.kwargs.get(name, default)

    def placed(self, arg: Any) -> Placement:
        """Placement of an operand on this axis; constants are replicated."""
        return self.place(arg, self.axis) if isinstance(arg, Node) else REPLICATE

    def tensors(self) -> list[Node]:
        """Tensor operands in order, lists flattened, each once."""
        return [source for source in self.node.all_input_nodes if meta.is_tensor(source)]

    @staticmethod
    def shape(arg: Any) -> tuple[int, ...]:
        """Global shape of an operand."""
        return tuple(meta.tensor(arg).shape)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return tuple(meta.tensor(self.node).shape)


@dataclass
class Decision:
    """Placement of the output (or of each output) and of the operands that must be converted first."""

    out: Placement | Sequence[Placement]
    need: Mapping[Node, Placement] = field(default_factory=dict)


Rule = Callable[[Call], Decision]
Emitter = Callable[["Sharder", Node, dict[str, Decision]], "Node | None"]


class Sharder:
    """Builds the local graph. ``axes`` maps the mesh axes being placed to their sizes."""

    def __init__(
        self,
        source: Graph,
        axes: Mapping[str, int],
        mode: FakeTensorMode,
        rules: Mapping[Any, Rule],
        emitters: Mapping[Any, Emitter],
        fallback: Callable[[Any], Rule | None],
    ) -> None:
        self.source, self.axes, self.mode = source, dict(axes), mode
        self.rules, self.emitters, self.fallback = rules, emitters, fallback
        self.graph = Graph()
        self.env: dict[Node, Node] = {}
        self.offsets: dict[tuple[str, int], Node] = {}
        self.new_offsets: list[tuple[str, int, Node]] = []
        self._converted: dict[tuple[Node, str, Placement], Node] = {}
        self._placed: dict[Node, dict[str, Placement]] = {}
        self._tuples: dict[Node, dict[str, Sequence[Placement]]] = {}

    # -- placements of the global graph's nodes ---------------------------------------------------------------------
    def place(self, node: Node, axis: str) -> Placement:
        return self._placed.get(node, {}).get(axis, REPLICATE)

    def add_placeholder(self, node: Node, placed: Mapping[str, Placement]) -> Node:
        """Copy a placeholder with its value cut to this rank's shape."""
        made = self.graph.placeholder(node.name)
        made.meta = meta.copy_meta(node)
        found = node.meta.get("val")
        if isinstance(found, torch.Tensor):
            shards = [(item, self.axes[axis]) for axis, item in placed.items() if isinstance(item, Shard)]
            with self.mode:
                made.meta["val"] = torch.empty(
                    local_shape(found.shape, shards),
                    dtype=found.dtype,
                    device=found.device,
                    requires_grad=False,
                )
        self._record(node, made, placed)
        return made

    def _record(self, node: Node, made: Node, placed: Mapping[str, Placement]) -> None:
        kept = {axis: item for axis, item in placed.items() if not isinstance(item, Replicate)}
        others = {axis: item for axis, item in meta.placements(node).items() if axis not in self.axes}
        self.env[node] = made
        self._placed[node] = kept
        meta.set_placements(made, others | kept)

    # -- the walk ----------------------------------------------------------------------------------------------------
    def visit(self, node: Node) -> None:
        """Shard one call."""
        if node.target is graphs.operator.getitem:
            self._visit_getitem(node)
            return
        decisions = self.decide(node)
        emitter = self.emitters.get(node.target)
        made = emitter(self, node, decisions) if emitter is not None else None
        if made is None:
            made = self.emit(node, node.args, node.kwargs, decisions)
        self.finish(node, made, decisions)

    def _visit_getitem(self, node: Node) -> None:
        source, index = node.args
        assert isinstance(source, Node) and isinstance(index, int)
        found = self._tuples.get(source, {})
        made = self.graph.call_function(graphs.operator.getitem, (self.env[source], index))
        made.meta = meta.copy_meta(node)
        made.meta["val"] = meta.value(self.env[source])[index]
        self._record(node, made, {axis: items[index] for axis, items in found.items()})

    def keep(self, node: Node, operand: Callable[[Node], Node]) -> Node:
        """Copy a call as it is, reading its operands through ``operand``; its placements on other axes stay."""
        made = self.graph.node_copy(node, operand)
        made.meta = meta.copy_meta(node)
        self.env[node] = made
        return made

    def decide(self, node: Node) -> dict[str, Decision]:
        """Ask the op's rule on every axis; an operand that is sharded where no rule exists is refused."""
        decisions = {}
        for axis, ranks in self.axes.items():
            call = Call(node, axis, ranks, self.place)
            if all(isinstance(call.placed(item), Replicate) for item in call.tensors()):
                count = len(meta.value(node)) if isinstance(meta.value(node), (tuple, list)) else 0
                decisions[axis] = Decision([REPLICATE] * count if count else REPLICATE)
                continue
            rule = self.rules.get(node.target) or self.fallback(node.target)
            operands = ", ".join(f"{item.name}: {call.placed(item)}{list(call.shape(item))}" for item in call.tensors())
            if rule is None:
                raise PassError(
                    f"shard-dense: {meta.where(node)} calls {node.target}, for which there is no placement rule on {axis} "
                    f"(operands {operands}); add a rule to moecompile/placement or rewrite the line with a supported op."
                )
            try:
                decisions[axis] = rule(call)
            except NoRule as reason:
                raise PassError(
                    f"shard-dense: {meta.where(node)} calls {node.target} on operands {operands}: {reason}"
                ) from None
        return decisions

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
        return graphs.call(self.graph, target or node.target, *local_args, like=node, mode=self.mode, **local_kwargs)

    def finish(self, node: Node, made: Node, decisions: Mapping[str, Decision]) -> None:
        """Record placements, and check the local shape against the global one."""
        outs = {axis: decision.out for axis, decision in decisions.items()}
        if isinstance(meta.value(node), (tuple, list)):
            self._tuples[node] = {axis: out for axis, out in outs.items() if not isinstance(out, Placement)}
            self._record(node, made, {})
            for index, found in enumerate(meta.value(node)):
                placed = {axis: out[index] for axis, out in self._tuples[node].items()}
                self._check_shape(node, found, meta.value(made)[index], placed)
            return
        placed = {axis: out for axis, out in outs.items() if isinstance(out, Placement)}
        self._record(node, made, placed)
        self._check_shape(node, meta.value(node), meta.value(made), placed)

    def _check_shape(self, node: Node, found: Any, local: Any, placed: Mapping[str, Placement]) -> None:
        if not isinstance(found, torch.Tensor):
            return
        wanted = self.local_shape(found.shape, placed)
        if wanted != list(local.shape) or found.dtype != local.dtype:
            raise PassError(
                f"shard-dense: {meta.where(node)} ({node.target}) gives a local {local.dtype}{list(local.shape)} where the placement asks for "
                f"{found.dtype}{wanted}; the rule of this op does not localise its arguments."
            )

    def local_shape(self, shape: Sequence[int], placed: Mapping[str, Placement]) -> list[int]:
        """This rank's part of a global shape."""
        return local_shape(shape, [(item, self.axes[axis]) for axis, item in placed.items() if isinstance(item, Shard)])

    def out_local_shape(self, node: Node, decisions: Mapping[str, Decision]) -> list[int]:
        """Local shape of the output of ``node``."""
        placed = {axis: item.out for axis, item in decisions.items() if isinstance(item.out, Placement)}
        return self.local_shape(meta.tensor(node).shape, placed)

    # -- conversions -------------------------------------------------------------------------------------------------
    def convert(self, made: Node, like: Node, axis: str, have: Placement, want: Placement) -> Node:
        """Change the placement of a local value on one axis; each conversion is made once."""
        if have == want:
            return made
        key = (made, axis, want)
        if key not in self._converted:
            self._converted[key] = self._convert(made, like, axis, have, want)
        return self._converted[key]

    def _convert(self, made: Node, like: Node, axis: str, have: Placement, want: Placement) -> Node:
        ranks = self.axes[axis]
        placed = {**meta.placements(made), axis: want}
        if isinstance(have, Partial) and isinstance(want, Replicate):
            new = graphs.call(self.graph, ops.all_reduce, made, "sum", axis, like=like, mode=self.mode)
        elif isinstance(have, Replicate) and isinstance(want, Partial):
            new = graphs.call(self.graph, aten.div.Tensor, made, ranks, like=like, mode=self.mode)
        elif isinstance(have, Replicate) and isinstance(want, Shard) and not want.rows:
            index = self.offset(axis)
            new = graphs.call(
                self.graph,
                ops.local_slice,
                made,
                index,
                want.dim,
                want.outer,
                ranks,
                like=like,
                mode=self.mode,
            )
        elif isinstance(have, Partial) and isinstance(want, Shard):
            whole = self.convert(made, like, axis, have, REPLICATE)
            return self.convert(whole, like, axis, REPLICATE, want)
        else:
            raise PassError(
                f"shard-dense: {meta.where(like)} is {have} on {axis} and {want} is needed there, which this version does not "
                f"convert; rewrite the line so that its batch dim stays first."
            )
        meta.set_placements(new, {key: item for key, item in placed.items() if not isinstance(item, Replicate)})
        return new

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


def replicated(call: Call) -> Decision:
    """Everything that is partial is reduced first; a cut operand has no rule."""
    need: dict[Node, Placement] = {}
    for item in call.tensors():
        placed = call.placed(item)
        if isinstance(placed, Shard):
            raise NoRule("a cut operand meets an op that needs all of it; keep the batch dim out of this op.")
        if isinstance(placed, Partial):
            need[item] = REPLICATE
    return Decision(REPLICATE, need)
