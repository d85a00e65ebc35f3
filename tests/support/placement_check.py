"""Does a placement rule mean what the plain op means? Every rank's graph is run and the parts are put together again.

A case is one op call (or a traced function) on global tensors and a placement for each of them. The inputs are cut accordingly,
the sharder emits one rank's graph, the simulator runs it on all ranks, and outputs and gradients are compared with the global
call's. Nothing here knows any rule.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from moecompile import graph as graphs
from moecompile import meta
from moecompile.compat import make_fx, tree_map
from moecompile.errors import PassError
from moecompile.mesh import Mesh
from moecompile.placement.sharder import Sharder
from moecompile.placement.table import sharder
from moecompile.placement.types import PARTIAL, REPLICATE, Partial, Placement, Replicate, Shard, parse
from moecompile.plan import Plan
from moecompile.runtime.simulator import simulate


class MismatchError(AssertionError):
    """The emitted graph does not mean what the global call means."""


@dataclass
class Case:
    """A graph of global shapes, and a value for each of its placeholders; ``fixed`` ones have no gradient."""

    graph: Graph
    values: list[Tensor]
    mode: Any
    fixed: tuple[int, ...] = ()


def op_case(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, fixed: tuple[int, ...] = ()
) -> Case:
    """One call of an op; every tensor among its arguments becomes a placeholder."""
    mode, graph, values = graphs.fake_mode(), Graph(), []

    def lift(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        values.append(leaf)
        return _placeholder(graph, f"x{len(values)}", leaf, mode)

    lifted = tree_map(lift, (tuple(args), dict(kwargs or {})))
    node = graphs.call(graph, target, *lifted[0], mode=mode, **lifted[1])
    several = isinstance(meta.value(node), (tuple, list))
    graph.output(tuple(graphs.unpack(graph, node)) if several else (node,))
    return Case(graph, values, mode, fixed)


def fn_case(fn: Callable[..., Any], *values: Tensor) -> Case:
    """A function of tensors that returns one tensor or a tuple of them, traced to composite ops."""
    traced = make_fx(fn, pre_dispatch=True)(*values).graph
    mode = graphs.fake_mode()
    for node, value in zip([n for n in traced.nodes if n.op == "placeholder"], values, strict=True):
        with mode:
            node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    graphs.eliminate_dead(traced)
    for node in traced.nodes:
        graphs.refresh(node, mode)
    (found,) = traced.output_node().args
    traced.output_node().args = (tuple(found) if isinstance(found, (tuple, list)) else (found,),)
    return Case(traced, list(values), mode)


def _placeholder(graph: Graph, name: str, value: Tensor, mode: Any) -> Node:
    node = graph.placeholder(name)
    with mode:
        node.meta["val"] = torch.empty(value.shape, dtype=value.dtype)
    return node


def shard(case: Case, placed: Sequence[Placement], ranks: int, *, strict: bool = True) -> Sharder:
    """One rank's graph, finished; PassError where a rule refuses, or without ``strict`` where not even gathering helps."""
    walk = sharder(case.graph, {"dp": ranks}, case.mode, strict=strict)
    wanted = iter(placed)
    for node in case.graph.nodes:
        if node.op == "placeholder":
            walk.add_placeholder(node, {"dp": next(wanted)})
        elif node.op == "call_function":
            walk.visit(node)
    outputs: Any = case.graph.output_node().args[0]
    walk.graph.output(tuple(walk.env[node] for node in outputs))
    walk.graph.lint()
    return walk


