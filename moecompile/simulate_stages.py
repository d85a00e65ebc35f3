"""All ranks of a plan with pipeline stages in one process: microbatches in the order of the schedule, sums as the runtime takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from . import graph as graphs
from . import meta
from .errors import PlanError
from .passes.sync_grads import reduce_axis
from .placement.types import Partial, Shard
from .program import NUM_VALID, Input, InputKind, Level, Output, OutputKind, Program
from .runtime.simulator import Trace, simulate
from .runtime.stage_simulator import simulate_stages
from .stages import cut_stages
from .timeline import order

# The value of an input on one rank for the leaves of one microbatch.
Value = Callable[[Input, int, Sequence[Any]], Any]


def run_stages(program: Program, leaves: Sequence[Sequence[Any]], value: Value, trace: Trace | None) -> list[list[Any]]:
    """Each rank's outputs of the whole program, summed over microbatches, stages and the axes of each gradient.

    ``leaves[rank]`` are the flattened arguments of the whole call. Results are None where another stage has them.
    """
    plan, mesh, number = program.plan, program.mesh, program.plan.microbatches
    chunks = [_cut(program, own) for own in leaves]
    scales = _scales(program, chunks, value)
    feed = [
        [
            {
                item.name: scales[item.name] if item.kind is InputKind.SCALE else value(item, rank, chunk)
                for item in program.inputs
            }
            for chunk in own
        ]
        for rank, own in enumerate(chunks)
    ]
    stages = cut_stages(program)
    trains = any(item.kind is OutputKind.GRAD for item in program.outputs)
    schedule = plan.schedule or "1f1b"
    each = len(stages) // plan.pp
    actions = [
        [
            (action.kind, action.stage, action.microbatch)
            for action in order(schedule, rank, plan.pp, number, each)
            if trains or action.kind == "F"
        ]
        for rank in range(plan.pp)
    ]
    found = simulate_stages(stages, actions, feed, mesh, trace=trace)
    outputs = [_outputs(program, own) for own in found]
    _add_stages(program, outputs)
    return outputs


def _cut(program: Program, leaves: Sequence[Any]) -> list[list[Any]]:
    number, dims = program.plan.microbatches, dict[int, int]()
    for item in program.inputs:
        placed = dict(item.placements).get("dp")
        if item.kind is InputKind.BATCH and isinstance(placed, Shard):
            dims[item.leaf] = placed.dim
    if any(leaves[at].shape[dim] % number for at, dim in dims.items()):
        raise PlanError(
            f"simulate_ranks runs microbatches of one size, and microbatches={number} do not divide the batch; pass a multiple of "
            f"{number} rows."
        )
    cut = {at: leaves[at].chunk(number, dim) for at, dim in dims.items()}
    return [[cut[at][index] if at in cut else leaf for at, leaf in enumerate(leaves)] for index in range(number)]


def _scales(program: Program, chunks: Sequence[Sequence[Any]], value: Value) -> dict[str, Tensor]:
    """The step's valid tokens over the number of microbatches, for each place that divides by them."""
    pairs = list(zip(program.output_nodes(), program.outputs, strict=True))
    wanted = [(node, item) for node, item in pairs if item.what == NUM_VALID and isinstance(node, Node)]
    if not wanted:
        return {}
    graph = graphs.extract(program.graph, [node for node, _ in wanted])
    module = graphs.as_module(graph, program.graph_module)
    counting = replace(program, graph_module=module, outputs=[item for _, item in wanted], level=Level.MODEL)
    read = {item.name for node, item in counting.items() if node.users}
    totals = [torch.zeros((), dtype=torch.float64) for _ in wanted]
    mesh, number = program.mesh, program.plan.microbatches
    for at in range(number):
        inputs = [
            [value(item, rank, own[at]) if item.name in read else None for item in program.inputs]
            for rank, own in enumerate(chunks)
        ]
        counts = simulate(module, inputs, mesh)
        for place, (_, item) in enumerate(wanted):
            ranks = [0]
            for axis in (axis for axis, placed in item.placements if isinstance(placed, Partial)):
                ranks = [peer for rank in ranks for peer in mesh.group_ranks(axis, rank)]
            totals[place] += torch.stack([counts[rank][place] for rank in ranks]).sum()
    dtypes = {item.name: meta.tensor(node).dtype for node, item in program.items() if item.kind is InputKind.SCALE}
    return {item.name: (total / number).to(dtypes[item.name]) for (_, item), total in zip(wanted, totals, strict=True)}


def _outputs(program: Program, found: Mapping[tuple[int, int], Any]) -> list[Any]:
    """One rank's outputs over its microbatches; zeros for sums that other stages have."""
    outputs: list[Any] = []
    for place, (node, item) in enumerate(zip(program.output_nodes(), program.outputs, strict=True)):
        values = [found[place, at] for at in range(program.plan.microbatches) if (place, at) in found]
        if item.kind is OutputKind.USER:
            outputs.append(_joined(item, values) if values else None)
        elif item.kind is OutputKind.BUFFER:
            outputs.append(values[-1] if values else None)
        else:
            fake = meta.tensor(node)
            outputs.append(sum(values, start=torch.zeros(fake.shape, dtype=fake.dtype)))
    return outputs


def _joined(item: Output, values: list[Tensor]) -> Tensor:
    placed = dict(item.placements).get("dp")
    return torch.cat(values, placed.dim) if isinstance(placed, Shard) else torch.stack(values).mean(0)


def _add_stages(program: Program, outputs: list[list[Any]]) -> None:
    """The loss and what is left in buffers on all stages; each gradient summed over those that read its parameter, then over its axes."""
    mesh, inputs = program.mesh, {item.name: item for item in program.inputs}
    places: dict[tuple[str, ...], list[int]] = {}
    for place, item in enumerate(program.outputs):
        if item.kind is OutputKind.LOSS:
            _sum(outputs, [place], "pp", program)
        elif item.kind is OutputKind.BUFFER:
            for rank, own in enumerate(outputs):
                peers = [outputs[peer][place] for peer in mesh.group_ranks("pp", rank)]
                own[place] = next(value for value in peers if value is not None)
        elif item.kind is OutputKind.GRAD:
            places.setdefault(inputs[item.name].fqns, []).append(place)
    for same in places.values():
        _sum(outputs, same, "pp", program)
        if axis := reduce_axis(inputs[program.outputs[same[0]].name], mesh):
            _sum(outputs, same[:1], axis, program)
        for own in outputs:
            for place in same[1:]:
                own[place] = own[same[0]]


def _sum(outputs: list[list[Any]], places: list[int], axis: str, program: Program) -> None:
    """Sum outputs over the ranks of an axis and over all ``places``, into the first of these."""
    totals = [
        torch.stack([outputs[peer][place] for peer in program.mesh.group_ranks(axis, rank) for place in places]).sum(0)
        for rank in range(program.mesh.world_size)
    ]
    for own, total in zip(outputs, totals, strict=True):
        own[places[0]] = total
