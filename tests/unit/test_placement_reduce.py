"""Placement rules of reductions, ops along a dim, and views: every combination of input placements is right or refused."""

import pytest
import torch

from tests.support.placement_check import check_cases, op_case

aten = torch.ops.aten
drawn = torch.Generator().manual_seed(1)


def real(*size: int) -> torch.Tensor:
    return torch.randn(size, dtype=torch.float64, generator=drawn)


def number(*size: int) -> torch.Tensor:
    return torch.randint(0, 4, size, generator=drawn)


def mask(*size: int) -> torch.Tensor:
    return torch.rand(size, generator=drawn) < 0.5


REDUCTIONS = [
    (aten.sum.default, (real(4, 3),), {}, "S(0) -> P; P -> P"),
    (aten.sum.dim_IntList, (real(4, 3, 4), [-1]), {}, "S(0) -> S(0); S(2) -> P; P -> P"),
    (aten.sum.dim_IntList, (real(4, 3, 4), [0, 1]), {}, "S(0) -> P; S(2) -> S(0); S(0,outer=2) -> P"),
    (aten.sum.dim_IntList, (real(3, 4), [0], True), {}, "S(1) -> S(1)"),
    (aten.sum.dim_IntList, (real(3, 4), []), {}, "S(1) -> P"),
    (aten.sum.dim_IntList, (number(4, 4), [0]), {"dtype": torch.float64}, "S(0) -> P; P -> R; S(1) -> S(0)"),
    (aten.sum.dim_IntList, (number(4, 4).int(), [0]), {"dtype": torch.int64}, "P -> R; S(0) -> P"),
    (aten.sum.default, (mask(4, 4),), {}, "S(1) -> P"),
    (aten.sum.default, (mask(4, 4),), {"dtype": torch.bool}, "S(1) -> refused"),
    (aten.mean.default, (real(4, 3),), {}, "S(0) -> P; P -> P"),
    (aten.mean.dim, (real(4, 3, 4), [0, 1]), {}, "S(0) -> P; S(2) -> S(0)"),
    (aten.mean.dim, (real(4, 3, 4), [-1], True), {}, "S(0) -> S(0); S(2) -> P"),
    (aten.mean.dim, (number(4, 4), [0]), {"dtype": torch.float64}, "S(0) -> P; P -> R"),
    (aten.mean.dim, (10000 * real(4, 4).abs().half() + 30000, [0]), {}, "S(0) -> P; P -> P"),
    (aten.nansum.default, (real(4, 3),), {}, "S(0) -> P; P -> R"),
    (aten.count_nonzero.dim_IntList, (number(4, 4), [0]), {}, "S(0) -> P; S(1) -> S(0); P -> R"),
    (aten.any.default, (mask(4, 3),), {}, "S(0) -> R"),
    (aten.any.dim, (mask(4, 4), 0, True), {}, "S(0) -> R; S(1) -> S(1)"),
    (aten.all.default, (mask(4),), {}, "S(0) -> R"),
    (aten.all.dim, (mask(3, 4), -1), {}, "S(1) -> R"),
    (aten.max.default, (number(4, 3),), {}, "S(0) -> R; P -> R"),
    (aten.max.default, (real(4, 3),), {}, "S(0) -> refused; P -> R"),
    (aten.min.default, (number(4),), {}, "S(0) -> R"),
    (aten.amax.default, (number(4, 4), [0]), {}, "S(0) -> R; S(1) -> S(0)"),
    (aten.amax.default, (real(4, 4), [-1]), {}, "S(0) -> S(0); S(1) -> refused; P -> R"),
    (aten.max.dim, (real(4, 4, 3), -1), {}, "S(0) -> S(0) S(0); S(1) -> S(1) S(1); P -> R R"),
    (aten.max.dim, (real(3, 4), 0), {}, "S(1) -> S(0) S(0)"),
    (aten.argmax.default, (real(4, 3), -1), {}, "S(0) -> S(0); P -> R"),
    (aten.argmax.default, (real(4, 3),), {}, "S(0) -> refused"),
    (aten.logsumexp.default, (real(4, 3), [-1]), {}, "S(0) -> S(0); P -> R"),
    (aten.logsumexp.default, (real(4, 3), [0]), {}, "S(0) -> refused"),
    (aten.var.correction, (real(4, 3), [1]), {"correction": 0, "keepdim": True}, "S(0) -> S(0); P -> R"),
    (aten.var.correction, (real(4, 3),), {}, "S(0) -> refused"),
    (aten.var_mean.correction, (real(4, 3), [1]), {}, "S(0) -> S(0) S(0)"),
    (aten.std.dim, (real(4, 3), [0]), {}, "S(0) -> refused"),
    (aten.prod.dim_int, (real(3, 4), 0), {}, "S(1) -> S(0)"),
    (aten.norm.ScalarOpt_dim, (real(4, 3), 2, [-1], True), {}, "S(0) -> S(0); P -> R"),
    (aten.linalg_vector_norm.default, (real(4, 3),), {}, "S(0) -> refused"),
    (aten.kthvalue.default, (real(3, 4, 4), 2, 0), {}, "S(1) -> S(0) S(0); S(2) -> S(1) S(1)"),
    (aten.aminmax.default, (real(4, 3),), {"dim": 1}, "S(0) -> S(0) S(0)"),
    (aten.bincount.default, (torch.tensor([0, 3, 3, 1]),), {"minlength": 4}, "S(0) -> refused"),
    (aten.bincount.default, (torch.tensor([0, 3, 3, 1]), number(4)), {"minlength": 4}, "S(0) R -> refused; R S(0) -> refused; R P -> R"),
    (aten.histc.default, (real(4), 3, -1, 1), {}, "S(0) -> P; P -> R"),
    (aten.histc.default, (real(4), 3), {}, "S(0) -> refused"),
]  # fmt: skip

