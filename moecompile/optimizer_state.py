"""An optimizer's state under parameter names and in global shapes, and back under any plan.

The form is that of ``torch.distributed.checkpoint.state_dict``: ``{"state": {name: {key: value}}, "param_groups": [...]}`` with
names in ``params``. Moments are spread as their parameter is, so one checkpoint serves every plan and a single process.
Parameters that no step has updated yet have zeros in it, as a template for readers, which are marked and dropped on loading.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from .optimizer_probe import fresh_state, is_unused
from .state import State


def save_optimizer(state: State, opt: Optimizer) -> dict[str, Any]:
    """The state of ``opt`` with plain names and global shapes; no communication.

    It is also the template that ``torch.distributed.checkpoint.load`` fills for a new optimizer.
    """
    names = _names(state, opt)
    found: dict[str, Any] = {}
    for group in opt.param_groups:
        for param in group["params"]:
            name = names[id(param)]
            held = opt.state.get(param)
            if not held and param.requires_grad:
                held = fresh_state(opt, group, param, len(state.weights.global_shape(name)))
            if held:
                cut_unused(state, name, param, held)
                found[name] = {key: _spread(state, name, param, key, value) for key, value in held.items()}
    groups = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [names[id(p)] for p in group["params"]],
        }
        for group in opt.param_groups
    ]
    return {"state": found, "param_groups": groups}


def _spread(state: State, name: str, param: nn.Parameter, key: str, value: Any) -> Any:
    """Moments take the global shape, step counts and settings stay."""
    if not isinstance(value, Tensor) or value.dim() == 0 or not state.weights.spread_axis(name):
        return value
    if value.shape != param.shape:
        raise ValueError(
            f"the optimizer keeps '{key}' of shape {list(value.shape)} for '{name}', whose share here has shape {list(param.shape)}, "
            "so it cannot be cut or joined as the parameter is; use an elementwise optimizer such as AdamW, SGD or RMSprop."
        )
    return state.spread(name, value)


def load_optimizer(state: State, opt: Optimizer, given: Mapping[str, Any]) -> None:
    """Put a state into ``opt``, cut as this model's parameters are.

    ``given`` comes from `save_optimizer` under any plan (directly or through torch.distributed.checkpoint), from
    ``torch.distributed.checkpoint.state_dict`` or from the ``state_dict()`` of the plain model's optimizer. Before the model is cut
    the state stays whole and is cut with it.

    Raises ValueError for parameters that are missing or unknown, for other groups, and for shapes that are not the plain model's.
    """
    names = _names(state, opt)
    if any(param.is_meta for group in opt.param_groups for param in group["params"]):
        raise ValueError(
            "the optimizer's parameters are on the meta device and would take its state there; load the model's weights first, or call "
            "the model once."
        )
    ours = [[names[id(param)] for param in group["params"]] for group in opt.param_groups]
    saved, saved_groups = _by_name(given, ours)
    flat = [name for group in ours for name in group]
    local: dict[int, dict[str, Any]] = {}
    for index, name in enumerate(flat):
        entry = {key: _local(state, name, value) for key, value in saved.get(name, {}).items()}
        if entry and not is_unused(entry):
            local[index] = entry
    groups, index = [], 0
    for group in ours:
        values = {key: value for key, value in _group_of(group, saved_groups).items() if key != "params"}
        groups.append({**values, "params": list(range(index, index + len(group)))})
        index += len(group)
    opt.load_state_dict({"state": local, "param_groups": groups})
    state.loaded.add(opt)


def _local(state: State, name: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0 and state.weights.global_shape(name) != ():
        return value.detach().clone()
    return state.part(name, value).detach().clone()


def _by_name(given: Mapping[str, Any], ours: list[list[str]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The saved entries and groups with names for parameters; a plain optimizer numbers them in the order of its groups."""
    groups = [dict(group) for group in given["param_groups"]]
    keys = [key for group in groups for key in group["params"]]
    flat = [name for group in ours for name in group]
    if keys and not any(isinstance(key, str) for key in keys):
        if len(keys) != len(flat):
            raise ValueError(
                f"the optimizer state is for {len(keys)} parameters, but this optimizer has {len(flat)}; build it over the same parameters "
                "in the same order as the one that was saved."
            )
        stored = [name for group in groups for name in group.get("param_names", [])]
        by_key = dict(zip(keys, stored if sorted(stored) == sorted(flat) else flat, strict=True))
    else:
        by_key = {key: key for key in keys}
    missing, unknown = sorted(set(flat) - set(by_key.values())), sorted(set(by_key.values()) - set(flat))
    if missing or unknown:
        raise ValueError(
            f"the optimizer state lacks {_few(missing)} and has {_few(unknown)} that this optimizer does not have; build the optimizer "
            "over the same parameters as the one that was saved."
        )
    entries = {by_key[key]: value for key, value in given["state"].items() if key in by_key}
    for group in groups:
        group["params"] = [by_key[key] for key in group["params"]]
    return entries, groups


def _group_of(names: Sequence[str], saved: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The one saved group that holds these parameters."""
    found = [group for group in saved if set(group["params"]) & set(names)]
    if len(found) != 1 and names:
        raise ValueError(
            f"the group of {_few(list(names))} spans {len(found)} groups of the saved optimizer state; group the parameters as they were "
            "when it was saved."
        )
    return found[0] if found else {}


def cut_loaded(state: State) -> None:
    """Cut what optimizers that were loaded before their model was cut still hold whole."""
    names = {id(param): name for name, param in state.weights.model.named_parameters()}
    for opt in state.loaded:
        for param, held in opt.state.items():
            name = names.get(id(param))
            if name is not None and state.weights.spread_axis(name):
                cut_entries(state, name, param, held)


def cut_unused(state: State, name: str, param: Tensor, held: MutableMapping[str, Any]) -> None:
    """Cut a state that an optimizer made when it was built and that no step has used."""
    step = held.get("step")
    if step is not None and float(step) == 0:
        cut_entries(state, name, param, held)


def cut_entries(state: State, name: str, param: Tensor, held: MutableMapping[str, Any]) -> None:
    """Replace whole tensors of one parameter's optimizer state by this rank's part."""
    for key, value in held.items():
        if (
            isinstance(value, Tensor)
            and value.shape != param.shape
            and tuple(value.shape) == state.weights.global_shape(name)
        ):
            held[key] = state.take(name, value).clone()


def _names(state: State, opt: Optimizer) -> dict[int, str]:
    names = {id(param): name for name, param in state.weights.model.named_parameters()}
    for number, group in enumerate(opt.param_groups):
        for param in group["params"]:
            if id(param) not in names:
                raise ValueError(
                    f"the optimizer's group {number} holds a tensor of shape {list(param.shape)} that is no parameter of the model; "
                    "build it from model.parameters(), of which parallelize keeps the identity."
                )
    return names


def _few(names: list[str]) -> str:
    if not names:
        return "nothing"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"'{name}'" for name in names[:3]) + more
