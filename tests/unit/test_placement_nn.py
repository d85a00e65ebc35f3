"""Placement rules of norms, attention, convolutions, losses and MoE ops: every combination of placements is right or refused."""

import pytest
import torch

from moecompile import ops
from moecompile.errors import PassError
from tests.support.placement_check import check, check_cases, fn_case, op_case

aten = torch.ops.aten
drawn = torch.Generator().manual_seed(3)
IGNORED = -100


def real(*size: int) -> torch.Tensor:
    return torch.randn(size, dtype=torch.float64, generator=drawn)


def number(*size: int, below: int = 3) -> torch.Tensor:
    return torch.randint(0, below, size, generator=drawn)


def labels(*size: int) -> torch.Tensor:
    """Class numbers below 3, of which the first ones are ignored: unevenly over the ranks."""
    found = number(*size)
    found.view(-1)[: found.numel() // 2 + 1] = IGNORED
    return found


def chances(*size: int) -> torch.Tensor:
    return real(*size).sigmoid()


NETWORK = [
    (aten.layer_norm.default, (real(4, 3), [3], real(3), real(3)), {}, "S(0) R R -> S(0); P R R -> R; S(0) P R -> S(0)"),
    (aten.layer_norm.default, (real(4, 4), [4]), {}, "S(0) -> S(0); S(1) -> refused"),
    (aten.rms_norm.default, (real(2, 4, 3), [3], real(3)), {}, "S(0) R -> S(0); S(1) R -> S(1); R P -> R"),
    (aten.native_layer_norm.default, (real(4, 3), [3], None, None, 1e-5), {}, "S(0) -> S(0) S(0) S(0); P -> R R R"),
    (aten.group_norm.default, (real(4, 4, 3), 2, real(4), real(4)), {}, "S(0) R R -> S(0); S(1) R R -> refused; R S(0) R -> refused"),
    (aten.batch_norm.default, (real(4, 3), None, None, None, None, True, 0.1, 1e-5, False), {}, "S(0) -> refused; P -> R"),
    (aten.conv1d.default, (real(4, 2, 5), real(2, 2, 3), real(2)), {"padding": [1]}, "S(0) R R -> S(0); P R R -> R; R S(0) R -> refused"),
    (aten.conv1d.default, (real(2, 5), real(2, 2, 3)), {}, "S(0) R -> refused"),
    (aten.conv2d.default, (real(4, 1, 3, 3), real(1, 1, 2, 2)), {}, "S(0) R -> S(0)"),
    (aten.avg_pool1d.default, (real(4, 3, 6), [2]), {}, "S(0) -> S(0); S(2) -> refused"),
    (aten.max_pool1d.default, (real(4, 6), [2]), {}, "S(0) -> refused"),
    (aten.dropout.default, (real(4, 3), 0.0, True), {}, "S(0) -> S(0)"),
    (aten.dropout.default, (real(4, 3), 0.5, False), {}, "S(0) -> S(0)"),
]  # fmt: skip

LOSSES = [
    (aten.cross_entropy_loss.default, (real(4, 3), labels(4)), {},
     "S(0) R -> P; R S(0) -> P; S(0) S(0) -> P; P R -> R; S(0) P -> P; S(0,outer=2) R -> P"),
    (aten.cross_entropy_loss.default, (real(4, 3), labels(4), None, 2), {}, "S(0) S(0) -> P"),
    (aten.cross_entropy_loss.default, (real(4, 3), labels(4)), {"reduction": 0}, "S(0) S(0) -> S(0); P R -> R"),
    (aten.cross_entropy_loss.default, (real(4, 3), number(4), None, 1, 1, 0.2), {}, "S(0) S(0) -> P"),
    (aten.cross_entropy_loss.default, (real(2, 3, 4), labels(2, 4)), {},
     "S(0) S(0) -> P; S(2) S(1) -> P; S(2) R -> P; R S(1) -> P; S(0) S(1) -> refused"),
    (aten.cross_entropy_loss.default, (real(2, 3, 4), labels(2, 4)), {"reduction": 0}, "S(2) S(1) -> S(1)"),
    (aten.cross_entropy_loss.default, (real(4, 4), real(4, 4).softmax(1)), {}, "S(0) S(0) -> P; S(1) R -> refused; S(0) R -> P"),
    (aten.cross_entropy_loss.default, (real(4, 3), real(4, 3).softmax(1), real(3).abs()), {}, "S(0) S(0) R -> P"),
    (aten.cross_entropy_loss.default, (real(2, 3, 4), real(2, 3, 4).softmax(1)), {}, "S(2) S(2) -> P; S(0) R -> P"),
    (aten.cross_entropy_loss.default, (real(4), torch.tensor(1)), {}, "S(0) R -> P; P R -> R"),
    (aten.cross_entropy_loss.default, (real(4, 6), labels(4)), {}, "S(1) R -> P; S(1) S(0) -> refused"),
    (aten.cross_entropy_loss.default, (real(4, 6), labels(4), None, 1, IGNORED, 0.2), {}, "S(1) R -> P"),
    (aten.cross_entropy_loss.default, (real(2, 6, 4), labels(2, 4), None, 2), {}, "S(1) R -> P"),
    (aten.cross_entropy_loss.default, (real(4, 3).bfloat16(), labels(4)), {}, "S(0) S(0) -> P; P R -> R"),
    (aten.cross_entropy_loss.default, (6e4 * real(4, 3).abs().clamp(0.5, 1).half(), labels(4)), {}, "S(0) S(0) -> P"),
    (aten.nll_loss_nd.default, (real(2, 3, 4), labels(2, 4)), {}, "S(0) S(0) -> P; S(2) S(1) -> P"),
    (aten.mse_loss.default, (real(4, 3), real(4, 3)), {}, "S(0) S(0) -> P; S(0) R -> P; P R -> R"),
    (aten.mse_loss.default, (real(4, 3), real(4, 3), 0), {}, "S(0) R -> S(0)"),
    (aten.mse_loss.default, (real(4, 3), real(4, 3), 2), {}, "S(0) R -> P"),
    (aten.l1_loss.default, (real(4), real(4)), {}, "S(0) S(0) -> P"),
    (aten.smooth_l1_loss.default, (3 * real(4, 2), real(4, 2), 1, 0.3), {}, "S(0) S(0) -> P; R S(0) -> P"),
    (aten.huber_loss.default, (3 * real(4, 2), real(4, 2)), {"delta": 0.5}, "S(0) S(0) -> P"),
    (aten.kl_div.default, (chances(4, 2), chances(4, 2)), {}, "S(0) S(0) -> P; S(1) R -> P"),
    (aten.binary_cross_entropy.default, (chances(4), chances(4)), {}, "S(0) S(0) -> P"),
]  # fmt: skip

# the third operand weights classes or elements and has no gradient
WEIGHTED = [
    (aten.cross_entropy_loss.default, (real(4, 3), labels(4), real(3).abs()), {}, "S(0) S(0) R -> P; S(0) R P -> P"),
    (aten.cross_entropy_loss.default, (real(4, 3), labels(4), real(3).abs(), 1, IGNORED, 0.2), {}, "S(0) S(0) R -> P"),
    (aten.nll_loss.default, (real(4, 3).log_softmax(1), labels(4), real(3).abs()), {}, "S(0) S(0) R -> P"),
    (aten.binary_cross_entropy_with_logits.default, (real(4, 2), chances(4, 2), real(2).abs(), None, 1), {},
     "S(0) S(0) R -> P; S(0) R P -> P"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "args", "kwargs", "must"), [pytest.param(*item, id=str(item[0])) for item in WEIGHTED])
def test_weighted_losses(op, args, kwargs, must):
    check_cases(op_case(op, args, kwargs, fixed=(2,)), must)


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "must"), [pytest.param(*item, id=str(item[0])) for item in NETWORK + LOSSES]
)
def test_every_placement_is_right_or_refused(op, args, kwargs, must):
    # a partial probability or class number is none until it is summed; double differentiation of narrow losses is rough
    check_cases(op_case(op, args, kwargs), must)


