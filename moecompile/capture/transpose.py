"""The transpose of a linear piece of a graph: how the backward of a custom function becomes operators with that gradient.

A backward computes ``g = B(s)`` from the gradient ``s`` of its output, linearly.  With ``y`` the forward's value and
``T`` the transpose of ``B``, ``graft(y, T(x))`` has the value ``y``, and whatever derives its gradient finds
``B(s)`` for ``x``: the transpose of the transpose.  What ``T(x)`` itself evaluates to does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from moecompile import graph as ir
from moecompile import meta
from moecompile.compat import FakeTensorMode, OpOverload, make_fx, without_new_symbols
from moecompile.errors import CaptureError

aten = torch.ops.aten

# Linear in the first operand; no other operand may depend on it.
_IN_FIRST = frozenset(
    {
        aten.neg.default, aten.clone.default, aten.alias.default, aten.contiguous.default, aten.to.dtype,
        aten._to_copy.default, aten.to.dtype_layout, aten.type_as.default, aten.positive.default,
        aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor, aten.mul.Scalar,
        aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.cumsum.default, aten.trace.default,
        aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.unflatten.int,
        aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default, aten.expand.default,
        aten.expand_as.default, aten.repeat.default, aten.repeat_interleave.self_int, aten.transpose.int, aten.permute.default,
        aten.t.default, aten.numpy_T.default, aten.mT.default, aten.movedim.int, aten.flip.default, aten.roll.default,
        aten.select.int, aten.slice.Tensor, aten.narrow.default, aten.gather.default, aten.index_select.default,
        aten.index.Tensor, aten.diagonal.default, aten.tril.default, aten.triu.default, aten.diag.default,
        aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.view_as.default,
        aten.reshape_as.default,
    }
)  # fmt: skip
# Linear in each operand: exactly one may depend on the seed.
_BILINEAR = frozenset(
    {
        aten.mul.Tensor, aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default,
        aten.linear.default, aten.einsum.default, aten.outer.default,
    }
)  # fmt: skip
# Linear in all operands at once: the others must be zero or depend on the seed, too.
_ADDITIVE = frozenset(
    {
        aten.add.Tensor, aten.sub.Tensor, aten.cat.default, aten.stack.default, aten.where.self, aten.scatter_add.default,
        aten.index_add.default, aten.select_scatter.default, aten.slice_scatter.default, aten.scatter.src,
        aten.masked_scatter.default,
    }
)  # fmt: skip
# Operand that may be anything, in the additive ops: a condition, an index.
_FREE_TYPES = (torch.bool, torch.int64, torch.int32, torch.uint8, torch.int8, torch.int16)
_ZEROS = frozenset({aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default})
_KEEPS_ZERO = frozenset(
    {
        aten.clone.default, aten.to.dtype, aten._to_copy.default, aten.view.default, aten.reshape.default,
        aten.expand.default, aten.detach.default, aten.alias.default,
    }
)  # fmt: skip
# Position of the number that fills.
_FILLED = {aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2}
# Replace part of an operand by a number, linear if that is zero: positions of operand and number.
_MASKING = {aten.masked_fill.Scalar: (0, 2), aten.where.ScalarOther: (1, 2)}

# insert(target, args, kwargs, value): append one call to the graph under construction
Insert = Callable[[Any, Any, Any, Any], Node]


def transpose(
    seeds: list[Node],
    pairs: list[tuple[Node, Node]],
    mode: FakeTensorMode,
    insert: Insert,
    constant: Callable[[Node], Node],
    where: str,
) -> list[Node | None]:
    """Append ``T(x_1, x_2, ...)``, T being the transpose of what computes ``g_1, g_2, ...`` from the seeds.

    ``pairs`` are (g, x).  Returns one value a seed, None where no g depends on it.  ``constant`` makes an operand from
    outside that piece of graph one that passes no gradient.  `CaptureError`, beginning with ``where``, for a piece that
    is not linear, and for a constant gradient other than zero.
    """
    reached = _dependents(seeds)
    if any(out not in reached and not _is_zero(out) for out, _ in pairs):
        raise CaptureError(
            f"{where} returns a gradient that does not depend on the incoming one (a loss put in by its gradient alone), "
            f"which has no meaning in a step made from the returned loss; add that term to the loss that the model returns."
        )
    pairs = [(out, cotangent) for out, cotangent in pairs if out in reached]
    if not pairs:
        return [None] * len(seeds)
    heads = [out for out, _ in pairs]
    wanted = ir.ancestors(*heads, stop=seeds) | set(heads)
    piece = [node for node in reached if node in wanted and node not in seeds]
    for node in piece:
        if not _is_linear(node, reached.keys()):
            raise CaptureError(
                f"{where} applies {node.target} to the incoming gradient in a way that is not linear in it; write the "
                f"backward as a linear function of the gradient."
            )
    inside = {*seeds, *piece}
    border = list(dict.fromkeys(item for node in piece for item in node.all_input_nodes if item not in inside))
    traced = _trace(seeds, piece, heads, border, mode)
    ir.eliminate_dead(traced)
    places = iter(node for node in traced.nodes if node.op == "placeholder")
    env: dict[Node, Any] = {}
    for given, outside in ((seeds, False), (border, True), ([cotangent for _, cotangent in pairs], False)):
        for node, place in zip(given, places, strict=False):
            env[place] = constant(node) if outside and place.users else node
    for node in traced.nodes:
        if node.op == "call_function":
            args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
            if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
                raise CaptureError(f"{where} has a transpose that needs {node.target}; write it with other operators.")
            env[node] = insert(node.target, args, kwargs, node.meta["val"])
    (results,) = traced.output_node().args
    return [None if item is None else env[item] for item in results]  # type: ignore[union-attr, index]


def _dependents(seeds: list[Node]) -> dict[Node, None]:
    """The seeds and what depends on their values, not only on their shapes, in graph order."""
    found: dict[Node, None] = dict.fromkeys(seeds)
    node = seeds[0].next
    while node.op != "root":
        by_shape = node.target in _ZEROS or node.target in (aten.sym_size.int, aten.sym_numel.default)
        if not by_shape and any(item in found for item in node.all_input_nodes):
            found[node] = None
        node = node.next
    return found


def _trace(seeds: list[Node], piece: list[Node], heads: list[Node], border: list[Node], mode: FakeTensorMode) -> Graph:
    """The gradients of the heads with respect to the seeds, as a graph of seeds, border and one cotangent a head."""

    def pulled(starts: list[torch.Tensor], values: list[Any], cotangents: list[torch.Tensor]) -> list[Any]:
        env: dict[Node, Any] = {**dict(zip(seeds, starts, strict=True)), **dict(zip(border, values, strict=True))}
        for node in piece:
            args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return list(torch.autograd.grad([env[head] for head in heads], starts, cotangents, allow_unused=True))

    def leaf(node: Node, needs_grad: bool = False) -> Any:
        found = meta.value(node)
        if not isinstance(found, torch.Tensor):
            return found
        with mode:
            made = torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device=found.device)
        return made.requires_grad_(needs_grad)

    with mode, torch.enable_grad(), without_new_symbols(mode):
        starts = [leaf(node, True) for node in seeds]
        traced = make_fx(pulled)(starts, [leaf(node) for node in border], [leaf(node) for node in heads])
    graph: Graph = traced.graph
    return graph


def _is_linear(node: Node, reached: Set[Node]) -> bool:
    target = node.target
    operands = list(_operands((node.args, node.kwargs)))
    dependent = [item for item in operands if item in reached]
    first = node.args[0] if node.args else None
    alone = dependent == [first]
    if target in _MASKING:
        kept, number = _MASKING[target]
        return dependent == [node.args[kept]] and _is_number_zero(node.args[number])
    if target in _IN_FIRST or getattr(target, "__name__", "") == "getitem":
        return alone
    if target in _BILINEAR:
        biased = target is aten.linear.default and len(node.args) > 2 and node.args[2] is not None
        return len(dependent) == 1 and not biased
    if target in _ADDITIVE:
        rest = [item for item in operands if item not in reached]
        indices = [item for item in dependent if meta.tensor(item).dtype in _FREE_TYPES]
        harmless = (meta.tensor(item).dtype in _FREE_TYPES or _is_zero(item) for item in rest if meta.is_tensor(item))
        scalars = target in (aten.add.Tensor, aten.sub.Tensor) and not all(
            isinstance(arg, Node) for arg in node.args[:2]
        )
        return not indices and not scalars and all(harmless)
    # torch's own backward formulas take the gradient first and are linear in it.
    own = isinstance(target, OpOverload) and target._schema.name.endswith(("_backward", "_backward_data"))
    return own and alone


def _operands(arg: Any) -> Iterator[Node]:
    """Every occurrence of a node, so that a square counts its operand twice."""
    if isinstance(arg, Node):
        yield arg
    elif isinstance(arg, (list, tuple)):
        for item in arg:
            yield from _operands(item)
    elif isinstance(arg, dict):
        yield from _operands(tuple(arg.values()))


def _is_zero(node: Node) -> bool:
    if node.target in _ZEROS:
        return True
    if node.target in _KEEPS_ZERO:
        return _is_zero(node.all_input_nodes[0])
    at = _FILLED.get(node.target)  # type: ignore[call-overload]
    return at is not None and _is_number_zero(node.args[at])


def _is_number_zero(found: Any) -> bool:
    return isinstance(found, (int, float)) and found == 0
