"""One family against its plain model: loss, outputs, every gradient, norm, and weights after three AdamW steps, twice.

The first three batches are random. The next three, on the same compiled program, crowd the tokens on few experts.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor

from moecompile import ops
from moecompile.capture import capture as capturing
from moecompile.compilation import Request, capture
from moecompile.plan import Plan
from moecompile.program import OutputKind
from moecompile.runtime.simulator import simulate
from tests.support import families
from tests.support.parity import LockStep, ParityError, Run, plain, slice_for

PLANS = (Plan(dp=2, ep=2), Plan(dp=4, ep=4))
# loop: the family's own eager code is captured; interface: transformers is asked for another implementation, and ours is taken
FORMS = ("loop", "interface")
KINDS = ("loss", "grads", "norm", "weights")
RTOL = 1e-9
# a gradient far below all others is rounding: the keys' bias of an attention, a weight in front of a norm
FLOOR = 1e-6


@dataclass
class Found:
    """What one family, form and plan gave. ``loads`` are tokens by data rank and expert, one for each layer and crowded batch."""

    layers: int
    recognised: str
    cut: bool
    worst: dict[str, float] = field(default_factory=dict)
    loads: list[Tensor] = field(default_factory=list)


@contextlib.contextmanager
def form(name: str) -> Iterator[str]:
    """The experts implementation for a form; within ``loop`` capture sees the family's own forward, as written."""
    with contextlib.ExitStack() as stack:
        if name == "loop":
            stack.enter_context(mock.patch.object(capturing, "split_experts", lambda model: contextlib.nullcontext()))
        stack.enter_context(families.WideFloats())
        yield "eager" if name == "loop" else "batched_mm"


def check(family: str, experts: str, plan: Plan) -> Found:
    """`ParityError` if anything differs."""
    with form(experts) as implementation:
        model = families.build(family, experts=implementation)
        random = [families.batch(seed) for seed in range(3)]
        run = LockStep(model, plan, random[0])
        names = {layer["how"] for layer in run.program.layers}
        cut = any(node.target is ops.dispatch for node in run.program.graph.nodes)
        found = Found(len(run.program.layers), ", ".join(sorted(names)), cut)
        for batches in (random, families.crowded(0)):
            run.reset()
            here = run.run(batches)
            without = {name for name, _ in model.named_parameters()} - set(here.steps[0].grads)
            for kind, error in differences(here, plain(model, batches, without_grad=without)).items():
                found.worst[kind] = max(error, found.worst.get(kind, 0.0))
        run.reset()
        for batch in families.crowded(0):
            found.loads += loads(run, batch)
    return found


def seconds(family: str) -> float:
    """CPU seconds of one capture, experts in eager form and ours in their place."""
    with families.WideFloats():
        model, plan = families.build(family), PLANS[0]
        request = Request((), slice_for(families.batch(0), plan, 0), plan)
        start = time.process_time()
        capture(model, request)
        return time.process_time() - start


def loads(run: LockStep, batch: dict[str, Tensor]) -> list[Tensor]:
    """Tokens for each rank and expert, one tensor for each layer."""
    world = range(run.mesh.world_size)
    with torch.no_grad():
        results = simulate(run.program.graph_module, [run._inputs(rank, batch) for rank in world], run.mesh)
    wanted = [
        at
        for at, item in enumerate(run.program.outputs)
        if item.kind is OutputKind.METRIC and item.what == "tokens_per_expert"
    ]
    return [torch.stack([results[rank][at] for rank in world]) for at in wanted]


def differences(found: Run, reference: Run) -> dict[str, float]:
    """The worst relative difference of each kind; `ParityError` above `RTOL`, for NaN, and for what only one side has."""
    pairs: list[tuple[str, str, Tensor, Tensor, float]] = []
    for at, (here, there) in enumerate(zip(found.steps, reference.steps, strict=True)):
        total = float(there.norm)
        pairs.append(("loss", f"step {at}", here.loss, there.loss, 0.0))
        pairs.append(("norm", f"step {at}", here.norm, there.norm, 0.0))
        pairs.append(("outputs", f"logits of step {at}", here.outputs["logits"], there.outputs["logits"], 0.0))
        if set(there.grads) - set(here.grads):
            raise ParityError(f"no gradients of {sorted(set(there.grads) - set(here.grads))}.")
        pairs += [("grads", f"{k} of step {at}", here.grads[k], there.grads[k], FLOOR * total) for k in there.grads]
    pairs += [("weights", name, found.weights[name], value, 0.0) for name, value in reference.weights.items()]
    worst: dict[str, float] = {}
    for kind, name, here_, there_, floor in pairs:
        if here_.shape != there_.shape or here_.dtype != there_.dtype or not torch.isfinite(here_ + there_).all():
            raise ParityError(f"{kind} {name}: other shape or type, NaN or inf.")
        size = max(float(there_.norm()), floor)
        error = float((here_ - there_).norm()) / size if size else float(here_.norm())
        if error > RTOL:
            raise ParityError(f"{kind} {name} differs by {error:.3e}.")
        worst[kind] = max(error, worst.get(kind, 0.0))
    return worst
