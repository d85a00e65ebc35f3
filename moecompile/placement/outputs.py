"""The end of a walk: outputs in the placement their readers expect, and a program whose interface fits its new graph."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import GraphModule, Node

from .. import meta
from ..errors import PassError
from ..program import Input, InputKind, Output, OutputKind, Program
from .gather import differentiated
from .sharder import Sharder
from .types import PARTIAL, REPLICATE, Partial, Placement, Replicate, Shard


def trained_values(program: Program) -> set[Node]:
    """Values whose gradients a step needs: those of the loss, or of all that a call without loss returns."""
    outputs = list(zip(program.output_nodes(), program.outputs, strict=True))
    kind = OutputKind.LOSS if any(item.kind is OutputKind.LOSS for _, item in outputs) else OutputKind.USER
    trained = [node for node, item in program.items() if item.requires_grad]
    return differentiated(program.graph, trained, [found for found, item in outputs if item.kind is kind])


def is_placed(program: Program, axis: str) -> bool:
    """Whether a walk over ``axis`` has ended here already."""
    return any(name == axis for item in program.outputs for name, _ in item.placements)


def finish(graph: GraphModule, program: Program, walk: Sharder, axis: str) -> None:
    """Convert the outputs on ``axis``, exchange the graph and bring the interface up to date.

    The loss becomes this rank's share, what a buffer holds becomes whole; other results become whole, or stay this rank's part where
    they are cut. A result that is cut on two axes within one data rank, one of them in stripes, becomes whole on the second: no
    DTensor says how it lies.
    """
    rows = _batch_sizes(program, axis)
    results, outputs = [], []
    for found, item in zip(program.output_nodes(), program.outputs, strict=True):
        if not isinstance(found, Node):
            results.append(found)
            outputs.append(item)
            continue
        have = walk.place(found, axis)
        want = _wanted(found, item, have, rows, walk, axis)
        made = walk.convert(walk.env[found], found, axis, have, want) if meta.is_tensor(found) else walk.env[found]
        results.append(made)
        outputs.append(Output(item.kind, item.name, item.leaf, item.what, (*item.placements, (axis, want))))
    walk.graph.output(tuple(results))
    walk.drop_dead()
    by_name = {node.name: item for node, item in program.items()}
    for name, stride, node in walk.new_offsets:
        by_name[node.name] = Input(InputKind.OFFSET, node.name, axis=name, stride=stride)
    program.inputs[:] = [by_name[node.name] for node in walk.graph.nodes if node.op == "placeholder"]
    program.outputs[:] = outputs
    runs = program.plan.microbatches if any(item.kind is OutputKind.LOSS for item in outputs) else 1
    program.gathers += [item.times(runs) for item in walk.ledger.gathers(walk.graph)]
    graph.graph = walk.graph


def note_rows(program: Program, walk: Sharder, axis: str) -> None:
    """Say of results how ``axis`` would cut them, after a walk whose graph is not used: one rank runs the whole batch."""
    rows = _batch_sizes(program, axis)
    for at, (found, item) in enumerate(zip(program.output_nodes(), program.outputs, strict=True)):
        if item.kind is OutputKind.USER and isinstance(found, Node):
            want = _wanted(found, item, walk.place(found, axis), rows, walk, axis)
            program.outputs[at] = replace(item, placements=(*item.placements, (axis, want)))


def _batch_sizes(program: Program, axis: str) -> set[int]:
    """Sizes of the dims of inputs that the axis cuts."""
    return {
        item.shape[placed.dim]
        for item in program.inputs
        for name, placed in item.placements
        if name == axis and item.kind is InputKind.BATCH and isinstance(placed, Shard)
    }


def _wanted(found: Node, item: Output, have: Placement, rows: set[int], walk: Sharder, axis: str) -> Placement:
    """How a result leaves the program on one axis."""
    if item.kind is OutputKind.LOSS:
        return PARTIAL
    if item.kind is OutputKind.BUFFER:
        return REPLICATE
    if isinstance(have, Partial) and item.kind is not OutputKind.METRIC:
        return REPLICATE
    if item.kind is OutputKind.USER:
        if isinstance(have, Replicate) and _is_batch(found, rows, walk):
            return Shard(0)
        if isinstance(have, Shard) and have.rows and axis != "dp":
            raise PassError(
                f"shard-dense: {meta.where(found)} is returned to the caller, but holds rows of experts, each rank of {axis} those of its "
                f"own tokens; return the result of the layer, or use {axis}=1."
            )
        if isinstance(have, Shard) and _is_striped(have, item):
            return REPLICATE
    return replace(have, zigzag=False) if isinstance(have, Shard) else have


def _is_striped(have: Shard, item: Output) -> bool:
    """Whether a result that an axis beside dp has cut already would be cut in stripes by one of the two."""
    before = [placed for axis, placed in item.placements if axis != "dp" and isinstance(placed, Shard)]
    return bool(before) and any(placed.outer > 1 for placed in (have, *before))


def _is_batch(found: Node, rows: set[int], walk: Sharder) -> bool:
    """Whether a whole result has the batch as its dim 0 because something was gathered: a rank returns its part of it."""
    shape = meta.tensor(found).shape if meta.is_tensor(found) else ()
    return len(shape) > 0 and isinstance(shape[0], int) and shape[0] in rows and found in walk.whole
