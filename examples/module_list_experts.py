"""A small MoE language model whose experts are modules of their own, in an `nn.ModuleList`, as people write them first.

    python examples/module_list_experts.py      # one process

N tokens, H width, K experts a token, E experts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Expert(nn.Module):
    def __init__(self, hidden_size: int, expert_size: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_size, expert_size)
        self.down = nn.Linear(expert_size, hidden_size)

    def forward(self, x_NH: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_NH)))


class MoE(nn.Module):
    """Every expert takes the tokens that chose it, and adds its weighted answer back in their places."""

    def __init__(self, hidden_size: int, expert_size: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts = nn.ModuleList([Expert(hidden_size, expert_size) for _ in range(num_experts)])

    def forward(self, x_NH: Tensor) -> Tensor:
        logits_NK, ids_NK = self.gate(x_NH).topk(self.top_k, dim=-1)
        probs_NK = logits_NK.softmax(-1)
        out_NH = torch.zeros_like(x_NH)
        for index, expert in enumerate(self.experts):
            token, choice = torch.where(ids_NK == index)
            out_NH.index_add_(0, token, probs_NK[token, choice].unsqueeze(-1) * expert(x_NH[token]))
        return out_NH


class Block(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int, expert_size: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(hidden_size)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)
        self.norm2 = nn.LayerNorm(hidden_size)
        self.moe = MoE(hidden_size, expert_size, num_experts, top_k)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq_len, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, seq_len, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq_len, width))
        return x + self.moe(self.norm2(x).view(-1, width)).view(x.shape)


class LanguageModel(nn.Module):
    """Returns the loss and the logits. ``labels[b, s]`` is the byte after ``input_ids[b, s]``."""

    def __init__(
        self,
        vocab_size: int = 256,
        hidden_size: int = 128,
        num_layers: int = 2,
        num_heads: int = 4,
        expert_size: int = 256,
        num_experts: int = 8,
        top_k: int = 2,
        max_len: int = 512,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden_size)
        self.position = nn.Embedding(max_len, hidden_size)
        blocks = [Block(hidden_size, num_heads, expert_size, num_experts, top_k) for _ in range(num_layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(hidden_size)
        self.head = nn.Linear(hidden_size, vocab_size)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.embed(input_ids) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def build() -> LanguageModel:
    """The model with the same weights every time."""
    torch.manual_seed(0)
    return LanguageModel()


def main(steps: int = 20) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with open(__file__, "rb") as source:
        text = torch.tensor(list(source.read()))
    for step in range(steps):
        start = torch.arange(8)[:, None] * 400 + step
        window = text[start + torch.arange(65)]
        loss, _ = model(window[:, :-1], labels=window[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
