"""Placement rules of elementwise ops, casts and products: every combination of input placements is right or refused."""

import pytest
import torch

from tests.support.placement_check import check_cases, op_case

aten = torch.ops.aten
drawn = torch.Generator().manual_seed(0)


def real(*size: int) -> torch.Tensor:
    return torch.randn(size, dtype=torch.float64, generator=drawn)


def number(*size: int) -> torch.Tensor:
    return torch.randint(0, 4, size, generator=drawn)


def mask(*size: int) -> torch.Tensor:
    return torch.rand(size, generator=drawn) < 0.5


ELEMENTWISE = [
    (aten.add.Tensor, (real(4, 3), real(4, 3)), {"alpha": 2}, "S(0) R -> S(0); P R -> P; R P -> P; P P -> P; P S(0) -> S(0)"),
    (aten.add.Tensor, (real(4, 4), real(4)), {}, "S(0) R -> S(0); S(1) R -> S(1); R S(0) -> S(1); S(0) S(0) -> refused"),
    (aten.add.Tensor, (real(1, 4), real(4, 1)), {}, "R S(0) -> S(0); S(1) R -> S(1); S(1) S(0) -> refused"),
    (aten.add.Tensor, (real(4), torch.randn(4, dtype=torch.float32)), {}, "P R -> R; R P -> R; S(0) R -> S(0)"),
    (aten.add.Tensor, (real(4), number(4)), {}, "P R -> R"),
    (aten.add.Tensor, (number(4), number(4)), {}, "P R -> R; S(0) P -> S(0)"),
    (aten.add.Tensor, (real(4), 2.0), {}, "P -> R; S(0) -> S(0)"),
    (aten.add.Scalar, (real(4), 2.0), {}, "P -> R"),
    (aten.sub.Tensor, (real(4), real(1)), {}, "P R -> P; R P -> P"),
    (aten.rsub.Scalar, (real(4), 1.0), {}, "P -> R; S(0) -> S(0)"),
    (aten.mul.Tensor, (real(4, 4), real(4, 4)), {}, "P R -> P; R P -> P; P P -> R; S(1) P -> S(1); S(0) S(1) -> refused"),
    (aten.mul.Tensor, (number(4), mask(4)), {}, "P R -> P; R S(0) -> S(0)"),
    (aten.mul.Tensor, (real(4), 0.5), {}, "P -> P"),
    (aten.div.Tensor, (real(4), real(4).abs() + 1), {}, "P R -> P; R P -> R; P P -> R"),
    (aten.div.Tensor, (number(4), 3), {}, "P -> P"),
    (aten.div.Tensor_mode, (real(4), 0.3), {"rounding_mode": "floor"}, "P -> R"),
    (aten.pow.Tensor_Scalar, (real(4), 2), {}, "P -> R; S(0) -> S(0)"),
    (aten.neg.default, (real(4),), {}, "P -> P"),
    (aten.exp.default, (real(4),), {}, "P -> R; S(0) -> S(0)"),
    (aten.silu.default, (real(4, 3),), {}, "P -> R; S(0) -> S(0)"),
    (aten.square.default, (real(4),), {}, "P -> R"),
    (aten.clamp.default, (real(4), -0.5, 0.5), {}, "P -> R"),
    (aten.maximum.default, (real(4), real(4)), {}, "P R -> R; S(0) R -> S(0)"),
    (aten.eq.Tensor, (number(4, 4), number(4)), {}, "R P -> R; R S(0) -> S(1)"),
    (aten.where.self, (mask(4, 1), real(4, 4), real(4)), {}, "S(0) R R -> S(0); R S(0) R -> S(0); R P R -> R; R R S(0) -> S(1)"),
    (aten.where.ScalarOther, (mask(4), real(4), 0.0), {}, "S(0) R -> S(0); R P -> R"),
    (aten.masked_fill.Scalar, (real(4, 4), mask(4), 2.0), {}, "P R -> R; S(0) R -> S(0); R S(0) -> S(1)"),
    (aten.masked_fill.Tensor, (real(4), mask(4), real()), {}, "P R R -> R; S(0) R P -> S(0)"),
    (aten.addcmul.default, (real(4), real(4), real(4)), {"value": 0.5}, "P R R -> R; S(0) R P -> S(0)"),
    (aten.lerp.Scalar, (real(4), real(4), 0.3), {}, "P R -> R; R S(0) -> S(0)"),
    (aten.bitwise_and.Tensor, (mask(4, 1), mask(1, 4)), {}, "S(0) R -> S(0); R S(1) -> S(1)"),
    (aten.clone.default, (real(4),), {}, "P -> P; S(0) -> S(0)"),
    (aten.detach.default, (real(4),), {}, "P -> P; S(0) -> S(0)"),
    (aten.zeros_like.default, (real(4),), {}, "P -> R; S(0) -> S(0)"),
    (aten.fill.Scalar, (real(4), 2.0), {}, "P -> R; S(0) -> S(0)"),
    (aten.copy.default, (number(4, 3), number(3)), {}, "S(0) R -> S(0); P P -> R"),
    (aten.ones_like.default, (number(4),), {"dtype": torch.float64}, "P -> R; S(0) -> S(0)"),
    (aten.isin.Tensor_Tensor, (number(4), torch.tensor([1, 2, 3, 5])), {}, "S(0) R -> S(0); R S(0) -> refused; P R -> R"),
    (aten.bucketize.Tensor, (real(4, 3), torch.tensor([0.0, 1.0])), {}, "S(0) R -> S(0); P R -> R"),
    (aten.prelu.default, (real(4, 4), real(4)), {}, "S(0) R -> S(0); S(1) R -> refused; R S(0) -> refused"),
    (aten.view_as_real.default, (torch.randn(4, 3, dtype=torch.complex128),), {}, "S(0) -> S(0)"),
    (aten.view_as_complex.default, (real(4, 3, 2),), {}, "S(0) -> S(0); S(2) -> refused; P -> P"),
    (aten.polar.default, (real(4).abs(), real(4)), {}, "S(0) R -> S(0); P R -> R"),
]  # fmt: skip