def test_a_batch_without_any_label_gives_nan_on_every_rank():
    case = op_case(aten.cross_entropy_loss.default, (real(4, 3), torch.full((4,), IGNORED)))
    assert check(case, ["S(0)", "S(0)"]) == "P"


ATTENTION = [
    ((real(4, 2, 3, 2), real(4, 2, 3, 2), real(4, 2, 3, 2)), {"is_causal": True}, ["S(0)", "S(0)", "S(0)"], "S(0)"),
    ((real(4, 2, 3, 2), real(4, 2, 3, 2), real(4, 2, 3, 2)), {}, ["S(0)", "R", "P"], "S(0)"),
    ((real(4, 2, 3, 2), real(4, 2, 3, 2), real(4, 2, 3, 2)), {}, ["S(1)", "S(1)", "R"], "S(1)"),
    ((real(4, 2, 3, 2), real(4, 2, 3, 2), real(4, 2, 3, 2)), {}, ["S(0,outer=2)", "S(0)", "S(0)"], ""),
    ((real(4, 2, 4, 2), real(4, 2, 4, 2), real(4, 2, 4, 2)), {}, ["S(2)", "R", "R"], "S(2)"),
    ((real(4, 2, 4, 2), real(4, 2, 4, 2), real(4, 2, 4, 2)), {"is_causal": True}, ["S(2)", "S(2)", "S(2)"], "S(2)"),
    ((real(3, 4, 2), real(3, 4, 2), real(3, 4, 2)), {"is_causal": True, "scale": 0.3}, ["S(1)", "S(1)", "R"], "S(1)"),
    ((real(4, 2, 4, 2), real(4, 2, 4, 2), real(4, 2, 4, 2), real(4, 1, 4, 4)), {}, ["S(2)", "S(2)", "S(2)", "R"], "S(2)"),
    ((real(4, 2, 4, 2), real(4, 2, 4, 2), real(4, 2, 4, 2), real(4, 4)), {}, ["S(2)", "S(2)", "S(2)", "P"], "S(2)"),
    ((real(4, 2, 4, 2), real(4, 2, 4, 2), real(4, 2, 4, 2), real(1, 4)), {}, ["S(2)", "S(2)", "R", "S(1)"], "S(2)"),
    ((real(4, 2, 4, 2), real(4, 2, 4, 2), real(4, 2, 4, 2)), {}, ["R", "S(2)", "S(2)"], ""),
    ((real(2, 4, 4, 2), real(2, 2, 4, 2), real(2, 2, 4, 2)), {"enable_gqa": True, "is_causal": True}, ["S(2)"] * 3, "S(2)"),
    ((real(2, 4, 3, 2), real(2, 2, 3, 2), real(2, 2, 3, 2)), {"enable_gqa": True}, ["S(1)", "S(1)", "S(1)"], "S(1)"),
    ((real(2, 4, 3, 2), real(2, 2, 3, 2), real(2, 2, 3, 2)), {"enable_gqa": True}, ["S(0)", "S(0)", "S(0)"], "S(0)"),
    ((real(2, 4, 3, 2), real(2, 2, 3, 2), real(2, 2, 3, 2)), {"enable_gqa": True}, ["S(1)", "R", "R"], "S(1)"),
    ((real(4, 2, 3, 2), real(4, 2, 3, 2), real(4, 2, 3, 2), real(4, 1, 3, 3)), {}, ["S(0)", "S(0)", "S(0)", "R"], "S(0)"),
    ((real(4, 2, 3, 2), real(4, 2, 3, 2), real(4, 2, 3, 2), real(3, 3)), {}, ["S(0)", "S(0)", "S(0)", "P"], "S(0)"),
    ((real(4, 2, 3, 2), real(4, 2, 3, 2), real(4, 2, 3, 2), real(4, 1, 3, 3)), {}, ["R", "R", "R", "S(0)"], "S(0)"),
    ((real(4, 3, 2), real(4, 3, 2), real(4, 3, 2)), {"scale": 0.3}, ["P", "R", "R"], "R"),
]  # fmt: skip


