"""Kinds of results beside the loss: metrics, counts, predictions, states."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.op_zoo import VOCAB, Kind, loss

V = VOCAB


def _each(z: Tensor, y: Tensor) -> Tensor:
    """Cross entropy of every token, ``[batch, sequence]``."""
    return F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none").reshape(y.shape)


def _beside(**results: Any) -> Any:
    """A loss with more results; each is made from logits, labels and hidden states."""

    def function(z: Tensor, y: Tensor, x: Tensor) -> dict[str, Any]:
        return {"loss": _each(z, y).mean(), **{name: made(z, y, x) for name, made in results.items()}}

    return function


def _hits(z: Tensor, y: Tensor) -> Tensor:
    return z.argmax(-1) == y


_RESULTS: dict[str, Any] = {
    "accuracy": _beside(accuracy=lambda z, y, x: _hits(z, y).to(z.dtype).mean()),
    "accuracy of valid tokens": _beside(
        accuracy=lambda z, y, x: (_hits(z, y) & (y != 3)).sum() / (y != 3).sum(), tokens=lambda z, y, x: (y != 3).sum()
    ),
    "counts": _beside(
        right=lambda z, y, x: _hits(z, y).sum(), classes=lambda z, y, x: torch.bincount(y.flatten(), minlength=V)
    ),
    "entropy as result": _beside(entropy=lambda z, y, x: torch.distributions.Categorical(logits=z).entropy().mean()),
    "predictions": _beside(best=lambda z, y, x: z.argmax(-1), top=lambda z, y, x: z.topk(3, -1).indices),
    "losses of sequences": _beside(each=lambda z, y, x: _each(z, y).mean(1)),
    "losses of tokens": _beside(each=lambda z, y, x: _each(z, y)),
    "losses of flat tokens": _beside(each=lambda z, y, x: _each(z, y).flatten()),
    "states": _beside(x=lambda z, y, x: x, pooled=lambda z, y, x: x.mean(1), centre=lambda z, y, x: x.mean((0, 1))),
    "largest logit": _beside(most=lambda z, y, x: z.abs().max(), norm=lambda z, y, x: z.norm()),
    "loss without gradient": _beside(plain=lambda z, y, x: _each(z, y).mean().detach()),
    "similarities": _beside(scores=lambda z, y, x: x.mean(1) @ x.mean(1).t()),
    "keys and values": _beside(keys=lambda z, y, x: x.unflatten(-1, (2, 4)).transpose(1, 2)),
    "confusion": _beside(
        matrix=lambda z, y, x: torch.zeros(V, V, dtype=z.dtype).index_put(
            (y.flatten(), z.argmax(-1).flatten()), torch.ones(y.numel(), dtype=z.dtype), accumulate=True
        )
    ),
    "histogram": _beside(levels=lambda z, y, x: torch.histc(z.detach(), 5, -2, 2)),
    "hardest sequence": _beside(at=lambda z, y, x: _each(z, y).mean(1).argmax()),
}

KINDS: dict[str, Kind] = {f"result {name}": loss(function) for name, function in _RESULTS.items()}
