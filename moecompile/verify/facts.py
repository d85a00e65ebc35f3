"""What a graph must look like while a fact holds, for the facts that can be seen in a graph."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import torch
from torch.fx import Node

from .. import meta, ops
from ..errors import VerifyError
from ..graph import ancestors, find, symbolic_sizes
from ..ops import cpu
from ..pass_base import Fact
from ..placement.types import Partial, Shard
from ..program import InputKind, Level, OutputKind, Program
from .collectives import axis_of, data_axes, reductions
from .report import fault

aten = torch.ops.aten
_DENSE = {
    aten.linear.default,
    aten.mm.default,
    ops.cpu.mm,
    aten.bmm.default,
    aten.matmul.default,
    aten.addmm.default,
    aten.einsum.default,
}
_LINEARS = (ops.grouped_linear, cpu.grouped_linear)
_WGRADS = (ops.grouped_linear_wgrad, cpu.grouped_linear_wgrad)


def check_facts(program: Program) -> None:
    """Each fact that holds, where it can be checked."""
    for fact, check in CHECKS.items():
        if fact in program.facts:
            check(program)


def _moe_ops(program: Program) -> None:
    """No loop over experts is left: rows picked by their values meet no dense product."""
    for node in program.graph.nodes:
        if node.target in _DENSE and any(True for _ in symbolic_sizes(node.meta.get("val"))):
            raise fault(
                node,
                "is a product on rows picked by their values; write the layer in permute, grouped_linear, unpermute",
            )


def _tokens_sharded(program: Program) -> None:
    """A batch input has this rank's share of the global shape."""
    for node, item in program.items():
        placed = dict(item.placements).get("dp")
        if item.kind is InputKind.BATCH and item.shape and isinstance(placed, Shard):
            local, whole = meta.tensor(node).shape[placed.dim], item.shape[placed.dim]
            if local * program.mesh.size("dp") != whole:
                raise fault(
                    node,
                    f"holds {local} of {whole} rows on each of {program.mesh.size('dp')} data ranks; cut it over dp",
                )


def _loss_shares(program: Program) -> None:
    """The loss is a sum still to be taken over the ranks of a stage."""
    for found, item in zip(program.output_nodes(), program.outputs, strict=True):
        if item.kind is not OutputKind.LOSS or not isinstance(found, Node):
            continue
        placed = dict(item.placements)
        for axis in placed.keys() | {"dp"}:
            if program.mesh.size(axis) > 1 and not isinstance(placed.get(axis), Partial):
                raise fault(
                    found, f"is the loss, but not a share of it on {axis}; convert it to P before differentiating"
                )


