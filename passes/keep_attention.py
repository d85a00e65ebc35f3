"""Keep the probabilities of short causal attention for the backward, which then does not compute them again.

Before:  _scaled_dot_product_flash_attention_for_cpu and its backward, which share the logarithms of sums
After:   moe_cpu.causal_attention and its backward, which share the probabilities

Flash attention (Dao et al. 2022) computes scores and probabilities twice, so that nothing as long as the square of the sequence is
kept. For a few hundred tokens that is little memory: (S + 64) / 2 numbers per head and token. Comes after ``lower-ops``: it is worth it
on the CPU; a graph that was lowered to another backend is left as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from moecompile import graph as graphs
from moecompile import meta
from moecompile.ops import cpu
from moecompile.pass_base import Fact, Numerics, Pass, PassContext
from moecompile.program import Level

aten = torch.ops.aten
_FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True)
class KeepAttention(Pass):
    """Keep the probabilities of causal attention over ``least`` to ``longest`` tokens for its backward."""

    least: int = 192  # shorter: flash attention is as fast
    longest: int = 512  # longer: more memory than the time is worth

    name: ClassVar[str] = "keep-attention"
    level: ClassVar[Level | None] = Level.STEP
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.LOWERED})
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATING  # the softmax is taken over all keys at once

    def run(self, graph: GraphModule, ctx: PassContext) -> int:
        if not any(str(node.target).startswith(cpu.NAMESPACE) for node in graph.graph.nodes):
            return 0
        pairs = [
            (flash, backward)
            for flash in graphs.find(graph, _FLASH)
            if self._fits(flash) and (backward := _backward_of(flash)) is not None
        ]
        for flash, backward in pairs:
            operands = tuple(graphs.arguments(flash)[name] for name in ("query", "key", "value"))
            scale = graphs.arguments(flash)["scale"] or meta.tensor(operands[0]).shape[-1] ** -0.5
            before, after = graphs.items(flash), graphs.items(backward)
            with graph.graph.inserting_before(flash):
                made = graphs.call(graph.graph, cpu.causal_attention, *operands, scale, like=flash, mode=ctx.mode)
                out, probs = graphs.unpack(graph.graph, made)
            if meta.has_placements(before[0]):
                meta.set_placements(out, meta.placements(before[0]))
            with graph.graph.inserting_before(backward):
                made = graphs.call(
                    graph.graph,
                    cpu.causal_attention_backward,
                    backward.args[0],
                    *operands,
                    out,
                    probs,
                    scale,
                    like=backward,
                    mode=ctx.mode,
                )
                gradients = graphs.unpack(graph.graph, made)
            for index, old in after.items():
                graphs.replace(old, gradients[index])
            graphs.replace(before[0], out)
        if pairs:
            graphs.eliminate_dead(graph.graph)
        return len(pairs)

    def _fits(self, flash: Node) -> bool:
        given = graphs.arguments(flash)
        query, key, value = (meta.tensor(given[name]) for name in ("query", "key", "value"))
        return (
            given["is_causal"]
            and given["attn_mask"] is None
            and given["dropout_p"] == 0.0
            and query.shape == key.shape == value.shape
            and query.dtype in (torch.float32, torch.float64)
            and self.least <= query.shape[2] <= self.longest
        )


def _backward_of(flash: Node) -> Node | None:
    """The backward of an attention, if it alone reads the logarithms of sums and says the same as the forward."""
    found = graphs.items(flash)
    if set(found) != {0, 1} or len(found[1].users) != 1:
        return None
    (backward,) = found[1].users
    if backward.target is not _FLASH_BACKWARD:
        return None
    ahead, back = graphs.arguments(flash), graphs.arguments(backward)
    same: list[Any] = ["query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale"]
    fits = back["out"] is found[0] and back["logsumexp"] is found[1] and all(ahead[name] == back[name] for name in same)
    return backward if fits else None
