"""How many experts a model says it has, before it is captured: so that a plan that does not fit fails before anything starts.

Only what leaves no doubt counts: fields of a Hugging Face config that are called after experts, and a ``ModuleList`` under a name
that says experts and whose modules are alike. Any other model is checked once its layers are recognised.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from .plan import Plan

_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def check_experts(model: nn.Module, plan: Plan) -> None:
    """PlanError naming module, ``ep`` and the nearest legal values if ``ep`` does not divide the model's experts."""
    if plan.ep > 1:
        for name, count in expert_counts(model):
            plan.check_model(num_experts=count, name=name)


def expert_counts(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Where experts are declared, and how many."""
    config = getattr(model, "config", None)
    for place, found in [("config", config), *((f"config.{key}", item) for key, item in _parts(config))]:
        for field in _FIELDS:
            count = getattr(found, field, None)
            if isinstance(count, int) and not isinstance(count, bool) and count > 1:
                yield f"the model ({place}.{field})", count
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        routed = isinstance(module, nn.ModuleList) and "expert" in name and "shared" not in name
        if routed and len(module) > 1 and len({_shape(item) for item in module}) == 1:
            yield path, len(module)


def _parts(config: Any) -> list[tuple[str, Any]]:
    """Configs inside a config, such as that of the text model."""
    found = getattr(config, "__dict__", {})
    return [(key, item) for key, item in found.items() if key.endswith("_config") and hasattr(item, "to_dict")]


def _shape(module: nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(item.shape)) for name, item in module.named_parameters())
