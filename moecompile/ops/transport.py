"""How bytes travel between the ranks of a group: `torch.distributed`, or a faster link where the runtime made one.

A `Link` serves the CPU tensors of one process group. The runtime attaches it to the group's name, the collectives below use it;
a group without one is served by `torch.distributed`. A link gives the same bytes, and sums in rank order.
"""

from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from moecompile.compat import all_gather_single


class Link(Protocol):
    """Transport of one group. Tensors are contiguous CPU tensors; every rank of the group makes the same calls in one order."""

    def all_to_all(self, out: Tensor, x: Tensor, outs: Sequence[int], ins: Sequence[int]) -> None:
        """Send ``ins[r]`` leading rows of ``x`` to rank r; ``outs[r]`` rows of ``out`` come from rank r."""

    def all_reduce(self, x: Tensor, op: str) -> None:
        """Replace ``x`` by its ``sum``, ``max`` or ``min`` over the ranks."""

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """Fill ``out`` with the ``x`` of all ranks, one after another."""


_links: dict[str, Link] = {}

REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def attach(group_name: str, link: Link) -> None:
    """Let collectives over the CPU tensors of a group use ``link``."""
    _links[group_name] = link


def detach(group_name: str) -> None:
    """Back to `torch.distributed`."""
    _links.pop(group_name, None)


def _link(group: dist.ProcessGroup, x: Tensor) -> Link | None:
    return _links.get(group.group_name) if x.device.type == "cpu" else None


def all_to_all(
    out: Tensor, x: Tensor, group: dist.ProcessGroup, outs: list[int] | None = None, ins: list[int] | None = None
) -> None:
    """Rows of ``x`` to the ranks of ``group``: ``ins[r]`` to rank r, equal parts where no sizes are given."""
    link = _link(group, x)
    if link is None:
        dist.all_to_all_single(out, x, outs, ins, group=group)
        return
    ranks = group.size()
    link.all_to_all(out, x, outs or [out.shape[0] // ranks] * ranks, ins or [x.shape[0] // ranks] * ranks)


def all_reduce(x: Tensor, op: str, group: dist.ProcessGroup) -> None:
    """Reduce in place."""
    link = _link(group, x)
    if link is None:
        dist.all_reduce(x, REDUCTIONS[op], group=group)
    else:
        link.all_reduce(x, op)


def all_gather(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
    """Concatenate along the leading dimension."""
    link = _link(group, x)
    if link is None:
        all_gather_single(out, x, group=group)
    else:
        link.all_gather(out, x)
