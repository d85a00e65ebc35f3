"""Draw random numbers by global index, so that every layout sees the same ones.

Before:  dropout(x, p, True), rand_like(x), uniform(x, a, b), bernoulli(probs)
After:   the same formula over moe.uniform(x, seed), whose element depends on the seed and its place in the global tensor only;
         inside an expert over moe.uniform_rows(x, seed, places), whose places are those of the tokens' choices

The seed is an input of the program, a new one each call; each op folds a stream number of its own into it. The numbers are not those
of torch's own generator, whose order no sharded program can follow. Does nothing in a model without random ops.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from moecompile import graph as graphs
from moecompile import meta, ops
from moecompile.errors import PassError
from moecompile.pass_base import Fact, Numerics, Pass, PassContext
from moecompile.program import Input, InputKind

aten = torch.ops.aten


@dataclass(frozen=True)
class SeedRandom(Pass):
    """Replace torch's random ops by counter-based ones."""

    name: ClassVar[str] = "seed-random"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.MOE_OPS})
    numerics: ClassVar[Numerics] = Numerics.LOSSY

    def run(self, graph: GraphModule, ctx: PassContext) -> int:
        calls = [node for node in graph.graph.nodes if node.op == "call_function" and _is_random(node)]
        if not calls:
            return 0
        draw = _Source(graph.graph, ctx)
        for node in calls:
            with graph.graph.inserting_before(node):
                made = _REWRITES[node.target](node, draw)
            graphs.replace(node, made)
        return len(calls)


def _is_random(node: Node) -> bool:
    """Whether a node draws numbers; a dropout that is off does not."""
    if node.target is aten.dropout.default:
        rate: Any = node.args[1]
        return bool(node.args[2]) and float(rate) != 0.0
    if node.target is aten.scaled_dot_product_attention.default:
        probability = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        if probability:
            raise PassError(
                f"seed-random: {meta.where(node)} drops attention weights inside scaled_dot_product_attention, where no pass can seed "
                f"them by global index; set the attention dropout to 0, or use an eager attention (attn_implementation='eager')."
            )
    return node.target in _REWRITES


class _Source:
    """Streams of uniform numbers, each with a seed folded at the start of the graph, outside every layer."""

    def __init__(self, graph: Graph, ctx: PassContext) -> None:
        self.graph, self.ctx, self.streams = graph, ctx, 0
        self.seed = ctx.add_input(Input(InputKind.SEED, "seed"), torch.int64)
        self._after = self.seed
        self._rows: dict[Node, Node] = {}

    def call(self, target: Any, *args: Any, like: Node, **kwargs: Any) -> Node:
        return graphs.call(self.graph, target, *args, like=like, mode=self.ctx.mode, **kwargs)

    def uniform(self, like: Node, node: Node) -> Node:
        """Numbers in [0, 1) of the shape of ``like``, in its floating dtype."""
        with self.graph.inserting_after(self._after):
            seed = graphs.call(self.graph, ops.fold_seed, self.seed, self.streams, mode=self.ctx.mode)
        self._after, self.streams = seed, self.streams + 1
        permute = _permute_of(like)
        if permute is not None:
            return self.call(ops.uniform_rows, like, seed, self._places(permute), like=node)
        return self.call(ops.uniform, like, seed, [], [], [], [], like=node)

    def _places(self, permute: Node) -> Node:
        """The place in the batch of each row of an expert region, made once for each."""
        if permute not in self._rows:
            row_map = graphs.items(permute)[2]
            with self.graph.inserting_after(row_map):
                self._rows[permute] = self.call(ops.global_rows, row_map, [], [], [], [], like=permute)
        return self._rows[permute]


def _permute_of(node: Node) -> Node | None:
    """The permute whose rows ``node`` holds: what an expert computes."""
    seen, todo = {node}, [node]
    while todo:
        here = todo.pop()
        source = here.args[0] if here.target is operator.getitem else None
        if isinstance(source, Node) and source.target is ops.permute:
            if here.args[1] == 0:
                return source
            continue
        if here.target is ops.unpermute:
            continue
        todo += [item for item in here.all_input_nodes if item not in seen]
        seen.update(todo)
    return None


