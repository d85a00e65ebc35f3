"""Programs that are wrong in one place: what a checker of programs has to notice.

`mutants(program)` yields changed copies of a compiled step, each with a kind and the place that was changed. The same change is
made for all ranks, as a faulty pass would make it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.mesh import ATTENTION_AXES, EXPERT_AXES, Mesh
from moecompile.ops import AXIS_ARGUMENT, cpu
from moecompile.program import InputKind, OutputKind, Program
from moecompile.verify.collectives import reductions

aten = torch.ops.aten
_LINEARS = (ops.grouped_linear, cpu.grouped_linear)
_PARTS = (ops.local_slice, ops.local_place)
_ZIGZAGS = (ops.zigzag_slice, ops.zigzag_place)
_OTHER_ORDER = dict(zip((*_PARTS, *_ZIGZAGS), (*_ZIGZAGS, *_PARTS), strict=True))
# which argument of a hop of a ring is this rank's place; the number of the hop is the next but for what the backward saves
_HOPS = {ops.attention_part: (3, 4), ops.attention_part_backward: (5, 8)}


@dataclass(frozen=True)
class Mutant:
    """One change: its kind, the node it was made at, more about it, and how to make it in a copy of the program."""

    kind: str
    node: str
    detail: str
    change: Callable[[Program], None]

    def __str__(self) -> str:
        return f"{self.kind} {self.node} {self.detail}".rstrip()


def copied(program: Program) -> Program:
    """The same program on nodes of its own."""
    graph, env = Graph(), dict[Node, Node]()
    for node in program.graph.nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
        env[node].meta = meta.copy_meta(node)
    made = GraphModule(torch.nn.Module(), graph)
    made.meta.update(program.graph_module.meta)
    return replace(
        program,
        graph_module=made,
        inputs=list(program.inputs),
        outputs=list(program.outputs),
    )


def mutated(program: Program, *mutants: Mutant) -> Program:
    """A copy with some changes made in it."""
    made = copied(program)
    for mutant in mutants:
        mutant.change(made)
    graphs.eliminate_dead(made.graph)
    made.graph.lint()
    made.graph_module.recompile()
    return made


def mutants(program: Program) -> Iterator[Mutant]:
    """Every change that is tried, in graph order."""
    for node in program.graph.nodes:
        if node.target in AXIS_ARGUMENT:
            yield from _of_collective(program, node)
        elif node.target in (aten.div.Tensor, aten.div.Scalar) and _is_share(program, node):
            yield Mutant("scale", node.name, "not divided", _following(node, lambda graph, at: at.args[0]))
            yield Mutant("scale", node.name, "divided twice", _argument(node, 1, node.args[1] * 2))
        elif node.target in _PARTS or node.target in _ZIGZAGS:
            yield from _of_part(program, node)
        elif node.target in _HOPS:
            yield from _of_hop(program, node)
        elif node.target in _LINEARS:
            yield Mutant("experts", node.name, "weights in reverse", _wrapping(node, 2, _flipped(0)))
            if meta.tensor(node.args[1]).shape[-1] > 1:
                yield Mutant("counts", node.name, "counts in reverse", _wrapping(node, 1, _flipped(-1)))
        elif node.target is ops.permute:
            yield Mutant("experts", node.name, "choices in reverse", _wrapping(node, 1, _reversed_ids(node.args[2])))
    yield from _of_offsets(program)
    yield from _of_gradients(program)


# ---- changes of one node -----------------------------------------------------------------------------------------------


def _find(program: Program, node: Node) -> Node:
    """The node of that name in a copy."""
    return next(item for item in program.graph.nodes if item.name == node.name)


def _argument(node: Node, index: int, value: Any) -> Callable[[Program], None]:
    def change(program: Program) -> None:
        at = _find(program, node)
        given = _find(program, value) if isinstance(value, Node) else value
        at.args = (*at.args[:index], given, *at.args[index + 1 :])

    return change


def _retargeted(node: Node, target: Any) -> Callable[[Program], None]:
    def change(program: Program) -> None:
        _find(program, node).target = target

    return change


def _following(node: Node, make: Callable[[Graph, Node], Any]) -> Callable[[Program], None]:
    """Let the readers of a node read what is made of it, or of its arguments."""

    def change(program: Program) -> None:
        at = _find(program, node)
        with program.graph.inserting_after(at):
            made = make(program.graph, at)
        at.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)

    return change


def _wrapping(node: Node, index: int, make: Callable[[Graph, Node], Node]) -> Callable[[Program], None]:
    def change(program: Program) -> None:
        at = _find(program, node)
        with program.graph.inserting_before(at):
            made = make(program.graph, at.args[index])  # type: ignore[arg-type]
        at.args = (*at.args[:index], made, *at.args[index + 1 :])

    return change


def _call(graph: Graph, target: Any, *args: Any, like: Node) -> Node:
    return graphs.call(graph, target, *args, like=like, mode=graphs.mode_of(graph))


def _flipped(dim: int) -> Callable[[Graph, Node], Node]:
    return lambda graph, source: _call(graph, aten.flip.default, source, [dim], like=source)


def _reversed_ids(experts: Any) -> Callable[[Graph, Node], Node]:
    return lambda graph, source: _call(graph, aten.rsub.Scalar, source, experts - 1, like=source)


# ---- collectives -------------------------------------------------------------------------------------------------------


def _of_collective(program: Program, node: Node) -> Iterator[Mutant]:
    index = AXIS_ARGUMENT[node.target]  # type: ignore[index]
    axis, size = str(node.args[index]), program.mesh.size(str(node.args[index]))
    fixed = node.target in (ops.all_reduce, ops.all_gather, ops.reduce_scatter)
    if fixed:
        yield Mutant("drop", node.name, "", _following(node, _without))
        yield Mutant("double", node.name, "", _following(node, _summed(axis)))
        if meta.tensor(node).is_floating_point():
            yield Mutant("scale", node.name, "mean", _following(node, _divided(size)))
    for other in _axes(program.mesh):
        fits = program.mesh.size(other) == size or node.target is ops.all_reduce
        if other != axis and fits and program.mesh.size(other) > 1:
            yield Mutant("axis", node.name, f"{axis} -> {other}", _argument(node, index, other))
    if node.target is ops.rotate:
        yield Mutant("drop", node.name, "", _following(node, _without))
        if size > 2:
            yield Mutant("ring", node.name, "the other way", _argument(node, 2, -node.args[2]))  # type: ignore[operator]
    if node.target is ops.zigzag_exchange:
        yield Mutant("drop", node.name, "", _following(node, _without))
        yield Mutant("order", node.name, "the other way", _argument(node, 4, not node.args[4]))
    if node.target in (ops.dispatch, ops.combine):
        send, recv = node.args[1], node.args[2]
        yield Mutant("sizes", node.name, "send for recv", _argument(node, 2, send))
        yield Mutant("sizes", node.name, "recv for send", _argument(node, 1, recv))


def _of_hop(program: Program, node: Node) -> Iterator[Mutant]:
    """Keys taken for those of another rank, and this rank for another."""
    index, hop = _HOPS[node.target]  # type: ignore[index]
    ranks: Any = node.args[hop + 1]
    yield Mutant("ring", node.name, "the next hop", _argument(node, hop, (node.args[hop] + 1) % ranks))  # type: ignore[operator]
    if node.args[hop + 4 :] == (True,):
        yield Mutant("order", node.name, "plain", _argument(node, hop + 4, False))
    elif meta.tensor(node.args[index - 2]).shape[-2] % 2 == 0:
        yield Mutant("order", node.name, "zigzag", _argument(node, hop + 4, True))
    for other, item in program.items():
        if item.kind is InputKind.OFFSET and other is not node.args[index] and item.stride == 1:
            yield Mutant("offset", node.name, f"index of {item.axis}", _argument(node, index, other))


def _axes(mesh: Mesh) -> list[str]:
    """Axes of more than one rank, and those that they make together."""
    found = []
    for axes in (ATTENTION_AXES[1:], EXPERT_AXES[1:]):
        single = [axis for axis in axes if mesh.size(axis) > 1]
        found += single
        found += ["+".join(single)] if len(single) > 1 else []
    return found


def _without(graph: Graph, node: Node) -> Node:
    """What a rank has without the others: its own part, as often as parts were due, or the first of the parts."""
    source: Any = node.args[0]
    if node.target is ops.all_gather:
        return _call(graph, aten.cat.default, [source] * node.args[1], like=node)  # type: ignore[operator]
    if node.target is ops.reduce_scatter:
        return _call(graph, aten.slice.Tensor, source, 0, 0, meta.tensor(node).shape[0], like=node)
    return _call(graph, aten.clone.default, source, like=node)


def _summed(axis: str) -> Callable[[Graph, Node], Node]:
    return lambda graph, node: _call(graph, ops.all_reduce, node, "sum", axis, like=node)


def _divided(by: int) -> Callable[[Graph, Node], Node]:
    return lambda graph, node: _call(graph, aten.mul.Tensor, node, 1.0 / by, like=node)


def _is_share(program: Program, node: Node) -> bool:
    """Whether a node divides by a number of ranks."""
    by = node.args[1]
    return isinstance(by, int) and by > 1 and by in {program.mesh.size(axis) for axis in _axes(program.mesh)}


# ---- parts, offsets, gradients -----------------------------------------------------------------------------------------


def _of_part(program: Program, node: Node) -> Iterator[Mutant]:
    source, index, dim, outer, ranks = node.args
    slices, zigzag = node.target in (ops.local_slice, ops.zigzag_slice), node.target in _ZIGZAGS
    shape = meta.tensor(source if slices else node).shape  # type: ignore[arg-type]
    if zigzag or shape[dim] % (outer * 2 * ranks) == 0:  # type: ignore[index, operator]
        yield Mutant("order", node.name, "plain" if zigzag else "zigzag", _retargeted(node, _OTHER_ORDER[node.target]))  # type: ignore[index]
    if shape[dim] % (outer * (2 + 2 * zigzag) * ranks) == 0:  # type: ignore[index, operator]
        yield Mutant("part", node.name, "twice the stripes", _argument(node, 3, outer * 2))  # type: ignore[operator]
    for other, item in program.items():
        if (
            item.kind is InputKind.OFFSET
            and other is not index
            and item.stride == 1
            and program.mesh.size(item.axis) == ranks
        ):
            yield Mutant("offset", node.name, f"index of {item.axis}", _argument(node, 1, other))
    for other_dim, size in enumerate(shape):
        if other_dim != dim and slices and len(shape) > 1 and size == shape[dim]:  # type: ignore[index]
            yield Mutant("part", node.name, f"dim {other_dim}", _argument(node, 2, other_dim))


def _of_offsets(program: Program) -> Iterator[Mutant]:
    """An input that holds this rank's index, with another stride or of another axis."""
    for at, item in enumerate(program.inputs):
        if item.kind is not InputKind.OFFSET or not item.stride:
            continue

        def strided(made: Program, at: int = at) -> None:
            made.inputs[at] = replace(made.inputs[at], stride=made.inputs[at].stride + 1)

        yield Mutant("offset", item.name, "stride", strided)
        for other in _axes(program.mesh):
            if other != item.axis and program.mesh.size(other) == program.mesh.size(item.axis):

                def turned(made: Program, at: int = at, other: str = other) -> None:
                    made.inputs[at] = replace(made.inputs[at], axis=other)

                yield Mutant("offset", item.name, f"axis {item.axis} -> {other}", turned)


