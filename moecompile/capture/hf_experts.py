"""Hugging Face experts, captured as `moe::` operators.

transformers lets an experts module look up its forward by name.  For the time of a capture that name is ours, and the
function behind it emits the split form: permute, grouped linear, the module's own activation as plain ATen, grouped
linear, unpermute with the routing weights.  Nothing has to be recognised then.  Configuration and registry are put back
afterwards, whatever happens.

T tokens, K choices per token, H width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from moecompile import ops
from moecompile.errors import CaptureError

_NAME = "moecompile"
_ATTRIBUTE = "_experts_implementation_internal"  # what the config's property stores; its setter would recurse


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of ``model`` whose forward transformers looks up by name, by their path."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(type(module), "_apply_gate") and hasattr(module, "is_concatenated") and hasattr(module, "config")
    }


@contextlib.contextmanager
def split_experts(model: nn.Module) -> Iterator[None]:
    """Within, experts modules of ``model`` run `split_forward`, whichever implementation their config names."""
    modules = experts_modules(model)
    if not modules:
        yield
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    for name, module in modules.items():
        if getattr(module, "_is_expert_parallel", False):
            raise CaptureError(
                f"{name}: transformers has sharded these experts already; load the model without its own expert "
                f"parallelism."
            )
    configs = {id(module.config): module.config for module in modules.values()}
    saved = [(config, vars(config).get(_ATTRIBUTE), _ATTRIBUTE in vars(config)) for config in configs.values()]
    ALL_EXPERTS_FUNCTIONS[_NAME] = split_forward
    try:
        for config in configs.values():
            vars(config)[_ATTRIBUTE] = _NAME
        yield
    finally:
        for config, value, present in saved:
            vars(config).pop(_ATTRIBUTE, None)
            if present:
                vars(config)[_ATTRIBUTE] = value
        del ALL_EXPERTS_FUNCTIONS[_NAME]  # type: ignore[no-untyped-call]


def split_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of an experts module in split form: x [T, H], ids and weights [T, K] -> [T, H] in x's type."""
    x, ids = hidden_states.reshape(-1, hidden_states.shape[-1]), top_k_index.reshape(-1, top_k_index.shape[-1])
    probs = top_k_weights.reshape(ids.shape)
    kind = "gate_up_proj" if self.has_gate else "up_proj"
    rows, tokens_per_expert, row_map = ops.permute(x, ids, self.num_experts)
    hidden = _linear(self, kind, rows, tokens_per_expert)
    hidden = self._apply_gate(hidden) if self.has_gate else self.act_fn(hidden)
    out = _linear(self, "down_proj", hidden, tokens_per_expert)
    if self.has_post_expert_norm:
        out = self.post_expert_norm(out)
    # Under autocast the experts' rows are narrower than the sum that the plain loop accumulates.
    out = out.to(torch.promote_types(out.dtype, hidden_states.dtype))
    mixed = ops.unpermute(out, row_map, ids.shape[0], ids.shape[1], probs)
    return mixed.to(hidden_states.dtype).reshape(hidden_states.shape)  # type: ignore[no-any-return]


def _linear(self: Any, name: str, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """One grouped linear with the module's own weights [E, out, in] (or [E, in, out]) and bias [E, out].

    Autocast knows nothing of `moe::` operators, so its casts are written out here.
    """
    weight = getattr(self, name)
    bias = getattr(self, f"{name}_bias") if self.has_bias else None
    weight = weight.transpose(1, 2) if self.is_transposed else weight
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        rows, weight = rows.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return ops.grouped_linear(rows, tokens_per_expert, weight, bias)  # type: ignore[no-any-return]
