"""Placement rules of slices, gathers and indexing: every combination of input placements is right or refused."""

import pytest
import torch

from tests.support.placement_check import check, check_cases, fn_case, op_case

aten = torch.ops.aten
drawn = torch.Generator().manual_seed(2)


def real(*size: int) -> torch.Tensor:
    return torch.randn(size, dtype=torch.float64, generator=drawn)


def number(*size: int, below: int = 4) -> torch.Tensor:
    return torch.randint(0, below, size, generator=drawn)


def mask(*size: int) -> torch.Tensor:
    return torch.rand(size, generator=drawn) < 0.5


PARTS = [
    (aten.slice.Tensor, (real(4, 4), 1, 0, 2), {}, "S(0) -> S(0); S(1) -> refused; P -> P"),
    (aten.slice.Tensor, (real(8, 3), 0, 4, 9223372036854775807), {}, "S(0) -> refused; S(0,outer=2) -> S(0)"),
    (aten.slice.Tensor, (real(8, 3), 0, -4, 8), {}, "S(0,outer=2) -> S(0)"),
    (aten.slice.Tensor, (real(4, 3), 0, 0, 4), {}, "S(0) -> S(0); S(0,outer=2) -> S(0,outer=2)"),
    (aten.slice.Tensor, (real(4, 4), 0, 0, 4, 2), {}, "S(0) -> S(0); S(1) -> S(1)"),
    (aten.slice.Tensor, (real(6, 4), 0, 0, 6, 2), {}, "S(0) -> refused; S(1) -> S(1)"),
    (aten.narrow.default, (real(8, 4), 0, 0, 4), {}, "S(0) -> refused; S(0,outer=2) -> S(0); S(1) -> S(1)"),
    (aten.narrow.default, (real(4, 4), 0, 0, 4), {}, "S(0) -> S(0)"),
    (aten.split.Tensor, (real(4, 4), 2, 1), {}, "S(0) -> S(0) S(0); S(1) -> refused; P -> P P"),
    (aten.split.Tensor, (real(8), 4), {}, "S(0) -> refused; S(0,outer=2) -> S(0) S(0)"),
    (aten.split_with_sizes.default, (real(4, 3), [1, 2], -1), {}, "S(0) -> S(0) S(0)"),
    (aten.chunk.default, (real(8, 2), 2), {}, "S(0,outer=2) -> S(0) S(0); S(1) -> S(1) S(1)"),
    (aten.tensor_split.sections, (real(8, 2), 2), {}, "S(0,outer=2) -> S(0) S(0)"),
    (aten.select.int, (real(4, 3, 4), 1, 2), {}, "S(0) -> S(0); S(2) -> S(1); P -> P"),
    (aten.select.int, (real(4, 3), 0, 0), {}, "S(0) -> refused"),
    (aten.unbind.int, (real(3, 4),), {}, "S(1) -> S(0) S(0) S(0)"),
    (aten.unbind.int, (real(4, 2), -1), {}, "S(0) -> S(0) S(0); S(1) -> refused"),
    (aten.unfold.default, (real(4, 5), 1, 2, 1), {}, "S(0) -> S(0); P -> P"),
    (aten.unfold.default, (real(4, 5), 0, 2, 1), {}, "S(0) -> refused"),
    (aten.slice_scatter.default, (real(4, 6), real(4, 2), 1, 2, 4), {},
     "S(0) R -> S(0); R S(0) -> S(0); P P -> P; P R -> R; S(0) P -> S(0)"),
    (aten.slice_scatter.default, (real(4, 3), real(2, 3), 0, 0, 2), {}, "S(0) R -> refused; P P -> P"),
    (aten.select_scatter.default, (real(3, 4), real(4), 0, 1), {}, "R S(0) -> S(1); S(1) R -> S(1); S(1) S(0) -> S(1)"),
    (aten.select_scatter.default, (real(4, 3, 4), real(4, 4), 1, 1), {},
     "S(0) R -> S(0); R S(1) -> S(2); S(2) S(1) -> S(2); S(0) S(1) -> refused"),
    (aten.diff.default, (real(4, 4),), {}, "S(0) -> S(0); S(1) -> refused"),
    (aten.diff.default, (real(4, 4), 1, -1, real(4, 1)), {}, "S(0) R -> S(0); R S(0) -> S(0); P R -> R"),
    (aten.constant_pad_nd.default, (real(4, 3), [1, 1], 2.0), {}, "S(0) -> S(0); P -> R"),
    (aten.constant_pad_nd.default, (real(4, 3), [0, 0, 1, 0]), {}, "S(0) -> refused"),
    (aten.pad.default, (real(4, 2, 4), [0, 1, 2, 0]), {}, "S(0) -> S(0); S(1) -> refused; S(2) -> refused"),
    (aten.tril.default, (real(4, 3, 3),), {}, "S(0) -> S(0); P -> P"),
    (aten.triu.default, (real(4, 4), 1), {}, "S(0) -> refused"),
    (aten.repeat_interleave.self_int, (real(4, 3), 2, 0), {}, "S(0) -> S(0); P -> P; S(0,outer=2) -> S(0,outer=2)"),
    (aten.repeat_interleave.self_int, (real(4, 2), 3, 1), {"output_size": 6}, "S(0) -> S(0); S(1) -> S(1)"),
    (aten.repeat_interleave.self_int, (real(4), 2), {}, "S(0) -> S(0)"),
    (aten.repeat_interleave.self_int, (real(4, 2), 2), {}, "S(0) -> refused"),
]  # fmt: skip

