"""What a plain module does with this rank's part of its weights would be a part, too, and nothing would say so.

To run it is refused, and its ``state_dict()`` says what of each weight a rank has, as the parallel model's does: a file of one rank's
parts is never taken for the whole model.

Calls of the parallel model do not run the plain model's code. A submodule of it that is called by itself does, and so does a
method that the parallel model hands on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .errors import CaptureError
from .state import State
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


@dataclass
class _SpreadState:
    """A post-hook of one module's ``state_dict()``, which torch marks; ``names`` are the full ones of its own weights."""

    layout: State | None
    names: Mapping[str, str]

    def __call__(self, module: nn.Module, found: dict[str, Any], prefix: str, metadata: Any) -> None:
        if self.layout is not None and not self.layout.bare:
            for name, full in self.names.items():
                value = found.get(prefix + name)
                if isinstance(value, Tensor):
                    found[prefix + name] = self.layout.spread(full, value)

    def __reduce__(self) -> Any:
        """Copies and pickles of the module: a whole one is let go, its copy has no part in the model."""
        weights = None if self.layout is None else self.layout.weights
        if weights is not None and any(weights.cut_of(full) or full in weights.stages for full in self.names.values()):
            raise TypeError(
                "the module holds one rank's parts of its weights, and a copy of it would not be the whole model; load "
                "moecompile.full_state_dict(model) into a plain one."
            )
        return _SpreadState, (None, {})


def guard(model: nn.Module, layout: State) -> None:
    """Watch every module that has weights of its own."""
    shapes = layout.weights.shapes
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        own = {
            name: shapes[prefix + name] for name in (*module._parameters, *module._buffers) if prefix + name in shapes
        }
        if own:
            module.register_forward_pre_hook(PartGuard(path, own))
            module.register_state_dict_post_hook(_SpreadState(layout, {name: prefix + name for name in own}))