ALONG = [
    (aten.softmax.int, (real(4, 4), -1), {}, "S(0) -> S(0); S(1) -> refused; P -> R"),
    (aten.softmax.int, (real(4, 4), 0, torch.float32), {}, "S(1) -> S(1)"),
    (aten.log_softmax.int, (real(2, 3, 4), 1), {}, "S(0) -> S(0); S(2) -> S(2)"),
    (aten.cumsum.default, (real(4, 4), 1), {}, "S(0) -> S(0); S(1) -> S(1); P -> R"),
    (aten.topk.default, (real(4, 4, 3), 2), {}, "S(0) -> S(0) S(0); S(1) -> S(1) S(1); P -> R R"),
    (aten.topk.default, (real(4, 4), 2, 0), {}, "S(0) -> refused; S(1) -> S(1) S(1)"),
    (aten.sort.default, (real(4, 3), -1, True), {}, "S(0) -> S(0) S(0)"),
    (aten.sort.stable, (number(4, 3),), {"stable": True, "dim": 1}, "S(0) -> S(0) S(0); P -> R R"),
    (aten.sort.stable, (number(4, 3),), {"stable": True, "dim": 0}, "S(0) -> refused"),
    (aten.argsort.default, (real(4, 3),), {}, "S(0) -> S(0); P -> R"),
    (aten.flip.default, (real(4, 4), [1]), {}, "S(0) -> S(0); S(1) -> refused"),
    (aten.roll.default, (real(4, 3), [1], [1]), {}, "S(0) -> S(0)"),
    (aten.roll.default, (real(4, 3), [1]), {}, "S(0) -> refused"),
    (aten.glu.default, (real(4, 4),), {}, "S(0) -> S(0); S(1) -> refused"),
    (aten.cummax.default, (real(4, 3), 1), {}, "S(0) -> S(0) S(0)"),
]

