"""A capture taken once and copied for every plan and rank with the same global batch: half of the time a small program takes.

For tests of what comes after the capture. Only a call that is the same in everything a capture can see is answered from
memory; whoever changes a model's attributes, hooks or weights' shapes gets a capture of his own.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn

from moecompile import compilation
from moecompile.capture import Captured, capture_model
from moecompile.compat import tree_flatten
from tests.support.captured_call import copied

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_OF_MODULES = frozenset(vars(nn.Module()))  # looked at one by one
_MOST = 32  # captures that are kept
_CAPTURES: OrderedDict[Hashable, Captured] = OrderedDict()


class _UnknownError(Exception):
    """Something of the model that cannot be told apart by its value."""


@contextlib.contextmanager
def captured_once() -> Iterator[None]:
    """Within it, `compile_call` takes a call that was captured before from memory."""
    with mock.patch.object(compilation, "capture_model", _captured):
        yield


def _captured(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    loss_fn: Callable[..., Any] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> Captured:
    try:
        key = _key(model, args, kwargs, loss_fn, shapes)
    except _UnknownError:
        return capture_model(model, args, kwargs, loss_fn=loss_fn, shapes=shapes)
    if key not in _CAPTURES:
        _CAPTURES[key] = copied(capture_model(model, args, kwargs, loss_fn=loss_fn, shapes=shapes))
        while len(_CAPTURES) > _MOST:
            _CAPTURES.popitem(last=False)
    _CAPTURES.move_to_end(key)
    return copied(_CAPTURES[key])


def _key(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: Callable[..., Any] | None,
    shapes: Mapping[str, Sequence[int]] | None,
) -> Hashable:
    if loss_fn is not None:
        raise _UnknownError
    leaves, spec = tree_flatten((args, kwargs))
    return (
        tuple(_module(name, module) for name, module in model.named_modules()),
        tuple(_identities(model)),
        str(spec),
        tuple(_argument(leaf) for leaf in leaves),
        (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        _value(dict(shapes or {})),
    )


def _argument(leaf: Any) -> Hashable:
    """Of a tensor the capture sees no values, and strides of its own making."""
    if type(leaf) is torch.Tensor:
        return (tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad)
    return _value(leaf)


def _module(name: str, module: nn.Module) -> Hashable:
    """What of a module's own state its code may read."""
    held = vars(module)
    if any(held[key] for key in _OF_MODULES if key.endswith("_hooks")):
        raise _UnknownError
    params = [
        (key, None if item is None else (_tensor(item), item.requires_grad))
        for key, item in held["_parameters"].items()
    ]
    buffers = [(key, None if item is None else _value(item)) for key, item in held["_buffers"].items()]
    others = [(key, _value(item)) for key, item in held.items() if key not in _OF_MODULES]
    return (name, type(module), module.training, tuple(params), tuple(buffers), tuple(others))


def _identities(model: nn.Module) -> Iterator[Hashable]:
    """Which names stand for one and the same tensor."""
    first: dict[int, str] = {}
    for name, item in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        if first.setdefault(id(item), name) != name:
            yield name, first[id(item)]


def _tensor(item: torch.Tensor) -> Hashable:
    if type(item) not in (torch.Tensor, nn.Parameter):
        raise _UnknownError
    return (tuple(item.shape), tuple(item.stride()), item.dtype, item.device)


def _value(item: Any) -> Hashable:
    """A key for a value; tensors count with what they hold."""
    if isinstance(item, _PLAIN):
        return (type(item), item)
    if isinstance(item, torch.Tensor):
        return (_tensor(item), item.requires_grad, tuple(item.detach().flatten().tolist()))
    if isinstance(item, (list, tuple)):
        return (type(item), tuple(_value(part) for part in item))
    if isinstance(item, Mapping):
        return (type(item), tuple((_value(key), _value(part)) for key, part in item.items()))
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return (type(item), tuple(_value(getattr(item, part.name)) for part in dataclasses.fields(item)))
    if hasattr(item, "to_json_string"):  # a Hugging Face configuration; what else it holds is not in its text
        return (type(item), tuple((key, _value(part)) for key, part in vars(item).items()))
    raise _UnknownError
