"""Replace a materialised causal mask by `is_causal`.

Models hand `scaled_dot_product_attention` an S x S mask that export spells out as index arithmetic.  Where the mask is
provably the lower triangle for every batch row, whatever the inputs, attention takes `is_causal=True` instead: the same
meaning without memory quadratic in S.

The proof evaluates the mask's subgraph, which must depend on no input.  The large part of it is made of elementwise
operators over index vectors, so it need not be evaluated element by element: a value is held as one row of the batch
where all rows are equal, which is checked where it still is small and follows for elementwise results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from moecompile import graph as ir
from moecompile import meta

aten = torch.ops.aten
_ATTENTION = aten.scaled_dot_product_attention.default
_LARGEST = 1 << 28  # elements of a value the proof is willing to compute

_ELEMENTWISE = frozenset(
    {
        aten.__and__.Tensor,
        aten.__or__.Tensor,
        aten.bitwise_and.Tensor,
        aten.bitwise_or.Tensor,
        aten.bitwise_not.default,
        aten.logical_and.default,
        aten.logical_or.default,
        aten.logical_not.default,
        aten.le.Tensor,
        aten.lt.Tensor,
        aten.ge.Tensor,
        aten.gt.Tensor,
        aten.eq.Tensor,
        aten.ne.Tensor,
        aten.le.Scalar,
        aten.lt.Scalar,
        aten.ge.Scalar,
        aten.gt.Scalar,
        aten.eq.Scalar,
        aten.ne.Scalar,
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.mul.Tensor,
        aten.where.self,
        aten.where.ScalarOther,
        aten.where.ScalarSelf,
        aten.where.Scalar,
        aten.masked_fill.Scalar,
        aten._to_copy.default,
        aten.clone.default,
        aten.contiguous.default,
    }
)

ConstantValue = Callable[[Node], torch.Tensor | None]


def use_causal_attention(graph: Graph, constant: ConstantValue) -> int:
    """Rewrite every attention whose mask is provably causal. Returns how many."""
    proofs: dict[Node, bool] = {}
    rewritten = 0
    for node in ir.find(graph, _ATTENTION):
        mask = _mask(node)
        if mask is None or not _is_square(node):
            continue
        if mask not in proofs:
            proofs[mask] = _is_causal(mask, constant)
        if proofs[mask]:
            query, key, value = node.args[:3]
            dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
            kept = {name: item for name, item in node.kwargs.items() if name in ("scale", "enable_gqa")}
            node.args, node.kwargs = (query, key, value, None, dropout, True), kept
            rewritten += 1
    return rewritten


def _mask(node: Node) -> Node | None:
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    is_causal = node.args[5] if len(node.args) > 5 else node.kwargs.get("is_causal", False)
    return mask if isinstance(mask, Node) and not is_causal else None


def _is_square(node: Node) -> bool:
    query, key = meta.tensor(node.args[0]), meta.tensor(node.args[1])  # type: ignore[arg-type]
    return query.shape[-2] == key.shape[-2] and isinstance(query.shape[-2], int)


def _is_causal(mask: Node, constant: ConstantValue) -> bool:
    """Whether ``mask`` [..., S, S] is the lower triangle in each of its leading entries."""
    needed = ir.ancestors(mask) | {mask}
    if any(node.op == "placeholder" and constant(node) is None for node in needed):
        return False
    if any(node.target in _RANDOM or not meta.is_tensor(node) for node in needed):
        return False
    try:
        found = _Evaluator(constant).rows(mask)
    except (RuntimeError, _TooLargeError):
        return False
    size = found.shape[-1]
    if found.dim() < 2 or found.shape[-2] != size:
        return False
    triangle = torch.ones(size, size, dtype=torch.bool).tril()
    if found.dtype == torch.bool:
        return bool((found == triangle).all())
    return bool((found.masked_fill(~triangle, 0) == 0).all()) and bool(
        (found.masked_select(~triangle) == -torch.inf).all()
    )


_RANDOM = frozenset(
    {aten.rand.default, aten.randn.default, aten.rand_like.default, aten.randn_like.default, aten.uniform.default}
)


class _TooLargeError(Exception):
    """A value of the mask's subgraph is too large to compute."""


class _Evaluator:
    """Concrete values of a subgraph without inputs, on the CPU, with equal leading rows held once."""

    def __init__(self, constant: ConstantValue) -> None:
        self._constant = constant
        self._full: dict[Node, torch.Tensor] = {}
        self._rows: dict[Node, torch.Tensor] = {}

    def rows(self, node: Node) -> torch.Tensor:
        """The value of ``node`` broadcast-equal to the full one: dim 0 has size 1 where all its rows are equal."""
        if node not in self._rows:
            self._rows[node] = self._compute_rows(node)
        return self._rows[node]

    def _compute_rows(self, node: Node) -> torch.Tensor:
        rank = meta.tensor(node).dim()
        if node.target in _ELEMENTWISE:
            kwargs = _on_cpu(node.kwargs)
            _refuse_large([self.rows(item).shape for item in node.all_input_nodes])
            return node.target(*map_arg(node.args, self.rows), **kwargs)  # type: ignore[operator]
        if node.target is aten.expand.default:
            source = self.rows(node.args[0])  # type: ignore[arg-type]
            sizes = list(meta.tensor(node).shape)
            aligned = source.reshape((1,) * (rank - source.dim()) + source.shape)
            # Only dims that stay as they are are kept; one that expands from a single entry stays single.
            return aligned if all(a in (1, b) for a, b in zip(aligned.shape, sizes, strict=True)) else self.full(node)
        full = self.full(node)
        if full.dim() > 1 and full.shape[0] > 1 and bool((full == full[:1]).all()):
            return full[:1]
        return full

    def full(self, node: Node) -> torch.Tensor:
        """The whole value of ``node``."""
        if node in self._full:
            return self._full[node]
        if meta.tensor(node).numel() > _LARGEST:
            raise _TooLargeError
        if node.op == "placeholder":
            value = self._constant(node)
            assert value is not None
            found = value.cpu()
        else:
            found = node.target(*map_arg(node.args, self.full), **_on_cpu(node.kwargs))  # type: ignore[operator]
        self._full[node] = found
        return found


def _refuse_large(shapes: list[torch.Size]) -> None:
    if torch.broadcast_shapes(*shapes).numel() > _LARGEST:
        raise _TooLargeError


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: torch.device("cpu") if name == "device" and item is not None else item for name, item in kwargs.items()
    }
