"""Small graphs with `moe::` collectives, built node by node:

tests of the runtime depend on no capture and no pass.
"""

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from moecompile import ops

TOP_K = 2


class Builder:
    """A graph in the making. Nodes carry the module path `module`, as capture would give them."""

    def __init__(self, module: str = "") -> None:
        self.graph = Graph()
        self.module = module

    def input(self, name: str) -> Node:
        return self.graph.placeholder(name)

    def call(self, target: Any, *args: Any) -> Node:
        node = self.graph.create_node("call_function", target, args, name=target.__name__.removesuffix(".default"))
        if self.module:
            node.meta["nn_module_stack"] = {self.module: (self.module, torch.nn.Module)}
        return node

    def unpack(self, node: Node, count: int) -> list[Node]:
        return [self.call(_item, node, i) for i in range(count)]

    def finish(self, *outputs: Node) -> GraphModule:
        self.graph.output(outputs)
        return GraphModule(torch.nn.Module(), self.graph)


def _item(items: Any, index: int) -> Any:
    return items[index]


def sum_sizes(sizes: torch.Tensor) -> int:
    return int(sizes.sum())


def num_tokens(x: torch.Tensor) -> int:
    return x.shape[0]


def moe_layer(build: Builder, x: Node, ids: Node, probs: Node, weight: Node, num_experts: int, ep: int) -> Node:
    """Tokens x [T, H] through one linear layer per expert, experts over axis ep; returns [T, H]."""
    rows, counts, row_map = build.unpack(build.call(ops.permute, x, ids, num_experts), 3)
    received = build.call(ops.exchange_counts, counts, ep, "ep")
    send, recv, tokens = build.unpack(build.call(ops.sizes_to_host, counts, received), 3)
    arrived = build.call(ops.dispatch, rows, send, recv, build.call(sum_sizes, recv), "ep")
    done = build.call(ops.grouped_linear, arrived, tokens, weight)
    back = build.call(ops.combine, done, recv, send, build.call(sum_sizes, send), "ep")
    return build.call(ops.unpermute, back, row_map, build.call(num_tokens, x), TOP_K, probs)


def moe_graph(num_experts: int, ep: int) -> GraphModule:
    """Inputs x, ids, probs, weight (this rank's experts); outputs:

    the layer's result and its sum over all ranks.
    """
    build = Builder("layers.0.mlp")
    x, ids, probs, weight = map(build.input, ("x", "ids", "probs", "weight"))
    y = moe_layer(build, x, ids, probs, weight, num_experts, ep)
    loss = build.call(torch.sum, build.call(torch.square, y))
    total = build.call(ops.all_reduce, loss, "sum", "world")
    return build.finish(y, total)


def moe_inputs(rank: int, num_experts: int, ep: int, *, tokens: int = 6, width: int = 4) -> list[torch.Tensor]:
    """Inputs of `moe_graph` for one rank:

    own tokens, some experts idle; ranks of equal ep index share weights.
    """
    own = torch.Generator().manual_seed(100 + rank)
    shared = torch.Generator().manual_seed(7)
    x = torch.randn(tokens, width, generator=own, dtype=torch.float64)
    # Two different experts per token, the last one never chosen.
    ids = torch.stack([torch.randperm(num_experts - 1, generator=own)[:TOP_K] for _ in range(tokens)])
    probs = torch.rand(tokens, TOP_K, generator=own, dtype=torch.float64)
    weight = torch.randn(num_experts, width, width, generator=shared, dtype=torch.float64)
    local = num_experts // ep
    return [x, ids, probs, weight[rank % ep * local :][:local].clone()]


def plain_moe(x: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same layer on one process, with all experts and no `moe::` op."""
    return torch.einsum("tk,tkoi,ti->to", probs, weight[ids], x)