def check(
    case: Case, placed: Sequence[Placement | str], ranks: int = 2, *, grad: bool = True, strict: bool = True
) -> str:
    """Output placements as text if outputs and gradients agree; MismatchError if not, PassError if the call is refused."""
    places = [parse(item) if isinstance(item, str) else item for item in placed]
    walk = shard(case, places, ranks, strict=strict)
    outputs: Any = case.graph.output_node().args[0]
    out_placed = [walk.place(node, "dp") for node in outputs]
    free = [grad and index not in case.fixed for index in range(len(places))]
    leaves = [
        [_leaf(part, leaf) for part in parts(value, item, ranks)]
        for value, item, leaf in zip(case.values, places, free, strict=True)
    ]
    found = simulate(GraphModule(torch.nn.Module(), walk.graph), _feeds(walk, leaves, ranks), Mesh(Plan(dp=ranks)))
    whole = [_leaf(value, leaf) for value, leaf in zip(case.values, free, strict=True)]
    expected = _run(case, whole)
    tolerance = _tolerance([*whole, *expected])
    for want, place, locals_ in zip(expected, out_placed, zip(*found, strict=True), strict=True):
        _compare("output", reassemble([item.detach() for item in locals_], place), want.detach(), tolerance)
        if isinstance(place, Replicate):
            for item in locals_:
                _compare("another rank's copy", item.detach(), want.detach(), tolerance)
    if grad and any(item.requires_grad for item in expected):
        _check_gradients(expected, list(zip(*found, strict=True)), out_placed, whole, leaves, places, ranks, tolerance)
    return " ".join(str(item) for item in out_placed)


def _feeds(walk: Sharder, leaves: list[list[Tensor]], ranks: int) -> list[list[Tensor]]:
    """Inputs of each rank; offsets stand before the leaves, in any order."""
    strides = {node: stride for _, stride, node in walk.new_offsets}
    feeds = []
    for rank in range(ranks):
        own = (parts_of[rank] for parts_of in leaves)
        names = [node for node in walk.graph.nodes if node.op == "placeholder"]
        feeds.append([torch.tensor(rank * strides[node]) if node in strides else next(own) for node in names])
    return feeds


def _run(case: Case, whole: list[Tensor]) -> list[Tensor]:
    return list(GraphModule(torch.nn.Module(), case.graph)(*whole))


def _leaf(value: Tensor, grad: bool) -> Tensor:
    return value.detach().clone().requires_grad_(grad and value.is_floating_point())


# ---- cutting and putting together --------------------------------------------------------------------------------


def parts(value: Tensor, placed: Placement, ranks: int) -> list[Tensor]:
    """What each rank holds of a value. Partial values are cut into random terms."""
    if isinstance(placed, Replicate):
        return [value] * ranks
    if isinstance(placed, Shard):
        shape = list(value.shape)
        split = value.reshape([*shape[: placed.dim], placed.outer, ranks, -1, *shape[placed.dim + 1 :]])
        return [split.select(placed.dim + 1, rank).flatten(placed.dim, placed.dim + 1) for rank in range(ranks)]
    if value.is_floating_point() or value.is_complex():
        terms = [torch.randn(value.shape, dtype=value.dtype) for _ in range(ranks - 1)]
    else:
        terms = [torch.randint(-5, 5, value.shape, dtype=value.dtype) for _ in range(ranks - 1)]
    return [*terms, value - torch.stack(terms).sum(0, dtype=value.dtype)]


