"""Does a sharded program mean what the plain model means? Runs of both, and a comparison that is hard to please.

`plain` trains the plain model on the whole batch. `LockStep` compiles one program for a plan and runs every rank of it in
this process. `assemble` puts the ranks' parts together again and demands that copies are bitwise equal. `compare` refuses
whatever could hide a difference: NaN, inf, another shape or type, a reference that is all zero.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from moecompile.compilation import Request, compile_call
from moecompile.mesh import Mesh
from moecompile.placement.types import Shard
from moecompile.plan import Plan
from moecompile.program import Input, InputKind, OutputKind, Program
from moecompile.runtime.simulator import simulate
from moecompile.weights import padded, part_of, put_together
from tests.support.capture_memo import captured_once

Batch = dict[str, Tensor]

# fp64: sums over ranks are taken in another order, nothing else differs
RTOL = 1e-11

# eps: where a gradient is zero but for rounding (the bias of attention keys), Adam must not blow the rounding up
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-5, weight_decay=0.1),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-5, weight_decay=0.1, foreach=True),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-5, weight_decay=0.1, fused=True),
}


class ParityError(AssertionError):
    """Two runs differ, or one of them is not fit for a comparison."""


@dataclass
class Step:
    """What one training step gave; gradients as they were before clipping, under the plain model's names."""

    loss: Tensor
    outputs: dict[str, Tensor]
    grads: dict[str, Tensor]
    norm: Tensor


@dataclass
class Run:
    """Steps of training, the weights after the last, and the buffers that the steps wrote."""

    steps: list[Step] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


# ---- comparison --------------------------------------------------------------------------------------------------------


def difference(name: str, found: Tensor, reference: Tensor, *, zero: bool = False) -> float:
    """Relative difference ``|found - reference| / |reference|``; ParityError where that number would mean nothing.

    ``zero``: the reference is known to be all zero, and ``found`` has to be exactly that, too.
    """
    if found.shape != reference.shape or found.dtype != reference.dtype:
        raise ParityError(
            f"{name}: {found.dtype} of shape {tuple(found.shape)} is compared with {reference.dtype} of shape "
            f"{tuple(reference.shape)}."
        )
    found, reference = found.detach(), reference.detach()
    for what, tensor in (("found", found), ("reference", reference)):
        if not torch.isfinite(tensor).all():
            raise ParityError(f"{name}: the {what} holds NaN or inf.")
    nothing = not reference.count_nonzero()
    if nothing != zero:
        raise ParityError(f"{name}: the reference is {'' if nothing else 'not '}all zero, which was not expected.")
    if zero:
        if found.count_nonzero():
            raise ParityError(f"{name}: exact zeros were expected, {found.abs().max():.3e} was found.")
        return 0.0
    if not found.is_floating_point():
        return float((found != reference).any())
    return float((found - reference).norm() / reference.norm())


def compare(found: Run, reference: Run, *, rtol: float = RTOL, zero: Sequence[str] = ()) -> dict[str, float]:
    """Worst relative difference of loss, outputs, grads, norm, weights and buffers; ParityError if one exceeds ``rtol``.

    ``zero`` are patterns of parameter names whose gradient is exactly zero in every step.
    """
    if len(found.steps) != len(reference.steps) or not reference.steps:
        raise ParityError(f"{len(found.steps)} steps are compared with {len(reference.steps)}.")
    errors: list[tuple[str, str, float]] = []
    for at, (here, there) in enumerate(zip(found.steps, reference.steps, strict=True)):
        errors.append(("loss", f"step {at}", difference(f"loss of step {at}", here.loss, there.loss)))
        errors.append(("norm", f"step {at}", difference(f"norm of step {at}", here.norm, there.norm)))
        errors += _each("outputs", f" of step {at}", here.outputs, there.outputs)
        errors += _each("grads", f" of step {at}", here.grads, there.grads, zero)
    errors += _each("weights", "", found.weights, reference.weights)
    errors += _each("buffers", "", found.buffers, reference.buffers)
    wrong = sorted((item for item in errors if item[2] > rtol), key=lambda item: -item[2])
    if wrong:
        listed = "; ".join(f"{kind} {name} by {size:.3e}" for kind, name, size in wrong[:6])
        listed += _factors(found.steps[0].grads, reference.steps[0].grads, rtol)
        raise ParityError(f"{len(wrong)} of {len(errors)} values differ by more than {rtol:g}: {listed}.")
    return {
        kind: max(size for one, _, size in errors if one == kind)
        for kind in ("loss", "outputs", "grads", "norm", "weights", "buffers")
        if any(one == kind for one, _, _ in errors)
    }


