"""Run a plan on local ranks and hold everything it gives against the plain model in one process.

Three steps of AdamW with clipping. Compared: every loss, every gradient of the first step, the gradient norms, the weights and
buffers after the last step; on every rank, each against the part of the plain model's tensor that this rank holds.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import api
from .capture import batch_inputs
from .compat import tree_flatten, tree_unflatten
from .errors import CaptureError, PlanError
from .fields import with_fields
from .mesh import Mesh
from .plan import Plan
from .runtime.launcher import launch
from .weights import Cut

# Largest relative error that the order of sums explains; a wrong factor or a missing reduction is far above.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}
# What is smaller than this many roundings of the norm of all gradients is noise.
_ROUNDINGS = 10.0
_MAX_NORM = 1.0
_LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Row:
    """One comparison: ``kind`` is loss, gradient, norm, weight or buffer, ``error`` is relative, ``rank`` has the worst."""

    kind: str
    name: str
    error: float
    rank: int


@dataclass(frozen=True)
class Report:
    """What was compared. True in a condition, and ``ok``, when every error is within ``tolerance``."""

    plan: Plan
    tolerance: float
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row.error <= self.tolerance for row in self.rows)

    def __bool__(self) -> bool:
        return self.ok

    def worst(self, kind: str) -> Row | None:
        """The row of that kind with the largest error, None if there is none."""
        return max((row for row in self.rows if row.kind == kind), key=lambda row: row.error, default=None)

    def __str__(self) -> str:
        lines = [f"{self.plan}: {'equal' if self.ok else 'NOT EQUAL'} to one process (tolerance {self.tolerance:g})"]
        for kind in KINDS:
            row = self.worst(kind)
            if row is not None:
                lines.append(
                    f"  {kind:<9} {row.error:.1e}  worst of {self._count(kind)}: {row.name} on rank {row.rank}"
                )
        if not self.ok and self.plan.microbatches > 1:
            lines.append(
                f"  one process took whole batches: a term that is no mean over tokens or rows, as a balance loss, is another one under "
                f"microbatches={self.plan.microbatches}; verify the plan with microbatches=1, too."
            )
        return "\n".join(lines)

    def _count(self, kind: str) -> int:
        return sum(row.kind == kind for row in self.rows)


KINDS = ("loss", "gradient", "norm", "weight", "buffer")


@dataclass
class Trace:
    """What one process has after the steps: its own parts of all tensors."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    cuts: dict[str, Cut] = field(default_factory=dict)
    elsewhere: set[str] = field(default_factory=set)  # parameters that only other pipeline stages read


@dataclass(frozen=True)
class Job:
    """What the ranks are sent. ``calls[step][data rank]`` are flattened arguments."""

    model: nn.Module
    plan: Plan
    loss_fn: Callable[..., Any] | None
    calls: list[list[tuple[tuple[Any, ...], dict[str, Any]]]]
    tolerance: float


def verify(
    model: nn.Module,
    plan: Plan,
    example: Any,
    *,
    steps: int = 3,
    dtype: torch.dtype | None = None,
    tolerance: float | None = None,
    loss_fn: Callable[..., Any] | None = None,
    timeout: float = 300.0,
) -> Report:
    """Compare ``plan`` on local gloo ranks with the plain ``model``, which is left as it was and must pickle.

    ``example`` is what one rank passes: a tuple or a mapping; the other ranks and steps get it rolled along each batch tensor's
    last dim. A function of one argument gives slice ``step * data ranks + data rank`` instead. ``dtype`` converts the floating
    weights and inputs first. With ``plan.microbatches`` the plain model still takes the whole batch at once.

    Raises PlanError, CaptureError and RankError as `parallelize` on a rank would.
    """
    job = prepare(model, plan, example, steps=steps, dtype=dtype, tolerance=tolerance, loss_fn=loss_fn)
    alone = run_alone(job)
    try:
        ranks: list[Trace] = launch(on_rank, job.plan.world_size, job, timeout=timeout)
    except TypeError as error:  # what cannot be pickled
        raise CaptureError(f"verify: {error}") from error
    return report(job, alone, ranks)