def _dropout(node: Node, draw: _Source) -> Node:
    source, probability = node.args[0], float(node.args[1])  # type: ignore[arg-type]
    assert isinstance(source, Node)
    kept = draw.call(aten.ge.Scalar, draw.uniform(source, node), probability, like=node)
    scaled = draw.call(aten.mul.Tensor, source, 1.0 / (1.0 - probability) if probability < 1 else 0.0, like=node)
    return draw.call(aten.mul.Tensor, scaled, kept, like=node)


def _as_type(node: Node, made: Node, draw: _Source) -> Node:
    wanted = meta.tensor(node).dtype
    return (
        made if meta.tensor(made).dtype == wanted else draw.call(aten._to_copy.default, made, like=node, dtype=wanted)
    )


def _rand_like(node: Node, draw: _Source) -> Node:
    assert isinstance(node.args[0], Node)
    return _as_type(node, draw.uniform(node.args[0], node), draw)


def _rand(node: Node, draw: _Source) -> Node:
    found = meta.tensor(node)
    like = draw.call(aten.zeros.default, list(found.shape), like=node, dtype=torch.float32, device=found.device)
    return _as_type(node, draw.uniform(like, node), draw)


def _uniform(node: Node, draw: _Source) -> Node:
    source = node.args[0]
    assert isinstance(source, Node)
    low, high = (float(arg) for arg in (*node.args[1:3], *(0.0, 1.0)[len(node.args) - 1 :]))  # type: ignore[arg-type]
    scaled = draw.call(aten.mul.Tensor, draw.uniform(source, node), high - low, like=node)
    return _as_type(node, draw.call(aten.add.Tensor, scaled, low, like=node), draw)


def _normal_from(like: Node, node: Node, draw: _Source) -> Node:
    """Box and Muller: two uniform numbers make one normal one."""
    first = draw.call(aten.rsub.Scalar, draw.uniform(like, node), 1.0, like=node)  # in (0, 1]
    angle = draw.call(aten.mul.Tensor, draw.uniform(like, node), 2 * math.pi, like=node)
    radius = draw.call(
        aten.sqrt.default,
        draw.call(aten.mul.Tensor, draw.call(aten.log.default, first, like=node), -2.0, like=node),
        like=node,
    )
    return draw.call(aten.mul.Tensor, radius, draw.call(aten.cos.default, angle, like=node), like=node)


def _randn_like(node: Node, draw: _Source) -> Node:
    assert isinstance(node.args[0], Node)
    return _as_type(node, _normal_from(node.args[0], node, draw), draw)


def _randn(node: Node, draw: _Source) -> Node:
    found = meta.tensor(node)
    like = draw.call(aten.zeros.default, list(found.shape), like=node, dtype=torch.float32, device=found.device)
    return _as_type(node, _normal_from(like, node, draw), draw)


def _exponential(node: Node, draw: _Source) -> Node:
    """By inversion, and never 0, as in torch: models take its logarithm."""
    source, rate = node.args[0], float(node.args[1]) if len(node.args) > 1 else 1.0  # type: ignore[arg-type]
    assert isinstance(source, Node)
    kept = draw.call(aten.rsub.Scalar, draw.uniform(source, node), 1.0, like=node)  # in (0, 1]
    made = draw.call(aten.neg.default, draw.call(aten.log.default, kept, like=node), like=node)
    made = draw.call(aten.clamp_min.default, made, 2.0**-25, like=node)
    return _as_type(node, draw.call(aten.div.Tensor, made, rate, like=node), draw)


def _bernoulli(node: Node, draw: _Source) -> Node:
    source = node.args[0]
    assert isinstance(source, Node)
    chance: Any = source if node.target is aten.bernoulli.default else node.args[1]
    op = aten.lt.Tensor if isinstance(chance, Node) else aten.lt.Scalar
    return _as_type(node, draw.call(op, draw.uniform(source, node), chance, like=node), draw)


_REWRITES: dict[Any, Callable[[Node, _Source], Node]] = {
    aten.dropout.default: _dropout,
    aten.rand_like.default: _rand_like,
    aten.rand.default: _rand,
    aten.uniform.default: _uniform,
    aten.randn_like.default: _randn_like,
    aten.randn.default: _randn,
    aten.exponential.default: _exponential,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli,
}
