"""canonicalize: calls that do nothing go, equal calls merge, and no bit of a result changes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moecompile import graph as graphs
from moecompile.passes.canonicalize import Canonicalize
from moecompile.program import OutputKind
from tests.support import golden
from tests.support.fusion import ALONE, SHARDED, step_outputs

aten = torch.ops.aten


class Repeats(golden.Line):
    """Says everything twice, and views where there is nothing to view."""

    def __init__(self) -> None:
        super().__init__()
        del self.head
        self.weight = nn.Parameter(torch.randn(golden.WIDTH, golden.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.weight.t()).view(-1, golden.WIDTH).view(-1) * 1.0
        z = (x @ self.weight.t()).view(-1)
        return (y.sigmoid() * z.sigmoid()).sum()


class Small(golden.Line):
    """The same for the golden file."""

    def __init__(self) -> None:
        super().__init__()
        del self.head
        self.weight = nn.Parameter(torch.randn(golden.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = (x * self.weight).view(-1).view(-1)
        return (y * 1.0 + (x * self.weight).view(-1)).sum()


def rewritten(model: nn.Module | None = None) -> golden.Rewrite:
    return golden.rewrite(f"{SHARDED},differentiate", "canonicalize", ALONE, model or Repeats())


def test_golden(golden: golden.Golden) -> None:
    golden("repeats", rewritten(Small()))


def test_merges_and_drops() -> None:
    found = rewritten()
    assert found.rewrites > 0
    assert not graphs.find(found.program.graph, aten.detach.default)
    assert not [node for node in graphs.find(found.program.graph, aten.mul.Tensor) if node.args[1] == 1.0]
    assert len(graphs.find(found.program.graph, aten.sigmoid.default)) == 1
    assert golden.run(found.program, "canonicalize").history[-1].rewrites == 0


def test_same_bits() -> None:
    model = Repeats()
    plain, short = step_outputs(model, "differentiate"), step_outputs(model, "differentiate,canonicalize")
    assert len(plain) == len(short) == 2
    for a, b in zip(plain, short, strict=True):
        assert a.norm() > 0
        assert torch.equal(a, b)


def test_outputs_stay_apart() -> None:
    """Two gradients with equal numbers are two tensors: an optimizer or a clip writes into them."""

    class Twins(golden.Line):
        def __init__(self) -> None:
            super().__init__()
            del self.head
            self.a, self.b = nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(2))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.a + x * self.b).sum()

    found = golden.rewrite(f"{SHARDED},differentiate", "canonicalize", ALONE, Twins()).program
    before = golden.run(golden.captured(ALONE, Twins()), f"{SHARDED},differentiate")

    def distinct(program: golden.Program) -> int:
        pairs = zip(program.output_nodes(), program.outputs, strict=True)
        return len({node for node, item in pairs if item.kind is OutputKind.GRAD})

    assert distinct(found) == distinct(before)


def test_effect() -> None:
    def effect() -> None:
        assert not graphs.find(rewritten().program.graph, aten.detach.default)

    golden.assert_needs(Canonicalize, effect)
