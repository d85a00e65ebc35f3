"""What one rank sends in a step, by mesh axis, direction and collective, and where it waits for its device, read off a program.

Bytes on the wire per rank are those of the usual ring and pairwise algorithms over n ranks: an all-reduce of b bytes sends
``2 (n-1)/n b``, a reduce-scatter ``(n-1)/n b``, an all-gather of parts of b bytes ``(n-1) b``. An exchange of rows sends
``(n-1)/n`` of them where routing is balanced; its rows are those of the side whose number is known. A gather of rows sends a rank's
own ``n-1`` times, and so does the sum on their way home. A rotation sends all of its operand once.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch.fx import Node

from . import meta, ops
from .ops import AXIS_ARGUMENT
from .program import Program

_EXCHANGES = (ops.dispatch, ops.combine)
_READS = (ops.sizes_to_host, ops.gathered_sizes_to_host)
_TAKES = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default, torch.ops.aten.nonzero.default)


@dataclass(frozen=True)
class Traffic:
    """``calls`` collectives of one kind over one axis in one direction of a step, and the bytes a rank sends in them."""

    axis: str
    ranks: int
    direction: str
    op: str
    calls: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.axis} ({self.ranks} ranks) {self.direction}: {self.calls} x {self.op}, {self.bytes:,} B"


@dataclass(frozen=True)
class HostRead:
    """One place where a step waits for numbers of the device: the line of the model it is due to."""

    direction: str
    module: str
    source: str
    op: str

    def __str__(self) -> str:
        return f"{self.direction}: {self.op} for {self.module or 'the model'} ({self.source or 'no line known'})"


def host_reads(program: Program) -> list[HostRead]:
    """All reads on the host, in program order. A number taken out of what was read before costs nothing and is left out."""
    found, held = [], set[Node]()  # values on the host
    for node in program.graph.nodes:
        if node.target in _READS or (node.target in _TAKES and node.args[0] not in held):
            read = HostRead(meta.direction(node).value, meta.module_path(node), meta.source(node), _name(node.target))
            found.append(read)
        if node.target in _READS or (node.all_input_nodes and held.issuperset(node.all_input_nodes)):
            held.add(node)
    return found


def communication(program: Program) -> list[Traffic]:
    """All collectives of a program, in order of axis, direction and op; those over one rank cost nothing and are left out."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for node in program.graph.nodes:
        if node.target not in AXIS_ARGUMENT:
            continue
        axis = str(node.args[AXIS_ARGUMENT[node.target]])
        ranks = program.mesh.size(axis)
        if ranks > 1:
            row = found.setdefault((axis, meta.direction(node).value, _name(node.target)), [0, 0])
            row[0] += 1
            row[1] += _sent(node, ranks)
    return [
        Traffic(axis, program.mesh.size(axis), direction, op, calls, sent)
        for (axis, direction, op), (calls, sent) in sorted(found.items(), key=_order)
    ]


def _order(item: tuple[tuple[str, str, str], list[int]]) -> tuple[str, bool, str]:
    (axis, direction, op), _ = item
    return axis, direction == "backward", op


def _name(target: Any) -> str:
    return str(target.name()).split("::")[1].split(".")[0]


def _sent(node: Node, ranks: int) -> int:
    share = Fraction(ranks - 1, ranks)
    factor = share
    if node.target is ops.all_reduce:
        factor = 2 * share
    elif node.target in (ops.rotate, ops.zigzag_exchange):
        factor = Fraction(1)
    elif node.target in (ops.all_gather, ops.all_gather_rows, ops.reduce_scatter_rows):
        factor = Fraction(ranks - 1)
    return int(factor * _known_bytes(node))


def _known_bytes(node: Node) -> int:
    """Bytes of the operand, or of the result where only that has a known size; of rows also one exchange further."""
    source: Any = node.args[0]
    if node.target is ops.all_gather_rows:
        values = [source, source.args[0] if source.target in _EXCHANGES else None]
    elif node.target is ops.reduce_scatter_rows:
        values = [node, *(user for user in node.users if user.target in _EXCHANGES)]
    else:
        values = [source, node]
    for value in values:
        if isinstance(value, Node) and meta.is_tensor(value):
            found = meta.tensor(value)
            size = found.numel() * found.element_size()
            if isinstance(size, int):
                return size
    return 0
