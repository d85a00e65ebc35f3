"""The only place that makes process groups: one per mesh axis, and a gloo group for control.

A graph names mesh axes, because process-group names differ from rank to rank and from run to run.  `bind`
turns the axes into this rank's groups at the last moment.  Groups belong to a `ProcessGroups` object and to
nothing global, so two plans live side by side in one process.
"""

from __future__ import annotations

import itertools
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import Graph, GraphModule, Node

from moecompile import meta, ops
from moecompile.compat import OpOverload, PrefixStore, default_store
from moecompile.errors import PlanError, VerifyError
from moecompile.mesh import Mesh
from moecompile.ops import transport
from moecompile.plan import Plan, torchrun_line
from moecompile.runtime import shared_memory
from moecompile.runtime.faults import PeerError, is_peer_fault
from moecompile.runtime.shared_memory import SharedMemory

# Numbers the ProcessGroups of a process: every rank makes them in the same order, so all count alike.
_serial = itertools.count()


def world_size() -> int:
    """Ranks in this run: those of the default group, else what torchrun's environment announces, else 1."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def start(plan: Plan, device: torch.device | str = "cpu") -> None:
    """Make the default group from torchrun's environment, where it is missing and the plan has several ranks.

    gloo serves CPU tensors, NCCL serves CUDA tensors.  Raises PlanError when the world size is not the
    plan's.
    """
    plan = plan.resolve(world_size())
    if plan.world_size == 1 or dist.is_initialized():
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise PlanError(
            f"{plan} needs {plan.world_size} ranks, but {', '.join(missing)} is not in the environment; "
            f"start it with `{torchrun_line(plan.world_size)}`."
        )
    backend = "gloo"
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=plan.timeout))


class ProcessGroups:
    """This rank's process groups for one mesh.

    A group is made when its axis is first asked for; making it is collective, so every rank of the world must
    ask for axes in the same order (they do: all bind the same graph text).  Axes whose groups hold the same
    ranks share one process group; groups of one rank need none.  ``device`` decides the backend, the plan's
    ``timeout`` how long a collective waits for a peer.
    """

    def __init__(self, mesh: Mesh, device: torch.device | str = "cpu") -> None:
        mesh.plan.resolve(world_size())
        self.mesh = mesh
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._backend = "nccl" if torch.device(device).type == "cuda" else "gloo"
        self._made: dict[tuple[Any, ...], dist.ProcessGroup] = {}
        self._links: dict[str, SharedMemory] = {}
        number = next(_serial)
        # A corner of the default store in which ranks say that they are alive after a failure.
        self.fault_store = PrefixStore(f"moecompile/faults/{number}", default_store()) if self.distributed else None

    @property
    def distributed(self) -> bool:
        """Whether there is more than this one rank."""
        return self.mesh.world_size > 1

    def size(self, axis: str) -> int:
        """Number of ranks in a group of ``axis``."""
        return self.mesh.size(axis)

    def ranks(self, axis: str) -> tuple[int, ...]:
        """The ranks of this rank's group of ``axis``, in the order of the axis."""
        return self.mesh.group_ranks(axis, self.rank)

    def group(self, axis: str) -> dist.ProcessGroup:
        """This rank's process group for ``axis``; ValueError where the group is this rank alone."""
        if self.size(axis) == 1:
            raise ValueError(f"axis {axis} has groups of one rank on {self.mesh.plan}, which have no process group.")
        return self._group(self.mesh.groups(axis), self._backend)

    def group_name(self, axis: str) -> str:
        """What a collective op takes in place of the axis name."""
        return str(self.group(axis).group_name)

    @property
    def control(self) -> dist.ProcessGroup | None:
        """A gloo group of all ranks for small exchanges beside the graph's, None when there is one rank."""
        return self._group(self.mesh.groups("world"), "gloo", "control") if self.distributed else None

    def _group(self, groups: tuple[tuple[int, ...], ...], backend: str, use: str = "graph") -> dist.ProcessGroup:
        key = (groups, backend, use)
        if key not in self._made:
            timeout = timedelta(seconds=self.mesh.plan.timeout)
            try:
                for ranks in groups:  # every rank takes part in making every group
                    made = dist.new_group(list(ranks), timeout=timeout, backend=backend)
                    if isinstance(made, dist.ProcessGroup):  # a rank outside the group gets a marker
                        self._made[key] = made
                if backend == "gloo":
                    self._link(self._made[key])
            except RuntimeError as error:
                if not is_peer_fault(error):
                    raise
                raise PeerError(
                    f"rank {self.rank}: making the process groups {groups} failed, because a rank did not come "
                    f"within timeout={timeout.total_seconds():g} s; look for its own error first, or raise "
                    "Plan(timeout=...)."
                ) from error
        return self._made[key]

    def _link(self, group: dist.ProcessGroup) -> None:
        """CPU ranks of one host talk through shared memory."""
        link = shared_memory.connect(group, self.mesh.plan.timeout)
        if link is not None:
            self._links[group.group_name] = link
            transport.attach(group.group_name, link)

    def _unlink(self, group: dist.ProcessGroup) -> None:
        link = self._links.pop(group.group_name, None)
        if link is not None:
            transport.detach(group.group_name)
            link.close()

    def hang_up(self) -> None:
        """After a failure: drop the connections, so that peers that wait for this rank fail at once, too.

        NCCL groups stay: their own watchdog ends the process, and taking them down could wait for it.
        """
        for key, group in list(self._made.items()):
            if dist.get_backend(group) == "gloo":
                del self._made[key]
                self._unlink(group)
                dist.destroy_process_group(group)

    def close(self) -> None:
        """Take the groups down. Graphs bound to them cannot run afterwards."""
        while self._made:
            _, group = self._made.popitem()
            self._unlink(group)
            dist.destroy_process_group(group)


def axis_of(node: Node) -> str | None:
    """The mesh axis (or, once bound, the group name) of a collective node; None for every other node."""
    position = ops.AXIS_ARGUMENT.get(node.target) if isinstance(node.target, OpOverload) else None
    if position is None:
        return None
    if len(node.args) <= position:
        raise VerifyError(f"{meta.where(node)} passes arguments by name; collectives take all theirs by position.")
    axis = node.args[position]
    assert isinstance(axis, str)
    return axis


def bind(graph_module: GraphModule, groups: ProcessGroups) -> GraphModule:
    """A copy of the graph in which collectives name this rank's process groups; nodes keep their names.

    Collectives over groups of one rank are taken out: they only hand their input on, `exchange_counts` as one
    row.
    """
    bound = Graph()
    env: dict[Node, Any] = {}
    for node in graph_module.graph.nodes:
        axis = axis_of(node)
        if axis is not None and groups.size(axis) == 1:
            env[node] = _alone(bound, node, env)
            continue
        env[node] = made = bound.node_copy(node, env.__getitem__)
        made.meta = meta.copy_meta(node)
        if axis is not None:
            made.update_arg(ops.AXIS_ARGUMENT[node.target], groups.group_name(axis))
    return GraphModule(graph_module, bound)


def _alone(bound: Graph, node: Node, env: dict[Node, Any]) -> Node:
    """What a collective gives where a rank is its whole group."""
    given = node.args[0]
    assert isinstance(given, Node)
    if node.target is not ops.exchange_counts:
        found: Node = env[given]
        return found
    made = bound.create_node("call_function", torch.ops.aten.unsqueeze.default, (env[given], 0), name=node.name)
    made.meta = meta.copy_meta(node)
    return made
