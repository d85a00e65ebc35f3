"""The public functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from . import grads
from .compilation import Request, compile_call
from .errors import PlanError
from .parallel_model import ParallelModel
from .plan import Plan
from .program import Program
from .runtime import process_groups
from .runtime.executor import tune_allocator

Example = tuple[Any, ...] | Mapping[str, Any]


def parallelize(
    model: nn.Module,
    plan: Plan,
    example: Example | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    init_fn: Callable[..., Any] | None = None,
) -> ParallelModel:
    """Shard a plain model over the ranks of ``plan``; called on every rank alike.

    ``example`` is one rank's arguments (a tuple, or a mapping of keyword arguments): with it the model is captured and cut at
    once, without it at its first call. ``loss_fn(output, *args, **kwargs)`` computes the loss of a model that returns none.
    ``init_fn(module)`` initialises a model on the meta device.

    Raises PlanError for a plan that does not fit the ranks or this release, CaptureError for a model that cannot be captured.
    """
    plan.check_supported()
    plan = plan.resolve(process_groups.world_size())
    process_groups.start(plan)
    tune_allocator()
    parallel = ParallelModel(model, plan, loss_fn)
    if example is not None:
        args, kwargs = _call(example)
        parallel.prepare(args, kwargs)
    return parallel


def trace(
    model: nn.Module,
    plan: Plan,
    example: Example,
    *,
    world_size: int | None = None,
    rank: int = 0,
    loss_fn: Callable[..., Any] | None = None,
) -> Program:
    """The program of one call, for any world size, without processes and devices.

    ``example`` is what one rank passes. All ranks of a plan share one text, so ``rank`` only says whose offsets are meant.
    """
    plan.check_supported()
    plan = plan.resolve(world_size) if world_size is not None else plan
    if plan.dp is None:
        raise PlanError("trace needs to know the number of ranks; pass world_size=N or give the plan dp=N.")
    if not 0 <= rank < plan.world_size:
        raise PlanError(
            f"rank={rank} is outside the plan's {plan.world_size} ranks; choose 0 to {plan.world_size - 1}."
        )
    args, kwargs = _call(example)
    return compile_call(model, Request(args, kwargs, plan, loss_fn), record_text=True)


def _call(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    return tuple(example) if isinstance(example, (tuple, list)) else (example,), {}


def clip_grad_norm_(model: ParallelModel, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients so that their joint norm is at most ``max_norm``; returns the norm before.

    The norm is that of the single-process model: a parameter that several ranks hold counts once. Same number on all ranks.
    """
    state = model._state
    cut: list[Tensor] = []
    whole: list[Tensor] = []
    held = [(name, param.grad) for name, param in model.plain.named_parameters() if param.grad is not None]
    for name, grad in held:
        (cut if name in state.weights.cuts else whole).append(grad)
    device = held[0][1].device if held else torch.device("cpu")
    parts = [grads.global_norm(whole, norm_type, None)] if whole else []
    if state.weights.cuts:
        axis = next(iter(state.weights.cuts.values())).axis
        group = state.groups.group(axis) if state.groups.size(axis) > 1 else None
        dtype = held[0][1].dtype if held else torch.float32
        parts.append(grads.global_norm(cut or [torch.zeros(0, dtype=dtype, device=device)], norm_type, group))
    total = (
        torch.linalg.vector_norm(torch.stack([part.to(device) for part in parts]), norm_type)
        if parts
        else torch.zeros(())
    )
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for _, grad in held:
        grad.mul_(scale.to(grad.dtype))
    return total
