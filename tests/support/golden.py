"""Golden texts of passes: a file holds plan, pipeline, and the graph of one MoE block before and after one pass."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecompile import ops
from moecompile import pipeline as pipelines
from moecompile.compilation import Request, as_program, capture
from moecompile.errors import VerifyError
from moecompile.pass_base import Pass
from moecompile.passes import PASSES
from moecompile.plan import Plan
from moecompile.printer import graph_text, plan_text
from moecompile.program import Program

FOLDER = Path(__file__).parents[1] / "passes" / "golden"
MAX_LINES = 80
EXPERTS, WIDTH, TOKENS = 4, 2, 3
PLAN = Plan(dp=2, ep=2)


class Block(nn.Module):
    """The smallest MoE block with a loss: a router, two linears per expert, the mean square of the result.

    Tokens [T, WIDTH], EXPERTS experts, top-1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.w2 = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        probs, ids = self.gate(x).softmax(-1).topk(1, dim=-1)
        rows, counts, row_map = ops.permute(x, ids, EXPERTS)
        rows = ops.grouped_linear(F.relu(ops.grouped_linear(rows, counts, self.w1)), counts, self.w2)
        out: Tensor = ops.unpermute(rows, row_map, x.shape[0], 1, probs)
        return out.square().sum() / out.numel()


class Stack(nn.Module):
    """Three blocks, whose losses add up."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for block in self.blocks:
            total = total + block(x)
        return total


class Experts(nn.Module):
    """One linear per expert, the choice of experts given: the smallest model with rows that travel."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        rows, counts, row_map = ops.permute(x, ids.reshape(-1, 1), EXPERTS)
        out: Tensor = ops.unpermute(ops.grouped_linear(rows, counts, self.w), row_map, x.shape[0], 1)
        return out.sum()


class Weighted(Experts):
    """The same with routing weights."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        rows, counts, row_map = ops.permute(x, ids.reshape(-1, 1), EXPERTS)
        rows = ops.grouped_linear(rows, counts, self.w)
        out: Tensor = ops.unpermute(rows, row_map, x.shape[0], 1, x[:, :1])
        return out.sum()


class Line(nn.Module):
    """A linear with a bias, summed."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x).sum()
        return out


class OverBatch(nn.Module):
    """A softmax over the tokens of the whole batch, which no rank can take of its own tokens alone."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.head(x).softmax(0) * x).sum()
        return out


class Scale(nn.Module):
    """One linear and a cross entropy: the smallest model with a mean over valid tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, EXPERTS, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), labels)


class Gated(nn.Module):
    """A gated MLP over [sequences, length, WIDTH], summed: two linears that are cut by columns, one by rows."""

    INNER = 4

    def __init__(self, inner: int = INNER) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, inner, bias=False), nn.Linear(WIDTH, inner, bias=False)
        self.down = nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out.square().sum()

    @staticmethod
    def example() -> tuple[Tensor, ...]:
        return (torch.randn(1, 4, WIDTH, dtype=torch.float64),)


class Attentive(nn.Module):
    """Embedded tokens, each of which attends to those before it; summed."""

    VOCAB, LENGTH = 6, 4

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(self.VOCAB, WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        query, key, value = self.qkv(self.embed(ids)).unflatten(-1, (3, WIDTH, 1)).permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return out.square().sum()

    @classmethod
    def example(cls) -> tuple[Tensor, ...]:
        return (torch.randint(0, cls.VOCAB, (1, cls.LENGTH)),)


def batch(model: nn.Module) -> tuple[Tensor, ...]:
    """What one rank passes; a model may bring an example of its own."""
    example: Callable[[], tuple[Tensor, ...]] | None = getattr(model, "example", None)
    if example is not None:
        return example()
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    return (x,) if isinstance(model, Block | Stack | Line | OverBatch) else (x, torch.randint(0, EXPERTS, (TOKENS,)))


def captured(plan: Plan = PLAN, model: nn.Module | None = None) -> Program:
    """The block as captured, before any pass."""
    torch.manual_seed(0)
    model = (model or Block()).double()
    parts = plan.microbatches
    request = Request(tuple(item.repeat_interleave(parts, 0) for item in batch(model)), {}, plan)
    return as_program(capture(model, request), request)


def run(program: Program, pipeline: str, **options: object) -> Program:
    """Run a pipeline given as text; facts are those of the program."""
    return pipelines.run(program, pipelines.parse(pipeline, PASSES), PASSES, **options)  # type: ignore[arg-type]


@dataclass
class Rewrite:
    """One pass on the block; ``before`` and ``after`` are the graph's text."""

    program: Program
    text: str
    before: str
    after: str

    @property
    def rewrites(self) -> int:
        return self.program.history[-1].rewrites


def rewrite(before: str, item: str, plan: Plan = PLAN, model: nn.Module | None = None) -> Rewrite:
    """Bring the block to where ``item`` runs with the passes ``before``, then run it."""
    program = run(captured(plan, model), before)
    text = graph_text(program)
    return Rewrite(run(program, item), item, text, graph_text(program))


class Golden:
    """Compares a rewrite with its file; with ``--update-golden`` writes the file first, for a reviewer to read."""

    def __init__(self, update: bool) -> None:
        self.update = update

    def __call__(self, case: str, found: Rewrite) -> None:
        name = found.text.partition("{")[0].replace("-", "_")
        path = FOLDER / name / f"{case}.txt"
        text = (
            f"plan: {plan_text(found.program.plan)}\npipeline: {found.program.pipeline}\n"
            f"before\n{found.before}after\n{found.after}"
        )
        assert len(text.splitlines()) <= MAX_LINES, f"{path} has {len(text.splitlines())} lines; use a smaller case"
        if self.update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        wanted = path.read_text(encoding="utf-8") if path.exists() else ""
        diff = "\n".join(difflib.unified_diff(wanted.splitlines(), text.splitlines(), "golden", "found", lineterm=""))
        assert not diff, f"{path} differs; run pytest --update-golden and read the diff:\n{diff}"


def assert_needs(kind: type[Pass], effect: Callable[[], None]) -> None:
    """The effect test holds, and turns red when the pass does nothing."""
    effect()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "run", lambda self, graph, ctx: 0)
        with pytest.raises((AssertionError, ValueError, VerifyError)):
            effect()
