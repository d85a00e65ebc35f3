"""From one call of a plain model to the program that one rank runs: capture, pipeline, passes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import pipeline as pipelines
from .capture import Captured, batch_inputs, capture_model, compare_capture, globalize, log_left_out, note_local_numbers
from .capture.batch import leaf_names
from .compat import tree_flatten, tree_unflatten, without_autocast
from .errors import CaptureError, PlanError
from .mesh import Mesh
from .pass_base import Fact, Pass
from .passes import PASSES, STEP
from .placement.types import Shard
from .plan import Plan
from .program import Level, Program

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_LOG = logging.getLogger("moecompile")
_SHOWN = 5  # lines that a warning names


@dataclass(frozen=True)
class Request:
    """One call to compile: the arguments that one rank passes, and under which plan. ``rows`` of a microbatch, if not equally many."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    plan: Plan
    loss_fn: Callable[..., Any] | None = None
    rows: int | None = None


def capture(model: nn.Module, request: Request, shapes: Mapping[str, tuple[int, ...]] | None = None) -> Captured:
    """Trace the call at the global batch shape. ``shapes`` are the global shapes of weights that are cut already."""
    plan = request.plan
    own_args, own_kwargs = first_microbatch(request)
    args, kwargs = globalize(own_args, own_kwargs, plan.num_data_ranks, plan.batch_dims, forward=model.forward)
    captured = capture_model(model, args, kwargs, loss_fn=request.loss_fn, shapes=shapes)
    if plan.balance_scope == "local" and plan.num_data_ranks > 1:
        local = capture_model(model, own_args, own_kwargs, loss_fn=request.loss_fn, shapes=shapes)
        note_local_numbers(captured.graph_module.graph, local.graph_module.graph)
    return captured


