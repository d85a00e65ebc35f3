"""A compiled call whose program is spread over pipeline stages: the same inputs and outputs, another way to run the microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Node

from . import layout as layouts
from . import meta
from .compat import foreach_add_
from .compiled import CompiledCall, Trained
from .errors import PlanError
from .phases import Phases, split_phases
from .program import InputKind, OutputKind, Program
from .reduction import reduce_flat
from .runtime.executor import Executor
from .runtime.process_groups import ProcessGroups, axis_of
from .runtime.stage_runner import GraphStage, Pipeline
from .stages import cut_stages
from .weights import Weights

_OF_A_MICROBATCH = (InputKind.BATCH, InputKind.SCALE, InputKind.SEED)


class StagedCall(CompiledCall):
    """Runs this rank's stages by the plan's schedule; outputs of other stages are None, losses and metrics zero shares."""

    def __init__(self, program: Program, groups: ProcessGroups, weights: Weights, **options: Any) -> None:
        super().__init__(program, groups, weights, **options)
        device = next((item.device for item in weights.model.parameters()), torch.device("cpu"))
        trains = any(item.kind is OutputKind.GRAD for item in program.outputs)
        held = [GraphStage(stage, self._number, groups, device) for stage in self._own]
        halves = [half for stage in self._own for half in (stage.forward, stage.backward) if half is not None]
        inputs = {item.name: item for half in halves for item in half.program.inputs}
        self._read = [item for item in inputs.values() if item.kind is not InputKind.RELAYED]
        self.pipeline = Pipeline(held, groups, self._schedule(), self.parts, trains)

    def _schedule(self) -> str:
        """The plan's schedule, or GPipe for a number of microbatches that it does not run."""
        plan = self.program.plan
        try:
            layouts.check_plan(plan.pp, plan.layout, plan.schedule, self.parts)
        except PlanError:
            return "gpipe"
        return plan.schedule or "1f1b"

    def _split(self) -> Phases:
        """Gathers and reductions of this rank's stages; ``_places`` are the outputs of the program that this rank computes."""
        assert self.program.layout is not None
        self._number, mine = len(self.program.layout.stages), self.mesh.axis_index("pp", self.groups.rank)
        own = range(mine, self._number, self.groups.size("pp"))
        phases = split_phases(self.program, own)
        self._own = cut_stages(phases.body, own)
        given = {at for stage in self._own for at in stage.outputs}
        self._places = {place for at, place in enumerate(phases.kept) if at in given} | set(phases.reduced)
        return phases

    def _bind(self) -> Executor | None:
        """Every rank makes the groups of all stages, in one order."""
        for node in self.program.graph.nodes:
            axis = axis_of(node)
            if axis is not None and self.groups.size(axis) > 1:
                self.groups.group(axis)
        return None

    def _gradients(self) -> dict[tuple[str, ...], list[int]]:
        """The outputs that are gradients of each parameter, one for each stage that reads it."""
        inputs, found = {item.name: item for item in self.program.inputs}, dict[tuple[str, ...], list[int]]()
        for place, item in enumerate(self.program.outputs):
            if item.kind is OutputKind.GRAD:
                found.setdefault(inputs[item.name].fqns, []).append(place)
        return found

    def _find_trained(self) -> list[Trained]:
        """One gradient a parameter; an empty one where another stage has the parameter."""
        held = {places[0]: any(place in self._places for place in places) for places in self._gradients().values()}
        found = [item for item in super()._find_trained() if item.output in held]
        return [item if held[item.output] else replace(item, place=-1) for item in found]

    def run_all(self, chunks: Sequence[Sequence[Any]], scales: dict[str, Tensor]) -> list[Any]:
        if self.kept is not None:
            self.kept.refresh()
        feed, items = self._feed(chunks, scales), self.phases.body.outputs
        found: dict[int, list[Any]] = {
            at: [None] * self.parts for stage in self._own for at in stage.outputs if items[at].kind is OutputKind.USER
        }
        totals: dict[int, Tensor] = {}
        left: dict[int, Tensor] = {}  # in buffers, by the last microbatch

        def collect(chunk: int, values: dict[int, Any]) -> None:
            known = [at for at in values if at in totals]
            for at in values:
                if at in found:
                    found[at][chunk] = values[at]
                elif items[at].kind is OutputKind.BUFFER:
                    left.update({at: values[at]} if chunk == self.parts - 1 else {})
                elif at not in totals:
                    totals[at] = values[at].clone()
            if known:
                foreach_add_([totals[at] for at in known], [values[at] for at in known])

        self.pipeline.run(feed, collect)
        outputs: list[Any] = [totals.get(at) for at in range(len(items))]
        for at, values in found.items():
            outputs[at] = values[0] if self.parts == 1 else self.join(items[at], values)
        self._write(outputs, left)
        if self.reduction is not None:
            outputs = self.phases.finish(outputs, self.reduction)
        self._fill(outputs)
        self._finish(outputs)
        return outputs

    def _write(self, outputs: list[Any], left: dict[int, Tensor]) -> None:
        """Put into buffers what the step has left there: the stage that has a value sends it to the others, a flat tensor of bytes each."""
        nodes, group, sources = self.phases.body.output_nodes(), self.groups.group("pp"), dict[int, list[int]]()
        for at, _ in self._written:
            sources.setdefault((meta.stage(nodes[at]) or 0) % self.groups.size("pp"), []).append(at)
        for source, places in sources.items():
            values = [left[at] if at in left else self._zeros(nodes[at]) for at in places]
            parts = [value.contiguous().reshape(-1).view(torch.uint8) for value in values]
            flat = torch.cat(parts)
            dist.broadcast(flat, dist.get_global_rank(group, source), group=group)
            for at, value, part in zip(places, values, torch.split(flat, list(map(len, parts))), strict=True):
                outputs[at] = part.clone().view(value.dtype).view(value.shape)
        self.weights.write({name: outputs[at] for at, name in self._written})

    def _fill(self, outputs: list[Any]) -> None:
        """Zero shares of what is summed over stages and computed on others: losses, metrics, gradients of tied parameters."""
        tied = {place for places in self._gradients().values() if len(places) > 1 for place in places}
        for place, (node, item) in enumerate(zip(self.program.output_nodes(), self.program.outputs, strict=True)):
            if outputs[place] is None and (item.kind in (OutputKind.LOSS, OutputKind.METRIC) or place in tied):
                outputs[place] = self._zeros(node)

    def _feed(self, chunks: Sequence[Sequence[Any]], scales: dict[str, Tensor]) -> list[dict[str, Any]]:
        """What this rank's stages read, by microbatch and name; weights are looked up once for all of them."""
        shared = {item.name: self._value(item, (), {}) for item in self._read if item.kind not in _OF_A_MICROBATCH}
        own = [item for item in self._read if item.kind in _OF_A_MICROBATCH]
        found = []
        for chunk in chunks:
            known = scales | self._seeds()
            found.append(shared | {item.name: self._value(item, chunk, known) for item in own})
        return found

    def _zeros(self, node: Any) -> Any:
        value = meta.tensor(node) if isinstance(node, Node) else None
        return None if value is None else torch.zeros(value.shape, dtype=value.dtype, device=value.device)

    def _finish(self, outputs: list[Any]) -> None:
        """The loss to all stages, gradients of tied parameters over them, then all gradients once over their axes."""
        group = self.groups.group("pp")
        for place, item in enumerate(self.program.outputs):
            if item.kind is OutputKind.LOSS:
                dist.all_reduce(outputs[place], group=group)
        axes = {item.output: item.axis for item in self.trained}
        reduced = []
        for places in self._gradients().values():
            if len(places) > 1:
                total = torch.stack([outputs[place] for place in places]).sum(0)
                dist.all_reduce(total, group=group)
                outputs[places[0]] = total
            if any(place in self._places for place in places):
                reduced.append((axes[places[0]], outputs[places[0]]))
        if self.synced:
            reduce_flat(reduced, self.groups)
