"""Run the stages that one rank holds, in the order of a schedule of ``torch.distributed.pipelining``.

The schedules drive any object with the methods of its stage classes. `GraphStage` is one whose forward and backward are graphs,
so no autograd runs, and whose messages are what the graphs say: several tensors a cut, of any type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleLoopedBFS

from moecompile.compat import without_autocast
from moecompile.errors import VerifyError
from moecompile.program import InputKind
from moecompile.runtime.executor import Executor
from moecompile.runtime.faults import PeerError, are_missing, is_peer_fault, missing_ranks
from moecompile.runtime.process_groups import ProcessGroups
from moecompile.stages import Part, Relayed, Stage

# What takes the outputs of the whole program that one half of a stage gives for a microbatch: ``collect(microbatch, values by place)``.
Collect = Callable[[int, dict[int, Any]], None]
# The values of the program's inputs for each microbatch, by name.
Feed = Sequence[Mapping[str, Any]]


class _Half:
    """The forward or the backward of a stage, ready to run."""

    def __init__(self, part: Part, outputs: Mapping[int, str], groups: ProcessGroups) -> None:
        self.executor, self.returns = Executor(part.program, groups), part.returns
        self.reads = [(item.name, item.kind is InputKind.RELAYED) for item in part.program.inputs]
        there = set(part.returns)
        self.outputs = [(place, name) for place, name in outputs.items() if name in there]

    def run(self, fed: Mapping[str, Any], values: dict[str, Any]) -> dict[int, Any]:
        """Add what the graph makes to ``values``, and return what the whole program gives of it."""
        given = [values[name] if relayed else fed[name] for name, relayed in self.reads]
        with torch.no_grad():
            values.update(zip(self.returns, self.executor.run(given), strict=True))
        return {place: values[name] for place, name in self.outputs}


class GraphStage:
    """One stage of this rank, as schedules see it."""

    def __init__(self, stage: Stage, num_stages: int, groups: ProcessGroups, device: torch.device) -> None:
        self.stage, self.groups, self.device = stage, groups, device
        self.stage_index, self.num_stages = stage.index, num_stages
        self.group = groups.group("pp")
        self.group_size, self.group_rank = groups.size("pp"), dist.get_rank(self.group)
        self.stage_index_to_group_rank = {at: at % self.group_size for at in range(num_stages)}
        self.is_first, self.is_last = stage.index == 0, stage.index == num_stages - 1
        self.submod, self.has_backward, self.output_chunks = torch.nn.Identity(), False, list[Any]()
        self.forward = _Half(stage.forward, stage.outputs, groups)
        self.backward = None if stage.backward is None else _Half(stage.backward, stage.outputs, groups)
        self._peers = {at: dist.get_global_rank(self.group, at % self.group_size) for at in range(num_stages)}
        self.args_recv_info, self.act_send_info = {0: ()}, dict[int, list[int]]()  # to neighbours only
        self.feed: Feed = ()
        self.collect: Collect = lambda _, __: None
        self.doing = "nothing yet"
        self.clear_runtime_states()

    # -- what schedules ask once --------------------------------------------------------------------------------------
    def clear_runtime_states(self) -> None:
        """Forget the microbatches of the step before."""
        self._values: dict[int, dict[str, Any]] = {}  # saved by forwards whose backward is to come, by microbatch
        self._sent: dict[int, dict[str, Any]] = {}
        self._grads: dict[int, dict[str, Any]] = {}
        self._buffers: dict[tuple[int, str], Tensor] = {}
        self._carried: dict[str, Any] = {}  # what the latest forward left in buffers, by the name of the input
        self._read: dict[int, dict[str, Any]] = {}  # what each microbatch whose backward is to come read there
        self.most_live = 0

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return ()

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> None:
        return None

    def scale_grads(self, factor: int) -> None:
        """Losses are normalised over the step already."""

    def perform_reduce_grad(self, factor: int) -> None:
        """Gradients are reduced by who runs the step."""

    # -- messages -----------------------------------------------------------------------------------------------------
    def _receive(self, chunk: int, found: Sequence[Relayed], source: int, what: str) -> list[dist.P2POp]:
        self.doing = f"receiving {what} of microbatch {chunk} from rank {self._peers[source]}"
        ops = []
        for item in found:
            buffer = torch.empty(item.shape, dtype=item.dtype, device=self.device)
            self._buffers[chunk, item.name] = buffer
            ops.append(self._op(dist.irecv, buffer, source))
        return ops

    def _send(
        self, chunk: int, values: Mapping[str, Any], found: Sequence[Relayed], target: int, what: str
    ) -> list[dist.P2POp]:
        self.doing = f"sending {what} of microbatch {chunk} to rank {self._peers[target]}"
        return [self._op(dist.isend, self._checked(values.get(item.name), item).contiguous(), target) for item in found]

    def _op(self, kind: Any, tensor: Tensor, stage: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, self._peers[stage], self.group)

    def _checked(self, value: Any, item: Relayed) -> Tensor:
        """A neighbour would take zeros, or wait for ever, for what is not there."""
        if not isinstance(value, Tensor) or tuple(value.shape) != item.shape or value.dtype != item.dtype:
            found = f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise VerifyError(
                f"stage {self.stage_index} should hand on '{item.name}' ({item.dtype}{list(item.shape)}), but its graph gave {found}; the "
                "program was changed after split-stages, or a pass lost that value."
            )
        return value

    def _take(self, chunk: int, found: Sequence[Relayed], into: dict[str, Any]) -> None:
        """What has arrived, in the memory order that the graph was traced for."""
        for item in found:
            value = self._buffers.pop((chunk, item.name))
            if value.stride() != item.stride:
                value = torch.empty_strided(item.shape, item.stride, dtype=item.dtype, device=self.device).copy_(value)
            into[item.name] = value

    def get_fwd_recv_ops(self, chunk: int) -> list[dist.P2POp]:
        return (
            self._receive(chunk, self.stage.received, self.stage_index - 1, "the forward") if not self.is_first else []
        )

    def get_fwd_send_ops(self, chunk: int) -> list[dist.P2POp]:
        sent = self._sent.pop(chunk)
        return [] if self.is_last else self._send(chunk, sent, self.stage.sent, self.stage_index + 1, "the forward")

    def get_bwd_recv_ops(self, chunk: int) -> list[dist.P2POp]:
        found = self.stage.received_grads if self.has_backward else ()
        return [] if self.is_last else self._receive(chunk, found, self.stage_index + 1, "the backward")

    def get_bwd_send_ops(self, chunk: int) -> list[dist.P2POp]:
        grads = self._grads.pop(chunk)
        if self.is_first:
            return []
        return self._send(chunk, grads, self.stage.sent_grads, self.stage_index - 1, "the backward")

    # neighbours on one rank hand over without messages
    def set_local_fwd_input(self, prev: Any, chunk: int) -> None:
        for item, value in zip(self.stage.received, prev, strict=True):
            self._buffers[chunk, item.name] = value

    def get_local_bwd_output(self, chunk: int) -> Any:
        grads = self._grads[chunk]
        return tuple(self._checked(grads.get(item.name), item) for item in self.stage.sent_grads)

    def set_local_bwd_input(self, grads: Any, chunk: int) -> None:
        for item, value in zip(self.stage.received_grads, grads, strict=True):
            self._buffers[chunk, item.name] = value

    # -- work ---------------------------------------------------------------------------------------------------------
    def forward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
        self.doing = f"computing the forward of microbatch {chunk}"
        values: dict[str, Any] = {}
        self._take(chunk, self.stage.received, values)
        self._read[chunk] = self._carried
        self.collect(chunk, self.forward.run({**self.feed[chunk], **self._carried}, values))
        self._carried = {name: values[new] for name, new in self.stage.carried.items()}
        self._values[chunk] = {name: values[name] for name in self.stage.saved} if self.has_backward else {}
        self._sent[chunk] = sent = {item.name: values.get(item.name) for item in self.stage.sent}
        self.most_live = max(self.most_live, len(self._values) if self.has_backward else 0)
        return torch.zeros(()) if self.is_last else tuple(sent.values())  # losses are collected like every other output

    def backward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> None:
        self.doing = f"computing the backward of microbatch {chunk}"
        values = self._values.pop(chunk)
        self._take(chunk, self.stage.received_grads, values)
        if self.backward is not None:
            self.collect(chunk, self.backward.run({**self.feed[chunk], **self._read.pop(chunk)}, values))
        self._grads[chunk] = {item.name: values.get(item.name) for item in self.stage.sent_grads}


@dataclass
class Pipeline:
    """The stages of this rank and the schedule that runs them."""

    stages: list[GraphStage]
    groups: ProcessGroups
    schedule: str
    microbatches: int
    trains: bool
    _runner: Any = field(default=None)

    def run(self, feed: Feed, collect: Collect) -> None:
        """All microbatches; ``collect`` gets every output of the whole program that this rank computes."""
        for stage in self.stages:
            stage.feed, stage.collect = feed, collect
        if self._runner is None:
            self._runner = self._schedule()
        target = torch.zeros(self.microbatches) if any(stage.is_last for stage in self.stages) and self.trains else None
        try:
            with without_autocast():
                self._runner.step(target=target, return_outputs=False)
        except RuntimeError as error:
            if isinstance(error, PeerError) or not is_peer_fault(error):
                raise
            raise self._peer_fault() from error

    def _peer_fault(self) -> PeerError:
        """Name what each stage of this rank was doing, and the missing rank."""
        groups = self.groups
        doing = ", ".join(f"stage {stage.stage_index} was {stage.doing}" for stage in self.stages)
        others = [rank for rank in groups.ranks("pp") if rank != groups.rank]
        missing = missing_ranks(groups.fault_store, groups.rank, others, groups.hang_up)
        return PeerError(
            f"rank {groups.rank}: a message of the pipeline never came: {doing}; {are_missing(missing)} (it died, or did not arrive "
            f"within timeout={groups.mesh.plan.timeout:g} s); look for its own error first, or raise Plan(timeout=...).",
            missing,
        )

    def _schedule(self) -> Any:
        first: Any = self.stages[0]
        loss_fn = (lambda output, target: output) if self.trains else None
        if len(self.stages) > 1:
            stages: Any = self.stages
            several = ScheduleLoopedBFS if self.schedule == "gpipe" else ScheduleInterleaved1F1B
            return several(stages, self.microbatches, loss_fn=loss_fn, scale_grads=False)
        kind = ScheduleGPipe if self.schedule == "gpipe" or not self.trains else Schedule1F1B
        return kind(first, self.microbatches, loss_fn=loss_fn, scale_grads=False)