def reassemble(locals_: Sequence[Tensor], placed: Placement) -> Tensor:
    """The global value of what the ranks hold."""
    if isinstance(placed, Replicate):
        return locals_[0]
    if isinstance(placed, Partial):
        return torch.stack(list(locals_)).sum(0, dtype=locals_[0].dtype)
    dim, first = placed.dim, locals_[0]
    shape = [*first.shape[:dim], placed.outer, first.shape[dim] // placed.outer, *first.shape[dim + 1 :]]
    return torch.stack([item.reshape(shape) for item in locals_], dim + 1).flatten(dim, dim + 2)


# what rounding may do, by the narrowest type of a case
_TOLERANCE = {
    torch.float64: 1e-10,
    torch.complex128: 1e-10,
    torch.float32: 1e-5,
    torch.bfloat16: 4e-2,
    torch.float16: 5e-3,
}


def _tolerance(tensors: Sequence[Tensor]) -> float:
    return max(_TOLERANCE.get(item.dtype, 0.0) for item in tensors)


def _compare(what: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    if got.shape != want.shape or got.dtype != want.dtype:
        raise MismatchError(f"{what}: {got.dtype}{list(got.shape)} for {want.dtype}{list(want.shape)}")
    if not want.dtype.is_floating_point and not want.dtype.is_complex:
        tolerance = 0.0
    if not torch.allclose(got, want, rtol=tolerance, atol=tolerance, equal_nan=True):
        raise MismatchError(f"{what}: {got} for {want}")


def _check_gradients(
    expected: list[Tensor],
    found: list[tuple[Tensor, ...]],
    out_placed: list[Placement],
    whole: list[Tensor],
    leaves: list[list[Tensor]],
    places: list[Placement],
    ranks: int,
    tolerance: float,
) -> None:
    """Each rank contributes its own share of a scalar; whole outputs are shared out unevenly, so that no copy is ignored."""
    weights = torch.rand(ranks, dtype=torch.float64) + 0.1
    weights /= weights.sum()
    plain, shared = torch.zeros(()), torch.zeros(())
    for want, place, locals_ in zip(expected, out_placed, found, strict=True):
        if not want.requires_grad:
            continue
        if want.is_complex():  # the imaginary part is as good as any other share
            want, locals_ = want.real + 2 * want.imag, [item.real + 2 * item.imag for item in locals_]
        seed = torch.randn_like(want)
        plain = plain + (want * seed).sum()
        for rank, item in enumerate(locals_):
            if isinstance(place, Shard):
                shared = shared + (item * parts(seed, place, ranks)[rank]).sum()
            else:
                shared = shared + (item * seed).sum() * (weights[rank].to(item.dtype) if place == REPLICATE else 1)
    used = [index for index, leaf in enumerate(whole) if leaf.requires_grad]
    wanted = torch.autograd.grad(plain, [whole[index] for index in used], allow_unused=True)
    for index, want in zip(used, wanted, strict=True):
        want = torch.zeros_like(whole[index]) if want is None else want
        grads = torch.autograd.grad(shared, leaves[index], allow_unused=True, retain_graph=True)
        got = [
            torch.zeros_like(leaf) if item is None else item for item, leaf in zip(grads, leaves[index], strict=True)
        ]
        if isinstance(places[index], Partial):
            for item in got:
                _compare(f"gradient of input {index}", item, want, tolerance)
        else:
            place = PARTIAL if isinstance(places[index], Replicate) else places[index]
            _compare(f"gradient of input {index}", reassemble(got, place), want, tolerance)


# ---- all placements of a case ------------------------------------------------------------------------------------


def placements_of(value: Tensor, ranks: int) -> list[Placement]:
    """Every placement a value of this shape can have; cuts in several blocks of dim 0 only, and of the coarsest kind."""
    found: list[Placement] = [REPLICATE]
    if value.dtype != torch.bool:
        found.append(PARTIAL)
    for dim, size in enumerate(value.shape):
        found += [Shard(dim, outer) for outer in ((1, 2) if dim == 0 else (1,)) if size and size % (outer * ranks) == 0]
    return found


def combinations(case: Case, ranks: int) -> Iterator[tuple[Placement, ...]]:
    """Every combination of placements of the inputs but the one in which all are whole."""
    for placed in itertools.product(*(placements_of(value, ranks) for value in case.values)):
        if any(item != REPLICATE for item in placed):
            yield placed


def check_all(case: Case, ranks: int = 2, *, grad: bool = True) -> dict[str, str]:
    """Every combination of placements is right or refused: from inputs to outputs, as text; '' where refused.

    What is refused under ``strict`` is right once it is gathered, and nothing is partial then.
    """
    table = {}
    for placed in combinations(case, ranks):
        try:
            out = check(case, placed, ranks, grad=grad)
        except PassError as error:
            assert "shard-dense: " in str(error) and "B per forward over dp" in str(error), error
            out = ""
            whole = check(case, placed, ranks, grad=grad, strict=False).split()
            assert whole and "P" not in whole
        table[" ".join(str(item) for item in placed)] = out
    return table


def check_cases(case: Case, must: str, ranks: int = 2, *, grad: bool = True) -> None:
    """As ``check_all``; ``must`` lists what has to come out, as in ``S(0) R -> S(0); P R -> refused``."""
    table = check_all(case, ranks, grad=grad)
    for line in filter(None, (part.strip() for part in must.split(";"))):
        placed, _, wanted = (part.strip() for part in line.partition("->"))
        assert table[placed] == ("" if wanted == "refused" else wanted), f"{placed} gives {table[placed] or 'refused'}"