def _factors(found: Mapping[str, Tensor], reference: Mapping[str, Tensor], rtol: float) -> str:
    """Gradients that are the right ones times a number: the ratio of two mesh axes, more often than not."""
    factors = {}
    for name, expected in reference.items():
        scale = float((found[name] * expected).sum() / (expected * expected).sum())
        straight = float((found[name] - scale * expected).norm() / expected.norm()) < 1e3 * rtol
        if straight and abs(scale - 1) > 1e3 * rtol:
            factors[name] = scale
    listed = ", ".join(f"{name} by {scale:.6g}" for name, scale in list(factors.items())[:6])
    return f"; gradients of the first step that are off by a factor alone: {listed}" if listed else ""


def _each(
    kind: str, where: str, found: Mapping[str, Tensor], reference: Mapping[str, Tensor], zero: Sequence[str] = ()
) -> list[tuple[str, str, float]]:
    if set(found) != set(reference):
        raise ParityError(f"{kind}{where}: only one side has {sorted(set(found) ^ set(reference))}.")
    errors = []
    for name, expected in reference.items():
        silent = any(fnmatchcase(name, pattern) for pattern in zero)
        label = f"{name}{where}"
        errors.append((kind, label, difference(f"{kind} {label}", found[name], expected, zero=silent)))
    return errors


# ---- the plain model ---------------------------------------------------------------------------------------------------


def plain(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    optimizer: str = "adamw",
    clip: float | None = None,
    without_grad: Collection[str] = (),
) -> Run:
    """Train a copy of the model on whole batches, one step each. An idle parameter has a zero gradient; a frozen one has none.

    ``without_grad`` names parameters that the loss does not reach: ParityError where one of them gets a gradient.
    """
    model = copy.deepcopy(model)
    stepper, run = OPTIMIZERS[optimizer](model.parameters()), Run()
    before = {name: value.clone() for name, value in model.named_buffers()}
    for batch in batches:
        out = model(**batch)
        out["loss"].backward()
        for name, param in model.named_parameters():
            if name in without_grad and param.grad is not None:
                raise ParityError(f"{name}: has a gradient in the plain model, and none was expected.")
            if param.requires_grad and name not in without_grad:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        grads = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
        outputs = {name: value.detach() for name, value in out.items() if name != "loss"}
        run.steps.append(Step(out["loss"].detach(), outputs, grads, global_norm(grads)))
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        stepper.step()
        stepper.zero_grad()
    run.weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    run.buffers = {
        name: value.detach() for name, value in model.named_buffers() if not torch.equal(value, before[name])
    }
    return run


