"""What an optimizer does, found out by letting a copy of it step on small tensors of our own.

The copy has the optimizer's class, settings and groups but parameters, state and hooks of its own, so nothing of the user's
moves. Two questions are answered this way: which state the optimizer keeps for a parameter, and whether the update of one
element depends on others.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_UNUSED = -0.0
_STEPS = 6  # RAdam begins to scale at the sixth
_BASE = ("state", "param_groups", "defaults", "step", "zero_grad", "profile_hook_step", "_zero_grad_profile_name")


def probe(opt: Optimizer, group: Mapping[str, Any], params: Sequence[nn.Parameter], lr: float) -> Optimizer:
    """A copy of ``opt`` with one group, that group's settings and these parameters."""
    made: Optimizer = type(opt).__new__(type(opt))
    extra = {key: value for key, value in vars(opt).items() if key not in _BASE and not key.startswith("_optimizer_")}
    extra = {key: value for key, value in extra.items() if not callable(value)}
    own = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    if "lr" in own:
        own["lr"] = torch.as_tensor(lr, device=own["lr"].device) if isinstance(own["lr"], Tensor) else lr
    made.__dict__.update(copy.deepcopy(extra))
    made.__setstate__(
        {
            "defaults": copy.deepcopy(opt.defaults),
            "state": defaultdict(dict),
            "param_groups": [{**copy.deepcopy(own), "params": list(params)}],
        }
    )
    return made


def run(opt: Optimizer) -> None:
    """One step of the class itself: the instance's own ``step`` may be a scheduler's wrapper."""
    with torch.no_grad():
        type(opt).step(opt)


def fresh_state(opt: Optimizer, group: Mapping[str, Any], param: nn.Parameter, ndim: int) -> dict[str, Any]:
    """The entries that a first step would make for ``param``: zeros of its shape (see `is_unused`), and step counts at zero.

    ``ndim`` is the number of dims of the plain parameter; another rank's expert has lost them.
    """
    device = torch.device("cpu") if param.is_meta else param.device
    dummy = nn.Parameter(torch.zeros([2] * ndim, dtype=param.dtype, device=device))
    dummy.grad = torch.zeros_like(dummy)
    made = probe(opt, group, [dummy], 0.0)
    run(made)
    found: dict[str, Any] = {}
    for key, value in made.state[dummy].items():
        if isinstance(value, Tensor):
            moment = value.shape == dummy.shape
            found[key] = torch.full_like(param, _UNUSED, dtype=value.dtype) if moment else torch.zeros_like(value)
        else:
            found[key] = value
    return found


def is_unused(held: Mapping[str, Any]) -> bool:
    """Whether an entry is what `fresh_state` made, unused since: its moments are all minus zero.

    To whoever computes with them these are zeros, and no optimizer leaves a tensor of them; so the mark costs no entry of its own
    in a checkpoint, which would keep it from being exchanged with plain code.
    """
    moments = [value for value in held.values() if isinstance(value, Tensor) and value.dim() and value.numel()]
    return bool(moments) and all(bool((value.signbit() & (value == 0)).all()) for value in moments)


def is_elementwise(opt: Optimizer, group: Mapping[str, Any], param: nn.Parameter, ndim: int, dim: int = 0) -> bool:
    """Whether a few steps on half of a tensor, cut in ``dim``, beside another parameter, equal those on the whole of it."""
    dtype = torch.float64 if param.device.type == "cpu" else torch.float32
    source = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source, dtype=dtype).to(param.device)

    shape = [3] * dim + [4] + [3] * (ndim - 1 - dim)
    start, other, grads = draw(*shape), draw(3), [(draw(*shape), draw(3)) for _ in range(_STEPS)]
    devices = [param.device] if param.device.type == "cuda" else []

    def updated(length: int) -> list[Tensor]:
        params = [nn.Parameter(start.narrow(dim, 0, length).clone()), nn.Parameter(other.clone())]
        made = probe(opt, group, params, 0.1)
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(0)
            for large, small in grads:
                params[0].grad, params[1].grad = large.narrow(dim, 0, length).clone(), small.clone()
                run(made)
        return [params[0].detach().narrow(dim, 0, 2), params[1].detach()]

    return all(
        torch.allclose(half, full, rtol=1e-6, atol=1e-9) for half, full in zip(updated(2), updated(4), strict=True)
    )
