"""Which operators treat every row for itself, and how each acts on the axes of a row.

An activation inside an expert has rows (tokens) on its leading axes and features on its trailing ones.  An operator is
row-wise when every row of its result depends on that row of its operands alone, and is the same function for all rows.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from moecompile import meta
from moecompile.compat import OpOverload

aten = torch.ops.aten

LINEARS = frozenset(
    {
        aten.linear.default,
        aten.matmul.default,
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten.baddbmm.default,
        aten.einsum.default,
    }
)
# Same rows, same features: position by position, or a change of representation.
UNARY = frozenset(
    {
        aten.clone.default,
        aten.contiguous.default,
        aten.detach.default,
        aten.alias.default,
        aten.to.dtype,
        aten.to.dtype_layout,
        aten._to_copy.default,
        aten.dropout.default,
        aten.gelu.default,
        aten.silu.default,
        aten.relu.default,
        aten.sigmoid.default,
        aten.tanh.default,
        aten.softplus.default,
        aten.relu6.default,
        aten.hardtanh.default,
        aten.leaky_relu.default,
        aten.elu.default,
        aten.selu.default,
        aten.mish.default,
        aten.square.default,
        aten.celu.default,
        aten.log_sigmoid.default,
        aten.hardsigmoid.default,
        aten.hardswish.default,
        aten.softshrink.default,
        aten.hardshrink.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
    }
)
NARY = frozenset(
    {
        aten.mul.Tensor,
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.div.Tensor,
        aten.true_divide.Tensor,
        aten.rsub.Tensor,
        aten.where.self,
        aten.where.ScalarOther,
        aten.where.ScalarSelf,
        aten.masked_fill.Scalar,
        aten.masked_fill.Tensor,
        aten.prelu.default,
        aten.lerp.Scalar,
        aten.addcmul.default,
    }
)
# Over feature axes only; the position of the axis argument, None where it has none.
OVER_FEATURES: dict[Any, int | None] = {
    aten.softmax.int: 1,
    aten._softmax.default: 1,
    aten.log_softmax.int: 1,
    aten._log_softmax.default: 1,
    aten.cumsum.default: 1,
    aten.cumprod.default: 1,
    aten.logcumsumexp.default: 1,
    aten.flip.default: 1,
}
REDUCTIONS = frozenset(
    {
        aten.sum.dim_IntList,
        aten.mean.dim,
        aten.amax.default,
        aten.amin.default,
        aten.linalg_vector_norm.default,
        aten.var.correction,
        aten.std.correction,
        aten.var.dim,
        aten.std.dim,
    }
)
NORMS: dict[Any, tuple[int, int]] = {  # positions of weight and bias (-1: none)
    aten.rms_norm.default: (2, -1),
    aten.layer_norm.default: (2, 3),
    aten.group_norm.default: (2, 3),
}
PIECES = frozenset(
    {aten.chunk.default, aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.unbind.int}
)
SLICES = frozenset({aten.slice.Tensor, aten.narrow.default, aten.select.int})
RESHAPES = frozenset(
    {
        aten.reshape.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
    }
)
AXES = frozenset(
    {
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.squeeze.default,
        aten.transpose.int,
        aten.permute.default,
        aten.t.default,
        aten.numpy_T.default,
        aten.mT.default,
        aten.expand.default,
        aten.expand_as.default,
    }
)
SIZES = frozenset({aten.sym_size.int, aten.sym_numel.default})


def is_pointwise(target: Any) -> bool:
    """Elementwise with broadcasting: what the tables name and what torch itself tags so."""
    if target in UNARY or target in NARY:
        return True
    return isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags and not target._schema.is_mutable


def is_linear(node: Node) -> bool:
    """Whether a node is a product that may apply a weight."""
    return node.target in LINEARS


def tensor_inputs(node: Node) -> list[Node]:
    """Operands that hold tensors or tuples of them, without sizes and other numbers."""
    return [
        item
        for item in node.all_input_nodes
        if not isinstance(item.meta.get("val"), (torch.SymInt, int, torch.SymBool))
    ]


def may_be_rowwise(node: Node) -> bool:
    """Whether some reading of the axes makes the node row-wise; the tracer then decides for one reading."""
    target = node.target
    if target is operator.getitem:
        source = node.args[0]
        return isinstance(source, Node) and source.target in PIECES
    if target in PIECES or target in SLICES:
        return _over_last(node, _axis_argument(node))
    if target in REDUCTIONS:
        at = 2 if target is aten.linalg_vector_norm.default else 1
        dims = node.args[at] if len(node.args) > at else None
        return isinstance(dims, (list, tuple)) and len(dims) == 1 and _over_last(node, dims[0])
    if target in OVER_FEATURES:
        position = OVER_FEATURES[target]
        assert position is not None
        dim: Any = node.args[position]
        return _over_last(node, dim[0] if isinstance(dim, (list, tuple)) else dim)
    if target is aten.cat.default:
        return _over_last(node, node.args[1] if len(node.args) > 1 else 0)
    if target in RESHAPES:
        return not isinstance(node.args[0], Node) or _keeps_features(node)
    known = target in LINEARS or target in NORMS or target in AXES or target in (aten.glu.default, aten.type_as.default)
    return known or is_pointwise(target)


def _axis_argument(node: Node) -> Any:
    """The axis of a slicing or splitting call; slice, narrow and select have it second, the others third."""
    position = 1 if node.target in SLICES or node.target is aten.unbind.int else 2
    return node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)


def _over_last(node: Node, dim: Any) -> bool:
    """Whether ``dim`` is not a leading axis: with one axis in front it is sure to be a feature axis."""
    source: Any = node.args[0]
    first = source[0] if isinstance(source, (list, tuple)) else source
    if not isinstance(first, Node) or not meta.is_tensor(first) or not isinstance(dim, int):
        return False
    ndim = meta.tensor(first).dim()
    return ndim > 1 and dim % ndim != 0


def _keeps_features(node: Node) -> bool:
    """A reshape of rows alone, or of the features of each row alone: what comes before the last axis stays together."""
    shapes = (meta.tensor(item).shape for item in (node.args[0], node))  # type: ignore[arg-type]
    before, after = ([str(size) for size in shape] for shape in shapes)  # nothing is guessed about unknown sizes
    return bool(before and after) and (before[-1] == after[-1] or before[0] == after[0])
