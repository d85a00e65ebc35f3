"""Experts that work in turns: rows of all experts are joined, pass row-wise operators, and are split again as before.

Before:  cat([e0(x0), e1(x1)]) -> silu -> narrow(0, 0, n0), narrow(0, n0, n1)
After:   silu(e0(x0)), silu(e1(x1))

The same values; each expert is then one run of operators from its rows to its results.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from moecompile import graph as ir
from moecompile import meta
from moecompile.compat import FakeTensorMode
from moecompile.recognition import rowwise

aten = torch.ops.aten


def unjoin(graph: Graph, mode: FakeTensorMode) -> int:
    """Split what is joined as soon as it is joined; returns how many joins went."""
    done = 0
    for join in ir.find(graph, aten.cat.default):
        parts: Any = join.args[0]
        dim = join.args[1] if len(join.args) > 1 else 0
        if dim != 0 or not all(isinstance(part.meta["val"].shape[0], torch.SymInt) for part in parts):
            continue
        inside = _rowwise_run(join)
        cuts = [
            user for node in inside for user in node.users if user.target is aten.narrow.default and user.args[1] == 0
        ]
        starts = _starts(parts)
        known = {(str(start), str(part.meta["val"].shape[0])): part for start, part in zip(starts, parts, strict=True)}
        found = [
            (cut, part) for cut in cuts if (part := known.get((_number(cut.args[2]), _number(cut.args[3])))) is not None
        ]
        copies: dict[tuple[Node, Node], Node] = {}
        for cut, part in found:
            if cut.args[0] is join:
                continue
            with graph.inserting_before(cut):
                ir.replace(cut, _copied(graph, cut.args[0], join, part, inside, copies, mode))  # type: ignore[arg-type]
        done += bool(found)
    if done:
        ir.eliminate_dead(graph)
    return done


def _starts(parts: list[Node]) -> list[Any]:
    starts: list[Any] = [0]
    for part in parts[:-1]:
        starts.append(starts[-1] + part.meta["val"].shape[0])
    return starts


def _number(item: Any) -> str:
    """A size as text, whether it is a constant or a value of the graph."""
    return str(item.meta["val"]) if isinstance(item, Node) else str(item)


def _rowwise_run(join: Node) -> set[Node]:
    """What is computed from the joined rows row by row, without a weight that has rows of its own."""
    inside = {join}
    for node in join.graph.nodes:
        sources = rowwise.tensor_inputs(node)
        if (
            node in inside
            or not any(item in inside for item in sources)
            or node.target in rowwise.RESHAPES | rowwise.AXES
        ):
            continue
        others = [item for item in sources if item not in inside]
        flat = all(meta.is_tensor(item) and meta.tensor(item).dim() < 2 for item in others)
        if node.target not in rowwise.LINEARS and rowwise.may_be_rowwise(node) and flat:
            inside.add(node)
    return inside


def _copied(
    graph: Graph,
    node: Node,
    join: Node,
    part: Node,
    inside: set[Node],
    copies: dict[tuple[Node, Node], Node],
    mode: FakeTensorMode,
) -> Node:
    """``node`` computed from one part alone."""
    if node is join:
        return part
    if (node, part) not in copies:

        def taken(item: Node) -> Node:
            return _copied(graph, item, join, part, inside, copies, mode) if item in inside else item

        args: Any
        args, kwargs = map_arg((node.args, node.kwargs), taken)
        if node.target is operator.getitem:
            made = graph.create_node("call_function", operator.getitem, args)
            made.meta = meta.copy_meta(node)
            made.meta["val"] = meta.value(args[0])[args[1]]
        else:
            made = ir.call(graph, node.target, *args, like=node, mode=mode, **kwargs)  # type: ignore[arg-type]
        copies[node, part] = made
    return copies[node, part]
