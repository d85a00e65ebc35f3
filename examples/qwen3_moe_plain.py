"""A Mixture-of-Experts language model in the style of Qwen3-MoE, written for one device.

Nothing here knows of ranks: the experts are one stacked parameter per projection, and a loop visits the experts that tokens
chose. `examples/train.py` and `moecompile demo` train it on several ranks as it stands.

    python examples/qwen3_moe_plain.py          # trains on its own source, one process

B sequences, S tokens in each, H width, N tokens in all, K experts a token, E experts, I width of an expert, D of a head.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    vocab_size: int = 256  # bytes
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    num_experts: int = 8
    top_k: int = 2
    expert_size: int = 256
    balance_weight: float = 0.01
    rope_theta: float = 10_000.0
    eps: float = 1e-6


class Output(NamedTuple):
    loss: Tensor | None
    logits: Tensor


def rotary(seq_len: int, dim: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, [1, 1, S, D]: the second half of a head repeats those of the first."""
    half = torch.arange(0, dim, 2, device=like.device, dtype=like.dtype) / dim
    angle = torch.arange(seq_len, device=like.device, dtype=like.dtype)[:, None] * theta**-half
    angle = torch.cat([angle, angle], -1)[None, None]
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of features by its angle. x [B, heads, S, D]."""
    half = x.shape[-1] // 2
    left, right = x[..., :half], x[..., half:]
    return x * cos + torch.cat([-right, left], -1) * sin


class Attention(nn.Module):
    """Causal attention: fewer key-value heads than heads, queries and keys normalised per head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, config.eps)
        self.k_norm = nn.RMSNorm(config.head_dim, config.eps)

    def forward(self, x_BSH: Tensor) -> Tensor:
        batch, seq_len, _ = x_BSH.shape
        heads, kv_heads, dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        q = self.q_norm(self.q_proj(x_BSH).view(batch, seq_len, heads, dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x_BSH).view(batch, seq_len, kv_heads, dim)).transpose(1, 2)
        v = self.v_proj(x_BSH).view(batch, seq_len, kv_heads, dim).transpose(1, 2)
        cos, sin = rotary(seq_len, dim, self.config.rope_theta, like=q)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, seq_len, heads * dim))


class Router(nn.Module):
    """Softmax over all experts, the K largest kept and renormalised; and how unevenly the tokens are spread, 1 for evenly."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.num_experts, self.top_k = config.num_experts, config.top_k
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))

    def forward(self, x_NH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        probs_NE = F.linear(x_NH, self.weight).softmax(-1)
        probs_NK, ids_NK = probs_NE.topk(self.top_k, -1)
        share_E = F.one_hot(ids_NK, self.num_experts).to(probs_NE.dtype).mean((0, 1))
        balance = self.num_experts * (share_E * probs_NE.mean(0)).sum()
        return probs_NK / probs_NK.sum(-1, keepdim=True), ids_NK, balance


class Experts(nn.Module):
    """E SwiGLU networks as two stacked parameters."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.gate_up = nn.Parameter(torch.empty(config.num_experts, 2 * config.expert_size, config.hidden_size))
        self.down = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, config.expert_size))

    def forward(self, x_NH: Tensor, probs_NK: Tensor, ids_NK: Tensor) -> Tensor:
        out_NH = torch.zeros_like(x_NH)
        for expert in range(self.num_experts):
            token, choice = torch.where(ids_NK == expert)
            gate, up = F.linear(x_NH[token], self.gate_up[expert]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self.down[expert])
            out_NH = out_NH.index_add(0, token, y * probs_NK[token, choice, None])
        return out_NH


class MoE(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)

    def forward(self, x_BSH: Tensor) -> tuple[Tensor, Tensor]:
        x_NH = x_BSH.reshape(-1, x_BSH.shape[-1])
        probs_NK, ids_NK, balance = self.router(x_NH)
        return self.experts(x_NH, probs_NK, ids_NK).reshape(x_BSH.shape), balance


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, config.eps)
        self.attention = Attention(config)
        self.moe_norm = nn.RMSNorm(config.hidden_size, config.eps)
        self.moe = MoE(config)

    def forward(self, x_BSH: Tensor) -> tuple[Tensor, Tensor]:
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH))
        y_BSH, balance = self.moe(self.moe_norm(x_BSH))
        return x_BSH + y_BSH, balance


class Qwen3Moe(nn.Module):
    """Next-byte language model. ``labels[b, s]`` is the byte after ``input_ids[b, s]``; -100 leaves a place out of the loss."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.num_layers)])
        self.norm = nn.RMSNorm(config.hidden_size, config.eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        x_BSH, balance = self.embed(input_ids), []
        for layer in self.layers:
            x_BSH, layer_balance = layer(x_BSH)
            balance.append(layer_balance)
        logits = self.head(self.norm(x_BSH))
        if labels is None:
            return Output(None, logits)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Output(loss + self.config.balance_weight * torch.stack(balance).mean(), logits)


def build(config: Config | None = None) -> Qwen3Moe:
    """The model with the same weights every time."""
    torch.manual_seed(0)
    return Qwen3Moe(config or Config())


def main(steps: int = 20) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with open(__file__, "rb") as source:
        text = torch.tensor(list(source.read()))
    for step in range(steps):
        start = torch.arange(8)[:, None] * 500 + step
        window = text[start + torch.arange(65)]
        out = model(window[:, :-1], labels=window[:, 1:])
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {out.loss.item():.4f}")


if __name__ == "__main__":
    main()
