"""The public functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import grads
from .compilation import Request, compile_call, microbatch_sizes
from .errors import CaptureError, PlanError
from .expert_counts import check_experts
from .optimizer_state import load_optimizer, save_optimizer
from .parallel_model import ParallelModel, refuse_parallel
from .passes.record_metrics import DROPPED, TOKENS_PER_EXPERT
from .plan import Plan
from .program import AUX, Program
from .reduction import add_up
from .runtime import process_groups
from .runtime.executor import tune_allocator
from .state import full_gradients, full_state

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
    refuse_parallel(model)
    plan.check_supported()
    plan = plan.resolve(process_groups.world_size())
    check_experts(model, plan)
    process_groups.start(plan)
    tune_allocator()
    parallel = ParallelModel(model, plan, loss_fn, init_fn)
    if example is not None:
        args, kwargs = split_call(example)
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
    check_experts(model, plan)
    args, kwargs = split_call(example)
    if plan.microbatches > 1:
        microbatch_sizes(args, kwargs, plan)  # refuses what they cannot be cut from
    return compile_call(model, Request(args, kwargs, plan, loss_fn), record_text=True)


def split_call(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of an example."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return tuple(example) if isinstance(example, (tuple, list)) else (example,), {}


def clip_grad_norm_(model: ParallelModel, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients so that their joint norm is at most ``max_norm``; returns the norm before.

    The norm is that of the single-process model: a parameter that several ranks hold counts once. Same number on all ranks.
    """
    state = model._state
    state.layout.check_reduced("clip_grad_norm_")
    held = [(name, param.grad) for name, param in model.plain.named_parameters() if param.grad is not None]
    device = held[0][1].device if held else torch.device("cpu")
    like = torch.zeros(0, dtype=held[0][1].dtype if held else torch.float32, device=device)
    # '' for whole gradients; every rank asks the axes in one order, whether or not it holds something that they cut
    axes = ["", *sorted({cut.axes for cut in state.weights.cuts.values()})]
    found: dict[str, list[Tensor]] = {axis: [] for axis in axes}
    for name, grad in held:
        if state.weights.counts(name):  # else another pipeline stage has the same
            found["" if (cut := state.weights.cut_of(name)) is None else cut.axes].append(grad)
    parts = []
    for axis in axes:
        group = state.groups.group(axis) if axis and state.groups.size(axis) > 1 else None
        if found[axis] or axis:
            parts.append(grads.global_norm(found[axis] or [like], norm_type, group))
    total = (
        torch.linalg.vector_norm(torch.stack([part.to(device) for part in parts]), norm_type)
        if parts
        else like.new_zeros(())
    )
    if state.plan.pp > 1:
        total = grads.global_norm([total], norm_type, state.groups.group("pp"))
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for _, grad in held:
        grad.mul_(scale.to(grad.dtype))
    return total


@dataclass(frozen=True)
class LayerMetrics:
    """What one MoE layer did in the latest call, over the global batch.

    ``tokens_per_expert`` is int64 [E]; ``imbalance`` is the busiest expert's load over the mean; ``dropped`` counts the choices that
    no expert served because of a capacity or mask, 0 in dropless layers. ``aux`` is what the loss holds for the layer's router,
    its balance and z terms with their coefficients; None where it holds nothing. A term over several layers counts for each in
    equal parts.
    """

    tokens_per_expert: Tensor
    imbalance: float
    dropped: int = 0
    aux: float | None = None


class Metrics(dict[str, LayerMetrics]):
    """The MoE layers of a model by module path."""

    @property
    def aux(self) -> float | None:
        """Mean of the layers' ``aux`` over the MoE layers that have one; None where none has."""
        found = [layer.aux for layer in self.values() if layer.aux is not None]
        return sum(found) / len(found) if found else None


def metrics(model: ParallelModel) -> Metrics:
    """Expert load and balance terms of every MoE layer in the latest call; collective, so every rank calls it.

    A model without MoE layers gives an empty dictionary. Raises CaptureError before the first call.
    """
    state = model._state
    if state.latest is None:
        raise CaptureError("the model has not been called yet, so there are no metrics; call it once before.")
    totals: dict[tuple[str, str], Tensor] = {}
    for key, (share, partial) in state.latest.metrics.items():
        totals[key] = share.clone()
        add_up(totals[key], partial, state.groups)
    found = Metrics()
    for (layer, what), counts in totals.items():
        if what == TOKENS_PER_EXPERT:
            mean, aux = counts.double().mean().item(), totals.get((layer, AUX))
            imbalance = counts.max().item() / mean if mean else 0.0
            dropped = int(totals.get((layer, DROPPED), torch.zeros(())).item())
            found[layer] = LayerMetrics(counts, imbalance, dropped, None if aux is None else aux.item())
    return found


def update_expert_bias(model: ParallelModel, rate: float = 1e-3) -> None:
    """Move the expert biases of aux-loss-free routers once by the load since the last time: ``b += rate * sign(mean load - load)``.

    Call it after each ``optimizer.step()``; collective. What is counted are the tokens per expert of all calls under grad, over all
    ranks and accumulated microbatches. The bias is the model's own buffer ``[num_experts]`` that its router adds to the scores
    before it chooses; it stays float32 when the model is converted. Formula: DeepSeek-V3, arXiv 2412.19437, section 2.1.2.

    Raises CaptureError where no router has such a buffer, or nothing was counted.
    """
    model._state.balance.update(rate, model._state.groups)


def full_state_dict(model: ParallelModel) -> dict[str, Any]:
    """A snapshot of the whole state as plain tensors under the plain model's names, on every rank; collective."""
    return full_state(model._state.layout, model._state.layout.own_state())


def full_grads(model: ParallelModel) -> dict[str, Tensor | None]:
    """All gradients as plain whole tensors under the plain model's names, on every rank; collective.

    None where the plain model would have None; an expert that saw no token has zeros.
    """
    model._state.layout.check_reduced("full_grads")
    return full_gradients(model._state.layout)


def optimizer_state_dict(model: ParallelModel, opt: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of ``opt`` with plain names and global shapes, for torch.distributed.checkpoint; no communication.

    For a new optimizer it is the template that ``torch.distributed.checkpoint.load`` fills.
    """
    return save_optimizer(model._state.layout, opt)


def load_optimizer_state_dict(model: ParallelModel, opt: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load what `optimizer_state_dict` gave under any plan, or a plain optimizer's ``state_dict()``, before or after the first call.

    Raises CaptureError for parameters that are missing or unknown and for shapes that are not the plain model's.
    """
    load_optimizer(model._state.layout, opt, state)
