"""Recipes: which parts make up a layer, and the small model and the batches that try it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support import moe_more_parts as more
from tests.support import moe_parts as parts
from tests.support.moe_parts import EXPERTS, WIDTH, Combine, Experts, Gated, Router

ROUTERS = parts.ROUTERS + more.ROUTERS
EXPERT_KINDS = parts.EXPERT_KINDS + more.EXPERT_KINDS
COMBINES = parts.COMBINES + more.COMBINES
# What happens to the decision between router and experts, or around the layer.
OPTIONS = [
    "plain", "threshold", "capacity", "scaled", "skipped", "checkpoint", "gated shared", "latent", "balance", "z-loss",
]  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """What a layer is made of. ``shared`` adds an expert that everybody uses, ``rows`` hands tokens in as a batch of rows."""

    router: type[Router]
    experts: type[Experts]
    combine: Combine
    shared: bool = False
    rows: bool = False
    option: str = "plain"

    def __str__(self) -> str:
        extra = "+shared" * self.shared + "+rows" * self.rows + f"+{self.option}" * (self.option != "plain")
        return f"{self.router.__name__}/{self.experts.__name__}/{self.combine.__name__}{extra}"


def number_of_recipes() -> int:
    return len(ROUTERS) * len(EXPERT_KINDS) * len(COMBINES) * 4 * len(OPTIONS)


def distinct(count: int, seed: int) -> list[Recipe]:
    """That many different recipes, the same for the same seed; a longer list begins with the shorter one."""
    draw = random.Random(seed)
    found: dict[Recipe, None] = {}
    while len(found) < min(count, number_of_recipes()):
        flags = draw.random() < 0.5, draw.random() < 0.5
        chosen = draw.choice(ROUTERS), draw.choice(EXPERT_KINDS), draw.choice(COMBINES)
        found[Recipe(*chosen, *flags, draw.choice(OPTIONS))] = None
    return list(found)


class Model(nn.Module):
    """A layer by recipe between a norm and a loss whose labels do not come from the tokens."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.norm, self.router, self.experts = nn.LayerNorm(WIDTH), recipe.router(), recipe.experts()
        self.shared = Gated() if recipe.shared or recipe.option == "gated shared" else None
        self.extra = _EXTRA[recipe.option]() if recipe.option in _EXTRA else None

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.norm(x)
        tokens = hidden.reshape(-1, WIDTH) if self.recipe.rows else hidden
        again = self.recipe.option == "checkpoint"
        out = checkpoint(self.layer, tokens, use_reentrant=False) if again else self.layer(tokens)
        loss = (x + out.reshape(x.shape) - labels).square().mean()
        return {"loss": loss + self.beside(tokens)}

    def layer(self, tokens: Tensor) -> Tensor:
        w, ids = self.router(tokens)
        w = self.weights(w, ids)
        latent = self.recipe.option == "latent"
        out = self.recipe.combine(self.extra(tokens) if latent else tokens, w, ids, self.experts)
        if self.shared is not None:
            beside = self.shared(tokens)
            out = out + (self.extra(tokens).sigmoid() * beside if self.recipe.option == "gated shared" else beside)
        return out

    def weights(self, w: Tensor, ids: Tensor) -> Tensor:
        """The weights after the option: zero where a choice is dropped."""
        option = self.recipe.option
        if option == "threshold":
            return w * (w > 0.4)
        if option == "capacity":
            chosen = F.one_hot(ids, EXPERTS)
            place = chosen.reshape(-1, EXPERTS).cumsum(0).reshape(chosen.shape)
            return w * ((place * chosen).sum(-1) <= 6)
        if option == "scaled":
            return w * self.extra[ids]
        if option == "skipped":
            return w.masked_fill(ids == EXPERTS - 1, 0.0)
        return w

    def beside(self, tokens: Tensor) -> Tensor | float:
        """Losses that the router adds; balance means the whole batch."""
        if self.recipe.option == "balance":
            probs = self.router.gate(tokens).softmax(-1)
            _, ids = self.router(tokens)
            share = F.one_hot(ids, EXPERTS).to(probs.dtype).mean((0, 1))
            return 0.1 * EXPERTS * (share * probs.mean(0)).sum()
        if self.recipe.option == "z-loss":
            return 0.01 * self.router.gate(tokens).logsumexp(-1).square().mean()
        return 0.0


_EXTRA: dict[str, Callable[[], nn.Module | nn.Parameter]] = {
    "scaled": lambda: nn.Parameter(torch.rand(EXPERTS) + 0.5),
    "gated shared": lambda: nn.Linear(WIDTH, 1, bias=False),
    "latent": lambda: nn.Linear(WIDTH, WIDTH),
}


def build(recipe: Recipe, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model(recipe).double()


def batch(recipe: Recipe, seed: int) -> dict[str, Tensor]:
    """Sixteen tokens, half of them alike, so that experts are crowded and idle."""
    shape = (4, 4, WIDTH) if recipe.rows else (16, WIDTH)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, WIDTH, generator=generator, dtype=torch.float64)
    x[8:] = x[8] + 1e-3 * x[8:]
    labels = torch.randn(16, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x.reshape(shape), "labels": labels.reshape(shape)}
