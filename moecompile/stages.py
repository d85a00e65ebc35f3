"""Take a program whose nodes have pipeline stages apart: per stage a forward and a backward program.

A value that depends on no parameter (masks, position embeddings, counts of labels) is computed on every stage that reads it, since
every pipeline rank has the batch. Any other value goes from stage to stage, as far as its last reader; so do gradients, backwards.
Values that only a stage's own backward reads are kept there.

A buffer that the forward writes goes from microbatch to microbatch. The stage that writes it also reads it, and no other one does;
but where its new value depends on no parameter, every stage that reads it writes it, too, in a copy of its own.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from . import graph as graphs
from . import meta
from .errors import PassError
from .program import NUM_VALID, Input, InputKind, Output, OutputKind, Program


@dataclass(frozen=True)
class Relayed:
    """A tensor that stages hand on: its name in the whole graph, and what a buffer for it looks like."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Part:
    """A program that is half of a stage. ``returns`` names its outputs as the whole graph does, in order; ``reads`` are RELAYED inputs."""

    program: Program
    returns: tuple[str, ...]

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(item.name for item in self.program.inputs if item.kind is InputKind.RELAYED)


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline.

    ``outputs`` are the places of the whole program's outputs that it computes, and the names of their nodes. ``received`` comes
    from the stage before, ``sent`` goes to the one behind; ``received_grads`` and ``sent_grads`` go the other way. ``saved``
    is what a microbatch keeps from its forward for its backward. ``carried`` are buffers by the name of the input: what the forward
    leaves in them for the next microbatch. ``backward`` is None in a program without one.
    """

    index: int
    forward: Part
    backward: Part | None
    outputs: dict[int, str]
    received: tuple[Relayed, ...]
    sent: tuple[Relayed, ...]
    received_grads: tuple[Relayed, ...]
    sent_grads: tuple[Relayed, ...]
    saved: tuple[str, ...]
    carried: dict[str, str]


def cut_stages(program: Program, only: Container[int] | None = None) -> list[Stage]:
    """The stages of a program that ``split-stages`` has marked, in order: all of them, or those that ``only`` names."""
    if program.layout is None:
        raise PassError("the program has no pipeline stages; run split-stages over it, or use a plan with pp=1.")
    number = len(program.layout.stages)
    return _Cutter(program).run([at for at in range(number) if only is None or at in only])


def holders(program: Program) -> dict[str, tuple[int, ...]]:
    """The pipeline ranks whose stages read each parameter, by name; nothing for a program without stages."""
    found: dict[str, set[int]] = {}
    for node, item in program.items():
        stage = meta.stage(node)
        if stage is not None and item.kind is InputKind.PARAM:
            for name in item.fqns:
                found.setdefault(name, set()).add(stage % program.plan.pp)
    return {name: tuple(sorted(ranks)) for name, ranks in found.items()}


def weighted(program: Program) -> set[Node]:
    """All that depends on a parameter, or on a buffer in which the forward leaves what does."""
    found = {node for node, item in program.items() if item.kind in (InputKind.PARAM, InputKind.GATHERED)}
    written = _written(program)
    while True:
        for node in program.graph.nodes:
            if node.op not in ("placeholder", "output") and any(source in found for source in node.all_input_nodes):
                found.add(node)
        more = {node for node, new in written.items() if new in found} - found
        if not more:
            return found
        found |= more


def check_buffers(program: Program, stages: Mapping[Node, int]) -> None:
    """PassError for a buffer that one stage writes and another one reads, which would see it some microbatches too early or too late."""
    found = weighted(program)
    for node, new in _written(program).items():
        other = next((user for user in node.users if user in stages and stages[user] != stages.get(new)), None)
        if node in found and other is not None:
            raise PassError(
                f"split-stages: {meta.where(new)} on stage {stages.get(new)} writes a buffer in forward that {meta.where(other)} reads on "
                f"stage {stages[other]}, which runs other microbatches at that time; put both on one stage with layout=, update the buffer "
                "after the step, or use pp=1."
            )


def _written(program: Program) -> dict[Node, Node]:
    """The buffers that the forward reads and writes, each with its new value."""
    read = {name: node for node, item in program.items() if item.kind is InputKind.BUFFER for name in item.fqns}
    results = zip(program.output_nodes(), program.outputs, strict=True)
    return {
        read[item.name]: node
        for node, item in results
        if item.kind is OutputKind.BUFFER and item.name in read and isinstance(node, Node)
    }


class _Cutter:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.back: set[Node] = set()  # nodes of the backward
        self.free: set[Node] = set()  # forward nodes that depend on no parameter
        self.stage: dict[Node, int] = {}
        self.weighted, self.written = weighted(program), _written(program)
        for node in program.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            sources = node.all_input_nodes
            if meta.direction(node) is meta.Direction.BACKWARD or any(source in self.back for source in sources):
                self.back.add(node)
            if node not in self.back and node not in self.weighted:
                self.free.add(node)
            before = max((self.stage.get(source, 0) for source in sources if source not in self.free), default=0)
            found = meta.stage(node)
            self.stage[node] = before if found is None else found
        check_buffers(program, self.stage)

    def run(self, stages: Sequence[int]) -> list[Stage]:
        borders = sorted({border for at in stages for border in (at, at + 1)})
        nodes = self._forward_nodes
        ahead = {at: self._crossing(at, nodes) for at in borders}
        behind = {at: self._crossing_back(at) for at in borders}
        return [self._stage(at, ahead[at], ahead[at + 1], behind[at + 1], behind[at]) for at in stages]

    @property
    def _forward_nodes(self) -> list[Node]:
        return [node for node in self.stage if node not in self.back and node not in self.free]

    def _readers(self, node: Node) -> list[int]:
        return [self.stage[user] for user in node.users if user in self.stage and user not in self.free]

    def _crossing(self, border: int, nodes: list[Node]) -> list[Node]:
        """Forward values made before stage ``border`` that it or a later stage reads, forward or backward."""
        return [node for node in nodes if self.stage[node] < border and any(at >= border for at in self._readers(node))]

    def _crossing_back(self, border: int) -> list[Node]:
        """Gradients made on stage ``border`` or later that an earlier stage reads."""
        return [
            node
            for node in self.stage
            if node in self.back and self.stage[node] >= border and any(at < border for at in self._readers(node))
        ]

    def _stage(
        self, at: int, received: list[Node], sent: list[Node], grads: list[Node], sent_grads: list[Node]
    ) -> Stage:
        results = self.program.output_nodes()
        mine = {
            place: node
            for place, node in enumerate(results)
            if isinstance(node, Node) and self._computes(self.program.outputs[place], node, at)
        }
        behind = [node for node in self.stage if node in self.back and self.stage[node] == at]
        wanted_back = [
            *dict.fromkeys(
                [*(n for n in sent_grads if self.stage[n] == at), *(n for n in mine.values() if n in self.back)]
            )
        ]
        needed = self._needed(wanted_back, at, back=True)
        saved = [node for node in self.stage if node not in self.back and any(user in needed for user in node.users)]
        ahead = [n for n in mine.values() if n not in self.back]
        wanted = [
            *dict.fromkeys([*ahead, *(n for n in sent if self.stage[n] == at), *(n for n in saved if self._own(n, at))])
        ]
        forward = self._part(wanted, at, back=False)
        backward = self._part(wanted_back, at, back=True) if behind or grads or sent_grads else None
        handed = [tuple(_relayed(node) for node in nodes) for nodes in (received, sent, grads, sent_grads)]
        names = {place: node.name for place, node in mine.items()}
        kept = tuple(node.name for node in saved)
        carried = self._carried(forward, backward)
        return Stage(at, forward, backward, names, handed[0], handed[1], handed[2], handed[3], kept, carried)

    def _carried(self, *halves: Part | None) -> dict[str, str]:
        read = {item.name for half in halves if half is not None for item in half.program.inputs}
        return {node.name: new.name for node, new in self.written.items() if node.name in read}

    def _computes(self, item: Output, node: Node, at: int) -> bool:
        """Whether a stage gives an output of the program: results and buffers that take no weights come from all of them.

        Valid tokens are counted before the step.
        """
        if item.what == NUM_VALID:
            return False
        if item.kind not in (OutputKind.USER, OutputKind.BUFFER):
            return self.stage.get(node) == at
        here = self.stage.get(self.written.get(node, node), meta.stage(node))
        return here == at or here is None or node in self.free

    def _own(self, node: Node, at: int) -> bool:
        return node in self.free or self.stage[node] == at

    def _needed(self, wanted: Iterable[Node], at: int, *, back: bool) -> set[Node]:
        """The calls of one half of a stage that ``wanted`` takes, and its collectives."""
        found: set[Node] = set()
        todo = list(wanted)
        while todo:
            node = todo.pop()
            if node in found or node not in self.stage or (node in self.back) is not back:
                continue
            if (not back and not self._own(node, at)) or (back and self.stage[node] != at):
                continue
            found.add(node)
            todo += node.all_input_nodes
        return found

    def _part(self, wanted: list[Node], at: int, *, back: bool) -> Part:
        """The graph of one half: inputs of the program that it reads, then values of other graphs."""
        calls = self._needed(wanted, at, back=back)
        read = {source for node in calls for source in node.all_input_nodes} | set(wanted)
        made, env = Graph(), dict[Node, Node]()
        inputs: list[Input] = []
        for node, item in self.program.items():
            if node in read:
                env[node] = made.placeholder(node.name)
                env[node].meta = meta.copy_meta(node)
                inputs.append(replace(item, name=env[node].name))
        for node in self.stage:
            if node in read and node not in calls:
                env[node] = made.placeholder(node.name)
                env[node].meta = meta.copy_meta(node)
                inputs.append(Input(InputKind.RELAYED, node.name, shape=tuple(_sizes(node))))
        for node in self.program.graph.nodes:
            if node in calls:
                env[node] = made.node_copy(node, env.__getitem__)
                env[node].meta = meta.copy_meta(node)
        made.output(tuple(env[node] for node in wanted))
        names = {node: place for place, node in enumerate(self.program.output_nodes()) if isinstance(node, Node)}
        outputs = [
            self.program.outputs[names[node]] if node in names else Output(OutputKind.SAVED, node.name)
            for node in wanted
        ]
        part = replace(
            self.program,
            graph_module=graphs.as_module(made, self.program.graph_module),
            inputs=inputs,
            outputs=outputs,
            history=[],
            in_spec=None,
            out_spec=None,
        )
        return Part(part, tuple(node.name for node in wanted))


def _sizes(node: Node) -> tuple[Any, ...]:
    found = meta.value(node)
    return tuple(found.shape) if isinstance(found, torch.Tensor) else ()


def _relayed(node: Node) -> Relayed:
    """What stages send of a value; refused where its size is known at run time only."""
    found = node.meta.get("val")
    if not isinstance(found, torch.Tensor) or any(True for _ in graphs.symbolic_sizes(found)):
        raise PassError(
            f"{meta.where(node)} would have to go from one pipeline stage to another, but it is no tensor of known size; put the layers "
            "that share it on one stage."
        )
    return Relayed(node.name, tuple(found.shape), tuple(found.stride()), found.dtype)
