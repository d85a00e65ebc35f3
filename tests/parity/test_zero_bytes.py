"""What a rank holds under each level of sharding, measured, against the closed form.

Linears without bias, so wide that activations are small beside one weight: each is a bucket of its own. Storages are counted, not
tensors: a view costs nothing, and a shard that kept the whole alive would show.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moecompile.plan import Plan
from tests.support.pool import Ranks, parallel

pytestmark = pytest.mark.timeout(240)
WIDTH, LAYERS, ROWS, RANKS = 256, 4, 2, 2
BUCKET = WIDTH * WIDTH * 4
PARAMS = LAYERS * BUCKET
SHARDS = PARAMS // RANKS
# activations: a few rows a layer
SLACK = 4 * LAYERS * ROWS * WIDTH * 4
PLANS = {
    "whole": Plan(dp=RANKS),
    **{f"level {level}": Plan(dp=RANKS, passes=f"+shard-params{{level={level}}}") for level in (1, 2, 3)},
}


class Wide(nn.Module):
    """Linears behind one another; the loss is the mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x).tanh()
        return {"loss": x.square().mean()}


class Live(TorchDispatchMode):
    """The most bytes that were alive at once of those that were made meanwhile; workspace within an op is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {item.untyped_storage()._cdata for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)}
        out = func(*args, **(kwargs or {}))
        self.found = {key: item for key, item in self.found.items() if not item[0].expired()}
        for item in tree_leaves(out):
            if isinstance(item, Tensor) and item.untyped_storage()._cdata not in known | set(self.found):
                storage = item.untyped_storage()
                self.found[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self.found.values()))
        return out


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of all storages behind some tensors."""
    return sum({item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in tensors}.values())


def measured(rank: int, plan: Plan) -> dict[str, int]:
    """Bytes held after the second step, and made at once during it."""
    torch.manual_seed(0)
    with parallel(Wide(), plan) as model:
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        x = torch.randn(ROWS, WIDTH)
        for _ in range(2):
            optimizer.zero_grad()
            with Live() as live:
                model(x)["loss"].backward()
            optimizer.step()
        params = list(model.parameters())
        return {
            "params": bytes_of(params),
            "kept": bytes_of(model._state.weights.kept.values()),
            "grads": bytes_of(param.grad for param in params if param.grad is not None),
            "optimizer": bytes_of(value for held in optimizer.state.values() for value in held.values() if value.dim()),
            "step": live.peak,
        }


# by plan: what is held after a step (parameters, wholes that are kept, gradients, two moments), and the most that a step makes at once:
# the gradients, summed flat where they are not scattered; kept wholes; one weight or gradient that is whole for a moment
HELD = {
    "whole": (PARAMS, 0, PARAMS, 2 * PARAMS, 2 * PARAMS),
    "level 1": (SHARDS, PARAMS, SHARDS, 2 * SHARDS, PARAMS + PARAMS + SHARDS),
    "level 2": (SHARDS, PARAMS, SHARDS, 2 * SHARDS, PARAMS + SHARDS + BUCKET),
    "level 3": (SHARDS, 0, SHARDS, 2 * SHARDS, SHARDS + BUCKET),
}


@pytest.mark.parametrize("name", PLANS)
def test_bytes_of_a_rank_are_those_of_the_closed_form(ranks: Ranks, name: str) -> None:
    *held, step = HELD[name]
    for found in ranks.run(RANKS, measured, PLANS[name]):
        assert [found[key] for key in ("params", "kept", "grads", "optimizer")] == held
        assert step <= found["step"] <= step + SLACK
