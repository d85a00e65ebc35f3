"""Run every rank's graph in one process, in lock step, with the collectives done right here.

Each rank is a coroutine that runs node by node and stops at a collective.  A collective happens when all
ranks of its group have stopped at one that fits; what would hang on real processes, or hand out garbage, is a
VerifyError that names ranks and nodes.  Results equal those of gloo except for the order in which gloo adds:
here it is rank order.

Nothing detaches, so under grad mode autograd runs across the ranks: the gradient of the sum of all ranks'
losses is the true one, whatever the graphs' own backward nodes say.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from moecompile import meta, ops
from moecompile.errors import VerifyError
from moecompile.mesh import Mesh
from moecompile.runtime import cpu_kernels as cpu_kernels  # registers the kernels of moe_cpu::
from moecompile.runtime.process_groups import axis_of

# Called as ``trace(rank, node, value)`` after every node.
Trace = Callable[[int, Node, Any], None]


@dataclass(frozen=True)
class _Stop:
    """A rank that waits in a collective. ``group`` are the ranks it expects, in the order of the axis."""

    rank: int
    node: Node
    op: Any
    args: tuple[Any, ...]
    axis: str
    group: tuple[int, ...]

    @property
    def x(self) -> Tensor:
        found = self.args[0]
        assert isinstance(found, Tensor)
        return found

    def __str__(self) -> str:
        kind = f" {self.args[1]}" if self.op is ops.all_reduce else ""
        return (
            f"rank {self.rank} at {meta.where(self.node)}: {_name(self.op)}{kind} of {_shape(self.x)} "
            f"on axis {self.axis}, ranks {self.group}"
        )


@dataclass(frozen=True)
class Awaited:
    """A rank that waits for a message, which another one puts into ``box`` under ``key``."""

    rank: int
    key: tuple[Any, ...]
    box: dict[tuple[Any, ...], Any]
    said: str
    group: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"rank {self.rank} {self.said}"


Run = Generator[_Stop | Awaited, Tensor, Any]


def simulate(
    graph_modules: Sequence[GraphModule] | GraphModule,
    inputs_per_rank: Sequence[Sequence[Any]],
    mesh: Mesh,
    *,
    trace: Trace | None = None,
) -> list[Any]:
    """Outputs of all ranks, in rank order.

    ``inputs_per_rank[r]`` lines up with the placeholders of rank r's graph; one graph stands for all ranks.
    Graphs name mesh axes, not process groups.  Raises VerifyError for a collective that lacks a partner or
    does not fit its partners' (op, dtype, shape, axis), and for a dispatch or combine in which a rank sends
    another number of rows than its peer expects.  What a node itself raises gets a note that names rank and
    node.
    """
    world_size = mesh.world_size
    graphs = [graph_modules] * world_size if isinstance(graph_modules, GraphModule) else list(graph_modules)
    if len(graphs) != world_size or len(inputs_per_rank) != world_size:
        raise VerifyError(
            f"simulate: {mesh.plan} has {world_size} ranks, but {len(graphs)} graphs and "
            f"{len(inputs_per_rank)} lists of inputs were given; pass one of each per rank, or one graph for "
            "all."
        )
    return finished([run(graph, inputs_per_rank[rank], rank, mesh, trace) for rank, graph in enumerate(graphs)])


def finished(runs: Sequence[Run]) -> list[Any]:
    """The results of all ranks' coroutines, in rank order; VerifyError where none of them can go on."""
    waiting: dict[int, _Stop | Awaited] = {}
    results: dict[int, Any] = {}
    answers: dict[int, Tensor | None] = dict.fromkeys(range(len(runs)))
    while len(results) < len(runs):
        for rank, answer in answers.items():
            try:
                waiting[rank] = runs[rank].send(answer)  # type: ignore[arg-type]  # the first send of a generator is None
            except StopIteration as end:
                results[rank] = end.value
        answers = _meet(waiting)
        if not answers and waiting:
            raise _deadlock(waiting, results)
    return [results[rank] for rank in range(len(runs))]