INDEXING = [
    (aten.gather.default, (real(4, 4), 1, number(4, 2)), {}, "S(0) R -> S(0); R S(0) -> S(0); S(1) R -> refused; P R -> R; S(0) P -> S(0)"),
    (aten.gather.default, (real(4, 4), 1, number(2, 2)), {}, "S(0) R -> refused; R S(0) -> refused"),
    (aten.gather.default, (real(4, 4), 0, number(2, 4)), {}, "S(1) R -> S(1); R S(0) -> refused"),
    (aten.take_along_dim.default, (real(4, 4), number(4, 1), 1), {}, "S(0) R -> S(0); R S(0) -> S(0); S(1) R -> refused"),
    (aten.take_along_dim.default, (real(1, 4), number(4, 2), 1), {}, "R S(0) -> S(0)"),
    (aten.scatter.value, (real(4, 4), 1, number(4, 1), 2.0), {}, "S(0) R -> S(0); R S(0) -> S(0); P R -> R"),
    (aten.scatter.src, (real(4, 4), -1, torch.tensor([[0, 2]] * 4), real(4, 2)), {},
     "S(0) R R -> S(0); R S(0) S(0) -> S(0); R R S(1) -> refused"),
    (aten.scatter.src, (real(4, 4), -1, torch.tensor([[0, 2]] * 2), real(2, 2)), {}, "S(0) R R -> refused"),
    (aten.scatter_add.default, (real(4, 4), 1, number(4, 2), real(4, 2)), {},
     "S(0) R R -> S(0); R S(0) S(0) -> S(0); R S(1) S(1) -> P; P S(1) R -> P; R S(0) S(1) -> refused"),
    (aten.scatter_add.default, (number(4), 0, number(6), number(6)), {}, "R S(0) S(0) -> P; R R S(0) -> P; S(0) R R -> refused"),
    (aten.index_add.default, (real(3, 4), 0, number(4, below=3), real(4, 4)), {},
     "R S(0) S(0) -> P; R S(0) R -> P; R R S(1) -> S(1); S(1) R R -> S(1); P S(0) R -> P"),
    (aten.index_add.default, (real(4, 4), 0, number(4), real(4, 4)), {}, "S(0) R R -> refused; R R S(0) -> P; R P R -> R"),
    (aten.index.Tensor, (real(3, 4), [number(4, below=3)]), {}, "R S(0) -> S(0); S(1) R -> S(1); P R -> R; S(1) S(0) -> refused"),
    (aten.index.Tensor, (real(4, 3), [number(4)]), {}, "S(0) R -> refused"),
    (aten.index.Tensor, (real(2, 4, 3), [None, None, number(4, 2, below=3)]), {}, "S(0) R -> S(0); S(1) R -> S(1); R S(0) -> S(2)"),
    (aten.index.Tensor, (real(3, 4, 3), [number(4, 1, below=3), None, number(4, below=3)]), {},
     "S(1) R R -> S(2); R S(0) R -> S(0); R R S(0) -> S(1); R S(0) S(0) -> refused"),
    (aten.index.Tensor, (real(3, 3, 4), [number(4, below=3), number(4, below=3)]), {}, "S(2) R R -> S(1); R S(0) R -> S(0); R P R -> R"),
    (aten.index.Tensor, (real(4, 3), [torch.tensor([True, False, True, True])]), {}, "S(0) R -> refused; P R -> R"),
    (aten.index_put.default, (real(4, 3), [mask(4, 3)], torch.tensor(2.0, dtype=torch.float64)), {},
     "S(0) R R -> S(0); R S(0) R -> S(0); P R R -> R; S(0) R P -> S(0)"),
    (aten.index_put.default, (real(4, 4), [mask(4)], torch.tensor(2.0, dtype=torch.float64)), {},
     "S(0) R R -> S(0); S(1) R R -> S(1); R S(0) P -> S(0); S(1) S(0) R -> refused"),
    (aten.index_put.default, (real(4, 3), [number(4)], real(4, 3)), {}, "S(0) R R -> refused; P R R -> R; R P R -> R"),
    (aten.index_put.default, (real(4), [number(4, 2)], real(4, 2), True), {},
     "R S(0) S(0) -> P; R S(0) R -> P; R R S(0) -> P; P S(0) R -> P; S(0) R R -> refused"),
    (aten.index_put.default, (number(4), [number(4)], torch.tensor(1), True), {}, "R S(0) R -> P"),
    (aten.index_put.default, (number(4), [number(4)], torch.tensor(1), False), {}, "R S(0) R -> refused"),
    (aten.index_select.default, (real(3, 4), 0, number(4, below=3)), {}, "R S(0) -> S(0); S(1) R -> S(1); S(1) S(0) -> refused; P R -> R"),
    (aten.one_hot.default, (number(4, 2), 5), {}, "S(0) -> S(0); P -> R"),
    (aten.embedding.default, (real(4, 3), number(4, 2)), {}, "R S(0) -> S(0); R S(1) -> S(1); R P -> R; P R -> R; S(0) R -> P"),
    (aten.embedding.default, (real(4, 3), number(4), -1, True), {}, "R S(0) -> refused"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "must"), [pytest.param(*item, id=str(item[0])) for item in PARTS + INDEXING]
)
def test_every_placement_is_right_or_refused(op, args, kwargs, must):
    # partial indices are sums of numbers out of range, which only a rule that sums them first survives
    check_cases(op_case(op, args, kwargs), must)


