"""All ranks of a plan in one process, without a launcher: for notebooks and for most tests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .api import Example, split_call
from .compat import tree_flatten
from .compilation import Request, compile_call
from .errors import PlanError
from .mesh import joined
from .placement.types import Partial, Shard
from .plan import Plan
from .program import Input, InputKind, OutputKind, Program
from .runtime.simulator import simulate
from .simulate_stages import run_stages
from .weights import padded, part_of, put_together


@dataclass
class Simulated:
    """What the ranks computed: the loss, each rank's user outputs by leaf, full gradients by plain name, buffers after the forward."""

    program: Program
    loss: Tensor | None
    outputs: list[dict[int, Tensor]]
    grads: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def simulate_ranks(
    model: nn.Module,
    plan: Plan,
    batches: Sequence[Example],
    *,
    loss_fn: Callable[..., Any] | None = None,
    program: Program | None = None,
    trace: Callable[..., None] | None = None,
) -> Simulated:
    """One call of every rank, node by node in lock step; the model is not changed.

    ``batches[r]`` is what rank r passes. ``program`` runs in place of the one compiled from the model, for a graph that was
    rewritten or loaded. With pipeline stages each batch is cut into the plan's microbatches, which run in the schedule's order. A
    collective or message that one rank misses is a VerifyError at once, not a hang.
    """
    plan = plan.resolve(len(batches))
    if plan.pp > 1:
        plan.check_supported()
    elif plan.microbatches != 1:
        raise PlanError("simulate_ranks runs one microbatch; call it once per microbatch with microbatches=1.")
    calls = [split_call(batch) for batch in batches]
    if program is None:
        args, kwargs = calls[0]
        program = compile_call(copy.deepcopy(model), Request(args, kwargs, plan, loss_fn))
    leaves = [tree_flatten(call)[0] for call in calls]
    with torch.no_grad():
        if program.layout is not None:
            results = run_stages(program, leaves, partial(_value, model, program), trace)
        else:
            inputs = [rank_inputs(model, program, rank, own) for rank, own in enumerate(leaves)]
            results = simulate(program.graph_module, inputs, program.mesh, trace=trace)
    return _collect(program, results)


def rank_inputs(model: nn.Module, program: Program, rank: int, leaves: Sequence[Any]) -> list[Any]:
    """The values of a program's placeholders on one rank, cut from the plain model."""
    return [_value(model, program, item, rank, leaves) for item in program.inputs]


def _value(model: nn.Module, program: Program, item: Input, rank: int, leaves: Sequence[Any]) -> Any:
    mesh = program.mesh
    if item.kind in (InputKind.PARAM, InputKind.BUFFER):
        weights: Mapping[str, Tensor] = dict(model.named_parameters(remove_duplicate=False)) | dict(
            model.named_buffers(remove_duplicate=False)
        )
        found = [weights[name].detach() for name in item.fqns]
        value = torch.stack(found) if item.stacked else found[0]
        for axis, placed in item.placements:
            if isinstance(placed, Shard):
                value = part_of(value, placed, mesh.size(axis), mesh.axis_index(axis, rank))
        return padded(value, item.local_shape(mesh)).contiguous() if item.placements else value
    if item.kind is InputKind.CONSTANT:
        return program.constants[item.name]
    if item.kind is InputKind.BATCH:
        return leaves[item.leaf].contiguous()
    if item.kind is InputKind.OFFSET:
        return torch.tensor(mesh.axis_index(item.axis, rank) * item.stride)
    if item.kind is InputKind.SEED:
        return torch.tensor(torch.initial_seed() % 2**63)
    raise PlanError(f"the program needs a {item.kind.value} input '{item.name}', which simulate_ranks does not supply.")


def _collect(program: Program, results: Sequence[Sequence[Any]]) -> Simulated:
    by_name = {item.name: item for item in program.inputs}
    found = Simulated(program, None, [{} for _ in results])
    for at, output in enumerate(program.outputs):
        values = [result[at] for result in results]
        if output.kind is OutputKind.LOSS:
            found.loss = values[0]
        elif output.kind is OutputKind.USER:
            for rank, value in enumerate(values):
                if value is not None:  # else another pipeline stage has it
                    found.outputs[rank][output.leaf] = value
        elif output.kind is OutputKind.BUFFER:
            found.buffers[output.name] = values[0]
        elif output.kind is OutputKind.METRIC:
            axes = [axis for axis, placed in output.placements if isinstance(placed, Partial)]
            terms = [values[rank] for rank in program.mesh.group_ranks(joined(axes), 0)] if axes else values[:1]
            found.metrics[f"{output.name}.{output.what}"] = torch.stack(terms).sum(0)
        elif output.kind is OutputKind.GRAD:
            item = by_name[output.name]
            whole = _gather(program, item, values)
            parts = whole.unbind(0) if item.stacked else (whole,)
            for name, part in zip(item.fqns, parts, strict=True):
                # experts that are called twice are two inputs; stages have added up already
                again = name in found.grads and program.layout is None
                found.grads[name] = found.grads[name] + part if again else part
    return found


def _gather(program: Program, item: Input, values: Sequence[Tensor]) -> Tensor:
    """The whole tensor from its parts on the ranks of rank 0's groups; the last cut is undone first."""
    cuts = [(axis, placed) for axis, placed in item.placements if isinstance(placed, Shard)]
    for at, (axis, placed) in reversed(list(enumerate(cuts))):
        size = replace(item, placements=tuple(cuts[:at])).local_shape(program.mesh)[placed.dim]
        groups = [program.mesh.group_ranks(axis, rank) for rank in range(program.mesh.world_size)]
        values = [put_together([values[rank] for rank in group], placed) for group in groups]
        values = [value.narrow(placed.dim, 0, size) for value in values]  # without padding
    return values[0]
