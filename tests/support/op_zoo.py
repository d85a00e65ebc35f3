"""A small MoE with any kind of layer or loss put into it, on simulated ranks and on one process.

A `Kind` is one row of the zoo's tables. Its outcome under a plan is one of two: everything equals the plain model, or a refusal
whose words the row gives. A refusal that no row expects, an expected one that does not come, and a difference all raise.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moecompile as mc
from moecompile.plan import Plan
from tests.support.parity import Batch, LockStep, ParityError, Step, global_norm

WIDTH, LENGTH, ROWS, VOCAB, EXPERTS = 8, 6, 4, 16, 4
RTOL = 1e-9
# a gradient far below all others is rounding: a bias in front of a norm
FLOOR = 1e-6

# plan -> degrees, and what follows the plan's usual passes
PLANS: dict[str, Plan] = {
    "dp1": Plan(dp=1),
    "dp2 ep2": Plan(dp=2, ep=2),
    "dp4 ep2 etp2": Plan(dp=4, ep=2, etp=2),
    "tp2 sp": Plan(dp=1, tp=2, ep=2, sequence_parallel=True),
    "cp2": Plan(dp=1, cp=2, ep=2),
    "zero3": Plan(dp=2, ep=2, passes="+shard-params{level=3}"),
}
ERRORS = (mc.CaptureError, mc.PassError, mc.PlanError, mc.VerifyError)

Apply = Callable[[Any, Tensor], Tensor]
Loss = Callable[[Tensor, Tensor, Tensor], Any]


@dataclass(frozen=True)
class Kind:
    """``make`` builds a module and ``apply`` uses it on tokens ``[batch, sequence, width]``; ``with_ids`` gets the ids, too.

    ``loss`` takes logits, labels and hidden states and gives the loss, or a dict with more results. ``refused`` says by plan, or
    for every other plan under ``*``, which words a refusal has; an empty text says that there is none. ``random``: compared with
    one rank, not with the plain model.
    """

    make: Callable[[], nn.Module]
    apply: Callable[..., Tensor]
    loss: Loss | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    random: bool = False
    with_ids: bool = False

    def words(self, plan: str) -> str | None:
        return self.refused.get(plan, self.refused.get("*")) or None


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def after(change: Callable[[Tensor, Tensor], Tensor], **options: Any) -> Kind:
    """A change of what a linear gives, which gets the tokens, too."""
    return Kind(linear, lambda layer, x: change(layer(x), x), **options)


def layer(make: Callable[[], nn.Module], **options: Any) -> Kind:
    """A module called with tokens ``[batch, sequence, width]``."""
    return Kind(make, lambda inner, x: inner(x), **options)


def channels(make: Callable[[], nn.Module], **options: Any) -> Kind:
    """A module called with tokens ``[batch, width, sequence]``."""
    return Kind(make, lambda inner, x: inner(x.transpose(1, 2)).transpose(1, 2), **options)


def loss(function: Loss, **options: Any) -> Kind:
    """A loss of a model whose layer is a linear."""
    return Kind(linear, lambda inner, x: torch.tanh(inner(x)), function, **options)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 12), nn.SiLU(), nn.Linear(12, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        probs, ids = self.gate(tokens).softmax(-1).topk(2)
        probs = probs / probs.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for at, expert in enumerate(self.experts):
            rows, slots = torch.where(ids == at)
            out.index_add_(0, rows, probs[rows, slots, None] * expert(tokens[rows]))
        return out.reshape(x.shape)


def model_class(kind: Kind) -> type[nn.Module]:
    """A class of its own for every kind: a capture is shared by what is of one class."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.part = kind.make()
            self.moe = Experts()
            self.head = nn.Linear(WIDTH, VOCAB)

        def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Any]:
            x = self.embed(ids)
            x = x + (kind.apply(self.part, x, ids) if kind.with_ids else kind.apply(self.part, x))
            x = x + self.moe(x)
            logits = self.head(x)
            if kind.loss is None:
                return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}
            found = kind.loss(logits, labels, x)
            return found if isinstance(found, dict) else {"loss": found}

    return Model