def global_norm(grads: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([grad.norm() for grad in grads.values()]).norm()


_FIRST = Shard(0)

# ---- parts of ranks ----------------------------------------------------------------------------------------------------


def slice_for(batch: Batch, plan: Plan, rank: int) -> Batch:
    """What ``rank`` passes of a global batch."""
    at, of = plan.data_rank(rank), plan.num_data_ranks
    return {name: value.chunk(of)[at].contiguous() for name, value in batch.items()}


def assemble(
    name: str, parts: Sequence[Tensor], shape: torch.Size, mesh: Mesh, axis: str = "ep", placed: Shard = _FIRST
) -> Tensor:
    """The whole tensor from one part per rank: copies, cuts over ``axis``, or one owner's whole (others empty).

    ParityError where copies are not bitwise equal or a part is missing; this is how drifting copies are found.
    """
    indices = [mesh.axis_index(axis, rank) for rank in range(mesh.world_size)]
    if all(part.shape == shape for part in parts):
        return _same(name, parts)
    held = [(index, part) for index, part in zip(indices, parts, strict=True) if part.numel()]
    if all(part.shape == shape for _, part in held):
        owners = {index for index, _ in held}
        if len(owners) != 1 or len(held) != indices.count(next(iter(owners))):
            raise ParityError(
                f"{name}: held by {axis} ranks {sorted(owners)} in {len(held)} copies, one owner was due."
            )
        return _same(name, [part for _, part in held])
    pieces = []
    for index in range(mesh.size(axis)):
        pieces.append(_same(name, [part for at, part in zip(indices, parts, strict=True) if at == index]))
    return without_padding(name, put_together(pieces, placed), shape, placed.dim, mesh.size(axis))


def without_padding(name: str, whole: Tensor, shape: torch.Size, dim: int, ranks: int) -> Tensor:
    """A whole of that shape: what stands behind it in one dim must be the zeros with which unequal parts are filled up."""
    size = shape[dim]
    if (
        whole.shape[dim] in (size, -(-size // ranks) * ranks)
        and not whole.narrow(dim, size, whole.shape[dim] - size).any()
    ):
        whole = whole.narrow(dim, 0, size)
    if whole.shape != shape:
        raise ParityError(f"{name}: the parts make up {tuple(whole.shape)}, the whole is {tuple(shape)}.")
    return whole


def join_parts(
    name: str, parts: Sequence[Tensor], shape: torch.Size, mesh: Mesh, axis: str, placed: Shard
) -> list[Tensor]:
    """What each rank would hold were one cut, over ``axis``, undone; a rank that holds nothing goes on doing so."""
    groups = [mesh.group_ranks(axis, rank) for rank in range(mesh.world_size)]
    ranks = mesh.size(axis)
    return [
        without_padding(name, put_together([parts[rank] for rank in group], placed), shape, placed.dim, ranks)
        if parts[group[0]].numel()
        else parts[group[0]]
        for group in groups
    ]


def _same(name: str, copies: Sequence[Tensor]) -> Tensor:
    for other in copies[1:]:
        if not torch.equal(copies[0], other):
            raise ParityError(f"{name}: copies on different ranks are not bitwise equal.")
    return copies[0]


def assemble_output(name: str, parts: Sequence[Tensor], shape: torch.Size, mesh: Mesh) -> Tensor:
    """A model output: the batch is cut over dp, everything else is a copy."""
    return assemble(name, parts, shape, mesh, axis="dp")


# ---- lock step ---------------------------------------------------------------------------------------------------------


class LockStep:
    """All ranks of one compiled program in this process. ``program`` may be changed before the first step."""

    def __init__(
        self, model: nn.Module, plan: Plan, batch: Batch, *, optimizer: str = "adamw", pipeline: str | None = None
    ) -> None:
        self.model, self.plan = model, plan
        request = Request((), slice_for(batch, plan, 0), plan)
        with captured_once():
            self.program: Program = compile_call(model, request, pipeline=pipeline)
        self.mesh = self.program.mesh
        self._optimizer = optimizer
        self._shapes: dict[Any, dict[str, torch.Size]] = {}
        self.reset()

    def reset(self) -> None:
        """Every rank's weights as the model has them, with a fresh optimizer."""
        self.written: list[dict[str, Tensor]] = [{} for _ in range(self.mesh.world_size)]
        weights = [item for item in self.program.inputs if item.kind in (InputKind.PARAM, InputKind.BUFFER)]
        self.ranks = [
            {
                item.name: local_value(self.program, item, self.model, rank).requires_grad_(item.requires_grad)
                for item in weights
            }
            for rank in range(self.mesh.world_size)
        ]
        trained = [[weight for weight in held.values() if weight.requires_grad] for held in self.ranks]
        self._optimizers = [OPTIMIZERS[self._optimizer](held) for held in trained]

    def step(self, batch: Batch, *, change: Callable[[dict[str, Tensor]], None] | None = None) -> Step:
        """One step on every rank. ``change`` may tamper with each rank's gradients before the optimizer sees them."""
        world = range(self.mesh.world_size)
        with torch.no_grad():
            inputs = [self._inputs(rank, batch) for rank in world]
            results = simulate(self.program.graph_module, inputs, self.mesh)
        grads: list[dict[str, Tensor]] = [{} for _ in world]
        outputs: dict[str, list[Tensor]] = {}
        for rank in world:
            for item, value in zip(self.program.outputs, results[rank], strict=True):
                if item.kind is OutputKind.GRAD:
                    grads[rank][item.name] = value
                elif item.kind in (OutputKind.LOSS, OutputKind.USER):
                    outputs.setdefault(self._output_names()[item.leaf], []).append(value)
                elif item.kind is OutputKind.BUFFER:
                    self.written[rank][item.name] = value
            if change is not None:
                change(grads[rank])
        whole = self._output_shapes(batch)
        user = {key: self._output(key, parts, whole[key]) for key, parts in outputs.items()}
        found = self._gathered(grads)
        for rank in world:
            for name, grad in grads[rank].items():
                self.ranks[rank][name].grad = grad
            self._optimizers[rank].step()
        loss = user.pop("loss")
        return Step(loss, user, found, global_norm(found))

    def run(self, batches: Sequence[Batch], **options: Any) -> Run:
        """One step for each batch."""
        steps = [self.step(batch, **options) for batch in batches]
        weights = self._gathered([{k: v.detach() for k, v in held.items()} for held in self.ranks])
        buffers = {name: _same(name, [held[name] for held in self.written]) for name in self.written[0]}
        return Run(steps, weights, buffers)

    def _output(self, name: str, parts: list[Tensor], shape: torch.Size) -> Tensor:
        """An output of the plain model's shape: parts over tp and cp are put together first, the last cut before the one before."""
        item = next(item for item in self.program.outputs if item.leaf == self._output_names().index(name))
        for axis, placed in reversed(item.placements):
            if axis in ("tp", "cp") and isinstance(placed, Shard):
                groups = [self.mesh.group_ranks(axis, rank) for rank in range(self.mesh.world_size)]
                parts = [put_together([parts[rank] for rank in group], placed) for group in groups]
        return assemble_output(name, parts, shape, self.mesh)

    def _inputs(self, rank: int, batch: Batch) -> list[Tensor]:
        leaves = list(slice_for(batch, self.plan, rank).values())
        found = []
        for item in self.program.inputs:
            if item.kind is InputKind.BUFFER and item.fqns[0] in self.written[rank]:
                found.append(self.written[rank][item.fqns[0]])
            elif item.kind in (InputKind.PARAM, InputKind.BUFFER):
                found.append(self.ranks[rank][item.name].detach())
            elif item.kind is InputKind.BATCH:
                found.append(leaves[item.leaf])
            elif item.kind is InputKind.CONSTANT:
                found.append(self.program.constants[item.name])
            elif item.kind is InputKind.OFFSET:
                found.append(torch.tensor(self.mesh.axis_index(item.axis, rank) * item.stride))
            elif item.kind is InputKind.SEED:
                found.append(torch.tensor(7))
            else:
                raise ParityError(f"input {item.name} of kind {item.kind.value} is not supplied by this harness.")
        return found

    def _gathered(self, per_rank: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Whole tensors under the plain model's names; a stack is taken apart."""
        found: dict[str, Tensor] = {}
        for item in self.program.inputs:
            if item.name not in per_rank[0] or item.kind is not InputKind.PARAM:
                continue
            cuts = [(axis, placed) for axis, placed in item.placements if isinstance(placed, Shard)]
            parts, shapes = [held[item.name] for held in per_rank], [list(item.shape)]
            for axis, placed in cuts:
                shapes.append(list(shapes[-1]))
                shapes[-1][placed.dim] //= self.mesh.size(axis)
            for (axis, placed), shape in reversed(list(zip(cuts[1:], shapes[1:], strict=False))):
                parts = join_parts(item.name, parts, torch.Size(shape), self.mesh, axis, placed)
            whole = assemble(item.name, parts, torch.Size(item.shape), self.mesh, *(cuts or [("ep", Shard(0))])[0])
            parts = whole.unbind(0) if item.stacked else [whole]
            found |= dict(zip(item.fqns, parts, strict=True))
        return found

    def _output_names(self) -> list[str]:
        assert self.program.out_spec is not None
        return list(self.program.out_spec.unflatten(range(self.program.out_spec.num_leaves)))

    def _output_shapes(self, batch: Batch) -> dict[str, torch.Size]:
        """Shapes of the plain model's outputs; it runs once for each shape of batch."""
        key = tuple(value.shape for value in batch.values())
        if key not in self._shapes:
            with torch.no_grad():
                made = copy.deepcopy(self.model)(**batch)
            self._shapes[key] = {name: value.shape for name, value in made.items()}
        return self._shapes[key]


def local_value(program: Program, item: Input, model: nn.Module, rank: int) -> Tensor:
    """A rank's part of a parameter or buffer, cut as the program's inputs say."""
    known = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    parts = [known[name].detach() for name in item.fqns]
    value = torch.stack(parts) if item.stacked else parts[0]
    for axis, placed in item.placements:
        if isinstance(placed, Shard):
            value = part_of(value, placed, program.mesh.size(axis), program.mesh.axis_index(axis, rank))
    return padded(value, item.local_shape(program.mesh)).clone()
