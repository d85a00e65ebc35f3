"""Autocast as explicit casts.

Under autocast the traced graph holds the plain operators, and only their result types show what happened.  Which inputs
an operator's autocast rule casts is found by running that rule on the fake inputs and watching its first steps, so that
the rules are those of the installed torch, on whatever device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from moecompile import meta
from moecompile.compat import OpOverload, TorchDispatchMode, has_autocast_rule
from moecompile.graph import map_nodes

_TO_COPY = torch.ops.aten._to_copy.default
_DEVICE = torch.ops.prim.device.default  # the rule asks for the device of each input in between


@dataclass(frozen=True)
class Autocast:
    """The autocast state of a region: type by device type, without an entry where autocast is off."""

    dtypes: tuple[tuple[str, torch.dtype], ...] = ()

    @staticmethod
    def ambient(device_types: set[str]) -> Autocast:
        """The state the caller has set up around the model."""
        known = [device for device in device_types if torch.amp.is_autocast_available(device)]
        on = sorted(device for device in known if torch.is_autocast_enabled(device))
        return Autocast(tuple((device, torch.get_autocast_dtype(device)) for device in on))

    def inside(self, device: str, dtype: torch.dtype | None, enabled: bool) -> Autocast:
        """The state inside a region that sets ``device``."""
        rest = tuple(item for item in self.dtypes if item[0] != device)
        if not enabled:
            return Autocast(rest)
        return Autocast((*rest, (device, dtype or torch.get_autocast_dtype(device))))


class _FirstCasts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the casts that come before any other operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.casts: dict[int, torch.dtype] = {}
        self._open = True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._open and func is _TO_COPY and isinstance(kwargs.get("dtype"), torch.dtype):
            self.casts[id(args[0])] = kwargs["dtype"]
        elif func is not _DEVICE:
            self._open = False
        return func(*args, **kwargs)


def input_casts(target: Any, args: Any, kwargs: Any, state: Autocast, mode: Any) -> dict[Node, torch.dtype]:
    """The inputs of a call that autocast converts, and to what."""
    if not isinstance(target, OpOverload):
        return {}
    casts: dict[Node, torch.dtype] = {}
    for device, dtype in state.dtypes:
        if not has_autocast_rule(target, device):
            continue
        # Detached copies: an id stands for one node only, and no autograd graph is built.
        fakes: dict[Node, Any] = {}

        def fake(node: Node, fakes: dict[Node, Any] = fakes) -> Any:
            if node not in fakes:
                found = meta.value(node)
                fakes[node] = found.detach() if isinstance(found, torch.Tensor) else found
            return fakes[node]

        watch = _FirstCasts()
        with mode, torch.no_grad():
            fake_args, fake_kwargs = map_nodes(args, fake), map_nodes(kwargs, fake)
            with torch.autocast(device, dtype, cache_enabled=False), watch:
                target(*fake_args, **fake_kwargs)
        casts.update({node: watch.casts[id(found)] for node, found in fakes.items() if id(found) in watch.casts})
    return casts
