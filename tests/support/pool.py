"""Gloo ranks that stay alive between tests, and the training loop they run: the ground truth of the parity tests.

Everything a rank runs is at module level here, because it is sent by name. Parts come back as this rank holds them;
`gathered` puts them together without the product's help.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import moecompile as mc
from moecompile.mesh import Mesh
from moecompile.placement.types import Shard
from moecompile.plan import Plan
from moecompile.runtime.launcher import RankPool
from tests.support.capture_memo import captured_once
from tests.support.models import Config, build
from tests.support.parity import OPTIMIZERS, Batch, Run, Step, assemble, assemble_output, join_parts, slice_for

# A step of these models takes milliseconds and a capture seconds: whoever needs longer hangs.
WATCHDOG_S = 90.0


class Ranks:
    """One pool per world size, started when first asked for."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def run(self, world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = WATCHDOG_S) -> list[Any]:
        """``fn(rank, *args)`` on every rank, results in rank order; all ranks are killed after ``timeout`` seconds."""
        if world_size not in self._pools:
            self._pools[world_size] = RankPool(world_size, timeout=timeout, env={"OMP_NUM_THREADS": "1"})
        return self._pools[world_size].run(fn, *args, timeout=timeout)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


@dataclass(frozen=True)
class Job:
    """A training run. ``clip``: max norm for the toolkit's helper or, with ``stock``, for torch's own.

    ``early``: the optimizer is made before the first call. ``forbid``: after the first step every forward of the user's
    modules raises.
    """

    config: Config
    plan: Plan
    optimizer: str = "adamw"
    clip: float | None = None
    stock: bool = False
    early: bool = True
    forbid: bool = False


@dataclass
class Part:
    """What one rank saw: its own slices, cuts and copies."""

    steps: list[Step] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    cuts: dict[str, tuple[tuple[str, Shard], ...]] = field(default_factory=dict)
    owned: set[str] = field(default_factory=set)


def train(rank: int, job: Job, batches: list[Batch]) -> Part:
    """Train on this rank's slices, one step a batch."""
    part = Part()
    with parallel(build(job.config), job.plan) as model:
        stepper = OPTIMIZERS[job.optimizer](model.parameters()) if job.early else None
        for at, batch in enumerate(batches):
            out = model(**slice_for(batch, job.plan, rank))
            stepper = stepper or OPTIMIZERS[job.optimizer](model.parameters())
            out["loss"].backward()
            grads = held_grads(model)
            norm = _clip(model, job)
            outputs = {name: of_data_rank(value) for name, value in out.items() if name != "loss"}
            part.steps.append(Step(out["loss"].detach(), outputs, grads, norm))
            stepper.step()
            stepper.zero_grad()
            if at == 0 and job.forbid:
                forbid_forward(model.plain)
        part.weights, part.cuts = held_weights(model), cuts(model)
        part.owned = {name for name, cut in model._state.weights.cuts.items() if cut.owner is not None}
    return part


def of_data_rank(value: Tensor) -> Tensor:
    """An output for this rank's batch, plain: collective over tp and cp where it is cut there."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def cuts(model: Any) -> dict[str, tuple[tuple[str, Shard], ...]]:
    """How parameters are cut within a tensor, by axis."""
    return {name: cut.parts for name, cut in model._state.weights.cuts.items() if cut.parts}


def _clip(model: Any, job: Job) -> Tensor:
    limit = float("inf") if job.clip is None else job.clip
    if job.stock:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), limit).detach().as_subclass(Tensor)
    return mc.clip_grad_norm_(model, limit).detach().as_subclass(Tensor)


@contextlib.contextmanager
def parallel(model: nn.Module, plan: Plan, **options: Any) -> Iterator[Any]:
    """`parallelize`, with its process groups taken down at the end: the ranks live on, and so do their captures."""
    made = mc.parallelize(model, plan, **options)
    with captured_once():
        yield made
    made._state.groups.close()


def held_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def held_grads(model: nn.Module) -> dict[str, Tensor]:
    """Gradients as this rank holds them, empty where the parameter is another rank's."""
    return {
        name: param.grad.detach().as_subclass(Tensor).clone()
        for name, param in model.named_parameters()
        if param.grad is not None
    }


def forbid_forward(model: nn.Module) -> None:
    """From now on, running the user's module code is an error."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the plain model's forward ran after capture")

    for module in model.modules():
        module.forward = refuse  # type: ignore[method-assign]


def gathered(parts: list[Part], reference: Run, plan: Plan) -> Run:
    """One run from the ranks' parts. Shapes come from the reference; copies have to be bitwise equal after every step."""
    mesh, run = Mesh(plan), Run()
    for at, expected in enumerate(reference.steps):
        steps = [part.steps[at] for part in parts]
        grads = _whole([step.grads for step in steps], expected.grads, mesh, f"gradient of step {at}, ", parts[0])
        outputs = {
            name: assemble_output(name, [step.outputs[name] for step in steps], value.shape, mesh)
            for name, value in expected.outputs.items()
        }
        loss = assemble_output("loss", [step.loss for step in steps], expected.loss.shape, mesh)
        norm = assemble_output("norm", [step.norm for step in steps], expected.norm.shape, mesh)
        run.steps.append(Step(loss, outputs, grads, norm))
    run.weights = _whole([part.weights for part in parts], reference.weights, mesh, "weight ", parts[0])
    return run


def _whole(
    held: list[dict[str, Tensor]],
    like: dict[str, Tensor],
    mesh: Mesh,
    what: str,
    one: Part,
) -> dict[str, Tensor]:
    names = {frozenset(item) for item in held} | {frozenset(like)}
    assert len(names) == 1, f"{what}: the ranks and the reference do not have the same parameters: {names}"
    found = {}
    for name, whole in like.items():
        parts, placed, owned = [item[name] for item in held], one.cuts.get(name, ()), name in one.owned
        first = ("ep", Shard(0)) if owned or not placed else placed[0]
        for at in range(len(placed) - 1, -1 if owned else 0, -1):
            parts = join_parts(f"{what}{name}", parts, _shape(whole.shape, placed[:at], mesh), mesh, *placed[at])
        found[name] = assemble(f"{what}{name}", parts, whole.shape, mesh, *first)
    return found


def _shape(shape: torch.Size, cuts: Sequence[tuple[str, Shard]], mesh: Mesh) -> torch.Size:
    """What cuts leave of a shape."""
    left = list(shape)
    for axis, placed in cuts:
        left[placed.dim] //= mesh.size(axis)
    return torch.Size(left)
