"""Collectives: what would hang, mix up groups, or leave a gradient out.

All ranks run one text without control flow, so the order of collectives is the same on each by construction. What is
left: axes and group sizes exist, operands have the same size on all ranks unless the op carries sizes, rows that leave
come back, and the backward's collectives are the transposes of the forward's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from .. import meta, ops
from ..graph import ancestors, find, symbolic_sizes
from ..mesh import AXES, is_axis
from ..ops import AXIS_ARGUMENT, TRANSPOSE
from ..pass_base import Fact
from ..program import InputKind, Level, OutputKind, Program
from .report import fault

aten = torch.ops.aten
_EXCHANGES = (ops.dispatch, ops.combine)
_SIZED = (*_EXCHANGES, ops.all_gather_rows, ops.reduce_scatter_rows)  # ops that carry how many rows each rank sends
_GROUPED = (
    ops.exchange_counts,
    ops.all_gather,
    ops.reduce_scatter,
    ops.all_to_all,
    ops.rotate,
    ops.zigzag_exchange,
)  # ops whose second argument is the group size


def axis_of(node: Node) -> str:
    return str(node.args[AXIS_ARGUMENT[node.target]])  # type: ignore[index]


def check_collectives(program: Program) -> None:
    """Each collective by itself."""
    for node in program.graph.nodes:
        if node.target not in AXIS_ARGUMENT:
            continue
        axis = axis_of(node)
        if not is_axis(axis):
            raise fault(
                node, f"runs over the axis '{axis}', which is none of {', '.join(AXES)}; name an axis of the mesh"
            )
        if not node.users:
            raise fault(node, "is a collective whose result nobody uses; erase it or use its result")
        ranks = program.mesh.size(axis)
        if node.target in _GROUPED and node.args[1] != ranks:
            raise fault(
                node,
                f"is written for a group of {node.args[1]}, but '{axis}' has {ranks} ranks; pass mesh.size('{axis}')",
            )
        if node.target not in _SIZED and any(True for _ in symbolic_sizes(meta.value(node.args[0]))):
            raise fault(
                node,
                "moves a tensor whose size may differ between ranks; exchange the sizes first",
            )


def check_exchanges(program: Program) -> None:
    """Rows that leave come back in the forward, and each layer reads its sizes on the host once."""
    reads: dict[Any, Node] = {}
    for node in find(program.graph, ops.sizes_to_host, ops.gathered_sizes_to_host):
        other = reads.setdefault(node.args[0], node)
        if other is not node:
            raise fault(
                node,
                f"reads on the host what {other.name} has read; use its result",
            )
    away = [node for node in find(program.graph, ops.dispatch) if meta.direction(node) is meta.Direction.FORWARD]
    if not away:
        return
    barrier = {*find(program.graph, ops.dispatch), *reads.values()}
    home: dict[Node, list[Node]] = {}
    for node in find(program.graph, ops.combine):
        rows = node.args[0]
        assert isinstance(rows, Node)
        for source in {rows, *ancestors(rows, stop=barrier)} if rows not in barrier else {rows}:
            if source.target is ops.dispatch and _transposed(source, node):
                home.setdefault(source, []).append(node)
    for node in away:
        if node not in home:
            raise fault(
                node,
                "sends rows away that no combine with swapped sizes brings back; insert the combine",
            )


def _transposed(one: Node, other: Node) -> bool:
    """Whether two exchanges go the same way in opposite directions."""
    send, recv = one.args[1:3]
    return other.args[1:3] == (recv, send) and axis_of(one) == axis_of(other)


# ---- forward and backward ------------------------------------------------------------------------------------------


def check_transposes(program: Program) -> None:
    """In a step graph the backward's collectives are the transposes of those that a gradient passes, one for one."""
    if program.level is not Level.STEP:
        return
    synced = _reductions_of_results(program) | weight_gathers(program)
    forward: dict[Any, list[Node]] = {}
    backward: dict[Any, list[Node]] = {}
    for node in program.graph.nodes:
        if node.target not in TRANSPOSE or node in synced or not _is_float(node):
            continue
        if meta.direction(node) is meta.Direction.BACKWARD:
            backward.setdefault(_signature(node), []).append(node)
        else:
            forward.setdefault(_signature(node, opposite=True), []).append(node)
    for key, nodes in backward.items():
        if len(nodes) > len(forward.get(key, ())):
            raise fault(
                nodes[-1],
                "is in the backward and transposes no collective of the forward; that of a dispatch is a combine "
                "with swapped sizes over the same axis",
            )
    for key, nodes in forward.items():
        passed = [node for node in nodes if meta.is_differentiated(node)]
        if len(passed) > len(backward.get(key, ())):
            raise fault(
                passed[-1],
                "has no transpose in the backward, so its gradient stays on the wrong ranks; differentiate again",
            )


