"""Partial values: a sum over ranks still to be taken must not reach an op that such a sum cannot be moved through.

An own list of linear ops, apart from the rules that placed the values. Checked where placements are recorded, which
is on every node of a model graph between sharding and differentiation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from .. import meta, ops
from ..graph import op_name
from ..ops import cpu
from ..pass_base import Fact
from ..placement.types import Partial
from ..program import Level, OutputKind, Program
from .collectives import axis_of
from .report import fault


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# linear in their only tensor operand, or not dependent on its numbers at all
_CONSTANTS = _words(
    "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty uniform uniform_rows"
)
_UNARY = _CONSTANTS | _words(
    """
    view reshape _unsafe_view view_as reshape_as ravel transpose permute t mT adjoint numpy_T swapaxes swapdims movedim
    unsqueeze squeeze expand expand_as flatten unflatten slice select narrow split split_with_sizes tensor_split chunk
    unbind getitem diagonal unfold pad constant_pad_nd flip roll repeat tile clone contiguous detach alias lift_fresh
    lift_fresh_copy neg negative positive real imag view_as_real view_as_complex conj _conj resolve_conj resolve_neg
    sum mean cumsum trace tril triu _to_copy to type_as _autocast_to_reduced_precision
    _autocast_to_full_precision local_slice local_place dispatch combine all_gather reduce_scatter all_to_all rotate all_gather_rows
    zigzag_slice zigzag_place zigzag_exchange
    """
)
_ADDITIVE = _words("add sub subtract rsub add_ sub_ where cat concat stack hstack vstack select_scatter slice_scatter")
_REPEATS = _words("repeat_interleave")  # linear in what is repeated, not in how often
_PRODUCTS = _words(
    """
    mul multiply mul_ matmul mm bmm addmm baddbmm linear dot mv inner outer einsum tensordot grouped_linear unpermute
    masked_fill index gather index_select embedding index_add scatter_add scatter
    """
)
_QUOTIENTS = _words("div true_divide divide div_")
_LISTS = _words("cat concat stack hstack vstack")
_WITH_BIAS = _words("linear addmm baddbmm index_add scatter_add")
# counts of one rank's own rows are what these ops want
_OWN_COUNTS = {
    ops.exchange_counts, ops.sizes_to_host, ops.gathered_sizes_to_host, ops.grouped_linear, ops.grouped_linear_wgrad, ops.grouped_sum,
    cpu.grouped_linear, cpu.grouped_linear_wgrad,
}  # fmt: skip


def check_partial_values(program: Program) -> None:
    """A partial value is reduced, or goes through linear ops only and stays partial."""
    if program.level is not Level.MODEL:
        return
    for node in program.graph.nodes:
        if node.op == "call_function":
            for axis in {axis for source in node.all_input_nodes for axis in _partial_axes(source)}:
                if not (axis == "etp" and node.target is ops.unpermute and _is_halfway(program)):
                    _check(node, axis)
    for found, item in zip(program.output_nodes(), program.outputs, strict=True):
        if isinstance(found, Node) and item.kind in (OutputKind.USER, OutputKind.BUFFER):
            reader = "returned to the user" if item.kind is OutputKind.USER else f"written into buffer {item.name!r}"
            for axis in _partial_axes(found):
                raise fault(found, f"is {reader} while partial on {axis}; all_reduce it over {axis} first")


def _is_halfway(program: Program) -> bool:
    """Whether experts are cut and their rows not sent yet: results of parts of experts are summed on the way back."""
    return Fact.EXPERTS_SHARDED in program.facts and Fact.TOKENS_DISPATCHED not in program.facts


def _partial_axes(node: Node) -> list[str]:
    return [axis for axis, placed in meta.placements(node).items() if isinstance(placed, Partial)]


def _check(node: Node, axis: str) -> None:
    if node.target in (ops.all_reduce, ops.reduce_scatter, ops.reduce_scatter_rows) and axis in axis_of(node).split(
        "+"
    ):
        if node.target is ops.all_reduce and node.args[1] != "sum":
            raise fault(node, f"takes the {node.args[1]} of a value that is partial on {axis}; reduce it with 'sum'")
        return
    if node.target is ops.all_reduce and node.args[1] == "sum":
        return  # over another axis: sums can be taken in any order
    if node.target in _OWN_COUNTS and not any(_is_partial(arg, axis) and _floats(arg) for arg in node.all_input_nodes):
        return
    reason = _nonlinear(node, axis)
    if reason:
        raise fault(node, f"reads a value that is partial on {axis}: {reason}; all_reduce it over {axis} first")
    if op_name(node.target) in _CONSTANTS or not meta.is_tensor(node) or not meta.has_placements(node):
        return
    if axis not in _partial_axes(node):
        raise fault(
            node,
            f"is recorded as whole on {axis}, but its operand is partial there; all_reduce the operand over {axis}",
        )


def _is_partial(node: Any, axis: str) -> bool:
    return isinstance(node, Node) and axis in _partial_axes(node)


def _floats(node: Node) -> bool:
    return meta.is_tensor(node) and meta.tensor(node).is_floating_point()


def _nonlinear(node: Node, axis: str) -> str:
    """Why the sum over ranks cannot be taken after this op, '' where it can."""
    name = op_name(node.target)
    tensors = [source for source in node.all_input_nodes if meta.is_tensor(source)]
    partial = [source for source in tensors if _is_partial(source, axis)]
    if name in _UNARY:
        return ""
    if name in _REPEATS:
        return "" if partial == [node.args[0]] else "a sum cannot say in parts how often something is repeated"
    if name in _ADDITIVE:
        terms = {arg for arg in _flat(node.args) if isinstance(arg, Node) and meta.tensor(arg).dtype is not torch.bool}
        numbers = [arg for arg in node.args[:2] if isinstance(arg, (int, float)) and arg and name not in _LISTS]
        return "" if len(partial) == len(terms) and not numbers else "a whole term would be added once per rank"
    if name in _PRODUCTS:
        uses = sum(1 for arg in _flat(node.args) if _is_partial(arg, axis))
        return "" if uses == 1 or name in _WITH_BIAS else "a product of two sums is not the sum of products"
    if name in _QUOTIENTS:
        by_parts = not _is_partial(node.args[0], axis) or _is_partial(node.args[1], axis)
        return "a sum cannot be divided by in parts" if by_parts else ""
    return f"{name} of a sum is not the sum of its {name}"


def _flat(args: Any) -> list[Any]:
    return [leaf for arg in args for leaf in (_flat(arg) if isinstance(arg, (list, tuple)) else [arg])]
