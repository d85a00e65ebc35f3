"""Rewrite every plain MoE layer in ``moe::`` ops.

Before:  topk -> a loop over experts, masks, one-hot products, ... -> weighted sum
After:   topk -> permute -> grouped_linear -> activation -> grouped_linear -> unpermute

The weights of E separate experts become one input ``[E, ...]`` that names the E parameters.  A layer that is in
``moe::`` ops already is only recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.errors import CaptureError
from moecompile.pass_base import Fact, Numerics, Pass, PassContext
from moecompile.program import Input
from moecompile.recognition import ACCEPTED, Layer, find_layers
from moecompile.recognition.body import PRODUCT, Leaf, Source, Step, Value
from moecompile.recognition.rowwise import NORMS, is_linear

aten = torch.ops.aten


@dataclass(frozen=True)
class RecognizeMoe(Pass):
    """Find MoE layers by what they compute and write them in ``moe::`` ops."""

    name: ClassVar[str] = "recognize-moe"
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.MOE_OPS})
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATING

    def run(self, graph: GraphModule, ctx: PassContext) -> int:
        program = ctx.program
        known = {record["permute"] for record in program.layers}
        for permute in graphs.find(graph, ops.permute):
            if permute.name not in known:
                program.layers.append(_canonical_record(permute, dict(program.items())))
        layers = find_layers(graph.graph, dict(program.items()), program.constants)
        replaced: list[Node] = []
        moved: dict[Node, Node] = {}  # results of layers written so far: a later layer may read them directly
        for layer in layers:
            writer = _Writer(graph.graph, layer, ctx, moved)
            program.layers.append(writer.write())
            replaced += writer.replaced
        if layers:
            graphs.eliminate_dead(graph.graph)
            _drop_inputs(replaced, ctx)
        _refuse_unread_experts(graph.graph)
        if not program.layers and ctx.mesh.size("ep") > 1:
            raise CaptureError(
                f"recognize-moe: the model has no MoE layer, and ep={ctx.mesh.size('ep')} needs one; use ep=1; "
                f"{ACCEPTED}."
            )
        return len(layers)


class _Writer:
    """Writes one layer in place of its result. N rows, E experts."""

    def __init__(self, graph: Graph, layer: Layer, ctx: PassContext, moved: dict[Node, Node]) -> None:
        self.graph = graph
        self.layer = layer
        self.ctx = ctx
        self.moved = moved
        self.inputs = dict(ctx.program.items())
        self.values: dict[int, Node] = {}
        self.per_expert: dict[int, bool] = {}
        self.params: list[str] = []
        self.replaced: list[Node] = []
        self.like = layer.match.result

    def write(self) -> dict[str, Any]:
        """Rewrite; returns the layer's record."""
        layer, match = self.layer, self.layer.match
        self.leaves = [self._leaf(slot) for slot in range(len(layer.weights))]
        tokens, top_k = layer.choice.num_tokens, layer.choice.top_k
        found = meta.tensor(match.result)
        with self.graph.inserting_before(match.result):
            x = self._matrix(match.tokens, [tokens, -1])
            ids = self._matrix(layer.choice.ids, [tokens, top_k])
            probs = None if match.probs is None else self._probs(match.probs, ids)
            made = self._call(ops.permute, x, ids, layer.num_experts)
            self.permute = made
            self.rows, self.counts, row_map = graphs.unpack(self.graph, made)
            rows = self._body()
            if torch.promote_types(meta.tensor(rows).dtype, found.dtype) != meta.tensor(rows).dtype:
                rows = self._call(aten.to.dtype, rows, found.dtype)
            result = self._call(ops.unpermute, rows, row_map, tokens, top_k, probs)
            result = self._fit(result, found)
            if match.base is not None:
                base = self.moved.get(match.base, match.base)
                result = self._call(aten.add.Tensor, self._fit(base, found), result)
        self.moved[match.result] = result
        graphs.replace(match.result, result)
        return self._record()

    def _call(self, target: Any, *args: Any, like: Node | None = None, **kwargs: Any) -> Node:
        return graphs.call(self.graph, target, *args, like=like or self.like, mode=self.ctx.mode, **kwargs)

    def _matrix(self, node: Node, shape: list[int]) -> Node:
        """The value with two axes."""
        node = self.moved.get(node, node)
        return node if meta.tensor(node).dim() == 2 else self._call(aten.reshape.default, node, shape)

    def _fit(self, node: Node, wanted: torch.Tensor) -> Node:
        if meta.tensor(node).dtype != wanted.dtype:
            node = self._call(aten.to.dtype, node, wanted.dtype)
        if meta.tensor(node).shape != wanted.shape:
            node = self._call(aten.reshape.default, node, list(wanted.shape))
        return node

    def _probs(self, node: Node, ids: Node) -> Node:
        """Weights ``[T, K]``; from ``[T, E]`` the chosen ones are picked."""
        choice, count = self.layer.choice, meta.tensor(node).numel()
        if count == choice.num_tokens * choice.top_k and (
            choice.top_k == 1 or meta.tensor(node).shape[-1] == choice.top_k
        ):
            return self._matrix(node, [choice.num_tokens, choice.top_k])
        return self._call(aten.gather.default, self._matrix(node, [choice.num_tokens, choice.num_options]), 1, ids)

    # The expert body ---------------------------------------------------------------------------------------------

    def _body(self) -> Node:
        steps = self.layer.body.steps
        for index, step in enumerate(steps):
            self.per_expert[index] = not step.on_rows and any(self._is_per_expert(ref) for ref in step.refers())
            self.values[index] = self._on_rows(step) if step.on_rows else self._on_weights(step)
        result: Node = self._value(self.layer.body.result)
        return result

    def _value(self, ref: Any) -> Any:
        if isinstance(ref, Leaf):
            return self.leaves[ref.index]
        if isinstance(ref, Value):
            return self.rows if ref.index < 0 else self.values[ref.index]
        return [self._value(item) for item in ref] if isinstance(ref, (list, tuple)) else ref

    def _is_per_expert(self, ref: Any) -> bool:
        """Whether a weight has a leading axis of experts."""
        if isinstance(ref, Leaf):
            sources = self.layer.weights[ref.index]
            return len(sources) > 1 or sources[0].kind != "own"
        return isinstance(ref, Value) and self.per_expert.get(ref.index, False)

    def _on_weights(self, step: Step) -> Node:
        args = [self._value(arg) for arg in step.args]
        if step.target is aten.reshape.default and self._is_per_expert(step.args[0]):
            args[1] = [self.layer.num_experts, *args[1]]
        return self._call(step.target, *args, like=step.node, **step.kwargs)

    def _on_rows(self, step: Step) -> Node:
        if step.target is PRODUCT:
            return self._product(step)
        if step.target is aten.alias.default:  # where the routing weight stood
            moved: Node = self._value(step.args[0])
            return moved
        if step.target in NORMS and any(self._is_per_expert(ref) for ref in step.args):
            return self._norm(step)
        args = [self._spread(arg, step) if self._is_per_expert(arg) else self._value(arg) for arg in step.args]
        return self._call(step.target, *args, like=step.node, **step.kwargs)

    def _product(self, step: Step) -> Node:
        rows, weight, bias = step.args
        grouped = self._is_per_expert(weight)
        joined = bias is not None and self._is_per_expert(bias) == grouped
        args = [self._value(rows)] + ([self.counts] if grouped else []) + [self._value(weight)]
        made = self._call(
            ops.grouped_linear if grouped else aten.linear.default,
            *args,
            *([self._value(bias)] if joined else []),
            like=step.node,
        )
        if bias is None or joined:
            return made
        return self._call(aten.add.Tensor, made, self._spread(bias, step), like=step.node)

    def _spread(self, ref: Any, step: Step) -> Node:
        """A weight of one value per expert and feature, as the value that each row's expert has.

        As a linear layer whose input is always 1, it goes wherever the experts go, and so does its gradient.
        """
        weight: Node = self._value(ref)
        if not self._is_per_expert(ref):
            return weight
        found = meta.tensor(weight)
        one = self._call(aten.slice.Tensor, self.rows, 1, 0, 1, like=step.node)
        one = self._call(aten.ones_like.default, one, dtype=found.dtype, like=step.node)
        columns = self._call(aten.reshape.default, weight, [self.layer.num_experts, -1, 1], like=step.node)
        made = self._call(ops.grouped_linear, one, self.counts, columns, like=step.node)
        if found.dim() > 2:
            made = self._call(aten.reshape.default, made, [-1, *found.shape[1:]], like=step.node)
        return made

    def _norm(self, step: Step) -> Node:
        """A norm whose weight differs from expert to expert: the plain norm, then scale and shift."""
        weight_at, bias_at = NORMS[step.target]
        args = [self._value(arg) for arg in step.args]
        parts = [step.args[at] if 0 <= at < len(args) else None for at in (weight_at, bias_at)]
        for at in (weight_at, bias_at):
            if 0 <= at < len(args):
                args[at] = None
        made = self._call(step.target, *args, like=step.node)
        for target, ref in zip((aten.mul.Tensor, aten.add.Tensor), parts, strict=True):
            if ref is not None:
                made = self._call(target, made, self._spread(ref, step), like=step.node)
        return made

    # Weights -----------------------------------------------------------------------------------------------------

    def _leaf(self, slot: int) -> Node:
        """The weight behind one leaf, with a leading axis of experts where they differ."""
        sources = self.layer.weights[slot]
        first = sources[0]
        if len(sources) > 1:
            return self._stack(sources)
        self.params += [name for node in (first.node, *graphs.ancestors(first.node)) for name in self._names(node)]
        with self.graph.inserting_before(self.layer.match.result):
            if first.kind == "stacked" and first.index:
                order = [
                    first.index,
                    *(dim for dim in range(meta.tensor(first.node).dim()) if dim != first.index),
                ]
                return self._call(aten.permute.default, first.node, order)
            if first.kind == "block":
                return self._call(aten.reshape.default, first.node, [self.layer.num_experts, *first.shape])
        return first.node

    def _names(self, node: Node) -> tuple[str, ...]:
        return self.inputs[node].fqns if node in self.inputs else ()

    def _stack(self, sources: list[Source]) -> Node:
        """One input in place of E parameters."""
        items = [self.inputs.get(source.node) for source in sources]
        described = [item for item in items if item is not None and item.fqns]
        if len(described) != len(sources) or any(len(item.fqns) != 1 for item in described):
            raise CaptureError(
                f"recognize-moe: {meta.where(sources[0].node)} is an expert weight that is no parameter of its "
                "own; store it as one."
            )
        kinds, frees = {item.kind for item in described}, {item.requires_grad for item in described}
        names = tuple(item.fqns[0] for item in described)
        self.params += names
        if len(kinds) > 1 or len(frees) > 1:
            raise CaptureError(
                f"recognize-moe: {', '.join(names)} are stacked into one weight, but only some of them require "
                "gradients; freeze all experts or none."
            )
        program, first = self.ctx.program, sources[0].node
        at = program.placeholders().index(first)
        with self.graph.inserting_before(first):
            node = self.graph.placeholder(_common_name(names))
            node.target = node.name  # generated code takes arguments by target, which must not occur twice
        with self.ctx.mode:
            found = meta.tensor(first)
            node.meta["val"] = torch.empty((len(sources), *found.shape), dtype=found.dtype, device=found.device)
            node.meta["val"].requires_grad_(described[0].requires_grad)
        made = Input(
            described[0].kind,
            node.name,
            names,
            (len(sources), *described[0].shape),
            requires_grad=described[0].requires_grad,
        )
        program.inputs.insert(at, made)
        self.replaced += [source.node for source in sources]
        self.inputs[node] = made
        return node

    def _record(self) -> dict[str, Any]:
        match, choice = self.layer.match, self.layer.choice
        return {
            "module": _module_of(self.like, choice.node),
            "source": meta.source(match.result) or meta.source(choice.node),
            "how": self.layer.how,
            "num_experts": self.layer.num_experts,
            "top_k": choice.top_k,
            "params": list(dict.fromkeys(self.params)),
            "permute": self.permute.name,
        }


