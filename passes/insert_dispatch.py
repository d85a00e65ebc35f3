"""Send each routed row to the rank that owns its expert, and bring the result back.

Before:  permute -> grouped_linear -> act -> grouped_linear -> unpermute
After:   permute -> dispatch -> grouped_linear -> act -> grouped_linear -> combine -> unpermute      (alltoall)
         all_gather -> permute_local -> grouped_linear -> act -> grouped_linear -> unpermute -> reduce_scatter   (allgather)

Under etp all ranks that hold parts of an expert compute on the rows of all of them: the rows that arrived are gathered over etp in
front of the experts, and the parts of their results summed and sent home behind them (all_gather_rows, reduce_scatter_rows).
With allgather the tokens of ep and etp are gathered, and their results summed, in one collective over both axes.

Counts travel first, as exchanges of equal sizes; one read on the host and at most two unbacked sizes a layer. Does nothing when
ep == etp == 1. Shared experts are not between permute and unpermute, so they stay local.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch.fx import Graph, GraphModule, Node

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.errors import PassError
from moecompile.mesh import joined
from moecompile.pass_base import Fact, Numerics, Pass, PassContext
from moecompile.placement.types import PARTIAL, Shard
from moecompile.program import Input, InputKind

aten = torch.ops.aten
_AWAY = {"ep": Shard(0, rows=True)}


@dataclass
class Region:
    """One MoE layer's rows: from the permute to the unpermute. T tokens, K experts a token, N = T * K rows, E experts."""

    permute: Node
    rows: Node
    counts: Node
    row_map: Node
    body: list[Node]
    unpermute: Node
    travelling: list[Node] = field(default_factory=list)

    @property
    def probs(self) -> Any:
        return self.unpermute.args[4] if len(self.unpermute.args) > 4 else self.unpermute.kwargs.get("probs")


@dataclass(frozen=True)
class InsertDispatch(Pass):
    """Insert expert-parallel dispatch and combine around the experts of every MoE layer.

    ``backend``: ``alltoall`` moves each row once a direction, ``allgather`` moves every token to all ranks of the group (less for
    a large top_k). ``probs``: ``combine`` applies the routing weights after the return trip, ``fc2`` before the second linear, so
    that no expert output is saved for the backward (memory-efficient permutation); the weights then travel with the rows.
    """

    backend: Literal["alltoall", "allgather"] = "alltoall"
    probs: Literal["combine", "fc2"] = "combine"

    name: ClassVar[str] = "insert-dispatch"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.MOE_OPS, Fact.EXPERTS_SHARDED, Fact.TOKENS_SHARDED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.TOKENS_DISPATCHED})
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATING

    def run(self, graph: GraphModule, ctx: PassContext) -> int:
        if ctx.mesh.size("ep") == ctx.mesh.size("etp") == 1:
            return 0
        done = 0
        for permute in graphs.find(graph, ops.permute):
            for region in find_regions(graph.graph, permute):
                self._rewrite(graph.graph, region, ctx)
                done += 1
        graphs.eliminate_dead(graph.graph)
        return done

    def _rewrite(self, graph: Graph, region: Region, ctx: PassContext) -> None:
        for part in (region.row_map, region.counts, region.rows):
            region.permute.append(part)  # in front of all that reads any of them
        if region.travelling and self.backend == "allgather":
            raise PassError(
                f"insert-dispatch: {meta.where(region.travelling[0])} numbers the rows for random numbers inside an expert, which "
                f"backend=allgather does not move; use backend=alltoall, or set the experts' dropout to 0."
            )
        if self.probs == "fc2" and self.backend == "alltoall":
            _probs_before_last_linear(graph, region, ctx)
        if self.backend == "alltoall":
            _alltoall(graph, region, ctx)
        else:
            _allgather(graph, region, ctx)


def find_regions(graph: Graph, permute: Node) -> list[Region]:
    """The expert regions that start at one permute."""
    parts = graphs.items(permute)
    if 0 not in parts:
        return []
    regions = []
    for node in graphs.find(graph, ops.unpermute):
        if node.args[1] is not parts.get(2):
            continue
        body = graphs.between([parts[0]], node)
        if not any(item.target is ops.grouped_linear for item in body):
            raise PassError(
                f"insert-dispatch: {meta.where(node)} brings back rows that no expert computed; give the layer expert weights or use ep=1."
            )
        inside = {*body, parts[0], parts[1]}
        places = [item.args[2] for item in body if item.target is ops.uniform_rows and item.args[2] not in inside]
        travelling = [item for item in dict.fromkeys(places) if isinstance(item, Node)]
        regions.append(Region(permute, parts[0], parts[1], parts[2], body, node, travelling))
    return regions


