"""How a step that has already run its backward looks to autograd.

A call under grad runs forward and backward at once; ``loss.backward()`` then only hands the gradients out, times the incoming
scalar. To the engine this is one function of all trained parameters, so accumulation into ``.grad``, hooks,
``torch.autograd.grad`` and loss scaling work as for any other loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .compat import foreach_mul_

Gradients = list["Tensor | None"]


class StepResult:
    """The gradients of one step, to be taken once. ``finish`` runs when they are taken, before they are handed out."""

    def __init__(self, gradients: Gradients, finish: Callable[[Gradients], Gradients] | None = None) -> None:
        self._gradients: Gradients | None = gradients
        self._finish = finish

    def take(self, scale: Tensor) -> Gradients:
        if self._gradients is None:
            raise RuntimeError(
                "backward was called a second time on the loss of one step, whose gradients were handed out already; call the "
                "model again, or add the losses up and call backward once."
            )
        gradients, self._gradients = self._gradients, None
        if self._finish is not None:
            gradients = self._finish(gradients)
        held = [item for item in gradients if item is not None]
        # a scalar of one is by far the commonest, and reading it costs nothing on the host
        if held and not (scale.device.type == "cpu" and scale.item() == 1.0):
            foreach_mul_(held, scale.to(held[0].dtype) if scale.dim() == 0 else scale)
        return gradients


def _refuse_graph() -> None:
    """RuntimeError in a backward that shall be differentiated again."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "backward was called with create_graph=True, but gradients of a parallel model's weights are summed over ranks and have no "
            "graph of their own; compute what needs second derivatives inside the model or in loss_fn, or leave create_graph out."
        )


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: StepResult, loss: Tensor, *parameters: Tensor) -> Tensor:
        ctx.result = result
        ctx.set_materialize_grads(False)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        _refuse_graph()
        return (None, None, *ctx.result.take(grads[0]))


class _ValueOnly(torch.autograd.Function):
    """Any other output of a step: its value is there, its gradient is not, and asking for it must not give zero."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, parameter: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        raise RuntimeError(
            "backward went through an output other than the loss of a call that ran its whole step, where only the loss has "
            "gradients; compute that term inside the model or in loss_fn, or detach the output."
        )


def value_only(value: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """An output from which nothing can be derived."""
    if not parameters or not value.is_floating_point():
        return value
    found: Tensor = _ValueOnly.apply(value, parameters[0])  # type: ignore[no-untyped-call]
    return found


def attach(result: StepResult, loss: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """The loss with the step's gradients behind it."""
    if not parameters:
        return loss
    attached: Tensor = _Step.apply(result, loss, *parameters)  # type: ignore[no-untyped-call]
    return attached


class _Shared(torch.autograd.Function):
    """Weights as a program under autograd reads them; their gradients come back together and are reduced at once."""

    @staticmethod
    def forward(ctx: Any, reduce: Callable[[Sequence[Tensor | None]], None], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.reduce = reduce
        ctx.set_materialize_grads(False)
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        _refuse_graph()
        own = [None if grad is None else grad.clone() for grad in grads]
        ctx.reduce(own)
        return (None, *own)


def share(reduce: Callable[[Sequence[Tensor | None]], None], weights: Sequence[Tensor]) -> list[Tensor]:
    """``weights`` for a differentiable program; ``reduce`` sums their gradients in place over the ranks."""
    if not weights:
        return []
    return list(_Shared.apply(reduce, *weights))  # type: ignore[no-untyped-call]