def _drop_inputs(replaced: list[Node], ctx: PassContext) -> None:
    """Take the separate expert parameters out of the interface; each must have served its expert alone."""
    program = ctx.program
    items = dict(program.items())
    for node in dict.fromkeys(replaced):
        if node.users:
            user = next(iter(node.users))
            raise CaptureError(
                f"recognize-moe: the expert parameter {items[node].fqns[0]} is also used at {meta.where(user)}, so it "
                "cannot live on one rank only; give that place a parameter of its own, or compute it after the step."
            )
        del items[node]
        program.graph.erase_node(node)
    program.inputs[:] = list(items.values())


def _refuse_unread_experts(graph: Graph) -> None:
    """A weight applied to rows whose number depends on values is part of some routing that was not recognised."""
    for node in graph.nodes:
        if not is_linear(node) or node.target is aten.einsum.default:
            continue
        if any(isinstance(size, torch.SymInt) for size in graphs.symbolic_sizes(node.meta.get("val"))):
            raise CaptureError(
                f"recognize-moe: {meta.where(node)} computes on rows picked by their values, and is not recognised "
                f"as an MoE layer; {ACCEPTED}."
            )


def _canonical_record(permute: Node, inputs: dict[Node, Input]) -> dict[str, Any]:
    """The record of a layer that is in ``moe::`` ops already."""
    users = [node for node in graphs.find(permute.graph, ops.grouped_linear) if permute in graphs.ancestors(node)]
    own = [node for node in users if permute in graphs.ancestors(node, stop=graphs.find(permute.graph, ops.unpermute))]
    weights = [arg for node in own for arg in node.args[2:4] if isinstance(arg, Node)]
    names = [name for node in inputs if node in {*weights, *graphs.ancestors(*weights)} for name in inputs[node].fqns]
    ids: Any = permute.args[1]
    return {
        "module": meta.module_path(permute),
        "source": meta.source(permute),
        "how": "moe ops",
        "num_experts": permute.args[2],
        "top_k": int(meta.tensor(ids).shape[-1]),
        "params": names,
        "permute": permute.name,
    }


def _module_of(*nodes: Node) -> str:
    """The innermost module that all nodes are in."""
    common = []
    for parts in zip(*(meta.module_path(node).split(".") for node in nodes), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _common_name(names: tuple[str, ...]) -> str:
    """``experts.0.w1.weight``, ``experts.1.w1.weight`` -> ``experts_w1_weight``."""
    rows = [name.split(".") for name in names]
    if len({len(row) for row in rows}) != 1:
        return "_".join(rows[0])
    return "_".join(parts[0] for parts in zip(*rows, strict=True) if len(set(parts)) == 1)
