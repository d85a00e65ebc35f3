"""One compiled call: a program bound to this rank, what its inputs are and what becomes of its outputs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from . import aliases, meta
from . import graph as graphs
from .compat import tree_unflatten
from .errors import CaptureError
from .mesh import Mesh, joined
from .passes.record_metrics import DROPPED, TOKENS_PER_EXPERT
from .passes.sync_grads import reduce_axis
from .phases import KeptParameters, Phases, split_phases
from .placement.types import Shard
from .program import AUX, NUM_VALID, Input, InputKind, Level, Output, OutputKind, Program
from .reduction import add_up, partial_axes, reduce_flat
from .results import Results
from .runtime.executor import Executor
from .runtime.process_groups import ProcessGroups
from .step import Gradients, StepResult, attach, share, value_only
from .weights import Weights

_LOG = logging.getLogger("moecompile")


def _report_nan(loss: Tensor) -> None:
    """Say so when a step's loss is not a number; on a GPU that would wait for the step, so there the user's own check must do."""
    if loss.device.type == "cpu" and not math.isfinite(loss.item()):
        _LOG.warning(
            "the loss of this step is %s: look for NaN in the batch, for labels that are all ignored, or lower the learning rate.",
            loss.item(),
        )


@dataclass(frozen=True)
class Trained:
    """Where the gradient of one Parameter comes from: an output, and for a stacked expert its place in there.

    ``place`` is None for a whole output, -1 for an expert of another rank. ``axis`` is what the gradient is reduced over.
    """

    param: nn.Parameter
    output: int
    place: int | None
    axis: str


class CompiledCall:
    """Runs one program for this rank: ``call(leaves)`` takes the flattened arguments and returns the model's return value.

    ``synced`` says whether the gradients are those of all ranks. Where not, each is this rank's share times the number of ranks among
    which it is a sum, so that a later mean over them leaves as it is what they have in common: other terms, and earlier gradients.
    ``before_hand_out`` runs in each backward before its gradients are handed out. ``parts`` is how many microbatches it runs, where
    these are not all of a call.
    """

    def __init__(
        self,
        program: Program,
        groups: ProcessGroups,
        weights: Weights,
        *,
        synced: bool = True,
        before_hand_out: Callable[[], None] | None = None,
        parts: int | None = None,
    ) -> None:
        self.program, self.groups, self.weights, self.synced = program, groups, weights, synced
        self._before_hand_out = before_hand_out
        self.mesh: Mesh = program.mesh
        self.differentiable = program.level is Level.MODEL and torch.is_grad_enabled() and not self._has_loss()
        self.phases = Phases(program) if self.differentiable else self._split()
        self.executor = self._bind()
        self.kept = KeptParameters(self.phases.head, groups, weights) if self.phases.head is not None else None
        self.reduction = Executor(self.phases.tail, groups) if self.phases.tail is not None else None
        self.results = Results(groups)
        self.parts = program.plan.microbatches if parts is None else parts
        self.metrics: dict[
            tuple[str, str], tuple[Tensor, tuple[str, ...]]
        ] = {}  # by layer and quantity; the axes it is a share on
        self.trained = self._find_trained()
        self._shared: set[int] | None = None  # which gradients are copied; known after the first step
        self._counter = self._count_program()
        self._overwritten = {item.name for item in program.outputs if item.kind is OutputKind.BUFFER}
        self._written = [
            (at, item.name) for at, item in enumerate(self.phases.body.outputs) if item.kind is OutputKind.BUFFER
        ]
        if program.plan.microbatches > 1:
            self._check_joins()

    # -- running -----------------------------------------------------------------------------------------------------
    def __call__(self, leaves: Sequence[Any]) -> Any:
        chunks = self.cut(leaves)
        return self.hand_out(self.run_all(chunks, self.scales(self.count(chunks))))

    def hand_out(self, outputs: Sequence[Any]) -> Any:
        """The model's return value, from all outputs of the program."""
        self._keep_metrics(outputs)
        return self._rebuild(outputs)

    def _split(self) -> Phases:
        """The parts of the program: what is gathered once, what runs for each microbatch, what is due behind the last."""
        return split_phases(self.program)

    def _bind(self) -> Executor | None:
        """What runs the whole program; None where its stages run one by one."""
        return Executor(self.phases.body, self.groups)

    def run_all(self, chunks: Sequence[Sequence[Any]], scales: dict[str, Tensor]) -> Sequence[Any]:
        """The program's outputs over all microbatches. ``scales``: valid tokens, for each place that divides by them."""
        if self.kept is not None:
            self.kept.refresh()
        runs = (self._run(chunk, scales | self._seeds()) for chunk in chunks)
        outputs = self._joined(runs)
        if self.reduction is None:
            return outputs
        return self.phases.finish(outputs, self.reduction)

    def _joined(self, runs: Iterator[Sequence[Any]]) -> Sequence[Any]:
        """The outputs of all runs together; what is summed is added up as it comes."""
        items, first = self.phases.body.outputs, next(runs)
        found, lists = list(first), [[value] for value in first]
        for run in runs:
            for at, (item, value) in enumerate(zip(items, run, strict=True)):
                if item.kind is OutputKind.USER:
                    lists[at].append(value)
                elif item.kind is OutputKind.BUFFER:
                    found[at] = value
                else:
                    found[at] = found[at] + value
        return [
            self.join(item, values) if len(values) > 1 else value
            for item, values, value in zip(items, lists, found, strict=True)
        ]

    def _run(self, leaves: Sequence[Any], scales: dict[str, Tensor]) -> Sequence[Any]:
        assert self.executor is not None
        shared = self._shared_weights() if self.differentiable else {}
        outputs = self.executor(
            [
                shared[item.name] if item.name in shared else self._value(item, leaves, scales)
                for item in self.phases.body.inputs
            ]
        )
        self.weights.write({name: outputs[at] for at, name in self._written})
        return outputs

    def _trained_inputs(self) -> list[Input]:
        return [item for item in self.program.inputs if item.kind is InputKind.PARAM and item.requires_grad]

    def _shared_weights(self) -> dict[str, Tensor]:
        """Trained weights with autograd behind them, for a program whose backward the engine runs."""
        trained = self._trained_inputs()
        axes = [reduce_axis(item, self.mesh) for item in trained]

        def reduce(grads: Sequence[Tensor | None]) -> None:
            self._hand_out(axes, grads)
            if self.synced:
                reduce_flat(
                    [(axis, grad) for axis, grad in zip(axes, grads, strict=True) if grad is not None], self.groups
                )

        found = share(reduce, [self.weights.attached(item) for item in trained])
        return {item.name: weight for item, weight in zip(trained, found, strict=True)}

    def _shared_leaf(self, leaf: Tensor) -> Tensor:
        """An argument that waits for a gradient: of the ranks that pass the same batch, each computes a share of it."""
        axes = [axis for axis in ("cp", "tp") if self.groups.size(axis) > 1]
        if not axes:
            return leaf

        def reduce(grads: Sequence[Tensor | None]) -> None:
            reduce_flat([(joined(axes), grad) for grad in grads if grad is not None], self.groups)

        return share(reduce, [leaf])[0]

    def _value(self, item: Input, leaves: Sequence[Any], scales: dict[str, Tensor]) -> Any:
        if item.kind in (InputKind.PARAM, InputKind.BUFFER):
            found = self.weights.value(item)
            # what the run writes afterwards may still be read: by autograd, or by who gets it as a result
            return found.clone() if item.fqns[0] in self._overwritten else found
        if item.kind is InputKind.GATHERED:
            return self.weights.kept[item.fqns]
        if item.kind is InputKind.CONSTANT:
            return self.program.constants[item.name]
        if item.kind is InputKind.BATCH:
            leaf = leaves[item.leaf].contiguous()  # as the program was captured: a view of a slice would fail
            return self._shared_leaf(leaf) if self.differentiable and leaf.requires_grad else leaf.detach()
        if item.kind is InputKind.OFFSET:
            return torch.tensor(self.mesh.axis_index(item.axis, self.groups.rank) * item.stride)
        if item.kind in (InputKind.SCALE, InputKind.SEED):
            return scales[item.name]
        raise CaptureError(
            f"the program asks for a {item.kind.value} input '{item.name}', which a call does not supply."
        )

    def _seeds(self) -> dict[str, Tensor]:
        """A new seed for each run, from rank 0's CPU generator, so that ``torch.manual_seed`` and saved states govern it."""
        names = [item.name for item in self.program.inputs if item.kind is InputKind.SEED]
        if not names:
            return {}
        seed = torch.randint(torch.iinfo(torch.int64).max, ())
        if self.groups.control is not None:
            dist.broadcast(seed, 0, group=self.groups.control)
        return dict.fromkeys(names, seed)

    # -- microbatches ------------------------------------------------------------------------------------------------
    def cut(self, leaves: Sequence[Any]) -> list[Sequence[Any]]:
        """The arguments of a call cut into microbatches."""
        if self.parts == 1:
            return [leaves]
        cut = {leaf: leaves[leaf].chunk(self.parts, dim) for leaf, dim in self.batch_dims().items()}
        return [
            [cut[at][index] if at in cut else leaf for at, leaf in enumerate(leaves)] for index in range(self.parts)
        ]

    def batch_dims(self) -> dict[int, int]:
        """Which arguments are batch tensors, and along which dim."""
        return {
            item.leaf: placed.dim
            for item in self.program.inputs
            if item.kind is InputKind.BATCH
            for axis, placed in item.placements
            if axis == "dp" and isinstance(placed, Shard)
        }

    def scales(self, totals: dict[str, Tensor], factor: float = 1.0) -> dict[str, Tensor]:
        """What each place divides by: the step's valid tokens over the plan's microbatches, times a factor."""
        dtypes = {
            item.name: node.meta["val"].dtype for node, item in self.program.items() if item.kind is InputKind.SCALE
        }
        number = self.program.plan.microbatches
        return {name: (total * factor / number).to(dtypes[name]) for name, total in totals.items()}

    def _count_program(self) -> tuple[Executor, list[Output], set[str]] | None:
        """The part of the program that counts valid tokens, as a program of its own, and the inputs that it reads."""
        program = self.program
        wanted = [
            (found, item)
            for found, item in zip(program.output_nodes(), program.outputs, strict=True)
            if item.what == NUM_VALID
        ]
        if not wanted:
            return None
        module = GraphModule(
            program.graph_module,
            graphs.extract(program.graph, [found for found, _ in wanted if isinstance(found, Node)]),
        )
        counting = replace(program, graph_module=module, outputs=[item for _, item in wanted], level=Level.MODEL)
        read = {item.name for node, item in counting.items() if node.users}
        return Executor(counting, self.groups), [item for _, item in wanted], read

    def count(self, chunks: Sequence[Sequence[Any]]) -> dict[str, Tensor]:
        """Valid tokens of some microbatches over all ranks, for each place that divides by them."""
        if self._counter is None:
            return {}
        executor, outputs, read = self._counter
        scales = {item.name: torch.ones(()) for item in self.program.inputs if item.kind is InputKind.SCALE}
        scales |= {
            item.name: torch.zeros((), dtype=torch.int64) for item in self.program.inputs if item.kind is InputKind.SEED
        }
        with torch.no_grad():
            counted = [
                executor(
                    [self._value(item, chunk, scales) if item.name in read else None for item in self.program.inputs]
                )
                for chunk in chunks
            ]
        found = {}
        for item, counts in zip(outputs, zip(*counted, strict=True), strict=True):
            found[item.name] = total = torch.stack(list(counts)).sum().to(torch.float64)
            add_up(total, partial_axes(item), self.groups)
        return found

    def _check_joins(self) -> None:
        """Results that are no part of the batch are not those of one process: means are told of, whole numbers refused."""
        for node, item in zip(self.program.output_nodes(), self.program.outputs, strict=True):
            whole = not isinstance(dict(item.placements).get("dp"), Shard)
            if item.kind is not OutputKind.USER or not whole or not isinstance(node, Node):
                continue
            said = f"{meta.where(node)} is returned and has no batch dim: microbatches={self.program.plan.microbatches}"
            if not meta.tensor(node).is_floating_point():
                raise CaptureError(
                    f"{said} cannot put whole numbers together; return them by row, or use microbatches=1."
                )
            if self.groups.rank == 0:
                _LOG.warning("%s return the mean of their values; what is no mean over the batch, return by row.", said)

    def join(self, item: Output, found: Sequence[Any]) -> Any:
        """What the user gets from those of the microbatches: the batch put together."""
        placed = dict(item.placements).get("dp")
        if isinstance(placed, Shard):
            return torch.cat(list(found), placed.dim)
        return torch.stack(list(found)).mean(0) if found[0].is_floating_point() else found[-1]

    # -- outputs -----------------------------------------------------------------------------------------------------
    def _has_loss(self) -> bool:
        return any(item.kind is OutputKind.LOSS for item in self.program.outputs)

    def _find_trained(self) -> list[Trained]:
        by_name = {item.name: item for item in self.program.inputs}
        found = []
        for at, output in enumerate(self.program.outputs):
            if output.kind is OutputKind.GRAD:
                item = by_name[output.name]
                for param, place in self.weights.parameters_of(item):
                    where = (-1 if place is None else place) if item.stacked else None
                    found.append(Trained(param, at, where, reduce_axis(item, self.mesh)))
        return found

    def _keep_metrics(self, outputs: Sequence[Any]) -> None:
        for item, found in zip(self.program.outputs, outputs, strict=True):
            if item.kind is OutputKind.METRIC and item.what in (TOKENS_PER_EXPERT, DROPPED, AUX):
                self.metrics[item.name, item.what] = (found.detach(), partial_axes(item))

    def counts(self) -> tuple[dict[str, Tensor], dict[str, Output]]:
        """Tokens per expert of the latest run by layer, and the outputs that they are."""
        outputs = {item.name: item for item in self.program.outputs if item.what == TOKENS_PER_EXPERT}
        return {name: self.metrics[name, TOKENS_PER_EXPERT][0] for name in outputs}, outputs

    def _rebuild(self, outputs: Sequence[Any]) -> Any:
        program = self.program
        values: dict[int, Tensor] = {}
        for item, value in zip(program.outputs, outputs, strict=True):
            if item.kind is OutputKind.LOSS:
                _report_nan(value)
            if item.kind is OutputKind.LOSS and program.level is Level.STEP:
                values[item.leaf] = self._attach(outputs, value)
            elif item.kind is OutputKind.USER and value is None:
                continue  # computed on another pipeline stage
            elif item.kind is OutputKind.USER:
                if program.level is Level.STEP:
                    value = value_only(value, [found.param for found in self.trained[:1]])
                values[item.leaf] = self.results.hand_out(item, value, self.parts, differentiable=self.differentiable)
            elif item.kind is OutputKind.LOSS:
                values[item.leaf] = value
        if -1 in values:
            return values[-1]
        if program.out_spec is None:
            raise CaptureError("the program does not know the return structure of the model; compile it from a model.")
        return tree_unflatten(
            [values.get(at, constant) for at, constant in enumerate(program.out_template)], program.out_spec
        )

    def _attach(self, outputs: Sequence[Any], loss: Tensor) -> Tensor:
        """Put the gradients of a finished step behind its loss."""
        gradients: Gradients = []
        parts: dict[int, tuple[Tensor, ...]] = {}
        for item in self.trained:
            grad = outputs[item.output]
            if item.place is not None and item.place < 0:
                gradients.append(torch.empty_like(item.param))  # others hold it
                continue
            if item.place is not None:
                grad = parts.setdefault(item.output, grad.unbind(0))[item.place]
            grad = grad if grad.shape == item.param.shape else grad[: len(item.param)]  # the rest is padding
            gradients.append(grad.to(item.param.dtype))
        if self._shared is None:
            self._shared = self._find_shared(gradients, outputs)
        for at in self._shared:
            gradients[at] = gradients[at].clone()  # type: ignore[union-attr]

        def finish(found: Gradients) -> Gradients:
            self._hand_out([item.axis for item in self.trained], found)
            return found

        return attach(StepResult(gradients, finish), loss, [item.param for item in self.trained])

    def _find_shared(self, gradients: Sequence[Tensor | None], outputs: Sequence[Any]) -> set[int]:
        """The gradients that lie where another one lies, an input or a result; by their places among the trained."""
        nodes, found = self.program.output_nodes(), [item for item in gradients if item is not None]
        assert len(found) == len(self.trained)
        results = [
            value
            for item, value in zip(self.program.outputs, outputs, strict=True)
            if item.kind is OutputKind.USER and isinstance(value, Tensor)
        ]
        sources = [nodes[item.output] for item in self.trained]
        inputs = {at for at, node in enumerate(sources) if isinstance(node, Node) and aliases.is_input(node)}
        return inputs | aliases.overlapping(found, results)

    def _hand_out(self, axes: Sequence[str], grads: Sequence[Tensor | None]) -> None:
        """What a backward does with its gradients, each of which is a share over its axis, before autograd gets them."""
        if self._before_hand_out is not None:
            self._before_hand_out()
        for axis, grad in zip(axes, grads, strict=True):
            if not self.synced and grad is not None and axis:
                grad.mul_(self.groups.size(axis))

    def summed_over(self) -> dict[nn.Parameter, str]:
        """The axes over which the ranks' shares of each parameter's gradient add up."""
        if not self.differentiable:
            return {item.param: item.axis for item in self.trained}
        return {
            param: reduce_axis(item, self.mesh)
            for item in self._trained_inputs()
            for param, _ in self.weights.parameters_of(item)
        }
