"""Models whose forward writes buffers: counters, loads of experts, running means, batch norms, biases that move themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.support.moe_styles import EXPERTS, MLP, TOP_K, WIDTH

SEQUENCE, WORDS = 4, 16


class Layer(nn.Module):
    """An MoE layer over [batch, sequence, width] whose router calls ``watch`` with what it chose."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList([MLP() for _ in range(EXPERTS)])
        self.make()

    def make(self) -> None:
        """Register buffers."""

    def scores(self, logits: Tensor) -> Tensor:
        return logits

    def watch(self, x: Tensor, logits: Tensor, ids: Tensor) -> None:
        """Write into buffers."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        logits = self.gate(flat)
        ids = self.scores(logits).topk(TOP_K).indices
        weights = logits.gather(-1, ids).softmax(-1)
        self.watch(x, logits, ids)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            token, choice = torch.where(ids == index)
            out = out.index_add(0, token, weights[token, choice, None] * expert(flat[token]))
        return out.reshape(x.shape)


class Steps(Layer):
    """Counts its calls, and scales its result by the count before and after."""

    def make(self) -> None:
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        before = self.steps.clone()
        self.steps += 1
        return super().forward(x) * (1 + 0.1 * before) + 0.01 * self.steps


class Load(Layer):
    """Tokens per expert of all calls, kept under no_grad."""

    def make(self) -> None:
        self.register_buffer("load", torch.zeros(EXPERTS), persistent=False)

    def watch(self, x: Tensor, logits: Tensor, ids: Tensor) -> None:
        with torch.no_grad():
            self.load += torch.bincount(ids.flatten(), minlength=EXPERTS)


class LoadByOneHot(Load):
    def watch(self, x: Tensor, logits: Tensor, ids: Tensor) -> None:
        self.load.add_(F.one_hot(ids, EXPERTS).sum((0, 1)))


class LoadByScatter(Load):
    def watch(self, x: Tensor, logits: Tensor, ids: Tensor) -> None:
        self.load.scatter_add_(0, ids.flatten(), torch.ones_like(ids.flatten(), dtype=self.load.dtype))


class LoadInParts(Load):
    """One expert's count at a time."""

    def watch(self, x: Tensor, logits: Tensor, ids: Tensor) -> None:
        for index in range(EXPERTS):
            self.load[index] += (ids == index).sum()


class CountedRows(MLP):
    """An expert that counts its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.rows += x.shape[0]
        return super().forward(x)


class LoadByLength(Layer):
    """How many rows each expert is given, as the expert sees it."""

    def make(self) -> None:
        self.experts = nn.ModuleList([CountedRows() for _ in range(EXPERTS)])


class Mean(Layer):
    """A running mean over batch and sequence, subtracted before it moves."""

    def make(self) -> None:
        self.register_buffer("mean", torch.linspace(-0.1, 0.1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        shifted = x - self.mean
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return super().forward(shifted)


class MeanReassigned(Mean):
    """The same, with a new tensor, read after it moved."""

    def forward(self, x: Tensor) -> Tensor:
        old = self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return Layer.forward(self, x - self.mean) + 0.1 * old


class Norm(Layer):
    def make(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x.reshape(-1, WIDTH).sin()).reshape(x.shape))


class NormOfChannels(Layer):
    """A convolution over [batch, channels, height, width] and its norm; the statistics of instances behind it."""

    def make(self) -> None:
        self.conv = nn.Conv2d(1, 2, 3, padding=1, bias=False)
        self.norm, self.each = nn.BatchNorm2d(2), nn.InstanceNorm2d(2, affine=True, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.each(self.norm(self.conv(x.unsqueeze(1)).sin()).sin()).mean(1))


class NormWithoutTrack(Layer):
    def make(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x.sin().transpose(1, 2)).transpose(1, 2))


class MovingBias(Layer):
    """A bias that chooses and follows the load by itself."""

    def make(self) -> None:
        self.register_buffer("bias", torch.linspace(-0.1, 0.1, EXPERTS))

    def scores(self, logits: Tensor) -> Tensor:
        return logits + self.bias

    def watch(self, x: Tensor, logits: Tensor, ids: Tensor) -> None:
        with torch.no_grad():
            load = torch.bincount(ids.flatten(), minlength=EXPERTS).to(self.bias.dtype)
            self.bias += 0.05 * torch.sign(load.mean() - load)


class MeanByOut(Layer):
    """A running mean over the tokens, written by ``out=``."""

    def make(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch.lerp(self.mean, x.mean((0, 1)), 0.1, out=self.mean)
        return super().forward(x - self.mean)


class Spectral(Layer):
    """A router whose weight has norm one: each forward takes a step towards its largest singular vectors, which are buffers."""

    def make(self) -> None:
        self.gate = parametrizations.spectral_norm(nn.Linear(WIDTH, EXPERTS, bias=False))
        self.out = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(super().forward(x))
        return found


class Checkpointed(Layer):
    """Counts inside of activation checkpointing; only values that the recomputation does not change."""

    reentrant = False

    def make(self) -> None:
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return found

    def inner(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls[1:] += 1
        return super().forward(x)


KINDS: list[type[Layer]] = [
    Steps, Load, LoadByOneHot, LoadByScatter, LoadInParts, Mean, MeanReassigned, Norm, NormOfChannels, NormWithoutTrack, MovingBias,
    LoadByLength, MeanByOut, Spectral,
]  # fmt: skip


class SummedRows(MLP):
    """An expert that sums its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.total += x.sum(0)
        return super().forward(x)


class NormedRows(MLP):
    """An expert with a norm over its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class SumsOfRows(Layer):
    def make(self) -> None:
        self.experts = nn.ModuleList([SummedRows() for _ in range(EXPERTS)])


class NormsOfRows(Layer):
    def make(self) -> None:
        self.experts = nn.ModuleList([NormedRows() for _ in range(EXPERTS)])


REFUSED: dict[type[Layer], str] = {
    SumsOfRows: r"writes into buffer 'layers\.0\.experts\.0\.total' what is computed from an expert's own rows.*by a mask",
    NormsOfRows: "running statistics of this norm are those of as many rows as data decide.*track_running_stats=False",
}


class Model(nn.Module):
    """Layers of a kind between norms, and a loss that every token has a share in; takes ids where it embeds ``words``."""

    def __init__(self, kind: Callable[[], nn.Module], layers: int = 2, words: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH) if words else nn.Identity()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(layers)])
        self.layers = nn.ModuleList([kind() for _ in range(layers)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        out = self.head(x)
        return {"loss": (out - labels).square().mean(), "out": out}


def made(kind: Callable[[], nn.Module], layers: int = 2, words: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(kind, layers, words).double()


def batch(seed: int = 0, rows: int = 4, words: bool = False) -> dict[str, Any]:
    shape, source = (2, rows, SEQUENCE, WIDTH), torch.Generator().manual_seed(seed)
    draw = torch.randn(shape, generator=source, dtype=torch.float64)
    x = torch.randint(WORDS, (rows, SEQUENCE), generator=source) if words else draw[0]
    return {"x": x, "labels": draw[1]}
