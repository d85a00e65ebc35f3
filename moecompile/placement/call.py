"""What a rule sees of a node and what it answers; what an emitter sees of the walk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch.fx import Node

from .. import meta
from ..graph import arguments
from .types import REPLICATE, Partial, Placement, Shard


class NoRuleError(Exception):
    """A rule cannot place this call; the text says why and what would help."""


def changed(node: Node, **changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and keyword arguments of a call with some of them replaced, by name."""
    args, kwargs = list(node.args), dict(node.kwargs)
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    for name, found in changes.items():
        index = names.index(name)
        if index < len(args):
            args[index] = found
        else:
            kwargs[name] = found
    return tuple(args), kwargs


class Needs(dict[Node, Placement]):
    """The operands to convert first. One value cannot be wanted in two placements by one call."""

    def want(self, item: Node, placed: Placement) -> None:
        if self.setdefault(item, placed) != placed:
            raise NoRuleError(f"{item.name} is read twice in ways that need different cuts; clone it for one of them.")


@dataclass
class Call:
    """A node of the global graph as a rule sees it on one axis.

    ``seen`` holds the operands whose placement was asked for: a decision that overlooked a cut or partial one is refused.
    """

    node: Node
    axis: str
    ranks: int
    place: Callable[[Node, str], Placement]
    seen: set[Node] = field(default_factory=set)

    @property
    def args(self) -> tuple[Any, ...]:
        return self.node.args

    def get(self, name: str) -> Any:
        """Argument by the name it has in the op's schema."""
        return arguments(self.node)[name]

    def placed(self, arg: Any) -> Placement:
        """Placement of an operand on this axis; constants are replicated."""
        if not isinstance(arg, Node):
            return REPLICATE
        self.seen.add(arg)
        return self.place(arg, self.axis)

    def tensors(self) -> list[Node]:
        """Tensor operands in order, lists flattened, each once."""
        return [source for source in self.node.all_input_nodes if meta.is_tensor(source)]

    def partial(self, items: Iterable[Node] | None = None) -> list[Node]:
        """Those of the operands (by default all) that are partial."""
        return [item for item in (self.tensors() if items is None else items) if isinstance(self.placed(item), Partial)]

    def reduced(self, items: Iterable[Node] | None = None) -> Needs:
        """Partial operands (by default all) are summed first."""
        return Needs(dict.fromkeys(self.partial(items), REPLICATE))

    def whole(self, items: Iterable[Any], what: str) -> None:
        """Refuse the call if one of these operands is cut."""
        for item in items:
            if isinstance(self.placed(item), Shard):
                raise NoRuleError(
                    f"its {what} depends on the batch, which is spread over ranks; it must be the same for all."
                )

    @staticmethod
    def shape(arg: Any) -> tuple[int, ...]:
        """Global shape of an operand."""
        return tuple(meta.tensor(arg).shape)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return tuple(meta.tensor(self.node).shape)

    def decide(self, placed: Placement, needs: Mapping[Node, Placement] | None = None) -> Decision:
        """The same placement for the output, or for each of several outputs."""
        found = meta.value(self.node)
        out = [placed] * len(found) if isinstance(found, (tuple, list)) else placed
        return Decision(out, needs or {})


@dataclass
class Decision:
    """Placement of the output (or of each output) and of the operands that must be converted first.

    ``gathered`` says why the call runs whole on every rank of the axis, '' where a rule placed it; ``cuts`` are then how the
    outputs are cut again behind it, None where they stay whole.
    """

    out: Placement | Sequence[Placement]
    need: Mapping[Node, Placement] = field(default_factory=dict)
    gathered: str = ""
    cuts: Sequence[Shard | None] = ()

    @property
    def outs(self) -> list[Placement]:
        return [self.out] if isinstance(self.out, Placement) else list(self.out)


Rule = Callable[[Call], Decision]


class Walk(Protocol):
    """The sharder, as far as emitters and conversions need it."""

    axes: dict[str, int]
    env: dict[Node, Node]  # global node -> local node
    stand_ins: set[Node]

    @property
    def differentiated(self) -> set[Node]:
        """Global values that gradients flow through."""

    whole: set[Node]  # global nodes that come from one that runs whole
    rules: Mapping[Any, Rule]
    emitters: Mapping[Any, Emitter]
    fallback: Callable[[Any], Rule | None]

    def place(self, node: Node, axis: str) -> Placement:
        """Placement of a global value."""

    def given(self, arg: Node, axis: str, decisions: Mapping[str, Decision]) -> Placement:
        """Placement of an operand once it is converted to what the decisions need."""

    def decide(self, node: Node) -> dict[str, Decision]:
        """What the op's rule says on every axis."""

    def operand(self, arg: Node, decisions: Mapping[str, Decision]) -> Node:
        """The local value of an operand, converted to what the decisions need."""

    def emit(self, node: Node, args: Any, kwargs: Any, decisions: Mapping[str, Decision], target: Any = None) -> Node:
        """Call ``target`` (the node's own by default) on the local operands."""

    def call(self, target: Any, *args: Any, like: Node, **kwargs: Any) -> Node:
        """Insert a call on local values."""

    def convert(self, made: Node, like: Node, axis: str, have: Placement, want: Placement) -> Node:
        """Change the placement of a local value on one axis."""

    def out_local_shape(self, node: Node, decisions: Mapping[str, Decision]) -> list[int]:
        """Local shape of the output of a node."""

    def offset(self, axis: str, stride: int = 1) -> Node:
        """A graph input that holds this rank's index on an axis times a stride."""


Emitter = Callable[[Walk, Node, dict[str, Decision]], "Node | None"]


def align(call: Call, operands: Sequence[Node], ndim: int) -> tuple[Shard | None, Needs]:
    """One cut for all operands of a broadcast to ``ndim`` dims, seen from the result.

    Operands are aligned from the right. Whole operands that span the cut dim are to be sliced, other partial ones summed.
    """
    cut: Shard | None = None
    for item in operands:
        placed = call.placed(item)
        if isinstance(placed, Shard):
            seen = placed.moved(placed.dim + ndim - len(call.shape(item)))
            if cut is not None and seen != cut:
                raise NoRuleError(
                    f"its operands are cut differently ({cut} and {seen}); keep the batch dim in one place."
                )
            cut = seen
    needs = Needs()
    if cut is not None:
        for item in operands:
            follow(call, needs, item, cut, cut.dim - (ndim - len(call.shape(item))))
    return cut, needs


def follow(call: Call, needs: Needs, item: Node, cut: Shard, dim: int) -> None:
    """Give one operand the part of ``cut`` that falls on its ``dim`` (negative: it lacks the dim)."""
    placed = call.placed(item)
    if isinstance(placed, Shard):
        if dim < 0 or placed != cut.moved(dim):
            raise NoRuleError(
                f"its operands are cut differently ({placed} and {cut}); keep the batch dim in one place."
            )
        return
    if dim >= 0 and call.shape(item)[dim] != 1:
        if cut.rows:
            raise NoRuleError("rows of an expert region meet a whole tensor of as many rows, whose order is another.")
        needs.want(item, cut.moved(dim))
    elif isinstance(placed, Partial):
        needs.want(item, REPLICATE)