VIEWS = [
    (aten.reshape.default, (real(4, 3, 2), [12, 2]), {}, "S(0) -> S(0); P -> P; S(2) -> S(1)"),
    (aten.reshape.default, (real(3, 4), [-1]), {}, "S(1) -> S(0,outer=3)"),
    (aten.reshape.default, (real(12), [3, 4]), {}, "S(0) -> refused; S(0,outer=2) -> refused"),
    (aten.reshape.default, (real(8), [2, 4]), {}, "S(0) -> S(0); S(0,outer=2) -> S(1)"),
    (aten.view.default, (real(2, 2, 3), [4, 3]), {}, "S(0) -> S(0); S(1) -> S(0,outer=2)"),
    (aten.view.default, (real(2, 1, 3), [2, 3]), {}, "S(0) -> S(0)"),
    (aten.flatten.using_ints, (real(2, 3, 2), 0, 1), {}, "S(0) -> S(0); S(2) -> S(1)"),
    (aten.unflatten.int, (real(4, 3), 0, [2, 2]), {}, "S(0) -> S(0); S(0,outer=2) -> S(1)"),
    (aten.unsqueeze.default, (real(2, 3), 0), {}, "S(0) -> S(1); P -> P"),
    (aten.squeeze.default, (real(2, 1, 2),), {}, "S(0) -> S(0); S(2) -> S(1)"),
    (aten.squeeze.dim, (real(2, 3), 0), {}, "S(0) -> S(0)"),
    (aten.squeeze.dims, (real(1, 2, 3), [0, 1]), {}, "S(1) -> S(0)"),
    (aten.view_as.default, (real(4, 3), real(2, 2, 3)), {}, "S(0) R -> S(0); R S(0) -> R; P S(0) -> P"),
    (aten.expand.default, (real(4, 1), [-1, 3]), {}, "S(0) -> S(0); P -> P"),
    (aten.expand.default, (real(2, 3), [4, 2, 3]), {}, "S(0) -> S(1)"),
    (aten.expand_as.default, (real(4, 1), real(4, 3)), {}, "S(0) R -> S(0); R S(0) -> R"),
    (aten.permute.default, (real(2, 4, 2), [2, 0, -2]), {}, "S(0) -> S(1); S(1) -> S(2); P -> P"),
    (aten.transpose.int, (real(2, 4, 2), 0, -1), {}, "S(0) -> S(2); S(1) -> S(1)"),
    (aten.t.default, (real(4, 3),), {}, "S(0) -> S(1)"),
    (aten.t.default, (real(4),), {}, "S(0) -> S(0)"),
    (aten.movedim.int, (real(2, 4, 2), 0, 2), {}, "S(0) -> S(2); S(1) -> S(0); S(2) -> S(1)"),
    (aten.numpy_T.default, (real(4, 2, 3),), {}, "S(0) -> S(2)"),
    (aten.diagonal.default, (real(4, 3, 3), 0, 1, 2), {}, "S(0) -> S(0)"),
    (aten.diagonal.default, (real(3, 4, 3), 0, 0, 2), {}, "S(1) -> S(0)"),
    (aten.diagonal.default, (real(4, 4),), {}, "S(0) -> refused"),
    (aten.cat.default, ([real(4, 3), real(4, 3)],), {},
     "S(0) R -> S(0,outer=2); S(0) S(0) -> S(0,outer=2); P R -> R; P P -> P; P S(0) -> S(0,outer=2)"),
    (aten.cat.default, ([real(4, 3), real(4, 2)], -1), {}, "S(0) R -> S(0); S(0) P -> S(0); S(0) S(0,outer=2) -> refused"),
    (aten.cat.default, ([real(4), real(8)],), {}, "S(0) S(0) -> refused; P P -> P"),
    (aten.cat.default, ([real(0), real(4, 3)],), {}, "R S(0) -> S(0)"),
    (aten.stack.default, ([real(4, 3), real(4, 3)],), {}, "S(0) R -> S(1); P P -> P; P R -> R"),
    (aten.stack.default, ([real(4, 3), real(4, 3)], 1), {}, "S(0) S(0) -> S(0)"),
    (aten.repeat.default, (real(4, 3), [2, 2]), {}, "S(0) -> S(0,outer=2); P -> P; S(0,outer=2) -> S(0,outer=4)"),
    (aten.repeat.default, (real(4), [3, 1]), {}, "S(0) -> S(1)"),
    (aten.tile.default, (real(3, 4), [2]), {}, "S(1) -> S(1,outer=2)"),
    (aten.new_zeros.default, (real(4), [4, 2]), {}, "S(0) -> R; P -> R"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "must"), [pytest.param(*item, id=str(item[0])) for item in REDUCTIONS + ALONG + VIEWS]
)
def test_every_placement_is_right_or_refused(op, args, kwargs, must):
    check_cases(op_case(op, args, kwargs), must)
