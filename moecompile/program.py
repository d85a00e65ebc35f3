"""Program: one sharded graph together with what its inputs, outputs and history mean."""

from __future__ import annotations

import difflib
import enum
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .compat import TreeSpec
from .layout import Layout
from .mesh import Mesh
from .placement.gather import Gather
from .placement.types import Placement, Shard
from .plan import Plan
from .printer import program_text, saved_text

# What an output is that counts a microbatch's valid tokens, for the runtime to add up before a step.
NUM_VALID = "num_valid"


class Level(enum.Enum):
    """Which of the two levels of the IR a graph stands at."""

    MODEL = "forward and loss; autograd derives the backward"
    STEP = "forward, loss and backward as one joint graph"


class InputKind(enum.Enum):
    """Where the value of a placeholder comes from."""

    PARAM = "param"
    BUFFER = "buffer"
    CONSTANT = "constant"
    BATCH = "batch"
    OFFSET = "offset"  # this rank's index on an axis, times a stride: 0-d int64, differs between ranks
    SEED = "seed"  # random seed of the call, equal on all ranks: 0-d int64
    SCALE = "scale"  # a number the runtime supplies per call, such as the step's valid tokens
    RELAYED = "relayed"  # a value of another graph of the pipeline, or of this stage's forward
    GATHERED = "gathered"  # the whole of a parameter that is held as shards
    TANGENT = "tangent"  # gradient of a user output, in a separate backward graph


@dataclass(frozen=True)
class Input:
    """One placeholder.

    ``fqns`` are the parameter or buffer names of the plain model behind it: one, or one per expert when the tensor is their
    stack along dim 0. ``shape`` is the global shape, ``placements`` say how this rank's part is cut from it. A BATCH input
    has the index of its leaf in the flattened call (``leaf``); an OFFSET has its ``axis`` and ``stride``.
    """

    kind: InputKind
    name: str
    fqns: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    placements: tuple[tuple[str, Placement], ...] = ()
    requires_grad: bool = False
    leaf: int = -1
    axis: str = ""
    stride: int = 1

    def placed(self, axis: str, placement: Placement) -> Input:
        """The same input with ``axis`` placed."""
        rest = tuple((key, found) for key, found in self.placements if key != axis)
        return replace(self, placements=(*rest, (axis, placement)))

    @property
    def stacked(self) -> bool:
        return len(self.fqns) > 1

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Shape of one rank's part; of the largest one where a dim does not divide, to which the others are padded."""
        shape = list(self.shape)
        for axis, placed in self.placements:
            if isinstance(placed, Shard):
                shape[placed.dim] = -(-shape[placed.dim] // mesh.size(axis))
        return tuple(shape)


class OutputKind(enum.Enum):
    """What an element of the output tuple is for."""

    LOSS = "loss"
    USER = "user"
    GRAD = "grad"
    METRIC = "metric"
    BUFFER = "buffer"  # what a buffer holds after the forward that wrote it
    SAVED = "saved"  # kept for a separate backward graph


AUX = "aux"  # METRIC: what the loss holds for a layer's router


@dataclass(frozen=True)
class Output:
    """One element of the output tuple.

    USER: ``leaf`` is its place in the flattened return value of the model. GRAD: ``name`` is the placeholder whose gradient
    it is. METRIC: ``name`` is the module path and ``what`` the quantity. BUFFER: ``name`` is that of the buffer; the value is
    whole, and the same on every rank.
    """

    kind: OutputKind
    name: str = ""
    leaf: int = -1
    what: str = ""
    placements: tuple[tuple[str, Placement], ...] = ()


@dataclass(frozen=True)
class HistoryEntry:
    """What one pass did: its text form, number of rewrites, node counts, seconds, text and diff of the graph.

    ``declined`` says what the pass left as it was, and why.
    ``before`` is the text that it found. ``seconds`` is all of it, ``verify_seconds`` the part that the verifier took.
    """

    pass_text: str
    rewrites: int
    nodes_before: int
    nodes_after: int
    seconds: float
    ops: tuple[tuple[str, int], ...]
    text: str = ""
    before: str = field(default="", repr=False)
    verify_seconds: float = 0.0
    declined: tuple[str, ...] = ()

    @cached_property
    def diff(self) -> str:
        """What the pass changed of the text."""
        if self.text == self.before:
            return ""
        lines = self.before.splitlines(), self.text.splitlines()
        return "\n".join(difflib.unified_diff(*lines, lineterm="", n=1))


@dataclass
class Program:
    """A graph whose placeholders line up with ``inputs`` and whose output tuple lines up with ``outputs``.

    ``layout`` says which layers stand on which pipeline stage; None without stages.
    ``gathers`` lists the lines of the user's code that run whole on every rank because no rule could place them,
    ``unrouted`` what looks like an MoE layer and runs data-parallel, with the reason.
    """

    graph_module: GraphModule
    inputs: list[Input]
    outputs: list[Output]
    plan: Plan
    mesh: Mesh
    level: Level = Level.MODEL
    facts: frozenset[Any] = frozenset()
    history: list[HistoryEntry] = field(default_factory=list)
    in_spec: TreeSpec | None = None
    out_spec: TreeSpec | None = None
    out_template: tuple[Any, ...] = ()
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    layers: list[dict[str, Any]] = field(default_factory=list)
    unrouted: list[dict[str, Any]] = field(default_factory=list)
    gathers: list[Gather] = field(default_factory=list)
    pipeline: str = ""
    layout: Layout | None = None

    @property
    def graph(self) -> torch.fx.Graph:
        return self.graph_module.graph

    def placeholders(self) -> list[Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    def items(self) -> Iterator[tuple[Node, Input]]:
        """Placeholders with their meaning."""
        return iter(zip(self.placeholders(), self.inputs, strict=True))

    def output_nodes(self) -> list[Any]:
        return list(self.graph.output_node().args[0])  # type: ignore[arg-type]

    def __str__(self) -> str:
        return program_text(self)

    def text(self, *, sources: bool = False) -> str:
        """The program as runnable Python; ``sources`` adds file and line of the user's code behind each node."""
        return program_text(self, sources=sources)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the program as a Python file that `moecompile.load` reads back, also after edits by hand.

        Raises CaptureError if the model returns constants that have no text form.
        """
        Path(path).write_text(saved_text(self), encoding="utf-8")
