"""Refuse to run a plain module on this rank's part of its weights: what it gives would be a part, too, and nothing would say so.

Calls of the parallel model do not run the plain model's code. A submodule of it that is called by itself does, and so does a
method that the parallel model hands on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from .errors import CaptureError
from .weights import is_share


@dataclass(frozen=True)
class PartGuard:
    """A forward pre-hook of one module; ``shapes`` are the global shapes of its own weights.

    While the model is captured anew it has stand-ins for the whole weights, and nothing is refused.
    """

    path: str
    shapes: Mapping[str, tuple[int, ...]]

    def __call__(self, module: nn.Module, args: Any) -> None:
        for name, shape in self.shapes.items():
            held = getattr(module, name, None)
            if held is not None and is_share(held):
                raise CaptureError(
                    f"{self.path or 'the model'}: '{name}' is this rank's part {list(held.shape)} of {list(shape)}, and the plain code of "
                    f"{type(module).__name__} would compute with that alone; call the parallel model as a whole, or load "
                    "moecompile.full_state_dict(model) into a plain one."
                )


def guard(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Watch every module that has weights of its own; ``shapes`` are the global ones, by full name."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        own = {
            name: shapes[prefix + name] for name in (*module._parameters, *module._buffers) if prefix + name in shapes
        }
        if own:
            module.register_forward_pre_hook(PartGuard(path, own))
