"""Write one recognised layer in ``moe::`` ops, in place of its result: `Writer`.

T tokens, K choices, N = T * K rows, E experts.  Choices that no expert serves keep a row, so that sizes are known, but its
weight is 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.errors import CaptureError
from moecompile.pass_base import PassContext
from moecompile.program import Input
from moecompile.recognition.body import PRODUCT, Leaf, Source, Step, Value
from moecompile.recognition.formula import Keep, Lone
from moecompile.recognition.reader import Layer
from moecompile.recognition.rowwise import NORMS

aten = torch.ops.aten


class Writer:
    """Writes one layer.  ``moved`` maps results of layers written so far, which a later layer may read directly."""

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
        self.size = layer.choice.num_tokens, layer.choice.top_k
        self.served: Node | None = None

    def write(self) -> dict[str, Any]:
        """Rewrite; returns the layer's record."""
        layer, match = self.layer, self.layer.match
        self.leaves = [self._leaf(slot) for slot in range(len(layer.weights))]
        tokens, top_k = self.size
        found = meta.tensor(match.result)
        with self.graph.inserting_before(match.result):
            self.ids = self._ids()
            probs = None if match.probs is None else self._slots(match.probs)
            experts, self.served = self._served()
            if self.served is not None:
                probs = self._masked(probs, self.served)
            x, experts = self._rows_in(experts)
            made = self._call(ops.permute, x, experts, layer.num_experts)
            self.permute = made
            self.rows, self.counts, row_map = graphs.unpack(self.graph, made)
            rows = self._body()
            if torch.promote_types(meta.tensor(rows).dtype, found.dtype) != meta.tensor(rows).dtype:
                rows = self._call(aten.to.dtype, rows, found.dtype)
            if match.apart:
                tokens, top_k = tokens * top_k, 1
                probs = None if probs is None else self._call(aten.reshape.default, probs, [tokens, 1])
            result = self._fit(self._call(ops.unpermute, rows, row_map, tokens, top_k, probs), found)
            if match.base is not None:
                result = self._call(aten.add.Tensor, self._fit(self._known(match.base), found), result)
            for item in match.lone:
                result = self._call(aten.add.Tensor, result, self._fit(self._lone(item), found))
        self.moved[match.result] = result
        graphs.replace(match.result, result)
        return self._record()

    def _call(self, target: Any, *args: Any, like: Node | None = None, **kwargs: Any) -> Node:
        return graphs.call(self.graph, target, *args, like=like or self.like, mode=self.ctx.mode, **kwargs)

    def _known(self, node: Node) -> Node:
        return self.moved.get(node, node)

    def _matrix(self, node: Node, shape: list[int]) -> Node:
        """The value with two axes."""
        node = self._known(node)
        found = meta.tensor(node)
        # Ids of one choice for [batch, sequence] have two axes, too.
        fits = found.dim() == 2 and all(want in (-1, have) for want, have in zip(shape, found.shape, strict=True))
        return node if fits else self._call(aten.reshape.default, node, shape)

    def _fit(self, node: Node, wanted: torch.Tensor) -> Node:
        if meta.tensor(node).dtype != wanted.dtype:
            node = self._call(aten.to.dtype, node, wanted.dtype)
        if meta.tensor(node).shape != wanted.shape:
            node = self._call(aten.reshape.default, node, list(wanted.shape))
        return node

    # Choices -----------------------------------------------------------------------------------------------------

    def _ids(self) -> Node:
        choice, tokens = self.layer.choice, self.size[0]
        if not choice.parts:
            return self._matrix(choice.ids, list(self.size))
        return self._call(
            aten.cat.default, [self._call(aten.reshape.default, part, [tokens, 1]) for part in choice.parts], 1
        )

    def _slots(self, node: Node) -> Node:
        """Weights or a mask as ``[T, K]``; of values per option the chosen ones are picked."""
        (tokens, top_k), value = self.size, meta.tensor(node)
        count, last = value.numel(), value.shape[-1]
        if count == tokens * top_k and (top_k == 1 or last == top_k):
            return self._matrix(node, [tokens, top_k])
        if count == tokens * top_k * last and top_k > 1:
            apart = self._call(aten.reshape.default, self._known(node), [tokens, top_k, last])
            at = self._call(aten.unsqueeze.default, self.ids, 2)
            return self._call(aten.squeeze.dim, self._call(aten.gather.default, apart, 2, at), 2)
        return self._call(aten.gather.default, self._matrix(node, [tokens, self.layer.choice.num_options]), 1, self.ids)

    def _served(self) -> tuple[Node, Node | None]:
        """Each choice's expert ``[T, K]``, and which choices an expert serves (None: all)."""
        layer, ids = self.layer, self.ids
        first, served = min(layer.match.order), None
        if layer.num_experts < layer.choice.num_options:
            served = self._within(first, first + layer.num_experts)
            shifted = self._call(aten.sub.Tensor, ids, first) if first else ids
            # rows of other choices go to all experts in turn: they cost time, and are weighed with 0
            spread = self._call(aten.remainder.Scalar, ids, layer.num_experts)
            ids = self._call(aten.where.self, served, shifted, spread)
        self.optioned = served
        if layer.match.keep is not None:
            self.kept = self._kept(layer.match.keep)
            served = self.kept if served is None else self._call(aten.logical_and.default, served, self.kept)
        return ids, served

    def _within(self, first: int, end: int) -> Node:
        """Where ids lie in ``first .. end - 1``."""
        low = self._call(aten.ge.Scalar, self.ids, first) if first else None
        high = self._call(aten.lt.Scalar, self.ids, end) if end < self.layer.choice.num_options else None
        if low is None or high is None:
            found = low or high
            assert found is not None
            return found
        return self._call(aten.logical_and.default, low, high)

    def _kept(self, keep: Keep) -> Node:
        """Choices within their expert's capacity, as the order of all choices says."""
        if keep.mask is not None:
            return self._call(aten.ne.Scalar, self._slots(keep.mask), 0)
        (tokens, top_k), options = self.size, self.layer.choice.num_options
        ids = self._call(aten.transpose.int, self.ids, 0, 1) if keep.by_choice else self.ids
        flat = self._call(aten.reshape.default, ids, [tokens * top_k])
        count = self._call(aten.cumsum.default, self._call(aten.one_hot.default, flat, options), 0)
        place = self._call(aten.gather.default, count, 1, self._call(aten.unsqueeze.default, flat, 1))
        place = self._call(aten.reshape.default, place, [top_k, tokens] if keep.by_choice else [tokens, top_k])
        place = self._call(aten.transpose.int, place, 0, 1) if keep.by_choice else place
        return self._call(aten.le.Scalar, place, keep.capacity)

    def _masked(self, probs: Node | None, mask: Node) -> Node:
        """Weights, 0 outside ``mask``."""
        if probs is None:
            return self._call(aten.to.dtype, mask, meta.tensor(self.like).dtype)
        return self._call(aten.masked_fill.Scalar, probs, self._call(aten.logical_not.default, mask), 0)

    def _lone(self, item: Lone) -> Node:
        """What choices without an expert give, ``[T, H]``."""
        if item.options:
            parts = [self._within(first, end) for first, end in _spans(item.options)]
            mask = parts[0]
            for part in parts[1:]:
                mask = self._call(aten.logical_or.default, mask, part)
        else:
            mask = self._call(aten.logical_not.default, self.kept)
            mask = mask if self.optioned is None else self._call(aten.logical_and.default, mask, self.optioned)
        factor = self._masked(None if item.probs is None else self._slots(item.probs), mask)
        factor = self._call(aten.sum.dim_IntList, factor, [1], True)
        if item.value is self.layer.match.tokens:
            value = self._matrix(item.value, [self.size[0], -1])
        else:
            value = self._call(aten.reshape.default, self._known(item.value), [1, -1])
        return self._call(aten.mul.Tensor, value, factor)

    def _rows_in(self, ids: Node) -> tuple[Node, Node]:
        """What is permuted: tokens and their experts, or one row for each choice where rows of one token differ."""
        match, (tokens, top_k) = self.layer.match, self.size
        if match.scale is None and not match.by_choice:
            return self._matrix(match.tokens, [tokens, -1]), ids
        x = self._matrix(match.tokens, [tokens * top_k if match.by_choice else tokens, -1])
        if match.scale is not None:
            factor = self._call(aten.unsqueeze.default, self._slots(match.scale), 2)
            apart = self._call(aten.reshape.default, x, [tokens, -1, meta.tensor(x).shape[1]])
            x = self._call(aten.mul.Tensor, apart, factor)
            x = self._call(aten.reshape.default, x, [tokens * top_k, -1])
        return x, self._call(aten.reshape.default, ids, [tokens * top_k, 1])

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
            if first.kind not in ("block", "slice"):
                return first.node
            held = int(meta.tensor(first.node).shape[0])
            if first.kind == "slice":
                return self._served_part(first, first.node, held)
            blocks = self._call(aten.reshape.default, first.node, [held // first.size, *first.shape])
            return self._served_part(first, blocks, held // first.size)

    def _served_part(self, first: Source, weight: Node, held: int) -> Node:
        """The experts that are computed; some models keep room for options that have none."""
        count = self.layer.num_experts
        if held == count:
            return weight
        return self._call(aten.slice.Tensor, weight, 0, first.index, first.index + count)

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
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            experts = [str(at) for at, name in enumerate(names) if name == twice]
            raise CaptureError(
                f"recognize-moe: {meta.where(sources[0].node)}: experts {', '.join(experts)} share the parameter {twice}, which in a stack "
                "would be trained once for each of them; give each expert a parameter of its own (copy.deepcopy of the module)."
            )
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
            **({} if self.served is None else {"partly_served": True}),
            **({} if match.keep is None else {"drops": True, "lone_options": self.optioned is not None}),
        }


def _spans(options: tuple[int, ...]) -> list[tuple[int, int]]:
    """Runs of neighbours: first option and the one behind the last."""
    spans: list[tuple[int, int]] = []
    for option in sorted(options):
        if spans and spans[-1][1] == option:
            spans[-1] = spans[-1][0], option + 1
        else:
            spans.append((option, option + 1))
    return spans


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