CASTS = [
    (aten._to_copy.default, (torch.randn(4),), {"dtype": torch.float64}, "P -> P; S(0) -> S(0)"),
    (aten._to_copy.default, (real(4),), {"dtype": torch.float32}, "P -> R; S(0) -> S(0)"),
    (aten._to_copy.default, (number(4),), {"dtype": torch.float64}, "P -> R"),
    (aten._to_copy.default, (real(4),), {"dtype": torch.int64}, "P -> R"),
    (aten._to_copy.default, (number(4),), {"dtype": torch.bool}, "P -> R"),
    (aten.to.dtype, (torch.randn(4).bfloat16(), torch.float32), {}, "P -> P"),
    (aten.type_as.default, (torch.randn(4), real(4)), {}, "P R -> P; R S(0) -> R; S(0) P -> S(0)"),
    (aten.to.other, (real(4), torch.ones(3)), {}, "P R -> R; S(0) P -> S(0)"),
]

PRODUCTS = [
    (aten.linear.default, (real(4, 3), real(4, 3), real(4)), {}, "S(0) R R -> S(0); P R R -> R; P R P -> P; R S(0) R -> S(1)"),
    (aten.linear.default, (real(2, 4, 4), real(3, 4)), {}, "S(0) R -> S(0); S(2) R -> P; R S(1) -> P; S(2) S(1) -> P; P R -> P; P P -> R"),
    (aten.linear.default, (real(4, 4), real(4)), {}, "S(0) R -> S(0); R S(0) -> P"),
    (aten.mm.default, (real(4, 4), real(4, 4)), {}, "S(0) R -> S(0); R S(1) -> S(1); S(1) R -> P; S(1) S(0) -> P; S(0) S(1) -> refused"),
    (aten.bmm.default, (real(4, 2, 3), real(4, 3, 2)), {}, "S(0) R -> S(0); S(0) S(0) -> S(0); P R -> P; S(1) R -> S(1)"),
    (aten.matmul.default, (real(4, 4), real(2, 1, 4, 3)), {}, "S(0) R -> S(2); R S(0) -> S(0); S(1) S(2) -> P"),
    (aten.matmul.default, (real(1, 4, 3), real(4, 3, 2)), {}, "R S(0) -> S(0); S(1) R -> S(1); S(1) S(0) -> refused"),
    (aten.matmul.default, (real(4), real(4, 4)), {}, "S(0) R -> P; R S(1) -> S(0)"),
    (aten.matmul.default, (real(4, 4), real(4)), {}, "S(0) R -> S(0); R S(0) -> P"),
    (aten.dot.default, (real(4), real(4)), {}, "S(0) R -> P; P P -> R"),
    (aten.mv.default, (real(4, 4), real(4)), {}, "S(0) R -> S(0); S(1) S(0) -> P"),
    (aten.addmm.default, (real(4), real(4, 4), real(4, 4)), {"beta": 0.5}, "R S(0) R -> S(0); R S(1) R -> P; R R S(1) -> S(1)"),
    (aten.baddbmm.default, (real(2, 1, 3), real(2, 3, 4), real(2, 4, 3)), {}, "R S(0) R -> S(0); R S(2) R -> P; P S(2) R -> P"),
    (aten.outer.default, (real(4), real(4)), {}, "S(0) R -> S(0); R S(0) -> S(1); P R -> P"),
    (aten.einsum.default, ("bsk,kn->bsn", [real(4, 2, 4), real(4, 3)]), {}, "S(0) R -> S(0); S(2) R -> P; R S(0) -> P; P R -> P"),
    (aten.einsum.default, ("tec,td->ecd", [real(4, 2, 3), real(4, 3)]), {}, "S(0) S(0) -> P; S(0) R -> P; S(1) R -> S(0)"),
    (aten.einsum.default, ("...i,...i->...", [real(2, 4, 3), real(4, 3)]), {}, "S(0) R -> S(0); S(1) R -> S(1); R S(0) -> S(1)"),
    (aten.einsum.default, ("ij,jk", [real(4, 2), real(2, 4)]), {}, "S(0) R -> S(0); R S(1) -> S(1); S(1) R -> P"),
    (aten.einsum.default, ("ii->i", [real(4, 4)]), {}, "S(0) -> refused; P -> P"),
    (aten.einsum.default, ("bk,bn->", [real(4, 1), real(4, 2)]), {}, "S(0) R -> P; R S(1) -> P; P R -> P"),
    (aten.linalg_solve_triangular.default, (real(4, 2, 2).tril() + 3 * torch.eye(2, dtype=torch.float64), real(4, 2, 3)), {"upper": False},
     "S(0) R -> S(0); R S(0) -> S(0); S(1) R -> refused; P R -> R"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "must"), [pytest.param(*item, id=str(item[0])) for item in ELEMENTWISE + CASTS + PRODUCTS]
)
def test_every_placement_is_right_or_refused(op, args, kwargs, must):
    check_cases(op_case(op, args, kwargs), must)


def test_one_value_twice_is_not_linear():
    """x * x of a partial x, once as the same node."""
    x = real(4)
    check_cases(op_case(aten.mul.Tensor, (x, x)), "P P -> R")
