"""Say on which pipeline stage each node is computed.

Before:  one graph
After:   the same graph, every node with its stage; a parameter that several stages read is one input on each of them

Layers are the items of the model's longest list of modules (of equally long ones: of that which computes more), or of the list
that ``layers`` names. What stands before them is on the stage of the embedding, what reads the last of them on the stage of the
loss. No node moves: `moecompile.stages` takes the graph apart, after ``differentiate``. Does nothing when pp == 1.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import ClassVar

from torch.fx import GraphModule, Node

from moecompile import flops, meta, ops
from moecompile import graph as graphs
from moecompile import layout as layouts
from moecompile.errors import PassError
from moecompile.layout import Layout
from moecompile.pass_base import Fact, Numerics, Pass, PassContext
from moecompile.placement.types import PARTIAL
from moecompile.program import NUM_VALID, InputKind, OutputKind, Program
from moecompile.stages import check_buffers, weighted

_ITEM = re.compile(r"\.(\d+)(?=\.|$)")


@dataclass(frozen=True)
class SplitStages(Pass):
    """Give every node a pipeline stage; ``layers`` is the path of the list whose items are the layers, such as ``model.blocks``."""

    layers: str = ""

    name: ClassVar[str] = "split-stages"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.MOE_OPS, Fact.TOKENS_SHARDED})
    numerics: ClassVar[Numerics] = Numerics.BITWISE

    def run(self, graph: GraphModule, ctx: PassContext) -> int:
        if ctx.plan.pp == 1 or ctx.program.layout is not None:
            return 0
        found = self._find_layers(graph)
        number = max(found.values()) + 1
        ctx.program.layout = layout = _layout(ctx, found, number)
        stages = layout.layer_stages()
        _tag(ctx.program, {node: stages[at] for node, at in found.items()}, found, number, len(layout.stages) - 1)
        _check_order(graph)
        tagged = {node: at for node in graph.graph.nodes if (at := meta.stage(node)) is not None}
        check_buffers(ctx.program, tagged)
        _split_parameters(ctx.program)
        program = ctx.program
        program.outputs[:] = [
            replace(item, placements=(*item.placements, ("pp", PARTIAL)))
            if item.kind is OutputKind.METRIC and item.what != NUM_VALID
            else item
            for item in program.outputs
        ]
        return sum(node.op == "call_function" for node in graph.graph.nodes)

    def _find_layers(self, graph: GraphModule) -> dict[Node, int]:
        """The place in the order of layers of every node inside of one."""
        inside = {node: _items_around(node) for node in graph.graph.nodes}
        lists = {name for around in inside.values() for name, _ in around}
        lengths = Counter(name for name, _ in {item for around in inside.values() for item in around})
        run = {path for node in inside for path in meta.module_paths(node)}
        items: dict[Node, tuple[str, int]] = {}
        for node, around in inside.items():
            fits = [item for item in around if not self.layers or item[0] == self.layers]
            if fits:  # a list of one item that does not run itself holds no layers, if there is another list in it
                items[node] = next((one for one in fits if lengths[one[0]] > 1 or f"{one[0]}.{one[1]}" in run), fits[0])
        sizes = Counter(name for name, _ in dict.fromkeys(items.values()))
        if not sizes:
            named = (
                f"the list '{self.layers}' has no item that the graph runs"
                if self.layers
                else "no nn.ModuleList runs in it"
            )
            advice = f"name one of {', '.join(sorted(lists))}" if lists else "keep the layers in an nn.ModuleList"
            raise PassError(
                f"split-stages: the layers of the model cannot be found: {named}; {advice}, as in "
                "Plan(passes='+split-stages{layers=model.layers}') for the list model.layers."
            )
        calls = Counter(name for name, _ in items.values())
        chosen = max(sizes, key=lambda name: (sizes[name], calls[name]))  # of two such lists the first, on every rank
        places = sorted({index for name, index in items.values() if name == chosen})
        return {node: places.index(index) for node, (name, index) in items.items() if name == chosen}


def _items_around(node: Node) -> list[tuple[str, int]]:
    """List and index of each item of a list that the node is inside of, outermost first; an item need not run as a module itself."""
    found: dict[tuple[str, int], None] = {}
    for path in meta.module_paths(node):
        for match in _ITEM.finditer(path):
            found[path[: match.start()], int(match[1])] = None
    return list(found)


def _layout(ctx: PassContext, found: dict[Node, int], number: int) -> Layout:
    """The plan's layout for a model of so many layers."""
    pp, text = ctx.plan.pp, ctx.plan.layout
    if text is None or text == layouts.EVEN:
        return layouts.even(number, pp)
    if text in (layouts.BALANCED, layouts.BALANCED_FLOPS):
        price = _sizes(ctx.program) if text == layouts.BALANCED else _work(ctx.program)
        costs, first, last = [0.0] * number, 0.0, 0.0
        ahead = graphs.ancestors(*(node for node, at in found.items() if at == 0))
        for node, cost in price.items():
            readers = [found[user] for user in (node, *node.users) if user in found]
            if readers:
                costs[readers[0]] += cost
            elif node in ahead:
                first += cost
            else:
                last += cost
        return layouts.balanced(costs, pp, first, last)
    layout = layouts.parse(text)
    layouts.check(layout, pp, number)
    return layout


