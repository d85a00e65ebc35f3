"""Gradients of cut parameters, and norms over them.

A rank holds the gradients of its own experts only, so a norm over what it holds is not the model's. The gradients of cut
parameters are therefore a light tensor subclass that answers norms with the global one, tells all ranks of an overflow that one of
them finds, and refuses what would join or pick elements across the cut. What is computed from it element by element is such a gradient,
too, outside of optimizers; everything else treats it as a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .compat import foreach_norm, tree_flatten, unscale_and_check_, without_torch_function

_NORMS = {
    torch.linalg.vector_norm: 1,
    torch.linalg.norm: 1,
    torch.norm: 1,
    Tensor.norm: 1,
}
_ELEMENTWISE = """abs absolute neg negative square sqrt pow __pow__ mul multiply __mul__ __rmul__ div divide true_divide __truediv__
    add __add__ __radd__ sub subtract __sub__ __rsub__ clone detach contiguous clamp clip nan_to_num sign isnan isinf isfinite eq ne gt
    ge lt le __eq__ __ne__ __gt__ __ge__ __lt__ __le__ logical_not to type float double half bfloat16 view view_as reshape flatten
    ravel"""
_OVER_ALL = """sum nansum mean nanmean max amax min amin aminmax any all prod std var median count_nonzero logsumexp"""
_JOINING = "dot vdot inner cat concat concatenate stack hstack vstack"
_MATRICES = """mm matmul __matmul__ __rmatmul__ bmm svd qr inv pinv pinverse inverse cholesky eigh eigvalsh matrix_norm
    matrix_power slogdet det"""
_ALONG = "softmax log_softmax cumsum cumprod logcumsumexp sort argsort argmax argmin"  # a dim comes second
_ACROSS = """einsum tensordot addmm addbmm baddbmm mv outer topk kthvalue quantile nanquantile unique histc bincount trace diag diagonal
    normalize layer_norm rms_norm group_norm cdist cov corrcoef"""
_PICKING = "index_select select narrow index_fill index_fill_ index_add index_add_ index_copy index_copy_ gather scatter scatter_"
_TURNING = "t transpose permute swapaxes swapdims movedim moveaxis adjoint unsqueeze squeeze flip roll"


def _functions(names: str) -> set[Any]:
    places = (torch, Tensor, torch.linalg, torch.nn.functional)
    return {getattr(place, name) for name, place in product(names.split(), places) if hasattr(place, name)}


def _properties(names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names.split()}


_KEPT = _functions(_ELEMENTWISE) | _properties("data")
_TURNED = _functions(_TURNING) | _properties("T mT H mH")
_NUMBERS, _JOINED = _functions(_OVER_ALL), _functions(_JOINING)
_PRODUCTS, _RUNNING, _OTHERS = _functions(_MATRICES), _functions(_ALONG), _functions(_ACROSS) | _functions(_PICKING)
_INDEXED = {Tensor.__getitem__, Tensor.__setitem__}
_in_optimizer = False


def in_optimizer(inside: bool) -> None:
    """Optimizers see gradients as plain tensors, so that their states are plain."""
    global _in_optimizer
    _in_optimizer = inside


class CutGrad(Tensor):
    """A gradient of which this rank holds a part; ``norm`` reduces over the ranks that hold the others."""

    _group: dist.ProcessGroup | None
    _counts: bool
    _dims: frozenset[int] | None

    @classmethod
    def of(
        cls, grad: Tensor, group: dist.ProcessGroup | None, *, counts: bool = True, dims: Iterable[int] | None = None
    ) -> CutGrad:
        """``counts=False``: another rank of the group holds the same and counts it. ``dims``: those that are cut, None if unknown."""
        made: CutGrad = grad.as_subclass(cls)
        made._group, made._counts, made._dims = group, counts, None if dims is None else frozenset(dims)
        return made

    def has_all_along(self, dim: Any) -> bool:
        """Whether what this rank holds of the gradient is whole in these dims."""
        dims = dim if isinstance(dim, (tuple, list)) else (dim,)
        if self._dims is None or not dims or not all(type(item) is int for item in dims):
            return False
        return not self._dims & {item % max(self.ndim, 1) for item in dims}

    def is_whole(self, last: int | None = None) -> bool:
        """Whether no dim of it is cut, or none of the ``last`` ones."""
        first = 0 if last is None else self.ndim - last
        return self._dims is not None and all(dim < first for dim in self._dims)

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
                f"the gradient is one rank's part of a parameter, and {func.__name__} would see that part only; take a norm, or "
                "moecompile.clip_grad_norm_(model, inf), which is finite where all gradients are, or moecompile.full_grads(model), or "
                "grad.as_subclass(torch.Tensor) for the part alone."
            )
        if func is foreach_norm:
            order = _order(args[1] if len(args) > 1 else kwargs.get("ord", 2))
            return [
                item.global_norm(order) if isinstance(item, CutGrad) else torch.linalg.vector_norm(item, order)
                for item in args[0]
            ]
        if func is unscale_and_check_:
            return _unscale(*args, **kwargs)
        if func is Tensor.__deepcopy__:
            return _kept(args[0].as_subclass(Tensor).clone(), args)
        if _in_optimizer:
            with without_torch_function():
                return func(*args, **kwargs)
        if _sees_a_part(func, args, kwargs):
            raise RuntimeError(
                f"the gradient is one rank's part of a parameter, and {func.__name__} would see that part only; take a norm, which is that "
                "of the whole, use moecompile.clip_grad_norm_(model, inf), which is finite where all gradients are, or "
                "moecompile.full_grads(model), or grad.as_subclass(torch.Tensor) for the part alone."
            )
        with without_torch_function():
            found = func(*args, **kwargs)
        return _kept(found, args, turned=func in _TURNED) if func in _KEPT or func in _TURNED else found


def _kept(found: Any, args: Any, *, turned: bool = False) -> Any:
    """The result of a function of elements, or of one that turns dims, as the kind of gradient that it was computed from."""
    own = next((item for item in args if isinstance(item, CutGrad)), None)
    if own is None or not isinstance(found, Tensor) or isinstance(found, CutGrad) or found.numel() != own.numel():
        return found
    dims = own._dims if not own._dims or (found.shape == own.shape and not turned) else None
    return CutGrad.of(found, own._group, counts=own._counts, dims=dims)


def _sees_a_part(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function joins or picks elements of which this rank has a part."""
    if func in _JOINED:
        return True
    if func in _NUMBERS or func in _RUNNING:
        return _runs_along_a_part(args, kwargs)
    held = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, CutGrad)]
    if func in _PRODUCTS:
        return not all(item.is_whole(2) for item in held)
    if func in _INDEXED:
        return isinstance(args[0], CutGrad) and _picks_of_a_part(args[0], args[1])
    return func in _OTHERS and not all(item.is_whole() for item in held)


