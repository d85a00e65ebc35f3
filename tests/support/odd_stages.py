"""Small models whose values go between pipeline stages in uncommon ways: what is read, written, frozen, shared or returned where."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, WORDS, LENGTH, LAYERS = 8, 12, 6, 4


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.a(x)))
        return out


class Plain(nn.Module):
    """Residual layers between a table and a head; the loss is a mean over the valid tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.norm = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(Mlp() for _ in range(LAYERS))
        self.make()

    def make(self) -> None:
        """Register more, or freeze something."""

    def streams(self, x: Tensor) -> list[Tensor]:
        """What stands before and behind each layer."""
        found = [x]
        for layer in self.layers:
            found.append(found[-1] + layer(found[-1]))
        return found

    def body(self, x: Tensor) -> Tensor:
        return self.streams(x)[-1]

    def answer(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
        logits = self.head(self.norm(x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100), "logits": logits}

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Any]:
        return self.answer(self.body(self.embed(ids)), labels)


class Skips(Plain):
    """The table's rows are read by the last layer and by the head, too."""

    def body(self, x: Tensor) -> Tensor:
        return self.streams(x)[-1] * (1 + 0.1 * x) + x.roll(1, -1)


class DeepLosses(Plain):
    """The mean of a loss behind every layer, by one head, computed when all layers have run."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Any]:
        found = [self.answer(x, labels) for x in self.streams(self.embed(ids))]
        return {"loss": torch.stack([item["loss"] for item in found]).mean(), "logits": found[-1]["logits"]}


class Terms(Plain):
    """Terms of every two layers' values, computed behind the loop in an order of their own."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Any]:
        found = self.streams(self.embed(ids))
        pairs = ((3, 0), (0, 3), (1, 2), (4, 0), (2, 2), (0, 1))
        out = self.answer(found[-1], labels)
        return {**out, "loss": out["loss"] + sum((found[i] * found[j].tanh()).mean() for i, j in pairs)}


class Streams(Plain):
    """Returns what stands behind every layer, and a mask."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Any]:
        found = self.streams(self.embed(ids))
        return {**self.answer(found[-1], labels), "streams": tuple(found), "mask": labels != -100}


class EarlyLoss(Plain):
    """Nothing behind the first layer has a part in the loss."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Any]:
        found = self.streams(self.embed(ids))
        return {**self.answer(found[1], labels), "late": found[-1]}


class SharedWeights(Plain):
    """The last layer has a weight of the first one, and the third a whole linear of it."""

    def make(self) -> None:
        first: Any = self.layers[0]
        self.layers[3].a.weight, self.layers[2].b = first.a.weight, first.b


class SharedLayers(Plain):
    """Two layers that run twice."""

    def make(self) -> None:
        self.layers = nn.ModuleList([self.layers[0], self.layers[1]] * 2)


class Gain(Plain):
    """A number that every layer reads."""

    def make(self) -> None:
        self.gain = nn.Parameter(torch.tensor(0.7))

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.gain * layer(x)
        return x


class Unused(Plain):
    """Parameters that nothing reads, on a layer and beside them."""

    def make(self) -> None:
        self.extra, self.layers[1].extra = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(3))


class FrozenFirst(Plain):
    def make(self) -> None:
        for module in (self.embed, self.layers[0], self.layers[1]):
            module.requires_grad_(False)


class FrozenButTable(Plain):
    def make(self) -> None:
        self.requires_grad_(False)
        self.embed.requires_grad_(True)


class FrozenButHead(Plain):
    def make(self) -> None:
        self.requires_grad_(False)
        self.head.requires_grad_(True)


class Choices(Plain):
    """Whole numbers and truth values that depend on weights, read three layers on."""

    def body(self, x: Tensor) -> Tensor:
        top, positive = x.argmax(-1), x.sum(-1) > 0
        x = self.streams(x)[-1]
        return torch.where(positive.unsqueeze(-1), x, -x) + F.one_hot(top, WIDTH).to(x.dtype)


class Turned(Plain):
    """The stream has its dims in another order."""

    def body(self, x: Tensor) -> Tensor:
        return super().body(x.transpose(0, 1)).transpose(0, 1)


class Checkpointed(Plain):
    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return x


class Detached(Plain):
    """No gradient comes back to the first stage, which has a term of its own."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Any]:
        x, term = self.embed(ids), torch.zeros(())
        for at, layer in enumerate(self.layers):
            x = x + layer(x)
            if at == 1:
                term, x = x.square().mean(), x.detach()
        out = self.answer(x, labels)
        return {**out, "loss": out["loss"] + term}


class TwoStreams(Plain):
    def body(self, x: Tensor) -> Tensor:
        other = 0.5 * x
        for layer in self.layers:
            x, other = other + layer(x), x
        return x + other


class Between(Plain):
    """A linear beside the list runs between its items."""

    def make(self) -> None:
        self.middle = nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        for at, layer in enumerate(self.layers):
            x = x + layer(x)
            x = self.middle(x) if at == 1 else x
        return x


class DictLayers(Plain):
    """Layers that are dictionaries of modules, which do not run themselves."""

    def make(self) -> None:
        parts = ({"norm": nn.LayerNorm(WIDTH), "mlp": nn.Sequential(Mlp(), nn.Tanh())} for _ in range(LAYERS))
        self.layers = nn.ModuleList(nn.ModuleDict(item) for item in parts)

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["mlp"](layer["norm"](x))  # type: ignore[index]
        return x


class OneTower(Plain):
    """The list of layers in the only item of another list."""

    def make(self) -> None:
        del self.layers
        self.towers = nn.ModuleList([nn.ModuleDict({"layers": nn.ModuleList(Mlp() for _ in range(LAYERS))})])

    def body(self, x: Tensor) -> Tensor:
        for layer in self.towers[0]["layers"]:  # type: ignore[index]
            x = x + layer(x)
        return x


KINDS: list[type[Plain]] = [
    Plain, Skips, DeepLosses, Terms, Streams, EarlyLoss, SharedWeights, SharedLayers, Gain, Unused, FrozenFirst, FrozenButTable,
    FrozenButHead, Choices, Turned, Checkpointed, Detached, TwoStreams, Between, DictLayers, OneTower,
]  # fmt: skip


def made(kind: type[Plain]) -> Plain:
    torch.manual_seed(0)
    return kind().double()


def batch(seed: int = 0, rows: int = 8, length: int = LENGTH) -> dict[str, Tensor]:
    """Ids and labels, of which a quarter and two whole rows are ignored."""
    source = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(WORDS, (2, rows, length), generator=source)
    labels[torch.rand(rows, length, generator=source) < 0.25] = -100
    labels[2:4] = -100
    return {"ids": ids, "labels": labels}