@dataclass(frozen=True)
class _Sizes:
    """How many rows go where, on the CPU: to and from each rank of ep, and from each rank of etp. ``counts`` are by source."""

    send: Node
    recv: Node
    counts: Node
    by_rank: Node | None


def _exchange_sizes(graph: Graph, region: Region, ctx: PassContext) -> _Sizes:
    """Counts travel; one read on the host."""
    ep, etp = ctx.mesh.size("ep"), ctx.mesh.size("etp")

    def make(target: Any, *args: Any) -> Node:
        return graphs.call(graph, target, *args, like=region.permute, mode=ctx.mode)

    exchange: tuple[Any, ...] = (ops.exchange_counts, ep, "ep") if ep > 1 else (aten.unsqueeze.default, 0)
    received = make(exchange[0], region.counts, *exchange[1:])
    if etp == 1:
        send, recv, counts = graphs.unpack(graph, make(ops.sizes_to_host, region.counts, received))
        return _Sizes(send, recv, counts, None)
    everyones = make(ops.all_gather, received, etp, "etp")
    read = make(ops.gathered_sizes_to_host, region.counts, received, everyones, etp)
    send, recv, by_rank, counts = graphs.unpack(graph, read)
    return _Sizes(send, recv, counts, by_rank)


def _alltoall(graph: Graph, region: Region, ctx: PassContext) -> None:
    """Rows go to the rank of their expert, and to all that hold parts of it."""
    ep = ctx.mesh.size("ep")
    first = min([*region.body, *region.travelling])
    here = meta.tensor(region.rows).shape[0]

    def make(target: Any, *args: Any, like: Node = region.permute) -> Node:
        return graphs.call(graph, target, *args, like=like, mode=ctx.mode)

    def total(sizes: Node) -> Node:
        return make(aten._local_scalar_dense.default, make(aten.sum.default, sizes))

    with graph.inserting_before(first):
        sizes = _exchange_sizes(graph, region, ctx)
        arrived: Any = total(sizes.recv) if ep > 1 else here
        num_rows = arrived if sizes.by_rank is None else total(sizes.counts)

    def send(rows: Node, like: Node) -> Node:
        if ep > 1:
            rows = make(ops.dispatch, rows, sizes.send, sizes.recv, arrived, "ep", like=like)
            meta.set_placements(rows, _AWAY)
        if sizes.by_rank is not None:
            rows = make(ops.all_gather_rows, rows, sizes.by_rank, num_rows, "etp", like=like)
            meta.set_placements(rows, _AWAY)
        return rows

    with graph.inserting_before(first):
        moved = {region.rows: send(region.rows, region.permute), region.counts: sizes.counts}
    for extra in region.travelling:
        with graph.inserting_before(extra.next):
            moved[extra] = send(extra, extra)
    _move_body(region, moved, num_rows, ctx)
    result = region.unpermute.args[0]
    assert isinstance(result, Node)
    with graph.inserting_before(region.unpermute):
        back = result
        if sizes.by_rank is not None:
            back = make(ops.reduce_scatter_rows, back, sizes.by_rank, arrived, "etp", like=region.unpermute)
            meta.set_placements(back, _AWAY)
        if ep > 1:
            back = make(ops.combine, back, sizes.recv, sizes.send, here, "ep", like=region.unpermute)
    meta.set_placements(back, meta.placements(region.rows))
    region.unpermute.replace_input_with(result, back)


