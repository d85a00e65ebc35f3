"""Send each routed row to the rank that owns its expert, and bring the result back.

Before:  permute -> grouped_linear -> act -> grouped_linear -> unpermute
After:   permute -> dispatch -> grouped_linear -> act -> grouped_linear -> combine -> unpermute      (alltoall)
         all_gather -> permute_local -> grouped_linear -> act -> grouped_linear -> unpermute -> reduce_scatter   (allgather)

Counts travel first, as one exchange of equal sizes; one read on the host and one unbacked size a layer. Does nothing when
ep == 1. Shared experts are not between permute and unpermute, so they stay local.
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
        if ctx.mesh.size("ep") == 1:
            return 0
        done = 0
        for permute in graphs.find(graph, ops.permute):
            for region in find_regions(graph.graph, permute):
                self._rewrite(graph.graph, region, ctx)
                done += 1
        graphs.eliminate_dead(graph.graph)
        return done

    def _rewrite(self, graph: Graph, region: Region, ctx: PassContext) -> None:
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
        body = graphs.between(graph, [parts[0]], node)
        if not any(item.target is ops.grouped_linear for item in body):
            raise PassError(
                f"insert-dispatch: {meta.where(node)} brings back rows that no expert computed; give the layer expert weights or use ep=1."
            )
        inside = {*body, parts[0], parts[1]}
        places = [item.args[2] for item in body if item.target is ops.uniform_rows and item.args[2] not in inside]
        travelling = [item for item in dict.fromkeys(places) if isinstance(item, Node)]
        regions.append(Region(permute, parts[0], parts[1], parts[2], body, node, travelling))
    return regions


def _alltoall(graph: Graph, region: Region, ctx: PassContext) -> None:
    ranks, mode = ctx.mesh.size("ep"), ctx.mode
    first = min([*region.body, *region.travelling], key=list(graph.nodes).index)

    def make(target: Any, *args: Any, like: Node = region.permute) -> Node:
        return graphs.call(graph, target, *args, like=like, mode=mode)

    with graph.inserting_before(first):
        received = make(ops.exchange_counts, region.counts, ranks, "ep")
        send, recv, local_counts = graphs.unpack(graph, make(ops.sizes_to_host, region.counts, received))
        num_rows = make(aten._local_scalar_dense.default, make(aten.sum.default, recv))
        away = make(ops.dispatch, region.rows, send, recv, num_rows, "ep")
    meta.set_placements(away, _AWAY)
    moved = {region.rows: away, region.counts: local_counts}
    for extra in region.travelling:
        with graph.inserting_after(extra):
            moved[extra] = make(ops.dispatch, extra, send, recv, num_rows, "ep", like=extra)
        meta.set_placements(moved[extra], _AWAY)
    _move_body(region, moved, num_rows, ctx)
    with graph.inserting_before(region.unpermute):
        result = region.unpermute.args[0]
        assert isinstance(result, Node)
        back = make(ops.combine, result, recv, send, meta.tensor(region.rows).shape[0], "ep", like=region.unpermute)
    meta.set_placements(back, meta.placements(region.rows))
    region.unpermute.replace_input_with(result, back)


def _allgather(graph: Graph, region: Region, ctx: PassContext) -> None:
    """Every rank of the group sees all tokens, computes its own experts' part, and the parts are summed at home."""
    ranks, mode = ctx.mesh.size("ep"), ctx.mode
    tokens, ids = region.permute.args[0], region.permute.args[1]
    assert isinstance(tokens, Node) and isinstance(ids, Node)
    experts = int(region.permute.args[2])  # type: ignore[arg-type]
    num_tokens, top_k = region.unpermute.args[2], region.unpermute.args[3]  # rows may stand for choices or for tokens
    assert isinstance(num_tokens, int)
    first = min(region.body, key=list(graph.nodes).index)

    def make(target: Any, *args: Any, like: Node = region.permute) -> Node:
        return graphs.call(graph, target, *args, like=like, mode=mode)

    with graph.inserting_before(first):
        everyone, all_ids = make(ops.all_gather, tokens, ranks, "ep"), make(ops.all_gather, ids, ranks, "ep")
        start = offset_input(ctx, "ep", experts // ranks)
        received = make(ops.exchange_counts, region.counts, ranks, "ep")
        _, recv, _ = graphs.unpack(graph, make(ops.sizes_to_host, region.counts, received))
        num_rows = make(aten._local_scalar_dense.default, make(aten.sum.default, recv))
        rows, counts, row_map = graphs.unpack(
            graph, make(ops.permute_local, everyone, all_ids, start, experts // ranks, num_rows)
        )
    meta.set_placements(rows, _AWAY)
    _move_body(region, {region.rows: rows, region.counts: counts}, num_rows, ctx)
    with graph.inserting_before(region.unpermute):
        probs = region.probs
        gathered = make(ops.all_gather, probs, ranks, "ep", like=region.unpermute) if isinstance(probs, Node) else None
        partial = make(
            ops.unpermute,
            region.unpermute.args[0],
            row_map,
            num_tokens * ranks,
            top_k,
            gathered,
            like=region.unpermute,
        )
        home = make(ops.reduce_scatter, partial, ranks, "ep", like=region.unpermute)
    meta.set_placements(partial, {"ep": PARTIAL})
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
            meta.set_placements(node, _AWAY)


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
    last.args = (scaled, *last.args[1:])
    region.unpermute.args = region.unpermute.args[:4]
    region.unpermute.kwargs = {}
    region.travelling.append(weights)
    region.body[:] = graphs.between(graph, [region.rows, weights], region.unpermute)
