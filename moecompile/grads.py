"""Gradients of cut parameters, and norms over them.

A rank holds the gradients of its own experts only, so a norm over what it holds is not the model's. The gradients of cut
parameters are therefore a light tensor subclass that answers norms with the global one; everything else treats it as a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .compat import foreach_norm, without_torch_function

_NORMS = {
    torch.linalg.vector_norm: 1,
    torch.linalg.norm: 1,
    torch.norm: 1,
    Tensor.norm: 1,
}


class CutGrad(Tensor):
    """A gradient of which this rank holds a part; ``norm`` reduces over the ranks that hold the others."""

    _group: dist.ProcessGroup | None
    _counts: bool

    @classmethod
    def of(cls, grad: Tensor, group: dist.ProcessGroup | None, *, counts: bool = True) -> CutGrad:
        """``counts=False``: another rank of the group holds the same and counts it."""
        made: CutGrad = grad.as_subclass(cls)
        made._group, made._counts = group, counts
        return made

    def global_norm(self, order: float) -> Tensor:
        """The norm over the parts of all ranks."""
        own = self.as_subclass(Tensor)
        return global_norm([own if self._counts else own.new_empty(0)], order, self._group)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _NORMS and isinstance(args[0], CutGrad):
            order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
            if kwargs.get("dim") is None and len(args) < 3:
                return args[0].global_norm(_order(order))
            raise RuntimeError(
                f"the gradient is one rank's part of a parameter, and {func.__name__} along a dim would see that part only; use "
                f"moecompile.clip_grad_norm_(model, max_norm) or moecompile.full_grads(model)."
            )
        if func is foreach_norm:
            order = _order(args[1] if len(args) > 1 else kwargs.get("ord", 2))
            return [
                item.global_norm(order) if isinstance(item, CutGrad) else torch.linalg.vector_norm(item, order)
                for item in args[0]
            ]
        with without_torch_function():
            return func(*args, **kwargs)


def _order(order: Any) -> float:
    return 2.0 if order in (None, "fro") else float(order)


def global_norm(parts: Iterable[Tensor], order: float, group: dist.ProcessGroup | None) -> Tensor:
    """The ``order``-norm over the parts of all ranks of ``group`` (None: this rank alone)."""
    plain = [part.as_subclass(Tensor) for part in parts]
    held = [torch.linalg.vector_norm(part, order) for part in plain if part.numel()]
    like = plain[0]
    if math.isinf(order):
        found = torch.stack(held).max() if held else like.new_zeros(())
        reduce = dist.ReduceOp.MAX if order > 0 else dist.ReduceOp.MIN
    else:
        found = torch.stack(held).pow(order).sum() if held else like.new_zeros(())
        reduce = dist.ReduceOp.SUM
    if group is not None:
        dist.all_reduce(found, reduce, group=group)
    return found if math.isinf(order) else found.pow(1.0 / order)


def mark(param: nn.Parameter, group: dist.ProcessGroup | None, *, counts: bool = True) -> Any:
    """Make the gradient of ``param``, and every one that accumulates into it, a CutGrad. Returns the hook's handle."""

    def convert(leaf: Tensor) -> None:
        if leaf.grad is not None and not isinstance(leaf.grad, CutGrad):
            leaf.grad = CutGrad.of(leaf.grad, group, counts=counts)

    convert(param)
    return param.register_post_accumulate_grad_hook(convert)  # type: ignore[no-untyped-call]
