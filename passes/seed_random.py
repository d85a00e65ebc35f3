"""Draw random numbers by global index, so that every layout sees the same ones.

Before:  dropout(x, p, True), rand_like(x), uniform(x, a, b), bernoulli(probs), randint(n, shape), multinomial(probs, n)
After:   the formulas of `moecompile.draws` over moe.uniform(x, seed), whose element depends on the seed and its place in the global
         tensor only; inside an expert over moe.uniform_rows(x, seed, places), whose places are those of the tokens' choices

The seed is an input of the program, a new one each call; each op folds a stream number of its own into it. The numbers are not those
of torch's own generator, whose order no sharded program can follow. Does nothing in a model without random ops.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from moecompile import draws, meta, ops
from moecompile import graph as graphs
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
                made = draws.FORMULAS[node.target](node, draw)
            graphs.replace(node, made)
        return len(calls)


def _is_random(node: Node) -> bool:
    """Whether a node draws numbers that a formula can make of uniform ones; fused attention that drops is refused."""
    if node.target is aten.scaled_dot_product_attention.default:
        probability = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        if probability:
            raise PassError(
                f"seed-random: {meta.where(node)} drops attention weights inside scaled_dot_product_attention, where no pass can seed "
                f"them by global index; set the attention dropout to 0, or use an eager attention (attn_implementation='eager')."
            )
    return draws.draws(node)


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