def _of_gradients(program: Program) -> Iterator[Mutant]:
    """One parameter's gradient that is not reduced, or reduced again."""
    for at, (found, item) in enumerate(zip(program.output_nodes(), program.outputs, strict=True)):
        if item.kind is not OutputKind.GRAD or not reductions(found):
            continue
        axis = str(reductions(found)[0].args[2])

        def skipped(made: Program, at: int = at) -> None:
            results = made.output_nodes()
            results[at] = _before_reduction(results[at])
            made.graph.output_node().args = (tuple(results),)

        def again(made: Program, at: int = at, axis: str = axis) -> None:
            results = made.output_nodes()
            with made.graph.inserting_before(made.graph.output_node()):
                results[at] = _summed(axis)(made.graph, results[at])
            made.graph.output_node().args = (tuple(results),)

        yield Mutant("gradient", item.name, "not reduced", skipped)
        yield Mutant("gradient", item.name, "reduced twice", again)


def _before_reduction(node: Node) -> Node:
    """The gradient as it is before the all-reduce, through the bucket that it travels in."""
    if node.target is ops.all_reduce:
        return node.args[0]  # type: ignore[return-value]
    part: Any = node.args[0]
    bucket: Any = part.args[0].args[0].args[0]
    flat: Any = bucket.args[0][part.args[1]]
    return flat.args[0]  # type: ignore[no-any-return]


