"""Hold each parameter as shards over the ranks that would hold copies of it, and gather it before use.

Before:  every rank of dp and cp has a dense parameter whole, every rank of edp an expert
After:   the input is this rank's shard; the whole is gathered before its first use in the forward and again before its first use
         in the backward; the gradient is reduced and scattered as soon as it is complete (level 3, ZeRO-3)

Level 2 gathers once: the runtime keeps what was gathered until a shard changes. Level 1 also keeps gradients whole until all
microbatches of a call are done, and then reduces and scatters them.

A gather is made for each bucket of parameters: those of one layer, or as many as fit in ``bucket-mb``. The first dim that the
ranks divide and no other axis cuts is cut, else dim 0 in unequal shards, padded where they travel. What has neither (scalars, fewer
rows than ranks, biases that tp cuts) stays whole. Axes that are left (tp) are reduced by ``sync-grads``. Does nothing where
dp == cp == edp == 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch.fx import Graph, GraphModule, Node

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.mesh import joined
from moecompile.pass_base import Fact, Numerics, Pass, PassContext
from moecompile.placement.types import Shard
from moecompile.program import Input, InputKind, Level, OutputKind

aten = torch.ops.aten
# what a backward computes again from the gathered weight rather than keep it
_CHEAP = {
    aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default, aten.reshape.default, aten._unsafe_view.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default, aten.slice.Tensor, aten.select.int, aten.detach.default,
    aten.alias.default, aten._to_copy.default, aten.clone.default, aten.split.Tensor, aten.split_with_sizes.default,
    aten.chunk.default, aten.unbind.int, aten.cat.default, aten.stack.default,
}  # fmt: skip


@dataclass
class _Member:
    """One parameter that is cut: its placeholder, which dim over how many ranks, and the shape that the graph computes with."""

    node: Node
    dim: int
    ranks: int
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Size of the cut dim in each shard, padding included."""
        return -(-self.shape[self.dim] // self.ranks)

    @property
    def shard(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.rows, *self.shape[self.dim + 1 :])

    @property
    def to_front(self) -> list[int]:
        """The order of dims in which the cut one comes first."""
        return [self.dim, *(dim for dim in range(len(self.shape)) if dim != self.dim)]

    @property
    def from_front(self) -> list[int]:
        return [self.to_front.index(dim) for dim in range(len(self.shape))]

    @property
    def front(self) -> list[int]:
        """The whole shape in that order."""
        return [self.shape[dim] for dim in self.to_front]

    @property
    def padding(self) -> int:
        """Rows of zeros behind those of all ranks."""
        return self.rows * self.ranks - self.shape[self.dim]

    @property
    def bytes(self) -> int:
        whole: int = torch.Size(self.shape).numel() * meta.tensor(self.node).element_size()
        return whole


@dataclass
class _Bucket:
    """Parameters that travel together: of one axis, type and pipeline stage, used one after another."""

    axis: str
    ranks: int
    stage: int | None
    members: list[_Member] = field(default_factory=list)


@dataclass(frozen=True)
class ShardParams(Pass):
    """Shards of parameters, gradients and optimizer state, as ``level`` says.

    ``bucket_mb``: largest size of what one collective gathers or scatters; 0: one for each layer.
    ``prefetch``: how many buckets are gathered ahead of the one in use. ``over``: the axes that share out dense parameters; those
    that are left hold copies of the shards.
    """

    level_: Literal[3, 2, 1] = 3
    over: Literal["dp+cp", "dp", "cp"] = "dp+cp"
    bucket_mb: int = 0
    prefetch: int = 0

    name: ClassVar[str] = "shard-params"
    level: ClassVar[Level | None] = None
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TOKENS_SHARDED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_SHARDED})
    excludes: ClassVar[frozenset[Fact]] = frozenset({Fact.GRADS_SYNCED})
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATING

    def run(self, graph: GraphModule, ctx: PassContext) -> int:
        members = self._cut(ctx)
        if not members:
            return 0
        kept = self.level_ < 3
        if not kept:
            _repeat_for_backward(graph.graph, members)
        buckets = self._buckets(graph.graph, members)
        for half in [None] if kept else list(meta.Direction):
            self._gather_all(graph.graph, buckets, half, ctx)
        self._scatter_all(graph.graph, buckets, ctx)
        graphs.eliminate_dead(graph.graph, keep=lambda node: node.target in ops.COLLECTIVES)
        return len(members)

    def _cut(self, ctx: PassContext) -> dict[Node, tuple[str, _Member]]:
        """Let the inputs be shards; what is cut, by placeholder and in the order of the inputs, with the axis."""
        found: dict[Node, tuple[str, _Member]] = {}
        for at, (node, item) in enumerate(ctx.program.items()):
            axis = shard_axis(item, ctx, self.over)
            if item.kind is not InputKind.PARAM or not axis or not meta.tensor(node).is_floating_point():
                continue
            ranks, value = ctx.mesh.size(axis), meta.tensor(node)
            taken = frozenset(placed.dim for _, placed in item.placements if isinstance(placed, Shard))
            dim = cut_dim(tuple(value.shape), ranks, 1 if item.stacked else 0, taken)
            if dim is None:
                ctx.decline(
                    self.name,
                    f"{' '.join(item.fqns[:1])} {list(value.shape)} stays whole on the {ranks} ranks of {axis}",
                )
                continue
            member = _Member(node, dim, ranks, tuple(value.shape))
            with ctx.mode:
                node.meta["val"] = value.new_empty(member.shard)
            meta.set_placements(node, {**meta.placements(node), axis: Shard(dim)})
            ctx.program.inputs[at] = item.placed(axis, Shard(dim))
            found[node] = axis, member
        return found

    def _buckets(self, graph: Graph, members: dict[Node, tuple[str, _Member]]) -> list[_Bucket]:
        """Parameters that travel together, in the order in which the program first reads them."""
        place = {node: at for at, node in enumerate(graph.nodes)}
        used = [(min(node.users, key=place.__getitem__), node) for node in members if node.users]
        open_: dict[tuple[str, torch.dtype, int | None], tuple[Any, int, _Bucket]] = {}
        found = []
        for user, node in sorted(used, key=lambda pair: (place[pair[0]], place[pair[1]])):
            axis, member = members[node]
            stage = meta.stage(node)
            key = axis, meta.tensor(node).dtype, stage
            layer, filled, bucket = open_.get(key, (None, 0, None))
            here = meta.layer(user) or "" if not self.bucket_mb else ""
            if bucket is None or here != layer or (self.bucket_mb and filled + member.bytes > self.bucket_mb << 20):
                filled, bucket = 0, _Bucket(axis, member.ranks, stage)
                found.append(bucket)
            bucket.members.append(member)
            open_[key] = here, filled + member.bytes, bucket
        return found

    def _gather_all(self, graph: Graph, buckets: list[_Bucket], half: meta.Direction | None, ctx: PassContext) -> None:
        """Gather every bucket before what first reads it in one half of the step; in all of it (None) to be kept."""
        place = {node: at for at, node in enumerate(graph.nodes)}
        due = []
        for bucket in buckets:
            users = {
                member.node: [user for user in member.node.users if half in (None, meta.direction(user))]
                for member in bucket.members
            }
            readers = [user for found in users.values() for user in found]
            if readers:
                due.append((min(readers, key=place.__getitem__), bucket, users))
        due.sort(key=lambda item: place[item[0]])
        for at, (_, bucket, users) in enumerate(due):
            read = [member for member in bucket.members if users[member.node]]
            before = due[max(0, at - self.prefetch)][0]
            with graph.inserting_before(before):
                make = _maker(graph, before, bucket.stage, half or meta.Direction.FORWARD, ctx)
                wholes = _gathered(graph, bucket, read, make)
            for member, whole in zip(read, wholes, strict=True):
                if half is None:
                    meta.set_whole(whole, member.node.name)
                for user in users[member.node]:
                    user.replace_input_with(member.node, whole)

    def _scatter_all(self, graph: Graph, buckets: list[_Bucket], ctx: PassContext) -> None:
        """Reduce and scatter the gradients of every bucket as soon as its last one is there; at level 1 when all are."""
        place = {node: at for at, node in enumerate(graph.nodes)}
        program, results = ctx.program, ctx.program.output_nodes()
        at_of = {item.name: at for at, item in enumerate(program.outputs) if item.kind is OutputKind.GRAD}
        for bucket in buckets:
            members = [member for member in bucket.members if isinstance(results[at_of.get(member.node.name, 0)], Node)]
            members = [member for member in members if member.node.name in at_of]
            if not members:
                continue
            grads = [results[at_of[member.node.name]] for member in members]
            last = max(grads, key=place.__getitem__)
            late = self.level_ == 1
            with graph.inserting_before(graph.output_node() if late else last.next):
                make = _maker(graph, last, bucket.stage, meta.Direction.BACKWARD, ctx, late=late)
                shards = _scattered(graph, bucket, members, grads, make)
            for member, shard in zip(members, shards, strict=True):
                results[at_of[member.node.name]] = shard
        graph.output_node().args = (tuple(results),)