def prepare(
    model: nn.Module,
    plan: Plan,
    example: Any,
    *,
    steps: int = 3,
    dtype: torch.dtype | None = None,
    tolerance: float | None = None,
    loss_fn: Callable[..., Any] | None = None,
) -> Job:
    """A copy of the model and every rank's arguments of all steps, as `verify` takes them."""
    plan.check_supported()
    plan = plan if plan.dp is not None else plan.resolve(plan.least_world_size)
    model = copy.deepcopy(model).cpu()
    if dtype is not None:
        model = model.to(dtype)
    choose: Any = getattr(model, "set_experts_implementation", None)
    if dtype is torch.float64 and choose is not None:
        choose("eager")  # the grouped matmul that Hugging Face prefers has no float64
    calls = [
        [_slice(example, step * plan.num_data_ranks + rank, plan, dtype) for rank in range(plan.num_data_ranks)]
        for step in range(steps)
    ]
    return Job(model, plan, loss_fn, calls, TOLERANCE.get(_dtype(model), 1e-4) if tolerance is None else tolerance)


def report(job: Job, alone: Trace, ranks: Sequence[Trace]) -> Report:
    """What the ranks have, beside what one process has."""
    rows = compare(alone, ranks, Mesh(job.plan), _dtype(job.model), job.tolerance)
    return Report(job.plan, job.tolerance, tuple(rows))


# ---- the two runs --------------------------------------------------------------------------------------------


def run_alone(job: Job) -> Trace:
    """The plain model over every step's global batch."""
    return _run(copy.deepcopy(job.model), [_joined(row, job.plan) for row in job.calls], job.loss_fn, _plain_clip)


def on_rank(rank: int, job: Job) -> Trace:
    """One rank of the plan."""
    mine = [row[job.plan.data_rank(rank)] for row in job.calls]
    if job.plan.world_size == 1:
        torch.set_num_threads(1)
    parallel = api.parallelize(job.model, job.plan, loss_fn=job.loss_fn)
    trace = _run(parallel, mine, None, api.clip_grad_norm_)
    weights = parallel._state.weights
    trace.cuts = dict(weights.cuts)
    trace.elsewhere = {name for name in weights.stages if not weights.holds(name)}
    parallel._state.groups.close()
    return trace