@pytest.mark.parametrize(("args", "kwargs", "placed", "wanted"), ATTENTION)
def test_attention(args, kwargs, placed, wanted):
    case = op_case(aten.scaled_dot_product_attention.default, args, kwargs)
    if wanted:
        assert check(case, placed) == wanted
        return
    with pytest.raises(PassError, match=r"shard-dense: .*scaled_dot_product_attention"):
        check(case, placed)


# ---- MoE ---------------------------------------------------------------------------------------------------------


def experts(x, ids, probs, w1, w2, bias):
    rows, counts, row_map = ops.permute(x, ids, 3)
    hidden = torch.relu(ops.grouped_linear(rows, counts, w1, bias))
    return ops.unpermute(ops.grouped_linear(hidden, counts, w2), row_map, x.shape[0], 2, probs)


MOE = (real(8, 4), number(8, 2), real(8, 2), real(3, 5, 4), real(3, 4, 5), real(3, 5))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("placed", "wanted"),
    [
        ("S(0) S(0) S(0) R R R", "S(0)"),
        ("S(0) R P P R R", "S(0)"),
        ("R S(0) R R P P", "S(0)"),
        ("P R R R R R", "R"),
    ],
)
def test_experts_see_the_rows_of_their_rank(placed, wanted, ranks):
    assert check(fn_case(experts, *MOE), placed.split(), ranks) == wanted


