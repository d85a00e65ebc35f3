"""Layers that tensor parallelism can cut, and such that it cannot, around one embedding, norm, head and loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, WIDTH, LENGTH = 32, 16, 8


class Layered(nn.Module):
    """``(ids, labels) -> {"loss", "logits"}`` with a body of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.make()

    def make(self) -> None:
        raise NotImplementedError

    def body(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.norm(self.body(self.embed(ids))))
        return {"loss": self.loss(logits, labels), "logits": logits}


def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias)


def heads(x: Tensor, count: int) -> Tensor:
    """[B, S, heads * D] -> [B, heads, S, D]."""
    return x.reshape(*x.shape[:2], count, -1).transpose(1, 2)


def join(x: Tensor) -> Tensor:
    """Inverse of ``heads``."""
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


class Attention(Layered):
    """Four heads, causal."""

    def make(self) -> None:
        self.q, self.k, self.v, self.o = (linear(WIDTH, WIDTH) for _ in range(4))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def body(self, x: Tensor) -> Tensor:
        return x + self.o(join(self.attend(heads(self.q(x), 4), heads(self.k(x), 4), heads(self.v(x), 4))))


class Mlp(Layered):
    """Two linears with ``between`` in the middle."""

    def make(self) -> None:
        self.a, self.b = linear(WIDTH, 24), linear(24, WIDTH)

    def between(self, h: Tensor) -> Tensor:
        return F.gelu(h)

    def body(self, x: Tensor) -> Tensor:
        return x + self.b(self.between(self.a(x)))


