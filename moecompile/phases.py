"""A program in up to three parts: parameters that are gathered once, what runs for each microbatch, and what is due behind the last.

`shard-params` marks in the graph what may be kept from call to call and what may be put off. Run as a whole the program means the
same; in parts it gathers when a shard has changed, and reduces gradients once a call.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Graph, Node

from . import graph as graphs
from . import meta
from .placement.types import Shard
from .program import Input, InputKind, Output, OutputKind, Program
from .runtime.executor import Executor
from .runtime.process_groups import ProcessGroups
from .weights import Weights, part_of


@dataclass(frozen=True)
class Phases:
    """``head`` takes parameters and returns their wholes, which are the GATHERED inputs of ``body``.

    ``body`` returns the program's outputs except those at the places ``late``, and behind them the SAVED inputs of ``tail``, by name.
    ``tail`` gives the outputs at the places ``reduced``: all late ones, or those of some pipeline stages.
    """

    body: Program
    head: Program | None = None
    tail: Program | None = None
    late: tuple[int, ...] = ()
    reduced: tuple[int, ...] = ()

    @property
    def kept(self) -> list[int]:
        """Which outputs of the program those of the body are; what is saved for the tail stands behind them."""
        own = sum(item.kind is not OutputKind.SAVED for item in self.body.outputs)
        return [at for at in range(own + len(self.late)) if at not in self.late]

    def finish(self, outputs: Sequence[Any], tail: Callable[[Sequence[Any]], Sequence[Any]]) -> list[Any]:
        """All outputs of the program, in order, from those of the body; None for what a tail of some stages does not give."""
        assert self.tail is not None
        named = {item.name: value for item, value in zip(self.body.outputs, outputs, strict=True)}
        found = dict(zip(self.kept, outputs, strict=False))
        found |= zip(self.reduced, tail([named[item.name] for item in self.tail.inputs]), strict=True)
        return [found.get(at) for at in range(len(self.kept) + len(self.late))]


def split_phases(program: Program, stages: Container[int] | None = None) -> Phases:
    """The parts of a program; all of it is ``body`` where nothing is marked.

    ``stages``: head and tail only do what these pipeline stages need. The body is that of all stages.
    """

    def is_own(node: Node) -> bool:
        return stages is None or meta.stage(node) in stages

    wholes = {node: name for node in program.graph.nodes if (name := meta.whole(node)) is not None}
    late = _deferred(program.graph)
    if not wholes and not late:
        return Phases(program)
    results = program.output_nodes()
    places = tuple(at for at, node in enumerate(results) if node in late)
    raw = list(dict.fromkeys(source for node in late for source in node.all_input_nodes if source not in late))
    by_name = {item.name: item for item in program.inputs}
    gathered = {
        node: replace(by_name[name], kind=InputKind.GATHERED, name=node.name, placements=())
        for node, name in wholes.items()
    }
    own = [node for node in wholes if is_own(node)]
    head = _part(program, own, [Output(OutputKind.SAVED, wholes[node]) for node in own], {})
    kept = [
        (node, item) for at, (node, item) in enumerate(zip(results, program.outputs, strict=True)) if at not in places
    ]
    saved = [(node, Output(OutputKind.SAVED, node.name)) for node in raw]
    body = _part(program, [node for node, _ in [*kept, *saved]], [item for _, item in [*kept, *saved]], gathered)
    reduced = tuple(at for at in places if is_own(results[at]))
    given = {node: Input(InputKind.RELAYED, node.name) for node in raw}
    tail = _part(program, [results[at] for at in reduced], [program.outputs[at] for at in reduced], given)
    return Phases(body, head if wholes else None, tail if late else None, places, reduced)


def _deferred(graph: Graph) -> set[Node]:
    """What is put off, and all that depends on it."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op != "output" and (meta.is_deferred(node) or any(source in found for source in node.all_input_nodes)):
            found.add(node)
    return found


def _part(program: Program, wanted: Sequence[Any], outputs: list[Output], given: Mapping[Node, Input]) -> Program:
    """The part of a program that computes ``wanted`` from its inputs and from the nodes in ``given``, which become inputs."""
    nodes = [node for node in wanted if isinstance(node, Node)]
    needed = graphs.ancestors(*nodes, stop=given) | set(nodes)
    made, env, inputs = Graph(), dict[Node, Node](), list[Input]()
    read = [
        *(pair for pair in program.items() if pair[0] in needed),
        *((n, item) for n, item in given.items() if n in needed),
    ]
    for node, item in read:
        env[node] = made.placeholder(node.name)
        env[node].meta = meta.copy_meta(node)
        inputs.append(replace(item, name=env[node].name))
    for node in program.graph.nodes:
        if node in needed and node not in env:
            env[node] = made.node_copy(node, env.__getitem__)
            env[node].meta = meta.copy_meta(node)
    made.output(tuple(env[node] if isinstance(node, Node) else node for node in wanted))
    module = graphs.as_module(made, program.graph_module)
    return replace(
        program, graph_module=module, inputs=inputs, outputs=outputs, history=[], in_spec=None, out_spec=None
    )


class KeptParameters:
    """Gathers parameters into ``weights.kept`` when a shard on any rank is no longer what it was gathered from."""

    def __init__(self, head: Program, groups: ProcessGroups, weights: Weights) -> None:
        self.head, self.groups, self.weights = head, groups, weights
        by_name = {item.name: item for item in head.inputs}
        self._items = [by_name[output.name] for output in head.outputs]
        self._executor = Executor(head, groups)

    def refresh(self) -> None:
        """Collective: the ranks agree first, since a change of a shard is seen on the rank that holds it."""
        stale = torch.tensor(int(any(self._is_stale(item) for item in self._items)))
        if self.groups.control is not None:
            dist.all_reduce(stale, dist.ReduceOp.MAX, group=self.groups.control)
        if stale:
            self._drop(item.fqns for item in self._items)
            with torch.no_grad():
                wholes = self._executor([self.weights.value(item) for item in self.head.inputs])
            self.weights.kept.update(zip((item.fqns for item in self._items), wholes, strict=True))

    def _drop(self, names: Iterable[tuple[str, ...]]) -> None:
        for one in names:
            self.weights.kept.pop(one, None)

    def _is_stale(self, item: Input) -> bool:
        """Compared number by number: a version counter would miss what is written through ``.data``."""
        whole = self.weights.kept.get(item.fqns)
        (axis, placed), mesh = item.placements[-1], self.groups.mesh
        assert isinstance(placed, Shard)
        if whole is None:
            return True
        shard: Tensor = self.weights.value(item)
        if (whole.dtype, whole.device) != (shard.dtype, shard.device):
            return True
        part = part_of(whole, placed, mesh.size(axis), mesh.axis_index(axis, self.groups.rank))
        return not torch.equal(part, shard.narrow(placed.dim, 0, part.shape[placed.dim]))
