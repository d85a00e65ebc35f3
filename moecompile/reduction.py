"""Reductions the runtime makes outside a graph: gradients that were accumulated before they were reduced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .compat import foreach_copy_
from .placement.types import Partial
from .program import Output
from .runtime.process_groups import ProcessGroups


def partial_axes(item: Output) -> tuple[str, ...]:
    """The axes on which an output is a sum still to be taken."""
    return tuple(axis for axis, placed in item.placements if isinstance(placed, Partial))


def add_up(value: Tensor, axes: Sequence[str], groups: ProcessGroups) -> None:
    """Sum a tensor in place over one axis after another."""
    for axis in axes:
        if groups.size(axis) > 1:
            dist.all_reduce(value, group=groups.group(axis))


REDUCE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def reduce_flat(tensors: Iterable[tuple[str, Tensor]], groups: ProcessGroups, *, mean: bool = False) -> None:
    """Sum each tensor in place over its axis (or average it), in the plan's type; one flat exchange per axis and dtype, in order."""
    wanted = groups.mesh.plan.reduce_dtype
    buckets: dict[tuple[str, torch.dtype], list[Tensor]] = {}
    for axis, tensor in tensors:
        if axis and groups.size(axis) > 1 and tensor.numel():
            buckets.setdefault((axis, tensor.dtype), []).append(tensor.as_subclass(Tensor))
    for (axis, _), members in buckets.items():
        flat = torch.cat([item.reshape(-1) for item in members])
        flat = flat if wanted is None else flat.to(REDUCE_DTYPES[wanted])
        dist.all_reduce(flat, group=groups.group(axis))
        flat = flat.div_(groups.size(axis)) if mean else flat
        parts = torch.split(flat, [item.numel() for item in members])
        foreach_copy_(members, [part.view_as(item) for part, item in zip(parts, members, strict=True)])
