"""Replace a materialised causal mask by `is_causal`.

Models hand `scaled_dot_product_attention` an S x S mask that export spells out as index arithmetic.  Where the mask is
provably the lower triangle for every batch row, whatever the inputs, attention takes `is_causal=True` instead: the
same meaning without memory quadratic in S.

Two proofs, both by evaluating the mask's subgraph, which must depend on no input.  A conjunction of comparisons between
a column of query positions and a row of key positions, as Hugging Face writes it, is decided from the positions, in
time linear in S.  Any other mask is evaluated whole, if it is small enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from moecompile import graph as ir
from moecompile import meta

aten = torch.ops.aten
_ATTENTION = aten.scaled_dot_product_attention.default
_LARGEST = 1 << 26  # elements of a value that a proof is willing to compute

ConstantValue = Callable[[Node], torch.Tensor | None]


def use_causal_attention(graph: Graph, constant: ConstantValue) -> int:
    """Rewrite every attention whose mask is provably causal. Returns how many.

    ``constant`` gives the value of a placeholder that never changes, None for the others.
    """
    proofs: dict[Node, bool] = {}
    rewritten = 0
    for node in ir.find(graph, _ATTENTION):
        mask = _mask(node)
        if mask is None or not _is_square(node):
            continue
        if mask not in proofs:
            proofs[mask] = _is_causal(mask, constant)
        if proofs[mask]:
            dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
            kept = {name: item for name, item in node.kwargs.items() if name in ("scale", "enable_gqa")}
            node.args, node.kwargs = (*node.args[:3], None, dropout, True), kept
            rewritten += 1
    return rewritten


def _mask(node: Node) -> Node | None:
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    is_causal = node.args[5] if len(node.args) > 5 else node.kwargs.get("is_causal", False)
    return mask if isinstance(mask, Node) and not is_causal else None


def _is_square(node: Node) -> bool:
    query, key = (meta.tensor(cast(Node, item)) for item in node.args[:2])
    return query.shape[-2] == key.shape[-2] and isinstance(query.shape[-2], int)


def _is_causal(mask: Node, constant: ConstantValue) -> bool:
    """Whether ``mask`` [..., S, S] is the lower triangle in each of its leading entries."""
    needed = ir.ancestors(mask) | {mask}
    if any(node.op == "placeholder" and constant(node) is None for node in needed):
        return False
    if any(not meta.is_tensor(node) or torch.Tag.nondeterministic_seeded in _tags(node) for node in needed):
        return False
    values = _Values(constant)
    try:
        return _is_causal_conjunction(mask, values) or _is_lower_triangle(values.of(mask))
    except _TooLargeError:
        return False


def _tags(node: Node) -> Any:
    return getattr(node.target, "tags", ())


# Proof from the positions ---------------------------------------------------------------------------------------------

_AND = frozenset({aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default})
# Comparison -> (compare for "small side <op> large side", whether the first argument is the small side).
_COMPARISONS: dict[Any, tuple[Callable[[Any, Any], Any], bool]] = {
    aten.le.Tensor: (torch.le, True),
    aten.lt.Tensor: (torch.lt, True),
    aten.ge.Tensor: (torch.le, False),
    aten.gt.Tensor: (torch.lt, False),
}


def _is_causal_conjunction(mask: Node, values: _Values) -> bool:
    """Whether ``mask`` is an "and" of parts that each are all true or causal, one at least causal."""
    causal = False
    for part in _conjuncts(mask):
        if _is_causal_comparison(part, values):
            causal = True
        elif not _is_all_true(part, values):
            return False
    return causal


def _conjuncts(mask: Node) -> Iterator[Node]:
    if mask.target in _AND:
        for item in mask.args:
            yield from _conjuncts(cast(Node, item))
    elif mask.target is aten.expand.default:
        yield from _conjuncts(cast(Node, mask.args[0]))
    else:
        yield mask


def _is_causal_comparison(part: Node, values: _Values) -> bool:
    """Whether ``part`` says that key j comes no later than query i exactly for j <= i."""
    if part.target not in _COMPARISONS:
        return False
    compare, in_order = _COMPARISONS[part.target]
    small, large = part.args if in_order else reversed(part.args)
    key, query = values.plane(small), values.plane(large)
    if key is None or query is None or key.shape[0] != 1 or query.shape[1] != 1 or key.shape[1] != query.shape[0]:
        return False
    key, query = key[0], query[:, 0]
    ascending = bool((key.diff() >= 0).all()) and bool((query.diff() >= 0).all())
    # With keys in ascending order, the first key too late for query i decides about all later ones.
    return ascending and bool(compare(key, query).all()) and not bool(compare(key[1:], query[:-1]).any())


def _is_all_true(part: Node, values: _Values) -> bool:
    if part.target in _COMPARISONS:
        compare, in_order = _COMPARISONS[part.target]
        small, large = (values.plane(item) for item in (part.args if in_order else reversed(part.args)))
        return small is not None and large is not None and bool(compare(small.max(), large.min()))
    if part.target is aten.eq.Tensor:
        one, other = (values.plane(item) for item in part.args)
        if one is None or other is None:
            return False
        return bool(one.min() == one.max()) and bool((other == one.min()).all())
    return bool(values.of(part).all())


# Proof by evaluation --------------------------------------------------------------------------------------------------


def _is_lower_triangle(found: torch.Tensor) -> bool:
    size = found.shape[-1] if found.dim() else 0
    if found.dim() < 2 or found.shape[-2] != size:
        return False
    triangle = torch.ones(size, size, dtype=torch.bool).tril()
    if found.dtype == torch.bool:
        return bool((found == triangle).all())
    below, above = found.masked_select(triangle), found.masked_select(~triangle)
    return bool((below == 0).all()) and bool((above == -torch.inf).all())


class _TooLargeError(Exception):
    """A value of the mask's subgraph is too large to compute."""


class _Values:
    """Concrete values of a subgraph without inputs, computed on the CPU."""

    def __init__(self, constant: ConstantValue) -> None:
        self._constant = constant
        self._known: dict[Node, torch.Tensor] = {}

    def of(self, node: Node) -> torch.Tensor:
        """The value of ``node``; `_TooLargeError` where it or something on the way is too large."""
        if node not in self._known:
            if meta.tensor(node).numel() > _LARGEST:
                raise _TooLargeError
            if node.op == "placeholder":
                self._known[node] = cast(torch.Tensor, self._constant(node)).cpu()
            else:
                target = cast(Callable[..., torch.Tensor], node.target)
                self._known[node] = target(*map_arg(node.args, self.of), **_on_cpu(node.kwargs))
        return self._known[node]

    def plane(self, node: Any) -> torch.Tensor | None:
        """The last two dims of a value whose leading entries are all equal; None where they differ."""
        found = self.of(node)
        found = found.reshape((1,) * (2 - found.dim()) + found.shape) if found.dim() < 2 else found
        entries = found.reshape(-1, *found.shape[-2:])
        return entries[0] if bool((entries == entries[:1]).all()) else None


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    given = {name: item for name, item in kwargs.items() if name not in ("device", "pin_memory")}
    return {**given, "device": torch.device("cpu")} if kwargs.get("device") is not None else given