def run(graph_module: GraphModule, inputs: Sequence[Any], rank: int, mesh: Mesh, trace: Trace | None) -> Run:
    """Execute one rank's graph; yields at collectives, is sent their results, returns the output."""
    nodes = list(graph_module.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    if len(inputs) != len(placeholders):
        raise VerifyError(f"simulate: rank {rank} got {len(inputs)} inputs, but its graph has {len(placeholders)}.")
    env: dict[Node, Any] = dict(zip(placeholders, inputs, strict=True))
    last_use = {source: node for node in nodes for source in node.all_input_nodes}
    for node in nodes:
        if node.op == "output":
            return map_arg(node.args[0], env.__getitem__)
        if node.op == "get_attr":
            env[node] = _attribute(graph_module, str(node.target))
        elif node.op == "call_function" and node.target in ops.COLLECTIVES:
            env[node] = yield _stop(node, env, rank, mesh)
        elif node.op == "call_function":
            args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
            try:
                env[node] = node.target(*args, **kwargs)
            except Exception as error:
                error.add_note(f"while simulating rank {rank}, at {meta.where(node)}")
                raise
        elif node.op != "placeholder":
            raise VerifyError(
                f"simulate: rank {rank} has a node {node.name} of kind {node.op}, which no program holds."
            )
        if trace is not None:
            trace(rank, node, env[node])
        for source in node.all_input_nodes:  # free values as early as real execution does
            if last_use[source] is node:
                env.pop(source, None)
    raise VerifyError(f"simulate: the graph of rank {rank} has no output node.")


def _attribute(graph_module: GraphModule, path: str) -> Any:
    found: Any = graph_module
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _stop(node: Node, env: dict[Node, Any], rank: int, mesh: Mesh) -> _Stop:
    args = map_arg(node.args, env.__getitem__)
    axis = axis_of(node)
    assert axis is not None
    return _Stop(rank, node, node.target, args, axis, mesh.group_ranks(axis, rank))


# ---- meeting -----------------------------------------------------------------------------------------------


# collectives of equal parts, whose second argument is the size of the group
_GROUPED = (ops.exchange_counts, ops.all_gather, ops.reduce_scatter, ops.all_to_all, ops.rotate, ops.zigzag_exchange)


def _meet(waiting: dict[int, _Stop | Awaited]) -> dict[int, Tensor | None]:
    """Do every collective whose group is complete, and hand out messages: its ranks leave ``waiting`` and get their results."""
    answers: dict[int, Tensor | None] = {}
    for rank in sorted(waiting):
        if rank not in waiting:  # it went with an earlier rank of its group
            continue
        stop = waiting[rank]
        if isinstance(stop, Awaited):
            if stop.key in stop.box:
                answers[rank] = stop.box.pop(stop.key)
                del waiting[rank]
            continue
        group = stop.group
        if all(peer in waiting and waiting[peer].group == group for peer in group):
            stops = [found for peer in group if isinstance(found := waiting.pop(peer), _Stop)]
            _check_fit(stops)
            answers.update(zip(group, _COLLECTIVES[stops[0].op](stops), strict=True))
    return answers


def _check_fit(stops: list[_Stop]) -> None:
    """All ranks must ask for the same thing."""
    first = stops[0]
    same_shape = first.op in (ops.all_reduce, *_GROUPED)

    def asked(stop: _Stop) -> tuple[Any, ...]:
        constants = tuple(item for item in stop.args[1:-1] if isinstance(item, str | int)) if same_shape else ()
        return stop.op, stop.axis, stop.x.dtype, stop.x.shape if same_shape else stop.x.shape[1:], constants

    if any(asked(stop) != asked(first) for stop in stops[1:]):
        found = "; ".join(map(str, stops))
        raise VerifyError(
            f"simulate: the ranks of a group are in collectives that do not fit: {found}. All ranks must run "
            "the same collectives in the same order."
        )
    size = len(first.group)
    if first.op in _GROUPED and first.args[1] != size:
        raise VerifyError(
            f"simulate: {first} is written for a group of {first.args[1]}, but its group has {size} ranks."
        )


def _deadlock(waiting: dict[int, _Stop | Awaited], results: dict[int, Any]) -> VerifyError:
    lines = []
    for _, stop in sorted(waiting.items()):
        if isinstance(stop, Awaited):
            lines.append(str(stop))
            continue
        absent = [peer for peer in stop.group if peer not in waiting or waiting[peer].group != stop.group]
        lines.append(f"{stop}, waits for rank {', '.join(map(str, absent))}")
    if results:
        lines.append(f"rank {', '.join(map(str, sorted(results)))} has finished")
    return VerifyError(
        f"simulate: deadlock, no collective has all its ranks: {'; '.join(lines)}. Some rank lacks a "
        "collective or message, or has one too many."
    )


# ---- the collectives ---------------------------------------------------------------------------------------


def _all_reduce(stops: list[_Stop]) -> list[Tensor]:
    kind = stops[0].args[1]
    total = stops[0].x.clone()
    for stop in stops[1:]:
        total = total + stop.x if kind == "sum" else getattr(torch, f"{kind}imum")(total, stop.x)
    return [total.clone() for _ in stops]


def _all_gather(stops: list[_Stop]) -> list[Tensor]:
    return [torch.cat([stop.x for stop in stops]) for _ in stops]


def _reduce_scatter(stops: list[_Stop]) -> list[Tensor]:
    total = stops[0].x.clone()
    for stop in stops[1:]:
        total = total + stop.x
    return [part.clone() for part in _equal_parts(total, stops)]


def _equal_parts(x: Tensor, stops: list[_Stop]) -> tuple[Tensor, ...]:
    if x.dim() == 0 or x.shape[0] % len(stops) != 0:
        raise VerifyError(f"simulate: {stops[0]} cannot be cut into {len(stops)} equal parts; pad dim 0.")
    return x.tensor_split(len(stops))


def _exchange_counts(stops: list[_Stop]) -> list[Tensor]:
    parts = [_equal_parts(stop.x, stops) for stop in stops]
    return [torch.stack([source[i] for source in parts]) for i in range(len(stops))]


def _exchange(stops: list[_Stop]) -> list[Tensor]:
    """dispatch and combine: rows to their destinations, after both sides' sizes were compared."""
    sends, receives = [stop.args[1].tolist() for stop in stops], [stop.args[2].tolist() for stop in stops]
    group = stops[0].group
    for i, stop in enumerate(stops):
        rows, expected = stop.x.shape[0], int(stop.args[3])
        fits = len(sends[i]) == len(receives[i]) == len(group)
        if not fits or sum(sends[i]) != rows or sum(receives[i]) != expected or min(sends[i] + receives[i]) < 0:
            raise VerifyError(
                f"simulate: {stop}: send {sends[i]} must add up to {rows} rows and recv {receives[i]} to "
                f"{expected}, with one entry for each of {len(group)} ranks; pass the sizes of this exchange "
                "(swapped on the way back)."
            )
    for i, source in enumerate(stops):
        for j, target in enumerate(stops):
            if sends[i][j] != receives[j][i]:
                raise VerifyError(
                    f"simulate: rank {source.rank} sends {sends[i][j]} rows at {meta.where(source.node)} to "
                    f"rank {target.rank}, which expects {receives[j][i]} at {meta.where(target.node)}; "
                    "exchange the counts of this very routing first."
                )
    parts = [torch.split(stop.x, sends[i]) for i, stop in enumerate(stops)]
    return [torch.cat([source[j] for source in parts]) for j in range(len(stops))]


def _row_sizes(stops: list[_Stop], here: list[int]) -> list[int]:
    """How many rows each rank has of its own, as all ranks must agree."""
    sizes: list[int] = stops[0].args[1].tolist()
    for at, stop in enumerate(stops):
        if stop.args[1].tolist() != sizes or len(sizes) != len(stops) or here[at] != sizes[at]:
            raise VerifyError(
                f"simulate: {stop}: sizes {stop.args[1].tolist()} must be those of all {len(stops)} ranks ({sizes} on rank "
                f"{stops[0].rank}), of which this rank has {here[at]}; gather the counts of this very routing first."
            )
    return sizes


def _all_gather_rows(stops: list[_Stop]) -> list[Tensor]:
    _row_sizes(stops, [stop.x.shape[0] for stop in stops])
    return _all_gather(stops)


def _reduce_scatter_rows(stops: list[_Stop]) -> list[Tensor]:
    sizes = _row_sizes(stops, [int(stop.args[2]) for stop in stops])
    if any(stop.x.shape[0] != sum(sizes) for stop in stops):
        raise VerifyError(f"simulate: {stops[0]} has not the {sum(sizes)} rows of all ranks; gather them first.")
    total = stops[0].x.clone()
    for stop in stops[1:]:
        total = total + stop.x
    return [part.clone() for part in torch.split(total, sizes)]


def _all_to_all(stops: list[_Stop]) -> list[Tensor]:
    _, _, split_dim, concat_dim, _ = stops[0].args
    parts = [stop.x.tensor_split(len(stops), split_dim) for stop in stops]
    return [torch.cat([source[i] for source in parts], concat_dim) for i in range(len(stops))]


def _rotate(stops: list[_Stop]) -> list[Tensor]:
    steps = int(stops[0].args[2])
    return [stops[(at - steps) % len(stops)].x.clone() for at in range(len(stops))]


def _zigzag_exchange(stops: list[_Stop]) -> list[Tensor]:
    """By way of the whole: rank r of n has pieces r and 2n - 1 - r of 2n in zigzag, and 2r and 2r + 1 out of it."""
    _, _, dim, outer, to_zigzag, _ = stops[0].args
    ranks = len(stops)
    zigzag = [piece for rank in range(ranks) for piece in (rank, 2 * ranks - 1 - rank)]
    order = zigzag if to_zigzag else sorted(range(2 * ranks), key=zigzag.__getitem__)
    shape = stops[0].x.shape
    split = [*shape[:dim], outer, 2, shape[dim] // (2 * outer), *shape[dim + 1 :]]
    held = [stop.x.reshape(split).unbind(dim + 1) for stop in stops]
    pieces = [piece for pair in held for piece in pair]
    wanted = [pieces[at] for at in order]
    return [torch.stack(wanted[2 * at : 2 * at + 2], dim + 1).reshape(shape) for at in range(ranks)]


_COLLECTIVES: dict[Any, Callable[[list[_Stop]], list[Tensor]]] = {
    ops.all_reduce: _all_reduce,
    ops.all_gather: _all_gather,
    ops.reduce_scatter: _reduce_scatter,
    ops.all_to_all: _all_to_all,
    ops.rotate: _rotate,
    ops.zigzag_exchange: _zigzag_exchange,
    ops.exchange_counts: _exchange_counts,
    ops.dispatch: _exchange,
    ops.combine: _exchange,
    ops.all_gather_rows: _all_gather_rows,
    ops.reduce_scatter_rows: _reduce_scatter_rows,
}


def _name(op: Any) -> str:
    return f"moe::{op.name().split('::')[1].split('.')[0]}"


def _shape(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