def _plain_clip(model: nn.Module, max_norm: float) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def _run(
    model: Any,
    calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    loss_fn: Callable[..., Any] | None,
    clip: Callable[[Any, float], Tensor],
) -> Trace:
    """The plain loop. ``loss_fn`` is applied here for the plain model; a parallel one has it inside."""
    trace = Trace()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=_LEARNING_RATE, eps=1e-6)
    for step, (args, kwargs) in enumerate(calls):
        output = model(*args, **kwargs)
        loss = loss_of(output if loss_fn is None else loss_fn(output, *args, **kwargs))
        loss.backward()  # type: ignore[no-untyped-call]
        if step == 0:
            trace.gradients = {
                name: _copy(item.grad) for name, item in model.named_parameters() if item.grad is not None
            }
        trace.losses.append(loss.item())
        trace.norms.append(float(clip(model, _MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    trace.weights = {name: _copy(item) for name, item in model.named_parameters()}
    trace.buffers = {name: _copy(item) for name, item in model.named_buffers()}
    return trace


def loss_of(output: Any) -> Tensor:
    """The loss of a model's return value: its entry or field ``loss``, or its first scalar."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None:
        leaves = [leaf for leaf in tree_flatten(with_fields(output))[0] if isinstance(leaf, Tensor)]
        found = next((leaf for leaf in leaves if leaf.dim() == 0 and leaf.requires_grad), None)
    if not isinstance(found, Tensor):
        raise CaptureError(
            "verify: the model returns no loss for these arguments; pass labels in the example, or a loss_fn."
        )
    return found


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().as_subclass(Tensor).clone()


# ---- arguments -----------------------------------------------------------------------------------------------


def _slice(example: Any, number: int, plan: Plan, dtype: torch.dtype | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of one data rank in one step."""
    given = callable(example) and len(inspect.signature(example).parameters) == 1
    args, kwargs = api.split_call(example(number) if given else example)
    leaves, spec = tree_flatten((args, kwargs))
    batch = batch_inputs(args, kwargs, plan.batch_dims)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().cpu()
            if index in batch and not given and leaf.dim() > 0:
                leaf = leaf.roll(number, -1)
            leaves[index] = leaf.to(dtype) if dtype is not None and leaf.is_floating_point() else leaf.clone()
    made: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(leaves, spec)
    return made


def _joined(
    row: Sequence[tuple[tuple[Any, ...], dict[str, Any]]], plan: Plan
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One step's arguments of all data ranks as one global batch."""
    flat = [tree_flatten(call) for call in row]
    leaves, spec = list(flat[0][0]), flat[0][1]
    for index, dim in batch_inputs(*row[0], plan.batch_dims).items():
        parts = [other[index] for other, _ in flat]
        if any(part.shape != parts[0].shape for part in parts):
            raise PlanError("verify: the example gives data ranks slices of different shapes; give all the same.")
        leaves[index] = torch.cat(parts, dim)
    made: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(leaves, spec)
    return made


def _dtype(model: nn.Module) -> torch.dtype:
    kinds = [item.dtype for item in model.parameters() if item.is_floating_point()]
    return max(kinds, key=lambda kind: torch.finfo(kind).eps, default=torch.float32)


# ---- the comparison ------------------------------------------------------------------------------------------


def compare(alone: Trace, ranks: Sequence[Trace], mesh: Mesh, dtype: torch.dtype, tolerance: float) -> list[Row]:
    """Rows for everything in ``alone``; a tensor that one side lacks has an infinite error."""
    rows = []
    for kind, mine, key in (("loss", alone.losses, "losses"), ("norm", alone.norms, "norms")):
        for step, wanted in enumerate(mine):
            errors = [_relative(_scalar(getattr(trace, key)[step]), _scalar(wanted), 0.0) for trace in ranks]
            rows.append(_row(kind, f"step {step}", errors))
    floor = _ROUNDINGS * torch.finfo(dtype).eps * (alone.norms[0] if alone.norms else 0.0) / tolerance
    for kind, key in (("gradient", "gradients"), ("weight", "weights"), ("buffer", "buffers")):
        wanted_all: dict[str, Tensor] = getattr(alone, key)
        names = list(wanted_all) + [name for name in getattr(ranks[0], key) if name not in wanted_all]
        for name in names:
            errors = [
                _part_error(
                    getattr(trace, key).get(name),
                    wanted_all.get(name),
                    trace.cuts.get(name),
                    mesh,
                    rank,
                    floor if kind == "gradient" else 0.0,
                )
                if name not in trace.elsewhere
                else _absent(getattr(trace, key).get(name))
                for rank, trace in enumerate(ranks)
            ]
            rows.append(_row(kind, name, errors))
    return rows


def _scalar(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)


def _row(kind: str, name: str, errors: Sequence[float]) -> Row:
    rank = max(range(len(errors)), key=errors.__getitem__)
    return Row(kind, name, errors[rank], rank)


def _part_error(
    found: Tensor | None, whole: Tensor | None, cut: Cut | None, mesh: Mesh, rank: int, floor: float
) -> float:
    """Error of what one rank holds of a tensor."""
    if found is None or whole is None:
        return math.inf
    if cut is None:
        return _relative(found, whole, floor)
    if cut.owner is not None and cut.owner != mesh.axis_index(cut.axis, rank):
        return 0.0 if found.numel() == 0 else math.inf
    return _relative(found, cut.part(whole, mesh, rank), floor)


def _absent(found: Tensor | None) -> float:
    """Error of a parameter that this rank should not have."""
    return 0.0 if found is None or found.numel() == 0 else math.inf


def _relative(found: Tensor, wanted: Tensor, floor: float) -> float:
    """Norm of the difference over the larger of the wanted norm and ``floor``; infinite for NaN and for other shapes."""
    if found.shape != wanted.shape:
        return math.inf
    gap = torch.linalg.vector_norm(found.double() - wanted.double())
    scale = max(float(torch.linalg.vector_norm(wanted.double())), floor)
    if not math.isfinite(float(gap)) or not math.isfinite(scale):
        return math.inf
    if scale == 0.0:
        return 0.0 if float(gap) == 0.0 else math.inf
    return float(gap) / scale