def _allgather(graph: Graph, region: Region, ctx: PassContext) -> None:
    """Every rank of the group sees all tokens, computes its own part of its own experts, and the parts are summed at home."""
    axes = [axis for axis in ("ep", "etp") if ctx.mesh.size(axis) > 1]
    axis, mode = joined(axes), ctx.mode
    ranks = ctx.mesh.size(axis)
    tokens, ids = region.permute.args[0], region.permute.args[1]
    assert isinstance(tokens, Node) and isinstance(ids, Node)
    held = int(region.permute.args[2]) // ctx.mesh.size("ep")  # type: ignore[arg-type]
    num_tokens, top_k = region.unpermute.args[2], region.unpermute.args[3]  # rows may stand for choices or for tokens
    assert isinstance(num_tokens, int)
    first = min(region.body)

    def make(target: Any, *args: Any, like: Node = region.permute) -> Node:
        return graphs.call(graph, target, *args, like=like, mode=mode)

    with graph.inserting_before(first):
        everyone, all_ids = make(ops.all_gather, tokens, ranks, axis), make(ops.all_gather, ids, ranks, axis)
        start = offset_input(ctx, "ep", held)
        sizes = _exchange_sizes(graph, region, ctx)
        counted = sizes.recv if sizes.by_rank is None else sizes.counts
        num_rows = make(aten._local_scalar_dense.default, make(aten.sum.default, counted))
        rows, counts, row_map = graphs.unpack(graph, make(ops.permute_local, everyone, all_ids, start, held, num_rows))
    meta.set_placements(rows, _AWAY)
    _move_body(region, {region.rows: rows, region.counts: counts}, num_rows, ctx)
    with graph.inserting_before(region.unpermute):
        probs = region.probs
        gathered = make(ops.all_gather, probs, ranks, axis, like=region.unpermute) if isinstance(probs, Node) else None
        partial = make(
            ops.unpermute,
            region.unpermute.args[0],
            row_map,
            num_tokens * ranks,
            top_k,
            gathered,
            like=region.unpermute,
        )
        home = make(ops.reduce_scatter, partial, ranks, axis, like=region.unpermute)
    meta.set_placements(partial, dict.fromkeys(axes, PARTIAL))
    meta.set_placements(home, meta.placements(region.unpermute))
    graphs.replace(region.unpermute, home)


def offset_input(ctx: PassContext, axis: str, stride: int) -> Node:
    """The placeholder that holds this rank's index on ``axis`` times ``stride``; made once, after the other placeholders."""
    for node, item in ctx.program.items():
        if item.kind is InputKind.OFFSET and (item.axis, item.stride) == (axis, stride):
            return node
    item = Input(InputKind.OFFSET, f"{axis}_offset_{stride}", axis=axis, stride=stride)
    return ctx.add_input(item, torch.int64)


def _move_body(region: Region, moved: dict[Node, Node], num_rows: Node, ctx: PassContext) -> None:
    """Let the experts read the rows that arrived; the body's shapes follow."""
    before = meta.tensor(region.rows).shape[0]
    for node in region.body:
        for old, new in moved.items():
            node.replace_input_with(old, new)
        if node.target in (aten.reshape.default, aten.expand.default, aten.view.default):
            shape: Any = node.args[1]
            node.args = (
                node.args[0],
                [num_rows if size == before and at == 0 else size for at, size in enumerate(shape)],
            )
        graphs.refresh(node, ctx.mode)
        if node.target is not operator.getitem and meta.is_tensor(node):
            _place_away(node)


def _place_away(node: Node) -> None:
    """Rows that are away; what etp cuts of them, or leaves to be summed, stays."""
    placed = meta.placements(node)
    meta.set_placements(node, _AWAY | ({"etp": placed["etp"]} if "etp" in placed else {}))


def _probs_before_last_linear(graph: Graph, region: Region, ctx: PassContext) -> None:
    """y = W2 (p * act): the same sum, with nothing kept behind the second linear. The weights become rows that travel too."""
    last, probs = region.unpermute.args[0], region.probs
    plain = isinstance(last, Node) and last.target is ops.grouped_linear and len(last.args) == 3 and not last.kwargs
    if not plain or not isinstance(last, Node) or not isinstance(probs, Node) or len(last.users) != 1:
        reason = "its rows do not come straight from a linear without bias, so its probs stay at combine"
        ctx.decline(InsertDispatch.name, f"{meta.where(region.unpermute)}: {reason}")
        return

    def make(target: Any, *args: Any) -> Node:
        return graphs.call(graph, target, *args, like=last, mode=ctx.mode)

    region.unpermute.prepend(last)  # the weights may be computed after the experts
    with graph.inserting_before(last):
        weights = make(ops.gather_rows, make(aten.reshape.default, probs, [-1, 1]), region.row_map, 1)
        scaled = make(aten.mul.Tensor, last.args[0], weights)
    meta.set_placements(scaled, meta.placements(last.args[0]))  # type: ignore[arg-type]
    last.args = (scaled, *last.args[1:])
    region.unpermute.args = region.unpermute.args[:4]
    region.unpermute.kwargs = {}
    region.travelling.append(weights)
    region.body[:] = graphs.between([region.rows, weights], region.unpermute)