def test_tokens_in_blocks():
    assert check(fn_case(experts, *MOE), ["S(0,outer=2)", "R", "R", "R", "R", "R"]) == "S(0,outer=2)"


def test_counts_add_up_over_the_ranks():
    counts = fn_case(lambda x, ids: ops.permute(x, ids, 3)[1].to(torch.float64) / 16, MOE[0], MOE[1])
    assert check(counts, ["S(0)", "S(0)"]) == "R"  # integers are summed as integers
    sums = fn_case(lambda x, ids: ops.permute(x, ids, 3)[0].sum(0), MOE[0], MOE[1])
    assert check(sums, ["S(0)", "S(0)"]) == "P"


def _rows(x, ids):
    return ops.permute(x, ids, 3)


FOREIGN = {
    "rows of another routing": lambda x, ids: _rows(x, ids)[0] + _rows(x, ids.flip(1))[0],
    "counts of another routing": lambda x, ids: ops.grouped_linear(_rows(x, ids)[0], _rows(x, ids.flip(1))[1], MOE[3]).sum(),
    "counts that were computed with": lambda x, ids: ops.grouped_linear(_rows(x, ids)[0], _rows(x, ids)[1] * 1, MOE[3]).sum(),
    "rows in pairs": lambda x, ids: _rows(x, ids)[0].reshape(8, 2, 4).sum(1),
    "rows against a whole tensor": lambda x, ids: _rows(x, ids)[0] * MOE[0].repeat(2, 1),
    "a mean of rows": lambda x, ids: _rows(x, ids)[0].mean(0),
    "a mean square of rows": lambda x, ids: torch.nn.functional.mse_loss(_rows(x, ids)[0], _rows(x, ids)[0] * 0),
    "rows in order": lambda x, ids: _rows(x, ids)[0].cumsum(0),
    "rows repeated": lambda x, ids: _rows(x, ids)[0].repeat(2, 1),
    "rows one after the other": lambda x, ids: torch.cat([_rows(x, ids)[0]] * 2),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_rows_that_cannot_be_compared_are_refused(name):
    case = fn_case(FOREIGN[name], MOE[0], MOE[1])
    with pytest.raises(PassError, match=r"shard-dense: .* calls "):
        check(case, ["S(0)", "S(0)"])
