"""Refuse what tracing would lose in silence.

`torch.export` keeps no trace of an attribute assigned in a submodule's forward, and may delete in-place updates made
without gradients.  The training step built from the graph would then be wrong without an error, so each of these is
caught the moment the model does it.  Custom `autograd.Function`s, whose backward export drops, are traced instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from moecompile.capture.attributes import Attributes
from moecompile.capture.buffers import Buffers, held_tensors, join, storage_key
from moecompile.capture.custom_function import functions_traced
from moecompile.capture.followed import unfollowed
from moecompile.capture.transforms import vmap_unrolled
from moecompile.capture.where import asked_by_user, current_line, forward_line, module_name
from moecompile.errors import CaptureError

# Methods that change their first argument without a trailing underscore.
_IN_PLACE = frozenset(
    [
        "__setitem__",
        "__iadd__",
        "__isub__",
        "__imul__",
        "__itruediv__",
        "__ifloordiv__",
        "__imod__",
        "__ipow__",
        "__iand__",
        "__ior__",
        "__ixor__",
        "__ilshift__",
        "__irshift__",
        "__set__",
    ]
)
# These give a tensor other memory, which no copy of a value stands for.
_EXCHANGES = frozenset({"__set__", "set_", "resize_", "resize_as_", "swap_tensors"})
# These end in an underscore and change no value.
_HARMLESS = frozenset({"requires_grad_", "retain_grad_", "rename_", "share_memory_"})


_HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook"})
_AS_TEXT = frozenset({"__repr__", "__str__", "__format__"})


def is_in_place(name: str) -> bool:
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__") and name not in _HARMLESS)


class _MutationWatch(TorchFunctionMode):
    """Raise when a call writes into the storage of a parameter, plain tensor attribute or model input.

    Into that of a buffer, too, where something else has the same memory, or where the buffer gets other memory.
    """

    def __init__(self, owners: dict[int, tuple[torch.Tensor, str]], buffers: dict[int, str]) -> None:
        super().__init__()
        self._owners = owners  # storage -> the tensor that keeps it alive, and "parameter 'x'", "attribute 'y'", ...
        self._buffers = buffers

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _AS_TEXT and asked_by_user():
            raise CaptureError(
                f"{current_line()}: the forward prints a tensor or makes text of it, which would happen once, without its "
                f"values; return the tensor and print it outside."
            )
        if getattr(func, "__name__", "") in _HOOKS and asked_by_user():
            raise CaptureError(
                f"{current_line()}: the forward hooks the gradient of a tensor ({func.__name__}), which a graph does not hold; write a "
                "torch.autograd.Function with that backward, or hook the parameters outside forward."
            )
        name = getattr(func, "__name__", "")
        if is_in_place(name):
            self._check(args[0], name, lasting=name in _EXCHANGES)
        if "out" in kwargs:
            self._check(kwargs["out"], name, lasting=True)
        return func(*args, **kwargs)

    def _check(self, tensor: Any, name: str, *, lasting: bool) -> None:
        """``lasting``: not even into a buffer."""
        key = storage_key(tensor) if isinstance(tensor, torch.Tensor) else 0
        found = self._owners[key][1] if key in self._owners else self._buffers.get(key) if lasting else None
        if found is not None:
            raise CaptureError(
                f"{current_line()}: the forward writes into {found} ({name}), and a captured step has no such side effect; "
                f"compute a new tensor instead, or update it outside forward, after the step."
            )


def _refuse_assignment(root: nn.Module, module: nn.Module, name: str, line: str) -> None:
    kind = "buffer" if name in module._buffers else "parameter" if name in module._parameters else "attribute"
    raise CaptureError(
        f"{line}: the forward assigns a tensor to {kind} {name!r} of {module_name(root, module)} that was there before, "
        f"and a captured step cannot carry it to the next call; return the tensor, or update it outside forward, after "
        f"the step."
    )


@contextlib.contextmanager
def _moves_ignored(root: nn.Module) -> Iterator[None]:
    """``module.to(...)`` in a forward changes nothing where the module is there already; other moves are refused."""
    members = {id(module): module for module in root.modules()}
    plain = nn.Module._apply

    def watched_apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        if id(self) not in members:
            return plain(self, fn, recurse)  # type: ignore[no-untyped-call, no-any-return]
        for tensor in (*self.parameters(), *self.buffers()):
            with torch.no_grad():
                moved = fn(tensor)
            if (moved.dtype, moved.device, moved.shape) != (tensor.dtype, tensor.device, tensor.shape):
                raise CaptureError(
                    f"{current_line()}: the forward moves or casts {module_name(root, self)}, which changes its "
                    f"parameters; do it once, before the model is parallelized."
                )
        return self

    nn.Module._apply = watched_apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = plain  # type: ignore[method-assign]


@contextlib.contextmanager
def _assignments_watched(root: nn.Module, attributes: Attributes, buffers: Buffers) -> Iterator[None]:
    """Follow ``module.name = value`` in every module of ``root``; refuse tensors that would have to last, but in buffers."""
    # By identity, and kept alive: the id of an object that is gone may be another one's.
    members = {id(module): module for module in root.modules()}
    # Parametrizations (adapters on expert weights) take a parameter out for the time of a forward and put it back.
    own = {id(tensor): tensor for tensor in (*root.parameters(), *root.buffers())}
    attributes.begin(members.values())
    plain_setattr, plain_register = nn.Module.__setattr__, nn.Module.register_buffer
    plain_get = nn.Module.__getattribute__

    def watched_get(self: nn.Module, name: str) -> Any:
        if id(self) in members:
            attributes.read(self, name)
            return attributes.value(self, name, plain_get(self, name))
        return plain_get(self, name)

    def watched_setattr(self: nn.Module, name: str, value: Any) -> None:
        if id(self) in members and isinstance(value, torch.Tensor) and buffers.takes(self, name, value, current_line):
            vars(self)["_buffers"][name] = value
            return
        if (
            id(self) in members and id(value) not in own and "_buffers" in vars(self)
        ):  # a proxy under construction has none
            lasting = name in vars(self)["_buffers"] or name in vars(self)["_parameters"]
            if not lasting:
                attributes.write(self, name, current_line())
            if isinstance(value, torch.Tensor) and (lasting or not attributes.is_local(self, name)):
                _refuse_assignment(root, self, name, current_line())
        plain_setattr(self, name, unfollowed(value))

    def watched_register(self: nn.Module, name: str, tensor: Any, persistent: bool = True) -> None:
        if id(self) in members:
            _refuse_assignment(root, self, name, current_line())
        plain_register(self, name, tensor, persistent)

    nn.Module.__setattr__ = watched_setattr  # type: ignore[method-assign]
    nn.Module.register_buffer = watched_register  # type: ignore[method-assign]
    nn.Module.__getattribute__ = watched_get  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.__setattr__ = plain_setattr  # type: ignore[method-assign]
        nn.Module.register_buffer = plain_register  # type: ignore[method-assign]
        del nn.Module.__getattribute__  # that of object again


def _owners(
    root: nn.Module, inputs: list[torch.Tensor], shared: Mapping[str, str]
) -> dict[int, tuple[torch.Tensor, str]]:
    owners = {storage_key(tensor): (tensor, "one of its inputs") for tensor in inputs}
    for prefix, module in root.named_modules():
        for name, tensor in held_tensors(module):
            owners[storage_key(tensor)] = tensor, f"attribute {join(prefix, name)!r}"
    for name, tensor in root.named_buffers():
        if name in shared:
            owners[storage_key(tensor)] = tensor, f"buffer {name!r}, which shares memory with {shared[name]}"
    owners.update({storage_key(tensor): (tensor, f"parameter {name!r}") for name, tensor in root.named_parameters()})
    return owners


@contextlib.contextmanager
def watched(root: nn.Module, inputs: list[torch.Tensor], attributes: Attributes, buffers: Buffers) -> Iterator[None]:
    """Run the model's forward inside: side effects that the graph cannot express raise `CaptureError`.

    ``attributes`` learns which plain attributes the forward wrote, to be forgotten after the trace, ``buffers`` what it
    assigned to buffers.
    """
    buffers.begin(root)
    held = {storage_key(tensor): f"buffer {name!r}" for name, tensor in root.named_buffers()}
    before = {id(tensor): tensor for module in root.modules() for _, tensor in held_tensors(module)}
    with (
        _assignments_watched(root, attributes, buffers),
        _moves_ignored(root),
        functions_traced(),
        vmap_unrolled(),
        _MutationWatch(_owners(root, inputs, buffers.shared), held),
    ):
        yield
    attributes.end()
    for module in root.modules():
        for name, tensor in held_tensors(module):
            if id(tensor) not in before and not attributes.is_local(module, name):
                _refuse_assignment(root, module, name, forward_line(module))
