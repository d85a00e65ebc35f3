"""The example that README.md opens with: the program of a plain MoE layer for four ranks, without starting any."""

import torch
from torch import nn

import moecompile as mc


class MoE(nn.Module):
    """What a single-device user writes: every expert takes the tokens that chose it."""

    def __init__(self, width: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList([self.expert(width) for _ in range(num_experts)])

    def expert(self, width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [tokens, width]
        probs, ids = self.gate(x).softmax(-1).topk(self.top_k)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, choice = torch.where(ids == index)
            out.index_add_(0, token, probs[token, choice, None] * expert(x[token]))
        return out


with torch.no_grad():
    program = mc.trace(MoE(16, num_experts=8, top_k=2), mc.Plan(dp=4, ep=4), (torch.randn(32, 16),))
print(program)