def _picks_of_a_part(grad: CutGrad, index: Any) -> bool:
    """Whether an index says which elements of a dim that is cut. A mask of the gradient's own shape goes by element."""
    if grad._dims is not None and not grad._dims:
        return False
    if isinstance(index, Tensor) and index.dtype == torch.bool and index.shape == grad.shape:
        return False
    items = index if isinstance(index, tuple) else (index,)
    plain = all(isinstance(item, (int, slice)) or item is Ellipsis for item in items)
    if grad._dims is None or not plain:
        return True
    at = items.index(Ellipsis) if Ellipsis in items else len(items)
    whole = (slice(None),) * (grad.ndim - len(items) + (Ellipsis in items))
    return any(
        item != slice(None) for dim, item in enumerate((*items[:at], *whole, *items[at + 1 :])) if dim in grad._dims
    )


def _runs_along_a_part(args: Any, kwargs: Any) -> bool:
    """Whether a reduction runs over dims of which this rank has a part; the larger of two tensors is none."""
    source = args[0] if args else kwargs.get("input")
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
    if isinstance(dim, Tensor) or "other" in kwargs or not isinstance(source, CutGrad):
        return False
    return dim is None or not source.has_all_along(dim)


def _unscale(grads: Any, found_inf: Tensor, inv_scale: Tensor) -> None:
    """What `torch.amp.GradScaler` does with gradients, where a rank that finds an overflow says so to those that hold the other parts."""
    with without_torch_function():
        unscale_and_check_([item.as_subclass(Tensor) for item in grads], found_inf, inv_scale)
    groups = {id(item._group): item._group for item in grads if isinstance(item, CutGrad)}
    for group in groups.values():
        if group is not None:
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group)


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


def mark(param: nn.Parameter, group: dist.ProcessGroup | None, *, counts: bool = True, dims: Iterable[int] = ()) -> Any:
    """Make the gradient of ``param``, which is cut in ``dims``, and every one that accumulates into it, a CutGrad.

    Returns the hook's handle.
    """
    cut = frozenset(dims)

    def convert(leaf: Tensor) -> None:
        if leaf.grad is not None and not isinstance(leaf.grad, CutGrad):
            leaf.grad = CutGrad.of(leaf.grad, group, counts=counts, dims=cut)

    convert(param)
    return param.register_post_accumulate_grad_hook(convert)  # type: ignore[no-untyped-call]