def first_microbatch(request: Request) -> Arguments:
    """The call with its batch tensors cut to one microbatch, the largest unless the request says otherwise."""
    args, kwargs, plan = request.args, request.kwargs, request.plan
    if plan.microbatches == 1:
        return args, kwargs
    leaves, spec = tree_flatten((args, kwargs))
    for index, dim in batch_inputs(args, kwargs, plan.batch_dims).items():
        rows = request.rows or -(-leaves[index].shape[dim] // plan.microbatches)
        leaves[index] = leaves[index].narrow(dim, 0, rows)
    found: Arguments = tree_unflatten(leaves, spec)
    return found


def microbatch_sizes(args: tuple[Any, ...], kwargs: dict[str, Any], plan: Plan) -> list[tuple[int, int]]:
    """How many rows a rank's microbatches have, and how many there are of each kind: the larger ones first, which have one row more.

    Fewer rows than microbatches make one microbatch each. Refuses a call without batch, and batch tensors of several sizes that the
    microbatches do not divide.
    """
    split = batch_inputs(args, kwargs, plan.batch_dims)
    leaves, _ = tree_flatten((args, kwargs))
    if not split:
        raise CaptureError(
            "the call has no tensor argument with a batch dim; pass the batch as tensors, or name its dim in batch_dims."
        )
    found, parts = sorted({leaves[index].shape[dim] for index, dim in split.items()}), plan.microbatches
    if found[0] == 0 or (len(found) > 1 and any(size % parts for size in found)):
        size = next(size for size in found if size == 0 or size % parts)
        near = max(parts, size // parts * parts)
        also = f" in one tensor and {found[-1]} in another" if len(found) > 1 else ""
        raise PlanError(
            f"each rank's batch has {size} rows{also}, but microbatches={parts} needs a positive multiple of it; "
            f"pass {near} rows, or drop the last batch of the data set."
        )
    rows, more = divmod(found[0], parts)
    return [kind for kind in ((rows + 1, more), (rows, parts - more)) if all(kind)]


def compile_call(
    model: nn.Module,
    request: Request,
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    pipeline: str | None = None,
    synced: bool = True,
    check: bool = True,
    record_text: bool = False,
    compare: bool = False,
) -> Program:
    """The program of this call: a step (forward and backward) if grad mode is on and the call returns a loss.

    With ``synced=False`` the gradients stay this rank's share.
    ``compare`` holds the capture against the plain model. Warns, on rank 0, if lines of the model run whole on every rank.
    """
    captured = capture(model, request, shapes)
    if (
        captured.loss_index is None and request.plan.microbatches > request.plan.pp == 1
    ):  # nothing is summed: all rows at once
        request = replace(request, plan=replace(request.plan, microbatches=1))
        captured = capture(model, request, shapes)
    if compare and not shapes:
        _compare(model, captured, request)
    learns = torch.is_grad_enabled() and any(item.requires_grad for item in captured.inputs)
    step = learns and captured.loss_index is not None
    if learns and not step and request.plan.pp > 1:
        raise CaptureError(
            f"the call returns no loss, and the stages of pp={request.plan.pp} run forward and backward in one call; let the model return "
            "its loss, pass loss_fn to parallelize, or call it under torch.no_grad()."
        )
    if learns and not step and request.plan.deterministic:
        raise CaptureError(
            "the call returns no loss, so its backward runs in autograd, where Plan(deterministic=True) does not reach; let the model "
            "return its loss, pass loss_fn to parallelize, or call torch.use_deterministic_algorithms(True) instead."
        )
    if step:
        _refuse_gradients_of_inputs(model, request)
    passes = pipelines.parse(pipeline or default_pipeline(request.plan, step=step), PASSES)
    if not synced or request.plan.pp > 1:  # stages add up their microbatches first
        passes = tuple(item for item in passes if Fact.GRADS_SYNCED not in item.provides)
    if learns and not step:
        passes = tuple(item for item in passes if Fact.LOWERED not in item.provides)  # backends' ops have no gradient
    program = as_program(captured, request)
    with without_autocast():
        pipelines.run(program, passes, PASSES, check=check, record_text=record_text, on_pass=_check_experts)
    if not learns:
        program.gathers[:] = [item.forward_only() for item in program.gathers]
    _warn_about_gathers(program)
    _warn_about_unrouted(program)
    if learns and not step and request.plan.num_data_ranks > 1 and not (dist.is_initialized() and dist.get_rank()):
        _LOG.warning(
            "the call returns no loss: gradients of what is computed from its results are summed over %d data ranks, of which "
            "DistributedDataParallel takes the mean. Divide the loss by the whole batch, or pass loss_fn to parallelize.",
            request.plan.num_data_ranks,
        )
    return program


def _refuse_gradients_of_inputs(model: nn.Module, request: Request) -> None:
    """A step gives gradients of parameters only: CaptureError where an argument of the call waits for one."""
    leaves, _ = tree_flatten((request.args, request.kwargs))
    names = leaf_names(request.args, request.kwargs, model.forward)
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            raise CaptureError(
                f"the argument {name} requires a gradient, but a call that returns its loss runs forward and backward at once and has "
                f"gradients of its parameters only; make what computes {name} a part of the model, compute the loss outside, from what the "
                "model returns, or detach the argument."
            )


def _warn_about_unrouted(program: Program) -> None:
    """Name what an expert-parallel plan leaves whole on every rank although it looks like experts."""
    degrees = [f"{axis}={program.mesh.size(axis)}" for axis in ("ep", "etp") if program.mesh.size(axis) > 1]
    if not degrees or not program.unrouted or (dist.is_initialized() and dist.get_rank() != 0):
        return
    shown = [
        f"{item['source']} ({item['module'] or 'the model'}): {item['reason']}" for item in program.unrouted[:_SHOWN]
    ]
    rest = (
        [f"and {len(program.unrouted) - _SHOWN} more, see `program.unrouted`"] if len(program.unrouted) > _SHOWN else []
    )
    _LOG.warning(
        "%d layers of the model are no MoE layers that %s could cut; they run data-parallel, whole on every rank. Set strict=True "
        "to refuse them.\n  %s",
        len(program.unrouted), degrees[0], "\n  ".join([*shown, *rest]),
    )  # fmt: skip


def _check_experts(program: Program, done: Pass) -> None:
    """As soon as a pass has found MoE layers: PlanError if ``ep`` does not divide their experts."""
    if Fact.MOE_OPS in done.provides:
        for layer in program.layers:
            program.plan.check_model(num_experts=layer["num_experts"], name=layer["module"])


def _compare(model: nn.Module, captured: Captured, request: Request) -> None:
    """Hold the capture against the plain model, whose weights are whole."""
    plan = request.plan
    args, kwargs = first_microbatch(request)
    log_left_out(compare_capture(model, captured, args, kwargs, plan.num_data_ranks, plan.batch_dims, request.loss_fn))


def _warn_about_gathers(program: Program) -> None:
    """Say once per program what is gathered, for how many bytes, and what to do about it."""
    found = sorted(program.gathers, key=lambda item: -item.step_bytes)
    if not found or (dist.is_initialized() and dist.get_rank() != 0):
        return
    shown = [f"{item}: {item.reason}" for item in found[:_SHOWN]]
    rest = [f"and {len(found) - _SHOWN} more lines, see `program.gathers`"] if len(found) > _SHOWN else []
    _LOG.warning(
        "lines of the model that are not computed in parts: %d; every rank gathers %s B per step and computes them whole. Rewrite "
        "them, or set strict=True to refuse them.\n  %s",
        len(found), f"{sum(item.step_bytes for item in found):,}", "\n  ".join([*shown, *rest]),
    )  # fmt: skip


def as_program(captured: Captured, request: Request) -> Program:
    """The captured graph as a program no pass has touched; batch inputs are marked as cut over dp."""
    split = batch_inputs(request.args, request.kwargs, request.plan.batch_dims)
    inputs = [item.placed("dp", Shard(split[item.leaf])) if item.leaf in split else item for item in captured.inputs]
    program = Program(
        captured.graph_module,
        inputs,
        list(captured.outputs),
        request.plan,
        Mesh(request.plan),
        in_spec=captured.in_spec,
        out_spec=captured.out_spec,
        out_template=tuple(captured.out_template),
        constants=dict(captured.constants),
    )
    return program


def default_pipeline(plan: Plan, *, step: bool) -> str:
    """The plan's own pipeline, else the preset; a call without backward leaves out the passes of the step level.

    A plan whose ``passes`` begin with ``+`` has the preset and these: each where it usually stands, in place of one of its name.
    """
    given = (plan.passes or "+").strip()
    if given.startswith("+"):
        added = pipelines.parse(given[1:], PASSES)
        passes = _with_added(_with_options(pipelines.parse(STEP, PASSES), plan), added)
    else:
        passes = pipelines.parse(given, PASSES)
        _check_said(passes, plan)
    if not step:
        passes = tuple(
            item for item in passes if item.level is not Level.STEP and Fact.DIFFERENTIATED not in item.provides
        )
    return pipelines.to_text(passes)


def _check_said(passes: Sequence[Pass], plan: Plan) -> None:
    """PlanError for a field that a pipeline written out would leave without effect."""
    if plan.overrides and not any(item.name == "shard-linears" for item in passes):
        raise PlanError(
            f"Plan(overrides={dict(plan.overrides)!r}): the plan's passes are a whole pipeline without shard-linears; put that behind "
            f"shard-dense, or begin passes with '+'."
        )
    if plan.reduce_dtype is None:
        return
    wanted = PASSES["cast-grads"].from_options({"dtype": plan.reduce_dtype})
    if wanted not in passes:
        raise PlanError(
            f"Plan(reduce_dtype={plan.reduce_dtype!r}): the plan's passes are a whole pipeline without "
            f"cast-grads{{dtype={plan.reduce_dtype}}}; put that behind sync-loss, or begin passes with '+'."
        )


def _with_added(passes: Sequence[Pass], added: Sequence[Pass]) -> tuple[Pass, ...]:
    """The preset with some passes more, or with other options."""
    order, names = list(PASSES), {item.name for item in added}
    kept = [item for item in passes if item.name not in names]
    return tuple(sorted([*kept, *added], key=lambda item: order.index(item.name)))


def _with_options(passes: Sequence[Pass], plan: Plan) -> tuple[Pass, ...]:
    """Set the options and add the passes that the plan's fields stand for."""
    chosen: list[Pass] = []
    for item in passes:
        chosen.append(replace(item, backend=plan.dispatch) if item.name == "insert-dispatch" else item)  # type: ignore[call-arg]
        if item.name == "recognize-moe" and plan.router_dtype is not None:
            chosen.append(PASSES["cast-router"].from_options({"dtype": plan.router_dtype}))
        if item.name == "sync-loss" and plan.reduce_dtype is not None:
            chosen.append(PASSES["cast-grads"].from_options({"dtype": plan.reduce_dtype}))
    return tuple(chosen)