def shard_axis(item: Input, ctx: PassContext, over: str) -> str:
    """The data axes over which every rank holds the same part of a parameter, as one; '' where there are none.

    Of an expert it is edp, of every other parameter what is in ``over``.
    """
    cut = {part for axis, placed in item.placements if isinstance(placed, Shard) for part in axis.split("+")}
    axes = ["edp"] if cut & {"ep", "etp"} else over.split("+")
    return joined(axis for axis in axes if ctx.mesh.size(axis) > 1)


def cut_dim(shape: tuple[int, ...], ranks: int, first: int = 0, taken: frozenset[int] = frozenset()) -> int | None:
    """The dim to cut, from ``first`` on; None where the parameter stays whole.

    One that divides and that no other axis has cut (``taken``), else ``first`` if each rank but the last ones gets a row, else, of a
    matrix, one that divides and is cut already.
    """
    dims = range(first, len(shape))
    even = [dim for dim in dims if shape[dim] and shape[dim] % ranks == 0]
    free = [dim for dim in even if dim not in taken]
    if free:
        return free[0]
    if first in dims and first not in taken and shape[first] >= ranks:
        return first
    return even[0] if even and len(dims) > 1 else None


def _repeat_for_backward(graph: Graph, members: Iterable[Node]) -> None:
    """Let the backward compute views and casts of a weight itself, so that nothing gathered lives from one half to the other.

    What one pipeline stage makes of a weight and another one reads is sent as any activation is.
    """
    weights, derived = set(members), set[Node]()
    copies: dict[Node, Node] = {}

    def copy(node: Node, before: Node) -> Node:
        if node in weights:
            return node
        if node not in copies:
            args = {source: copy(source, before) for source in node.all_input_nodes}
            with graph.inserting_before(before):
                copies[node] = graph.node_copy(node, args.__getitem__)
            copies[node].meta = meta.copy_meta(node)
            meta.set_direction(copies[node], meta.Direction.BACKWARD)
        return copies[node]

    for node in list(graph.nodes):
        if node.op == "call_function" and meta.direction(node) is meta.Direction.BACKWARD:
            for source in node.all_input_nodes:
                if source in derived and meta.stage(source) == meta.stage(node):
                    node.replace_input_with(source, copy(source, node))
        elif node.target in _CHEAP or getattr(node.target, "__name__", "") == "getitem":
            sources = node.all_input_nodes
            if sources and all(source in weights or source in derived for source in sources):
                derived.add(node)