def batch() -> Batch:
    draw = torch.randint(0, VOCAB, (2, ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"ids": draw[0], "labels": draw[1]}


class Zoo:
    """Models and what one process makes of them, kept for the next plan."""

    def __init__(self, kinds: Mapping[str, Kind]) -> None:
        self.kinds = kinds
        self._classes: dict[str, type[nn.Module]] = {}
        self._references: dict[str, Step] = {}

    def model(self, name: str) -> nn.Module:
        made = self._classes.setdefault(name, model_class(self.kinds[name]))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return made().double()

    def check(self, name: str, plan: str) -> str:
        """``exact`` or ``refused``; `ParityError` for everything that the table does not say."""
        words = self.kinds[name].words(plan)
        logger = logging.getLogger("moecompile")
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            found = self._step(name, PLANS[plan])
        except ERRORS as error:
            if words is None or not re.search(words, str(error)):
                raise ParityError(f"{name} under {plan}, refused with other words than {words!r}: {error}") from error
            return "refused"
        finally:
            logger.setLevel(level)
        if words is not None:
            raise ParityError(f"{name} under {plan} is no longer refused.")
        worst(found, self._reference(name))
        return "exact"

    def _step(self, name: str, plan: Plan) -> Step:
        run = LockStep(self.model(name), plan, batch(), optimizer="sgd")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return run.step(batch())

    def _reference(self, name: str) -> Step:
        if name not in self._references:
            kind = self.kinds[name]
            self._references[name] = self._step(name, PLANS["dp1"]) if kind.random else plain_step(self.model(name))
        return self._references[name]


def plain_step(model: nn.Module) -> Step:
    out = model(**batch())
    out["loss"].backward()
    held = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    grads = {name: grad.to_dense() if grad.is_sparse else grad for name, grad in held.items()}
    outputs = {name: value.detach() for name, value in out.items() if name != "loss" and isinstance(value, Tensor)}
    return Step(out["loss"].detach(), outputs, grads, global_norm(grads))


def worst(found: Step, reference: Step) -> float:
    """The largest difference of loss, results and gradients; `ParityError` beyond `RTOL`, and for what only one side has."""
    empty = {name for name, grad in found.grads.items() if not grad.any()}
    if missing := set(reference.grads) ^ (set(found.grads) - (empty - set(reference.grads))):
        raise ParityError(f"only one side has gradients of {sorted(missing)}.")
    if set(found.outputs) != set(reference.outputs):
        raise ParityError(f"only one side has the results {sorted(set(found.outputs) ^ set(reference.outputs))}.")
    floor = FLOOR * float(reference.norm)
    pairs = [("the loss", found.loss, reference.loss, 0.0), ("the norm", found.norm, reference.norm, floor)]
    pairs += [(f"result {name}", found.outputs[name], value, 0.0) for name, value in reference.outputs.items()]
    pairs += [(f"gradient of {name}", found.grads[name], grad, floor) for name, grad in reference.grads.items()]
    errors = {name: _error(name, here, there, least) for name, here, there, least in pairs}
    wrong = {name: error for name, error in errors.items() if not error <= RTOL}
    if wrong:
        raise ParityError("; ".join(f"{name} differs by {error:.3e}" for name, error in wrong.items()))
    return max(errors.values())


def _error(name: str, found: Tensor, reference: Tensor, least: float) -> float:
    if found.shape != reference.shape or found.dtype != reference.dtype:
        raise ParityError(f"{name}: {found.dtype} {list(found.shape)}, not {reference.dtype} {list(reference.shape)}.")
    if not torch.isfinite(reference).all():
        return math.inf
    size = max(float(reference.abs().double().norm()), least)
    away = (
        float((found - reference).abs().double().norm())
        if found.dtype != torch.bool
        else float((found ^ reference).any())
    )
    return away / size if size else away