def _experts_sharded(program: Program) -> None:
    """An expert weight holds E / ep experts."""
    ranks = program.mesh.size("ep")
    if ranks == 1:
        return
    experts = {int(node.args[2]) // ranks for node in find(program.graph, ops.permute)}  # type: ignore[arg-type]
    experts |= {int(node.args[3]) for node in find(program.graph, ops.permute_local)}  # type: ignore[arg-type]
    for node in find(program.graph, *_LINEARS):
        held = meta.tensor(node.args[2]).shape[0]  # type: ignore[arg-type]
        if experts and held not in experts:
            raise fault(
                node, f"has the weights of {held} experts, a rank holds {sorted(experts)}; cut its weight over ep"
            )


def _tokens_dispatched(program: Program) -> None:
    """Experts read rows that were sent to them."""
    if program.mesh.size("ep") == program.mesh.size("etp") == 1:
        return
    parts = program.mesh.size("etp") > 1  # then rows are gathered, too
    last = (ops.all_gather_rows, ops.gathered_sizes_to_host) if parts else (ops.dispatch, ops.sizes_to_host)
    sent = set(find(program.graph, ops.permute_local, *last))
    for node in find(program.graph, *_LINEARS, *_WGRADS):
        rows = node.args[:2] if node.target in _WGRADS else node.args[:1]
        for source in rows:
            assert isinstance(source, Node)
            found = {source, *ancestors(source, stop=sent)} if source not in sent else {source}
            own = [item for item in found if item.target is ops.permute]
            if own:
                raise fault(
                    node, f"computes on this rank's own rows of {own[0].name}; let it read the rows of the dispatch"
                )


def _differentiated(program: Program) -> None:
    """The graph returns gradients, of parameters only."""
    if program.level is not Level.STEP:
        raise VerifyError(
            f"the facts say that the graph is differentiated, but its level is {program.level.name}; set it to STEP."
        )
    params = {item.name for item in program.inputs if item.kind is InputKind.PARAM}
    for item in program.outputs:
        if item.kind is OutputKind.GRAD and item.name not in params:
            raise VerifyError(
                f"an output is the gradient of '{item.name}', which is no parameter; name an input of kind PARAM."
            )


def _grads_synced(program: Program) -> None:
    """Each gradient is summed exactly once, over the ranks that hold its parameter whole, or scattered where these hold shards."""
    inputs = {item.name: item for item in program.inputs}
    for found, item in zip(program.output_nodes(), program.outputs, strict=True):
        if item.kind is not OutputKind.GRAD or not isinstance(found, Node):
            continue
        axes = [axis for axis, placed in inputs[item.name].placements if isinstance(placed, Shard)]
        cut = {part for axis in axes for part in axis.split("+")}
        mesh = ("edp", "ep", "etp") if cut & {"ep", "etp"} else ("dp", "cp", "tp")
        axis = "+".join(axis for axis in mesh if axis not in cut and program.mesh.size(axis) > 1)
        wanted = [f"sum over {axis}"] if axis else []
        wanted += [f"scattered sum over {axis}" for axis in axes if data_axes(axis)]
        seen = [_reduction(node) for node in reductions(found)]
        if seen != wanted:
            raise fault(
                found,
                f"is the gradient of {item.name}: {' of '.join(seen) or 'not reduced'}, one {' of '.join(wanted) or 'sum over nothing'} "
                f"is due; let sync-grads reduce it once",
            )


def _reduction(node: Node) -> str:
    return (
        f"scattered sum over {axis_of(node)}"
        if node.target is ops.reduce_scatter
        else f"{node.args[1]} over {axis_of(node)}"
    )


def _params_sharded(program: Program) -> None:
    """Nothing but a gather reads a shard, and its gradient is summed and scattered once, before whatever else sums it."""
    for start, item in program.items():
        axes = [axis for axis, placed in item.placements if isinstance(placed, Shard) and data_axes(axis)]
        todo = list(start.users) if axes and item.kind is InputKind.PARAM else []
        while todo:
            node = todo.pop()
            if node.target in (aten.reshape.default, aten.cat.default, aten.permute.default):
                todo += node.users
            elif node.target is not ops.all_gather or axis_of(node) != axes[-1]:
                raise fault(
                    node, f"reads {item.name}, of which this rank holds a shard over {axes[-1]}; gather it there first"
                )
    inputs = {item.name: item for item in program.inputs}
    for found, output in zip(program.output_nodes(), program.outputs, strict=True):
        if output.kind is OutputKind.GRAD and isinstance(found, Node):
            sums = [node for node in reductions(found) if node.target is ops.reduce_scatter]
            seen = [_reduction(node) for node in sums if data_axes(axis_of(node))]
            cuts = [axis for axis, placed in inputs[output.name].placements if isinstance(placed, Shard)]
            wanted = [f"scattered sum over {axis}" for axis in cuts if data_axes(axis)]
            if seen != wanted:
                raise fault(
                    found,
                    f"is the gradient of {output.name}, of which this rank holds a shard: {' of '.join(seen) or 'not reduced'}, one "
                    f"{' of '.join(wanted) or 'sum over nothing'} is due; scatter it once",
                )


def _lowered(program: Program) -> None:
    """One backend: no moe:: op is left beside the backend's op of the same name."""
    lowered = {
        str(node.target).partition(".")[2] for node in program.graph.nodes if str(node.target).startswith("moe_cpu.")
    }
    for node in program.graph.nodes:
        kind, _, name = str(node.target).partition(".")
        if kind == "moe" and name in lowered:
            raise fault(
                node,
                f"is still moe::{name.removesuffix('.default')} while others are lowered; map every call in lower-ops",
            )


CHECKS: MappingProxyType[Fact, Callable[[Program], None]] = MappingProxyType(
    {
        Fact.MOE_OPS: _moe_ops,
        Fact.TOKENS_SHARDED: _tokens_sharded,
        Fact.LOSS_SHARES: _loss_shares,
        Fact.EXPERTS_SHARDED: _experts_sharded,
        Fact.TOKENS_DISPATCHED: _tokens_dispatched,
        Fact.DIFFERENTIATED: _differentiated,
        Fact.PARAMS_SHARDED: _params_sharded,
        Fact.GRADS_SYNCED: _grads_synced,
        Fact.LOWERED: _lowered,
    }
)
