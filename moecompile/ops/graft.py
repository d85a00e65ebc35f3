"""One tensor's value with another one's gradient: how a custom backward stands in a graph of plain operators."""

from typing import Any

import torch
from torch import Tensor

from moecompile.ops.registry import define, require


def _check(value: Tensor, path: Tensor) -> None:
    require(
        value.dim() == path.dim() and value.dtype == path.dtype,
        f"moe::graft: value is {value.dtype} with {value.dim()} dims and path {path.dtype} with {path.dim()}, but they must "
        "be alike; reshape or cast the path.",
    )


def _graft(value: Tensor, path: Tensor) -> Tensor:
    _check(value, path)
    return value.clone()


def _graft_fake(value: Tensor, path: Tensor) -> Tensor:
    _check(value, path)
    return torch.empty_like(value)


def _backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
    return None, grad


# Elementwise in both operands: placement and recognition treat it as such because of its tag.
graft = define(
    "graft(Tensor value, Tensor path) -> Tensor",
    _graft,
    _graft_fake,
    setup=lambda ctx, inputs, output: None,
    backward=_backward,
    tags=(torch.Tag.pointwise,),
)
