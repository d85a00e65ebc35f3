"""Placement rule of cumulative sums: along the batch, each rank adds what stands before its part in the global order."""

import pytest
import torch

from moecompile import graph as graphs
from moecompile import ops
from moecompile.placement.types import Shard
from tests.support.placement_check import check_all, check_cases, op_case, shard

aten = torch.ops.aten
drawn = torch.Generator().manual_seed(1)


def real(*size: int) -> torch.Tensor:
    return torch.randn(size, dtype=torch.float64, generator=drawn)


def number(*size: int) -> torch.Tensor:
    return torch.randint(0, 4, size, generator=drawn)


SCANS = [
    (aten.cumsum.default, (real(4, 3), 0), {}, "S(0) -> S(0); S(0,outer=2) -> S(0,outer=2); P -> R"),
    (aten.cumsum.default, (real(3, 4), -1), {}, "S(1) -> S(1)"),
    (aten.cumsum.default, (real(4, 4, 4), 1), {}, "S(0) -> S(0); S(1) -> S(1); S(2) -> S(2)"),
    (aten.cumsum.default, (number(8, 3), 0), {}, "S(0) -> S(0); S(0,outer=2) -> S(0,outer=2)"),
    (aten.cumsum.default, (number(4, 3).int(), 0), {}, "S(0) -> S(0)"),
    (aten.cumsum.default, (number(4, 3), 0), {"dtype": torch.float64}, "S(0) -> S(0)"),
    (aten.cumsum.default, (number(4, 3), 0), {"dtype": torch.int32}, "S(0) -> S(0)"),
    (aten.cumsum.default, (number(4, 3) > 1, 0), {}, "S(0) -> S(0)"),
]


@pytest.mark.parametrize(("target", "args", "kwargs", "expected"), SCANS)
def test_scans(target: object, args: tuple[object, ...], kwargs: dict[str, object], expected: str) -> None:
    check_cases(op_case(target, args, kwargs), expected)


def test_four_ranks() -> None:
    found = check_all(op_case(aten.cumsum.default, (real(8, 2), 0)), ranks=4)
    assert found["S(0)"] == "S(0)"


def test_only_totals_travel() -> None:
    """One number for each block and column is gathered, whatever the length."""
    walk = shard(op_case(aten.cumsum.default, (real(64, 3), 0)), [Shard(0)], 2)
    (gathered,) = graphs.find(walk.graph, ops.all_gather)
    assert tuple(gathered.args[0].meta["val"].shape) == (1, 1, 3)  # type: ignore[union-attr]
