"""Cut a forward graph into segments, one per layer and what stands between, and tell which have the same structure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .. import graph as graphs
from .. import meta
from ..errors import PassError


@dataclass
class Segment:
    """A contiguous run of calls. ``inputs`` are the outside nodes it reads, ``outputs`` its nodes that others read."""

    nodes: list[Node]
    inputs: list[Node] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        own = set(self.nodes)
        self.inputs = list(
            dict.fromkeys(source for node in self.nodes for source in node.all_input_nodes if source not in own)
        )
        self.outputs = [node for node in self.nodes if any(user not in own for user in node.users)]

    @property
    def layer(self) -> str | None:
        """Module path of the layer that the segment is, None between layers."""
        return meta.layer(self.nodes[0])

    @property
    def stage(self) -> int | None:
        """Pipeline stage of all its nodes, None without stages."""
        return meta.stage(self.nodes[0])

    def leaks_symbols(self) -> bool:
        """Whether a run-time size leaves the segment."""
        return any(True for node in self.outputs for _ in graphs.symbolic_sizes(node.meta.get("val")))

    def structure(self) -> str:
        """Equal for segments that differ only in which values they read and in the names of run-time sizes."""
        place = {node: f"n{index}" for index, node in enumerate(self.nodes)}
        outside = {node: f"i{index}" for index, node in enumerate(self.inputs)}
        symbols: dict[str, str] = {}
        digest = hashlib.sha256()
        for node in self.inputs:
            digest.update(f"{node.op == 'placeholder'} {_value_text(node.meta.get('val'), symbols)}\n".encode())
        for node in self.nodes:
            args = map_arg((node.args, dict(node.kwargs)), lambda arg: _Reference(place.get(arg) or outside[arg]))
            digest.update(f"{node.target} {args} {_value_text(node.meta.get('val'), symbols)}\n".encode())
        digest.update(" ".join(place[node] for node in self.outputs).encode())
        return digest.hexdigest()


class _Reference(str):
    """A node within a structural text; printed bare, so it cannot be taken for a string argument."""

    def __repr__(self) -> str:
        return str(self)


def _value_text(found: Any, symbols: dict[str, str]) -> str:
    if isinstance(found, torch.Tensor):
        sizes = [_size_text(size, symbols) for size in (*found.shape, *found.stride())]
        return f"{found.dtype}{sizes}{found.device}"
    if isinstance(found, (tuple, list)):
        return str([_value_text(item, symbols) for item in found])
    return _size_text(found, symbols)


def _size_text(size: Any, symbols: dict[str, str]) -> str:
    if not isinstance(size, torch.SymInt):
        return str(size)
    text = str(size.node.expr)
    for symbol in sorted(size.node.expr.free_symbols, key=str):
        name = symbols.setdefault(str(symbol), f"s{len(symbols)}")
        text = text.replace(str(symbol), name)
    return text


def split_segments(graph: Graph, *, layered: bool = True) -> list[Segment]:
    """Segments in graph order, none over two pipeline stages; together they hold every call once.

    No run-time size crosses a border; PassError where one would have to.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    runs: list[list[Node]] = []
    current: object = None
    for node in nodes:
        found = (meta.stage(node), meta.layer(node) if layered else "all")
        if not runs or found != current:
            runs.append([])
            current = found
        runs[-1].append(node)
    segments: list[Segment] = []
    for run in runs:
        segment = Segment(run)
        while segments and segments[-1].leaks_symbols():
            if segments[-1].stage != segment.stage:
                raise PassError(
                    f"a size that is known at run time only leaves pipeline stage {segments[-1].stage} at "
                    f"{meta.where(segments[-1].outputs[0])}; put the layers that share it on one stage."
                )
            segment = Segment(segments.pop().nodes + segment.nodes)
        segments.append(segment)
    return segments