def _maker(
    graph: Graph, like: Node, stage: int | None, direction: meta.Direction, ctx: PassContext, *, late: bool = False
) -> Any:
    """Makes nodes that belong to the module of ``like``, to a stage and to one half of the step; ``late``: behind its last microbatch."""

    def make(target: Any, *args: Any, **kwargs: Any) -> Node:
        made = graphs.call(graph, target, *args, like=like, mode=ctx.mode, **kwargs)
        meta.set_direction(made, direction)
        meta.set_stage(made, stage)
        if late:
            meta.defer(made)
        return made

    return make


def _gathered(graph: Graph, bucket: _Bucket, members: list[_Member], make: Any) -> list[Node]:
    """The whole parameters, from one collective; the dim that is cut travels in front."""
    fronts = [_turned(member.node, member.to_front, make) for member in members]
    if len(members) == 1:
        parts = [make(ops.all_gather, fronts[0], bucket.ranks, bucket.axis)]
    else:
        flat = [make(aten.reshape.default, front, [1, -1]) for front in fronts]
        found = make(ops.all_gather, make(aten.cat.default, flat, 1), bucket.ranks, bucket.axis)
        pieces = _split(graph, found, members, make)
        parts = [
            make(aten.reshape.default, piece, [member.rows * bucket.ranks, *member.front[1:]])
            for member, piece in zip(members, pieces, strict=True)
        ]
    wholes = []
    for member, part in zip(members, parts, strict=True):
        if member.padding:
            part = make(aten.slice.Tensor, part, 0, 0, member.front[0])
        wholes.append(_turned(part, member.from_front, make, copy=True))
    return wholes


def _scattered(graph: Graph, bucket: _Bucket, members: list[_Member], grads: list[Node], make: Any) -> list[Node]:
    """This rank's shards of the summed gradients, from one collective."""
    fronts = [_turned(grad, member.to_front, make) for grad, member in zip(grads, members, strict=True)]
    for at, member in enumerate(members):
        if member.padding:
            behind = [0, 0] * (len(member.shape) - 1)
            fronts[at] = make(aten.constant_pad_nd.default, fronts[at], [*behind, 0, member.padding])
    if len(members) == 1:
        parts = [make(ops.reduce_scatter, fronts[0], bucket.ranks, bucket.axis)]
    else:
        flat = [make(aten.reshape.default, front, [bucket.ranks, -1]) for front in fronts]
        found = make(ops.reduce_scatter, make(aten.cat.default, flat, 1), bucket.ranks, bucket.axis)
        pieces = _split(graph, found, members, make)
        parts = [
            make(aten.reshape.default, piece, [member.rows, *member.front[1:]])
            for member, piece in zip(members, pieces, strict=True)
        ]
    return [_turned(part, member.from_front, make, copy=True) for member, part in zip(members, parts, strict=True)]


def _turned(node: Node, order: list[int], make: Any, *, copy: bool = False) -> Node:
    """Dims in another order; ``copy``: in the memory order of a tensor of its own."""
    if order == sorted(order):
        return node
    found: Node = make(aten.permute.default, node, order)
    return make(aten.clone.default, found, memory_format=torch.contiguous_format) if copy else found


def _split(graph: Graph, found: Node, members: list[_Member], make: Any) -> list[Node]:
    """What came out of a collective, taken apart along dim 1."""
    sizes = [torch.Size(member.shard).numel() for member in members]
    parts = graphs.unpack(graph, make(aten.split_with_sizes.default, found, sizes, 1))
    for part in parts:
        meta.set_direction(part, meta.direction(found))
    return parts