# ---- two errors that make up for each other ----------------------------------------------------------------------------


def compensating(program: Program) -> Iterator[tuple[Mutant, Mutant]]:
    """A collective and its transpose in the backward changed alike; one gradient left out and another summed twice."""
    by_node: dict[str, list[Mutant]] = {}
    for mutant in mutants(program):
        by_node.setdefault(mutant.node, []).append(mutant)
    for forward, backward in _twins(program):
        for one in by_node.get(forward.name, ()):
            for other in by_node.get(backward.name, ()):
                if one.kind in ("drop", "axis", "double") and (one.kind, one.detail) == (other.kind, other.detail):
                    yield one, other
    skipped = [mutant for mutant in mutants(program) if mutant.kind == "gradient" and mutant.detail == "not reduced"]
    doubled = [mutant for mutant in mutants(program) if mutant.kind == "gradient" and mutant.detail == "reduced twice"]
    yield from zip(skipped, doubled[1:], strict=False)


def _twins(program: Program) -> Iterator[tuple[Node, Node]]:
    """Collectives that a gradient passes, each with its transpose; the backward runs the other way round."""
    calls = [
        node for node in program.graph.nodes if node.target in ops.TRANSPOSE and meta.tensor(node).is_floating_point()
    ]
    backward = [node for node in calls if meta.direction(node) is meta.Direction.BACKWARD]
    for node in calls:
        if meta.direction(node) is meta.Direction.FORWARD and meta.is_differentiated(node):
            found = next((item for item in reversed(backward) if _transposed(node, item)), None)
            if found is not None:
                backward.remove(found)
                yield node, found


def _transposed(forward: Node, backward: Node) -> bool:
    axes = (str(node.args[AXIS_ARGUMENT[node.target]]) for node in (forward, backward))  # type: ignore[index]
    return backward.target is ops.TRANSPOSE[forward.target] and len(set(axes)) == 1  # type: ignore[index]