class ParallelBlock(Attention):
    """Attention and MLP beside each other, both of one norm."""

    def make(self) -> None:
        super().make()
        self.up, self.down, self.first = linear(WIDTH, 32, True), linear(32, WIDTH, True), nn.LayerNorm(WIDTH)

    def body(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return super().body(h) - h + x + self.down(F.gelu(self.up(h)))


class LowRank(Layered):
    """A product without anything between."""

    def make(self) -> None:
        self.a, self.b = linear(WIDTH, 8), linear(8, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(x))


class Three(Layered):
    """Three linears in a row: the last two are the chain."""

    def make(self) -> None:
        self.a, self.b, self.c = linear(WIDTH, 8), linear(8, 12), linear(12, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        return x + self.c(torch.tanh(self.b(torch.relu(self.a(x)))))


class Tied(Layered):
    """One weight in two places."""

    def make(self) -> None:
        self.a = linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        return x + self.a(torch.relu(self.a(x)))


class ReadElsewhere(Mlp):
    """Somebody else reads what would be cut."""

    def body(self, x: Tensor) -> Tensor:
        h = F.silu(self.a(x))
        return x + self.b(h) + h.mean(-1, keepdim=True)


class GateUp(Layered):
    """gate and up side by side in one weight."""

    def make(self) -> None:
        self.a, self.b = linear(WIDTH, 48, True), linear(24, WIDTH)

    def halves(self, h: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = h.chunk(2, -1)
        return up, gate

    def body(self, x: Tensor) -> Tensor:
        one, other = self.halves(self.a(x))
        return x + self.b(F.silu(one) * other)


class Interleaved(GateUp):
    """gate and up in turn."""

    def halves(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return h[..., ::2], h[..., 1::2]


class FusedGrouped(Layered):
    """query, key and value of different sizes in one weight."""

    def make(self) -> None:
        self.qkv, self.o = linear(WIDTH, 32), linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([16, 8, 8], -1)
        key, value = (heads(item, 2).repeat_interleave(2, 1) for item in (k, v))
        return x + self.o(join(F.scaled_dot_product_attention(heads(q, 4), key, value, is_causal=True)))


class Grouped(Layered):
    """Two key-value heads for four of the query's."""

    kv_heads = 2

    def make(self) -> None:
        self.q, self.o = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)
        self.k, self.v = linear(WIDTH, 4 * self.kv_heads), linear(WIDTH, 4 * self.kv_heads)

    def body(self, x: Tensor) -> Tensor:
        q, k, v = heads(self.q(x), 4), heads(self.k(x), self.kv_heads), heads(self.v(x), self.kv_heads)
        return x + self.o(join(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)))


class OneKeyHead(Grouped):
    """One key-value head for all."""

    kv_heads = 1


class Expanded(OneKeyHead):
    """One key-value head, expanded by hand."""

    def body(self, x: Tensor) -> Tensor:
        k, v = (heads(layer(x), 1).expand(-1, 4, -1, -1) for layer in (self.k, self.v))
        return x + self.o(join(F.scaled_dot_product_attention(heads(self.q(x), 4), k, v, is_causal=True)))


class SoftmaxBetween(Mlp):
    """A softmax over features."""

    def between(self, h: Tensor) -> Tensor:
        return h.softmax(-1)


class NormBetween(Mlp):
    """A norm over features."""

    def make(self) -> None:
        super().make()
        self.n = nn.LayerNorm(24)

    def between(self, h: Tensor) -> Tensor:
        return self.n(F.gelu(h))


class MaximumBetween(Mlp):
    """A maximum over features."""

    def between(self, h: Tensor) -> Tensor:
        return h / (1 + h.abs().amax(-1, keepdim=True))


class ScaleBetween(Mlp):
    """A parameter a feature."""

    def make(self) -> None:
        super().make()
        self.s = nn.Parameter(torch.linspace(0.2, 1, 24))

    def between(self, h: Tensor) -> Tensor:
        return torch.relu(h).pow(2) * self.s


class HeadsFastest(Attention):
    """Heads run fastest in the features."""

    def body(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).reshape(*x.shape[:2], -1, 4).permute(0, 3, 1, 2) for layer in (self.q, self.k, self.v))
        return x + self.o(self.attend(q, k, v).permute(0, 2, 3, 1).reshape(x.shape))


class ByHand(Attention):
    """Attention by hand, with a bias of positions for each head."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        at = torch.arange(LENGTH)
        future = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)
        slope = torch.tensor([0.5, 0.25, 0.125, 0.0625]).view(1, 4, 1, 1)
        scores = query @ key.transpose(-1, -2) / 2 + future - slope * (at[:, None] - at[None]).abs()
        return scores.softmax(-1) @ value


class Window(Attention):
    """A sliding window."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        back = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=(back >= 0) & (back < 3))


class Cross(Attention):
    """Keys and values of learned memory."""

    def make(self) -> None:
        super().make()
        self.memory = nn.Parameter(torch.linspace(-1, 1, 6 * WIDTH).sin().reshape(1, 6, WIDTH))

    def body(self, x: Tensor) -> Tensor:
        seen = self.memory.expand(x.shape[0], -1, -1)
        q, k, v = heads(self.q(x), 4), heads(self.k(seen), 4), heads(self.v(seen), 4)
        return x + self.o(join(F.scaled_dot_product_attention(q, k, v)))


class ComputedWeight(Mlp):
    """Weight norm."""

    def make(self) -> None:
        super().make()
        self.g = nn.Parameter(torch.linspace(0.5, 1.5, 24)[:, None])

    def body(self, x: Tensor) -> Tensor:
        weight = self.a.weight * self.g / self.a.weight.norm(dim=1, keepdim=True)
        return x + self.b(torch.relu(F.linear(x, weight)))


class Convolutions(Layered):
    """Convolutions over one position."""

    def make(self) -> None:
        self.a, self.b = nn.Conv1d(WIDTH, 24, 1), nn.Conv1d(24, WIDTH, 1)

    def body(self, x: Tensor) -> Tensor:
        return x + self.b(torch.relu(self.a(x.transpose(1, 2)))).transpose(1, 2)


class PlainMatmul(Layered):
    """Products with [in, out] parameters."""

    def make(self) -> None:
        self.w1, self.w2 = (nn.Parameter(torch.randn(*size) / 5) for size in ((WIDTH, 24), (24, WIDTH)))

    def body(self, x: Tensor) -> Tensor:
        return x + F.gelu(x @ self.w1) @ self.w2


class AddedMatmul(PlainMatmul):
    """addmm with [in, out] parameters on tokens of all sequences in a row."""

    def make(self) -> None:
        super().make()
        self.b1, self.b2 = nn.Parameter(torch.ones(24)), nn.Parameter(torch.zeros(WIDTH))

    def body(self, x: Tensor) -> Tensor:
        h = torch.addmm(self.b1, x.reshape(-1, WIDTH), self.w1)
        return x + torch.addmm(self.b2, F.gelu(h), self.w2).reshape(x.shape)


class Flat(Mlp):
    """Tokens of all sequences in a row, the residual too."""

    def body(self, x: Tensor) -> Tensor:
        return super().body(x.reshape(-1, WIDTH)).reshape(x.shape)


class ShiftedInput(Mlp):
    """Each token sees the one before."""

    def body(self, x: Tensor) -> Tensor:
        return x + self.b(torch.relu(self.a(x + F.pad(x, (0, 0, 1, 0))[:, :-1])))


class RunningSum(Mlp):
    """A running sum along the sequence."""

    def body(self, x: Tensor) -> Tensor:
        return x + self.b(torch.relu(self.a(x))).cumsum(1)


class Pooled(Mlp):
    """A mean over the sequence."""

    def body(self, x: Tensor) -> Tensor:
        return x + self.b(torch.relu(self.a(x.mean(1))))[:, None]


class Joined(Layered):
    """Two projections of different sizes, joined."""

    def make(self) -> None:
        self.a, self.c, self.b = linear(WIDTH, 8), linear(WIDTH, 16), linear(24, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        return x + self.b(torch.relu(torch.cat([self.a(x), self.c(x)], -1)))


class NextToken(Mlp):
    """The loss cuts the logits of the last token off."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits[:, :-1], labels[:, 1:])


# what tp=2 cuts of each body
CUT: dict[type[Layered], set[str]] = {
    Attention: {"q", "k", "v", "o"},
    Mlp: {"a", "b"},
    ParallelBlock: {"q", "k", "v", "o", "up", "down"},
    LowRank: {"a", "b"},
    Three: {"b", "c"},
    Tied: set(),
    ReadElsewhere: set(),
    GateUp: {"a", "b"},
    Interleaved: {"a", "b"},
    FusedGrouped: set(),
    Grouped: {"q", "k", "v", "o"},
    OneKeyHead: {"q", "o"},
    Expanded: {"q", "o"},
    SoftmaxBetween: set(),
    NormBetween: set(),
    MaximumBetween: set(),
    ScaleBetween: {"a", "b"},
    HeadsFastest: set(),
    ByHand: {"q", "k", "v", "o"},
    Window: {"q", "k", "v", "o"},
    Cross: {"q", "k", "v", "o"},
    ComputedWeight: set(),
    Convolutions: set(),
    PlainMatmul: {"w1", "w2"},
    AddedMatmul: {"w1", "b1", "w2"},
    Flat: {"a", "b"},
    ShiftedInput: {"a", "b"},
    RunningSum: {"a", "b"},
    Pooled: {"a", "b"},
    Joined: set(),
    NextToken: {"a", "b"},
}