@pytest.mark.parametrize("ranks", [2, 4])
def test_own_rows_by_arange(ranks):
    """x[arange(B), last] and a padding mask looked up by batch number, as attention masks are made."""

    def last(x, at):
        return x[torch.arange(4), at]

    def look_up(x):
        return x[torch.arange(4)[:, None, None] + 0, torch.arange(3)[None, None, :]].expand(4, 2, 3)

    def transposed(x, at):
        return x[:, torch.arange(4)[None, :], at]

    case = fn_case(last, real(4, 3), number(4, below=3))
    assert check(case, ["S(0)", "S(0)"], ranks) == "S(0)"
    assert check(case, ["S(0)", "R"], ranks) == "S(0)"
    assert check(fn_case(look_up, mask(4, 3)), ["S(0)"], ranks) == "S(0)"
    assert check(fn_case(transposed, real(3, 4, 5), number(2, 1)), ["S(1)", "R"], ranks) == "S(2)"


def test_other_batch_indices_are_refused():
    with pytest.raises(Exception, match="it indexes along the batch"):
        check(fn_case(lambda x: x[torch.arange(4).flip(0)], real(4, 3)), ["S(0)"])
    with pytest.raises(Exception, match="it indexes along the batch"):
        check(fn_case(lambda x, at: x[at], real(4, 3), torch.arange(4)), ["S(0)", "R"])
