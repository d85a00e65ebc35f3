"""moecompile: a compiler for Mixture-of-Experts training.

A plain single-device model and a `Plan` go in; a program that means exactly the same on many ranks comes
out.  Public names load on first use, so that `import moecompile` costs milliseconds and needs no torch.
"""

import importlib
import sys
from types import ModuleType

__version__ = "0.1.0"

# Public name -> submodule that defines it.  `__init__.pyi` says the same to type checkers.
_DEFINED_IN = {
    "Plan": "plan",
    "MoeCompileError": "errors",
    "PlanError": "errors",
    "CaptureError": "errors",
    "PassError": "errors",
    "VerifyError": "errors",
    "parallelize": "api",
    "trace": "api",
    "mark_moe": "capture",
    "verify": "verification",
    "metrics": "api",
    "update_expert_bias": "api",
    "clip_grad_norm_": "api",
    "full_state_dict": "api",
    "full_grads": "api",
    "optimizer_state_dict": "api",
    "load_optimizer_state_dict": "api",
    "launch": "launch",
    "simulate_ranks": "simulate",
    "Program": "program",
    "load": "text",
}

__all__ = [*_DEFINED_IN]


def __getattr__(name: str) -> object:
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_DEFINED_IN[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps public names public: importing the submodule `moecompile.verify` must not hide the function."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _DEFINED_IN and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
