"""Refuse, before it steps, an optimizer that would be silently wrong on parameters of which each rank holds a part.

One global hook looks at an optimizer once after each cut; every further step costs a dictionary look-up, and optimizers
without cut parameters are never looked at twice. An optimizer fits if the update of an element depends on that element alone:
those of ``torch.optim`` are known, any other one is tried on small tensors. Muon also fits where one rank has the whole matrix.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from . import grads
from .errors import PlanError
from .optimizer_probe import is_elementwise
from .optimizer_state import cut_unused
from .state import State
from .weights import Cut

_ELEMENTWISE = {
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
}
# by name, so that those of other packages are meant, too
_NEEDS_WHOLE = {
    "Muon": "orthogonalises whole matrices",
    "Adafactor": "factors whole matrices",
    "LBFGS": "works on one flat vector of all parameters",
    "Shampoo": "preconditions whole matrices",
    "SOAP": "preconditions whole matrices",
}
_ONE_BY_ONE = {"Muon"}
_states: weakref.WeakSet[State] = weakref.WeakSet()
_looked_at: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
_cuts = 0
_registered = False


def watch(state: State) -> None:
    """From now on optimizers are checked against the parameters that ``state`` cuts; call after every cut."""
    global _cuts, _registered
    _states.add(state)
    _cuts += 1
    if not _registered:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _registered = True


def _before_step(opt: Optimizer, args: Any, kwargs: Any) -> None:
    _check(opt)
    grads.in_optimizer(True)


def _after_step(opt: Optimizer, args: Any, kwargs: Any) -> None:
    grads.in_optimizer(False)


def _check(opt: Optimizer) -> None:
    for state in _states:
        if state.unreduced and _has_any(opt, state.weights.model):
            state.check_reduced(f"{type(opt).__name__}.step()")
    seen = (_cuts, len(opt.param_groups))
    if _looked_at.get(opt) == seen:
        return
    cut = {}
    for state in _states:
        for name, param in state.weights.model.named_parameters():
            if state.weights.spread_axis(name):
                cut[id(param)] = (state, name)
    for group in opt.param_groups:
        held = [(param, *cut[id(param)]) for param in group["params"] if id(param) in cut]
        parts = [item for item in held if _is_part(opt, item[1].weights.cut_of(item[2]))]
        kinds: dict[Any, tuple[nn.Parameter, State, str]] = {}
        for item in parts:  # one parameter of each number of dims and way of cutting them
            weights, name = item[1].weights, item[2]
            kinds.setdefault((len(weights.global_shape(name)), weights.cut_dims(name)), item)
        for param, state, name in kinds.values():
            _check_kind(opt, group, param, state, name)
        for param, state, name in held:
            _check_state(opt, param, state, name)
    _looked_at[opt] = seen


def _is_part(opt: Optimizer, cut: Cut | None) -> bool:
    """Whether ranks hold parts of a weight; a matrix that one rank holds whole is none to who takes one matrix at a time."""
    whole = cut is not None and cut.owner is not None and not cut.more
    return cut is not None and not (whole and any(kind.__name__ in _ONE_BY_ONE for kind in type(opt).__mro__))


def _has_any(opt: Optimizer, model: nn.Module) -> bool:
    own = {id(param) for param in model.parameters()}
    return any(id(param) in own for group in opt.param_groups for param in group["params"])


def _check_kind(opt: Optimizer, group: Mapping[str, Any], param: nn.Parameter, state: State, name: str) -> None:
    if type(opt) in _ELEMENTWISE:
        return
    why = next((_NEEDS_WHOLE[kind.__name__] for kind in type(opt).__mro__ if kind.__name__ in _NEEDS_WHOLE), None)
    if why is None:
        try:
            ndim, dims = len(state.weights.global_shape(name)), state.weights.cut_dims(name) or {0}
            if all(is_elementwise(opt, group, param, ndim, dim) for dim in sorted(dims)):
                return
            why = "updates an element by what other elements are"
        except Exception as error:
            why = f"could not be tried on a small tensor ({type(error).__name__}: {error})"
    cut = state.weights.cut_of(name)
    assert cut is not None
    raise PlanError(
        f"the optimizer {type(opt).__name__} {why}, but '{name}' is cut over the ranks of {cut.axes}; use an elementwise optimizer such "
        f"as AdamW or SGD for the parameters that are cut, or {_uncut(cut.axes.split('+'))}."
    )


def _uncut(axes: list[str]) -> str:
    """What leaves a parameter whole: degrees of one, and no shards of it."""
    degrees = [axis for axis in axes if axis not in ("dp", "cp", "edp")]
    said = ["=".join([*degrees, "1"])] if degrees else []
    return " and ".join([*said, *(["leave shard-params out of the plan"] if len(degrees) < len(axes) else [])])


def _check_state(opt: Optimizer, param: nn.Parameter, state: State, name: str) -> None:
    """State from before the cut is refused unless no step has used it: some optimizers make theirs when they are built."""
    held = opt.state.get(param)
    if not held:
        return
    cut_unused(state, name, param, held)
    wrong = [
        key for key, value in held.items() if isinstance(value, Tensor) and value.dim() and value.shape != param.shape
    ]
    if not wrong:
        return
    raise PlanError(
        f"the optimizer {type(opt).__name__} has state ('{wrong[0]}' of '{name}', shape {list(held[wrong[0]].shape)}) from before "
        f"the model was cut, whose share here has shape {list(param.shape)}; build a new optimizer after parallelize, and bring "
        "the state in with moecompile.load_optimizer_state_dict(model, optimizer, old.state_dict())."
    )
