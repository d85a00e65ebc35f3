"""What can be said about a layer in ``moe::`` ops from the graph around it: its router and its shared experts.

For people to read (``moecompile inspect``): nothing is rewritten by it, and what is not seen is reported as not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.fx import Node

from moecompile import graph as ir
from moecompile import meta, ops
from moecompile.program import Input, InputKind
from moecompile.recognition import rowwise

aten = torch.ops.aten
_CHOICES = frozenset(
    {
        aten.topk.default, aten.max.dim, aten.argmax.default, aten.sort.default, aten.sort.stable, aten.argsort.default,
        aten.argsort.stable,
    }
)  # fmt: skip
_SOFTMAX = frozenset({aten.softmax.int, aten._softmax.default, aten.log_softmax.int})
_SIGMOID = frozenset({aten.sigmoid.default})
_RUNNING = frozenset({aten.cumsum.default})
_SUMS = frozenset({aten.sum.dim_IntList})
_ENDS = frozenset({ops.permute, ops.unpermute, ops.grouped_linear})
_RANDOM = torch.Tag.nondeterministic_seeded


def describe(permute: Node, inputs: Mapping[Node, Input]) -> dict[str, Any]:
    """``router`` and ``shared_experts`` of the layer that begins with this ``moe::permute``, as plain data."""
    unpermute = next((node for node in ir.find(permute.graph, ops.unpermute) if permute in _rows_from(node)), None)
    probs = unpermute.args[4] if unpermute is not None and len(unpermute.args) > 4 else None
    return {
        "router": _router(permute, probs if isinstance(probs, Node) else None, inputs),
        "shared_experts": [] if unpermute is None else _shared(permute, unpermute, inputs),
        "capacity": _capacity(unpermute),
    }


def _capacity(unpermute: Node | None) -> int | None:
    """How many tokens an expert takes at most, where the layer drops the rest."""
    for node in [] if unpermute is None or len(unpermute.args) < 5 else _back(unpermute.args[4]):
        if node.target is aten.le.Scalar and isinstance(node.args[1], int) and _nearest(node, _RUNNING) is not None:
            return node.args[1]
    return None


def _rows_from(unpermute: Node) -> set[Node]:
    """The permute whose row map an unpermute reads."""
    source = unpermute.args[1]
    return set(source.all_input_nodes) if isinstance(source, Node) else set()


def _router(permute: Node, probs: Node | None, inputs: Mapping[Node, Input]) -> dict[str, Any]:
    """Score function and where it stands, selection bias, groups, renormalisation, noise."""
    choice = _nearest(permute.args[1], _CHOICES)
    if choice is None:
        return {"kind": "given", "where": "", "bias": False, "groups": 0, "normalized": False, "noise": False}
    before = _back(choice.args[0])
    after = [*_forward(choice), *([] if probs is None else _back(probs, stop={choice}))]
    names = {"softmax": _SOFTMAX, "sigmoid": _SIGMOID}
    found = [(kind, "before") for kind, targets in names.items() if _calls(before, targets)]
    found += [(kind, "after") for kind, targets in names.items() if _calls(set(after) - set(before), targets)]
    kind, where = found[0] if found else ("logits" if probs is not None else "ones", "before")
    vectors = {node for node, item in inputs.items() if len(item.shape) == 1 and item.kind is not InputKind.BATCH}
    sums = [node for node in before if node.target is aten.add.Tensor]
    biased = any(_weight_behind(item) in vectors for node in sums for item in node.all_input_nodes)
    groups = [node for node in before if node.target in _CHOICES]
    shapes = [meta.tensor(node.args[0]).shape[-1] for node in groups if _is_narrower(node, choice)]  # type: ignore[arg-type]
    return {
        "kind": kind,
        "where": f"{where} top-k",
        "bias": biased,
        "groups": int(min(shapes)) if shapes else 0,
        "normalized": any(
            node.target in (aten.div.Tensor, aten.true_divide.Tensor) and _is_sum(node.args[1])
            for node in set(after) - set(before)
        ),
        "noise": any(_RANDOM in getattr(node.target, "tags", ()) for node in before),
    }


def _is_narrower(node: Node, choice: Node) -> bool:
    """Whether an earlier choice is among fewer options: groups of experts, not the experts of a group."""
    options = [meta.tensor(item.args[0]).shape[-1] for item in (node, choice)]  # type: ignore[arg-type]
    return all(isinstance(size, int) for size in options) and options[0] < options[1]


def _nearest(node: Any, targets: frozenset[Any]) -> Node | None:
    """The closest of these calls that a value comes from."""
    todo, seen = [node], set()
    while todo:
        here = todo.pop(0)
        if not isinstance(here, Node) or here in seen:
            continue
        if here.target in targets:
            return here
        seen.add(here)
        todo += here.all_input_nodes
    return None


def _back(node: Any, stop: Iterable[Node] = ()) -> list[Node]:
    """What a value is computed from, back to the first products with a weight and not past ``stop``."""
    barrier, seen, todo = set(stop), dict[Node, None](), [node]
    while todo:
        here = todo.pop()
        if not isinstance(here, Node) or here in seen or here in barrier or here.op != "call_function":
            continue
        seen[here] = None
        if not rowwise.is_linear(here):
            todo += here.all_input_nodes
    return list(seen)


def _forward(choice: Node) -> list[Node]:
    """What is computed from a choice before anything is multiplied by a weight."""
    seen, todo = dict[Node, None](), list(choice.users)
    while todo:
        here = todo.pop()
        if here in seen or here.op != "call_function" or rowwise.is_linear(here) or here.target in _ENDS:
            continue
        seen[here] = None
        todo += here.users
    return list(seen)


def _is_sum(node: Any) -> bool:
    """A sum, possibly kept away from zero."""
    for _ in range(4):
        if not isinstance(node, Node) or node.target in _SUMS:
            break
        node = node.args[0] if node.args else None
    return isinstance(node, Node) and node.target in _SUMS


def _weight_behind(node: Node) -> Node:
    """The placeholder that an operand is a cast or a view of, else the operand."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


def _calls(nodes: Iterable[Node], targets: frozenset[Any]) -> bool:
    return any(node.target in targets for node in nodes)


def _shared(permute: Node, unpermute: Node, inputs: Mapping[Node, Input]) -> list[str]:
    """Parameters of what is computed from the same tokens by everybody and added to the experts' result."""
    tokens: Any = permute.args[0]
    while tokens.op == "call_function" and tokens.target in rowwise.RESHAPES and isinstance(tokens.args[0], Node):
        tokens = tokens.args[0]
    here = unpermute
    for _ in range(8):  # views, casts and factors on the way to the sum
        follow = [user for user in here.users if meta.is_tensor(user) and user.target is not aten.sym_size.int]
        if here.target in (aten.add.Tensor, aten.add_.Tensor) and here is not unpermute:
            break
        if len(follow) != 1:
            return []
        here, came = follow[0], here
    else:
        return []
    others = [item for item in here.all_input_nodes if item is not came]
    linears: list[Node] = []
    for item in others:
        path = ir.between([tokens], item)
        end = [item] if path or tokens in item.all_input_nodes else []
        linears += [node for node in (*path, *end) if rowwise.is_linear(node)]
    weights = {_weight_behind(arg) for node in linears for arg in node.all_input_nodes}
    return [
        name for node, item in inputs.items() if item.kind is InputKind.PARAM and node in weights for name in item.fqns
    ]
