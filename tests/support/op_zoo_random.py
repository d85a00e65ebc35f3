"""Kinds of random numbers: what a layer draws is the same on every layout, whatever shape it is drawn in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.op_zoo import LENGTH, WIDTH, Kind, after, channels, layer, linear

D, S = WIDTH, LENGTH


def drawn(change: Callable[[Tensor, Tensor], Tensor]) -> Kind:
    return after(change, random=True)


def times(numbers: Callable[[Tensor], Tensor]) -> Kind:
    """What a linear gives, times numbers that are drawn for the tokens."""
    return drawn(lambda h, x: h * numbers(x))


def _drop_path(h: Tensor, x: Tensor, keep: float = 0.7) -> Tensor:
    """Whole samples are dropped, as people write it: a mask of any rank, filled and scaled in place."""
    kept = h.new_empty((h.shape[0],) + (1,) * (h.ndim - 1)).bernoulli_(keep)
    kept.div_(keep)
    return h * kept


def _part_filled(h: Tensor, x: Tensor) -> Tensor:
    mask = torch.ones_like(h)
    mask[:, 1:].bernoulli_()
    return h * mask


def _fill(name: str, *args: Any) -> Kind:
    return times(lambda x: getattr(torch.empty_like(x), name)(*args))


KINDS: dict[str, Kind] = {
    **{
        f"{kind.__name__} random": layer(lambda kind=kind: nn.Sequential(linear(), kind(0.3)), random=True)
        for kind in (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Dropout1d)
    },
    "Dropout1d of channels random": channels(lambda: nn.Dropout1d(0.3), random=True),
    "dropout2d random": drawn(lambda h, x: F.dropout2d(h[..., None] * torch.ones(3, dtype=h.dtype), 0.4).sum(-1)),
    "nn.RReLU random": layer(lambda: nn.Sequential(linear(), nn.RReLU()), random=True),
    "noise random": drawn(lambda h, x: h + 0.1 * torch.randn_like(h)),
    "gumbel_softmax random": drawn(lambda h, x: F.gumbel_softmax(h, dim=-1) * x),
    # in place
    "stochastic depth random": times(lambda x: torch.empty(x.shape[0], 1, 1, dtype=x.dtype).bernoulli_(0.5)),
    "drop path random": drawn(_drop_path),
    "bernoulli_ of a part random": drawn(_part_filled),
    "bernoulli_ of chances random": times(lambda x: torch.empty_like(x).bernoulli_(x.detach().sigmoid())),
    "bernoulli_ of samples random": times(lambda x: torch.empty_like(x).bernoulli_(torch.rand(x.shape[0], 1, 1))),
    "uniform_ random": _fill("uniform_"),
    "uniform_ of tokens random": times(lambda x: x.new_empty(*x.shape[:2], 1).uniform_(-1, 1)),
    "normal_ random": _fill("normal_"),
    "normal_ scaled random": _fill("normal_", 1.0, 0.2),
    "exponential_ random": _fill("exponential_"),
    "log_normal_ random": _fill("log_normal_"),
    "geometric_ random": _fill("geometric_", 0.5),
    "cauchy_ random": times(lambda x: torch.empty_like(x).cauchy_().tanh()),
    "random_ random": _fill("random_", 7),
    "random_ between random": _fill("random_", 2, 5),
    # of a shape of its own
    "token drop random": times(lambda x: (torch.rand(x.shape[:2], dtype=x.dtype) > 0.3)[..., None]),
    "token drop of flat tokens random": drawn(
        lambda h, x: (h.flatten(0, 1) * (torch.rand(x.shape[0] * x.shape[1]) > 0.5)[:, None]).view_as(h)
    ),
    "span drop random": times(lambda x: torch.rand(x.shape[0], S // 2, 1).repeat_interleave(2, 1) > 0.3),
    "sample scale random": times(lambda x: (0.7 + torch.rand(x.shape[0], 1, 1, dtype=x.dtype)).floor_() / 0.7),
    "batch noise random": times(lambda x: torch.randn(x.shape[0] * x.shape[1], 1).view(*x.shape[:2], 1)),
    "one number random": times(lambda x: 1 + torch.rand(())),
    "features random": times(lambda x: 1 + torch.rand(x.shape[-1])),
    "sequence random": times(lambda x: 1 + torch.rand(x.shape[1], 1)),
    "masked order random": drawn(
        lambda h, x: h.gather(1, torch.rand(x.shape[:2]).argsort(1)[:, :, None].expand(-1, -1, D))
    ),
    # distributions
    "normal of means random": times(lambda x: torch.normal(x.detach(), 0.1)),
    "normal of deviations random": times(lambda x: torch.normal(0.0, x.detach().sigmoid())),
    "normal of both random": times(lambda x: torch.normal(x.detach(), x.detach().sigmoid())),
    "normal of a shape random": times(lambda x: torch.normal(0.0, 1.0, x.shape)),
    "Normal random": drawn(lambda h, x: torch.distributions.Normal(h, h.exp()).rsample()),
    "Bernoulli random": times(lambda x: torch.distributions.Bernoulli(probs=x.sigmoid()).sample()),
    "Categorical random": times(lambda x: torch.distributions.Categorical(logits=x).sample()[..., None]),
    "Gumbel random": times(lambda x: torch.distributions.Gumbel(0.0, 1.0).sample(x.shape)),
    "beta random": times(lambda x: torch.distributions.Beta(0.5, 0.5).sample((x.shape[0], 1, 1))),
    "poisson random": times(lambda x: torch.poisson(x.detach().sigmoid())),
    # integers and choices
    "randint random": times(lambda x: 1 + torch.randint(0, 5, (x.shape[0],))[:, None, None]),
    "randint_like random": times(lambda x: torch.randint_like(x, 2, 5)),
    "diffusion steps random": Kind(
        lambda: nn.Embedding(10, D), lambda m, x: m(torch.randint(10, (x.shape[0],)))[:, None] * x, random=True
    ),
    "randperm random": drawn(lambda h, x: h[:, torch.randperm(S)]),
    "randperm of the batch random": drawn(lambda h, x: h + h[torch.randperm(h.shape[0])]),
    "multinomial random": times(
        lambda x: torch.multinomial(x.detach().softmax(-1).flatten(0, 1), 2).sum(-1).view(*x.shape[:2], 1)
    ),
    "multinomial with replacement random": times(
        lambda x: torch.multinomial(x.detach().softmax(-1).flatten(0, 1), 3, True).sum(-1).view(*x.shape[:2], 1)
    ),
}