def _signature(node: Node, *, opposite: bool = False) -> tuple[Any, ...]:
    """Equal for a backward collective and, taken ``opposite``, for the forward collective that it transposes."""
    target: Any = node.target
    target = TRANSPOSE[target] if opposite else target
    if node.target in _EXCHANGES:
        send, recv = node.args[1:3]
        return target, axis_of(node), *((recv, send) if opposite else (send, recv))
    if node.target is ops.all_to_all:
        split, concat = node.args[2:4]
        return target, axis_of(node), *((concat, split) if opposite else (split, concat))
    if node.target is ops.zigzag_exchange:
        return target, axis_of(node), node.args[4] is opposite
    if node.target is ops.rotate:
        return target, axis_of(node), -node.args[2] if opposite else node.args[2]  # type: ignore[operator]
    return target, axis_of(node)


def _is_float(node: Node) -> bool:
    return meta.is_tensor(node) and meta.tensor(node).is_floating_point()


def _reductions_of_results(program: Program) -> set[Node]:
    """Collectives that sum an output over ranks: those of the gradients and of the reported loss."""
    found: set[Node] = set()
    for result, item in zip(program.output_nodes(), program.outputs, strict=True):
        if isinstance(result, Node) and item.kind in (OutputKind.GRAD, OutputKind.LOSS):
            found.update(reductions(result))
    return found


# what only moves or renames numbers between a gradient and the output that holds it
_CARRIERS = {
    aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.alias.default, aten.clone.default,
    aten.contiguous.default, aten._to_copy.default, aten.to.dtype, aten.permute.default, aten.constant_pad_nd.default,
}  # fmt: skip


def reductions(result: Node) -> list[Node]:
    """The sums over ranks between a computed value and the output that holds it, outermost first, through flat buckets."""
    found: list[Node] = []
    parts: list[int] = []
    node: Any = result
    while isinstance(node, Node):
        if node.target in (ops.all_reduce, ops.reduce_scatter):
            found.append(node)
            node = node.args[0]
        elif node.target in _CARRIERS:
            node = node.args[0]
        elif getattr(node.target, "__name__", "") == "getitem" and _is_bucket(node.args[0]):
            bucket, index = node.args
            parts.append(index)  # type: ignore[arg-type]
            node = bucket.args[0]  # type: ignore[union-attr]
        elif node.target is aten.cat.default and parts:
            members: Any = node.args[0]
            node = members[parts.pop()]
        else:
            break
    return found


def _is_bucket(node: Any) -> bool:
    return isinstance(node, Node) and node.target is aten.split_with_sizes.default


def weight_gathers(program: Program) -> set[Node]:
    """Gathers of parameters that are held as shards: no gradient passes them, the backward gathers anew."""
    if Fact.PARAMS_SHARDED not in program.facts:
        return set()
    inputs = dict(program.items())
    found = set()
    for node in find(program.graph, ops.all_gather):
        if not data_axes(axis_of(node)):
            continue
        sources = [source for source in ancestors(node) if source.op == "placeholder"]
        if sources and all(inputs[source].kind is InputKind.PARAM for source in sources):
            found.add(node)
    return found


def data_axes(axis: str) -> bool:
    """Whether the ranks of an axis hold copies of a parameter, unless it is held as shards."""
    return set(axis.split("+")) <= {"dp", "cp", "edp"}


def over(nodes: Iterable[Node]) -> list[str]:
    """The axes of some collectives."""
    return [axis_of(node) for node in nodes]
