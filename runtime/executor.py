"""Run one rank's program: generated code, bound to this rank's process groups.

The code is generated once.  A second copy with profiler ranges around every module is made when a profiler
first looks. When a collective fails because a peer is gone, the error says in one sentence where this rank
was and which rank is missing.
"""

from __future__ import annotations

import ctypes
import itertools
import linecache
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from moecompile import meta
from moecompile.compat import profiler_enabled, without_autocast
from moecompile.program import Level, Program
from moecompile.runtime import cpu_kernels as cpu_kernels  # registers the kernels of moe_cpu::
from moecompile.runtime.faults import PeerError, are_missing, is_peer_fault, missing_ranks
from moecompile.runtime.process_groups import ProcessGroups, axis_of, bind

_ASSIGNED = re.compile(r"\s*(\w+)\s*(?::[^=]*)?=")


class Executor:
    """A program ready to run on this rank: ``executor(inputs)`` takes and returns flat lists.

    ``inputs`` line up with the placeholders, the returned tuple with ``program.outputs``.  Graphs at step
    level hold their own backward and run without autograd.  ``ranges``: put profiler ranges that carry module
    names around the nodes of each module; None means only while a profiler is on.  Under ``Plan(deterministic=True)`` it
    runs with torch's deterministic algorithms.  Raises PeerError when a peer died or did not arrive in time.
    """

    def __init__(self, program: Program, groups: ProcessGroups, *, ranges: bool | None = None) -> None:
        self.groups = groups
        self.ranges = ranges
        self._axes = {node.name: axis for node in program.graph.nodes if (axis := axis_of(node)) is not None}
        self._bound = bind(program.graph_module, groups)
        self._ranged: GraphModule | None = None
        self._num_inputs = len(program.inputs)
        self._no_grad = program.level is Level.STEP
        self._deterministic = program.plan.deterministic

    @property
    def code(self) -> str:
        """The Python that runs."""
        return str(self._bound.code)

    def __call__(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        if len(inputs) != self._num_inputs:
            raise ValueError(f"the program takes {self._num_inputs} inputs, but {len(inputs)} were passed.")
        with without_autocast(), torch.set_grad_enabled(torch.is_grad_enabled() and not self._no_grad):
            return self.run(inputs)

    def run(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The same for a caller that has turned off autocast, and autograd where the graph does without."""
        module = self._bound
        if self.ranges or (self.ranges is None and profiler_enabled()):
            module = self._with_ranges()
        try:
            with deterministic() if self._deterministic else nullcontext():
                outputs: tuple[Any, ...] = module.forward(*inputs)
            return outputs
        except Exception as error:
            node = _failed_node(error, module)
            if node is not None and node.name in self._axes and is_peer_fault(error):
                raise self._peer_fault(node) from error
            if node is not None:
                error.add_note(f"rank {self.groups.rank}, at {meta.where(node)}")
            raise

    def _with_ranges(self) -> GraphModule:
        if self._ranged is None:
            self._ranged = with_ranges(self._bound)
        return self._ranged

    def _peer_fault(self, node: Node) -> PeerError:
        """Name op, layer, phase, axis and the missing rank."""
        axis = self._axes[node.name]
        ranks = self.groups.ranks(axis)
        others = [rank for rank in ranks if rank != self.groups.rank]
        missing = missing_ranks(self.groups.fault_store, self.groups.rank, others, self.groups.hang_up)
        layer = meta.module_path(node) or meta.layer(node) or "the model"
        return PeerError(
            f"rank {self.groups.rank}: {node.name} of {layer} ({meta.direction(node).value}) failed on axis "
            f"{axis}, ranks {ranks}: {are_missing(missing)} (it died, or did not arrive within "
            f"timeout={self.groups.mesh.plan.timeout:g} s); look for its own error first, or raise "
            "Plan(timeout=...).",
            missing,
        )


@contextmanager
def deterministic() -> Iterator[None]:
    """Torch's deterministic algorithms inside, whatever is set outside."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _failed_node(error: BaseException, module: GraphModule) -> Node | None:
    """The node whose line of generated code the error went through."""
    forward = type(module).forward.__code__
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code is forward:
            found = _ASSIGNED.match(linecache.getline(forward.co_filename, line, frame.f_globals))
            name = found.group(1) if found else ""
            return next((node for node in module.graph.nodes if node.name == name), None)
    return None


# ---- profiler ranges ---------------------------------------------------------------------------------------


def enter_range(name: str) -> Any:
    """Open a profiler range; generated code calls this."""
    opened = torch.profiler.record_function(name)
    opened.__enter__()  # type: ignore[no-untyped-call]  # torch has no types there
    return opened


def exit_range(opened: Any) -> None:
    """Close a range that `enter_range` opened."""
    opened.__exit__(None, None, None)


def with_ranges(graph_module: GraphModule) -> GraphModule:
    """A copy of the graph with nested profiler ranges, one per module and direction, named like ``forward
    layers.0.mlp``.
    """
    ranged = Graph()
    env: dict[Node, Any] = {}
    opened: list[tuple[str, Node]] = []

    def switch(wanted: list[str]) -> None:
        """Close and open ranges until exactly ``wanted`` are open, outermost first."""
        pairs = zip(opened, wanted, strict=False)
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0][0] == pair[1], pairs))
        while len(opened) > common:
            ranged.call_function(exit_range, (opened.pop()[1],))
        for name in wanted[common:]:
            opened.append((name, ranged.call_function(enter_range, (name,))))

    for node in graph_module.graph.nodes:
        if node.op == "output":
            switch([])
        elif node.op == "call_function":
            switch([f"{meta.direction(node).value} {path}" for path in meta.module_paths(node) if path])
        env[node] = made = ranged.node_copy(node, env.__getitem__)
        made.meta = meta.copy_meta(node)
    return GraphModule(graph_module, ranged)


# ---- allocator ---------------------------------------------------------------------------------------------


def tune_allocator() -> bool:
    """Let glibc keep freed memory for the next step, instead of giving it back and faulting it in again.

    Blocks under 1 GiB come from the heap rather than from mmap, and the heap is not trimmed.  Affects the
    whole process, for good; peak memory stays what it was.  Returns False where the C library is not glibc.
    """
    if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    m_trim_threshold, m_top_pad, m_mmap_threshold = -1, -2, -3
    # glibc before 2.35 refuses thresholds above 32 MiB.
    threshold = mallopt(m_mmap_threshold, 1 << 30) or mallopt(m_mmap_threshold, 1 << 25)
    return bool(threshold and mallopt(m_trim_threshold, (1 << 31) - 1) and mallopt(m_top_pad, 1 << 26))