def _sizes(program: Program) -> dict[Node, float]:
    """Elements of every parameter."""
    return {node: float(meta.tensor(node).numel()) for node, item in program.items() if item.kind is InputKind.PARAM}


def _work(program: Program) -> dict[Node, float]:
    """FLOPs of every call; experts take as many rows as their layer's tokens choose, which is the mean over the ranks."""
    found, rows = dict[Node, float](), 0
    for node in program.graph.nodes:
        if node.target is ops.permute:
            rows = meta.tensor(node.args[1]).numel()
        if node.op == "call_function":
            found[node] = float(flops.of(node, rows))
    return found


def _tag(program: Program, fixed: dict[Node, int], found: dict[Node, int], number: int, last: int) -> None:
    """Give each call its stage: that of its layer, else by what it reads and who reads it."""
    trained = weighted(program)
    batch: set[Node] = {node for node, item in program.items() if item.kind is InputKind.BATCH}
    behind = {node for node, at in found.items() if at == number - 1}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        sources = node.all_input_nodes
        for group in (batch, behind):
            if any(source in group for source in sources):
                group.add(node)
        if node in fixed:
            meta.set_stage(node, fixed[node])
        elif node in behind and node in trained:
            meta.set_stage(node, last)
        elif node in batch or node not in trained:
            meta.set_stage(node, max((meta.stage(source) or 0 for source in sources), default=0))
    for node in reversed(program.graph.nodes):  # made of weights alone: where it is read first
        if node.op == "call_function" and meta.stage(node) is None:
            readers = [stage for user in node.users if (stage := meta.stage(user)) is not None]
            meta.set_stage(node, min(readers, default=last))


def _check_order(graph: GraphModule) -> None:
    for node in graph.graph.nodes:
        for source in node.all_input_nodes if node.op == "call_function" else ():
            here, there = meta.stage(node), meta.stage(source)
            if here is not None and there is not None and there > here:
                raise PassError(
                    f"split-stages: {meta.where(node)} on stage {here} reads {meta.where(source)} of the later stage {there}, so "
                    "the layers do not run in the order of their list; name another list with split-stages{layers=...}, or order the list."
                )


def _split_parameters(program: Program) -> None:
    """One input per stage that reads a parameter, so that each stage has a gradient of its own for it."""
    graph = program.graph
    last = program.placeholders()[-1]
    for node, item in list(program.items()):
        if item.kind is not InputKind.PARAM:
            continue
        readers: dict[int, list[Node]] = {}
        for user in node.users:
            stage = meta.stage(user)
            if stage is not None:
                readers.setdefault(stage, []).append(user)
        for at, stage in enumerate(sorted(readers)):
            if at == 0:
                meta.set_stage(node, stage)
                continue
            with graph.inserting_after(last):
                copy = graph.placeholder(f"{node.name}_stage{stage}")
            copy.meta = meta.copy_meta(node)
            meta.set_stage(copy, stage)
            for user in readers[stage]:
                user.replace_input_with(node, copy)
            program.inputs.append(replace(item, name=copy.name))
            last = copy
