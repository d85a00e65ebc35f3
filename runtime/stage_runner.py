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
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from moecompile.errors import VerifyError
from moecompile.program import InputKind
from moecompile.runtime.executor import Executor
from moecompile.runtime.faults import PeerError, is_peer_fault
from moecompile.runtime.process_groups import ProcessGroups
from moecompile.stages import Part, Relayed, Stage

# The value of an input of the program for one microbatch: ``feed(microbatch, input)``.
Feed = Callable[[int, Any], Any]


class GraphStage:
    """One stage of this rank, as schedules see it. ``results[place]`` collects a whole program's output over the microbatches."""

    def __init__(self, stage: Stage, num_stages: int, groups: ProcessGroups, device: torch.device) -> None:
        self.stage, self.groups, self.device = stage, groups, device
        self.stage_index, self.num_stages = stage.index, num_stages
        self.group = groups.group("pp")
        self.group_size, self.group_rank = groups.size("pp"), dist.get_rank(self.group)
        self.stage_index_to_group_rank = {at: at % self.group_size for at in range(num_stages)}
        self.is_first, self.is_last = stage.index == 0, stage.index == num_stages - 1
        self.submod, self.has_backward, self.output_chunks = torch.nn.Identity(), False, list[Any]()
        self._forward = Executor(stage.forward.program, groups)
        self._backward = None if stage.backward is None else Executor(stage.backward.program, groups)
        self.args_recv_info, self.act_send_info = {0: ()}, dict[int, list[int]]()  # to neighbours only
        self.feed: Feed = lambda _, __: None
        self.collect: Callable[[int, int, Any], None] = lambda _, __, ___: None
        self.doing = "nothing yet"
        self.live = self.most_live = 0
        self.clear_runtime_states()

    # -- what schedules ask once --------------------------------------------------------------------------------------
    def clear_runtime_states(self) -> None:
        """Forget the microbatches of the step before."""
        self._values: dict[int, dict[str, Any]] = {}
        self._grads: dict[int, dict[str, Any]] = {}
        self._buffers: dict[tuple[int, str], Tensor] = {}
        self.live = self.most_live = 0

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
        self.doing = f"receiving {what} of microbatch {chunk}"
        ops = []
        for item in found:
            buffer = torch.empty(item.shape, dtype=item.dtype, device=self.device)
            self._buffers[chunk, item.name] = buffer
            ops.append(self._op(dist.irecv, buffer, source))
        return ops

    def _send(self, values: Mapping[str, Any], found: Sequence[Relayed], target: int) -> list[dist.P2POp]:
        return [self._op(dist.isend, self._checked(values.get(item.name), item).contiguous(), target) for item in found]

    def _op(self, kind: Any, tensor: Tensor, stage: int) -> dist.P2POp:
        peer = self.stage_index_to_group_rank[stage]
        return dist.P2POp(kind, tensor, dist.get_global_rank(self.group, peer), self.group)

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
        return [] if self.is_last else self._send(self._values[chunk], self.stage.sent, self.stage_index + 1)

    def get_bwd_recv_ops(self, chunk: int) -> list[dist.P2POp]:
        found = self.stage.received_grads if self.has_backward else ()
        return [] if self.is_last else self._receive(chunk, found, self.stage_index + 1, "the backward")

    def get_bwd_send_ops(self, chunk: int) -> list[dist.P2POp]:
        grads = self._grads.pop(chunk)
        return [] if self.is_first else self._send(grads, self.stage.sent_grads, self.stage_index - 1)

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
        self._run(self._forward, self.stage.forward, chunk, values)
        self._collect(chunk, values, self.stage.forward)
        if self.has_backward:
            self.live += 1
            self.most_live = max(self.most_live, self.live)
        kept = {item.name for item in self.stage.sent} | set(self.stage.saved if self.has_backward else ())
        self._values[chunk] = {name: value for name, value in values.items() if name in kept}
        if self.is_last:
            return torch.zeros(())  # losses are collected like every other output
        return tuple(values[item.name] for item in self.stage.sent)

    def backward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> None:
        self.doing = f"computing the backward of microbatch {chunk}"
        values, grads = self._values.pop(chunk), dict[str, Any]()
        self._take(chunk, self.stage.received_grads, grads)
        values.update(grads)
        if self._backward is not None and self.stage.backward is not None:
            self._run(self._backward, self.stage.backward, chunk, values)
            self._collect(chunk, values, self.stage.backward)
        self.live -= 1
        self._grads[chunk] = {item.name: values.get(item.name) for item in self.stage.sent_grads}

    def _run(self, executor: Executor, part: Part, chunk: int, values: dict[str, Any]) -> None:
        given = [
            values[item.name] if item.kind is InputKind.RELAYED else self.feed(chunk, item)
            for item in part.program.inputs
        ]
        values.update(zip(part.returns, executor(given), strict=True))

    def _collect(self, chunk: int, values: Mapping[str, Any], part: Part) -> None:
        there = set(part.returns)
        for place, name in self.stage.outputs.items():
            if name in there:
                self.collect(chunk, place, values[name])


@dataclass
class Pipeline:
    """The stages of this rank and the schedule that runs them."""

    stages: list[GraphStage]
    groups: ProcessGroups
    schedule: str
    microbatches: int
    trains: bool
    _runner: Any = field(default=None)

    def run(self, feed: Feed, collect: Callable[[int, int, Any], None]) -> None:
        """All microbatches. ``collect(microbatch, place, value)`` gets every output of the whole program that this rank computes."""
        for stage in self.stages:
            stage.feed, stage.collect = feed, collect
        if self._runner is None:
            self._runner = self._schedule()
        target = torch.zeros(self.microbatches) if any(stage.is_last for stage in self.stages) and self.trains else None
        try:
            self._runner.step(target=target, return_outputs=False)
        except RuntimeError as error:
            if isinstance(error, PeerError) or not is_peer_fault(error):
                raise
            doing = "; ".join(f"stage {stage.stage_index} was {stage.doing}" for stage in self.stages)
            raise PeerError(
                f"rank {self.groups.rank}: a message of the pipeline never came: {doing}; a neighbour on axis pp, ranks "
                f"{self.groups.ranks('pp')}, died or did not arrive within timeout={self.groups.mesh.plan.timeout:g} s; look for its own "
                "error first, or raise Plan(timeout=...).",
                (),
            ) from error

    def _schedule(self) -> Any:
        first: Any = self.stages[0]
        loss_fn = (lambda output, target: output) if self.trains else None
        if len(self.stages) > 1:
            stages: Any = self.stages
            return ScheduleInterleaved1F1B(stages, self.microbatches, loss_fn=loss_fn, scale_grads=False)
        kind = ScheduleGPipe if self.schedule == "gpipe" or not self.trains else Schedule1F1B
        return kind(first, self.microbatches, loss_fn=loss_fn, scale_grads=False)
