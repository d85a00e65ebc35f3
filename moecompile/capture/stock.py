"""Functions of torch that look at values, in a form that does not: the same numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def columns_of_rows(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Where a mask holds, dim by dim, worked out from plain `nonzero`: the op that says that its size comes with its values."""
    if not args[0].dim() or not (func.__name__ == "where" or kwargs.get("as_tuple")):
        return func(*args, **kwargs)
    place, columns = torch.nonzero(args[0].reshape(-1)).select(1, 0), []
    for size in reversed(args[0].shape[1:]):
        columns.append(torch.remainder(place, size))
        place = torch.div(place, size, rounding_mode="floor")
    return (place, *reversed(columns))


def gaussian_nll_loss(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Without the look for negative variances, where all is of one shape."""
    given = dict(zip(("input", "target", "var", "full", "eps", "reduction"), args, strict=False)) | kwargs
    mean, target, var, eps = given["input"], given["target"], given["var"], given.get("eps", 1e-6)
    reduction = given.get("reduction", "mean")
    if not isinstance(var, Tensor) or var.shape != mean.shape or reduction not in ("mean", "sum", "none"):
        return func(*args, **kwargs)
    var = torch.where(var < eps, var - (var - eps).detach(), var)  # torch clamps the value and leaves the gradient
    loss = 0.5 * (torch.log(var) + (mean - target) ** 2 / var)
    if given.get("full", False):
        loss = loss + 0.5 * math.log(2 * math.pi)
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()


def covariance(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`cov` without weights, whose values torch would check, and `corrcoef`, which is made of it."""
    given = dict(zip(("input",), args, strict=False)) | kwargs
    x, correction = given["input"], given.get("correction", 1)
    if x.dim() != 2 or x.is_complex() or not x.is_floating_point() or given.keys() - {"input", "correction"}:
        return func(*args, **kwargs)
    x = x - x.mean(1, keepdim=True)
    found = x @ x.t() / max(x.shape[1] - correction, 0)
    if func.__name__ == "cov":
        return found
    spread = found.diagonal().sqrt()
    return (found / spread[:, None] / spread).clamp(-1, 1)


def random_between(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`random_(from, to)`, whose graph torch cannot print: one of its arguments is a word of Python's."""
    given = dict(zip(("self", "from", "to"), args, strict=False)) | kwargs
    low, high = given.get("from"), given.get("to")
    if not isinstance(low, int) or not isinstance(high, int) or given.keys() - {"self", "from", "to"}:
        return func(*args, **kwargs)
    return given["self"].random_(high - low).add_(low)


def repeated(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`repeat_interleave` by a tensor of counts, as the rows that it picks: again the op that says that its size comes with its values."""
    given = dict(zip(("input", "repeats", "dim"), args, strict=False)) | kwargs
    counts, dim = given.get("repeats"), given.get("dim")
    if not isinstance(counts, Tensor):
        return func(*args, **kwargs)
    x, dim = (given["input"].flatten(), 0) if dim is None else (given["input"], dim)
    picked = torch.repeat_interleave(counts.expand(x.shape[dim]), output_size=given.get("output_size"))
    return x.index_select(dim, picked)


def written(func: Callable[..., Any], call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call with ``out=``, as a call and a copy; ``call`` makes it. As it is where torch itself would change more than values."""
    out, rest = kwargs["out"], {name: item for name, item in kwargs.items() if name != "out"}
    if torch.is_grad_enabled() and any(isinstance(item, Tensor) and item.requires_grad for item in (*args, out)):
        return func(*args, **kwargs)  # an error of torch
    made = call(**rest)
    if not isinstance(made, Tensor) or made.shape != out.shape or made.dtype != out.dtype:
        return func(*args, **kwargs)
    return out.copy_(made)


REPLACED: dict[str, Callable[..., Any]] = {
    "gaussian_nll_loss": gaussian_nll_loss,
    "cov": covariance,
    "corrcoef": covariance,
    "random_": random_between,
    "repeat_interleave": repeated,
}
