"""Right programs that the proof of places has to read: each was refused once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moecompile as mc
from moecompile.errors import VerifyError
from moecompile.pass_base import Fact
from moecompile.plan import Plan
from moecompile.verify import check_spread
from tests.support.mutants import mutants, mutated


class Cosine(nn.Module):
    """Router on normalised weights: the gradient of the norm chooses between a sum over the ranks and a scalar 0."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(4, 8))
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        probs, ids = (F.normalize(x, dim=-1) @ F.normalize(self.gate, dim=-1).t()).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(ids == index)
            out.index_add_(0, token, expert(x[token]) * probs[token, slot, None])
        return out.square().mean()


def test_a_scalar_zero_goes_with_a_sum() -> None:
    program = mc.trace(Cosine().double(), Plan(dp=2, ep=2), (torch.randn(6, 8, dtype=torch.float64),))
    coverage = check_spread(program)
    assert coverage.checked and coverage.proved > 0 and not coverage.unproved


class Decay(nn.Module):
    """One number for each head over batch and sequence, as gates of linear attention have."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:  # [batch, sequence, 4, width]
        rate = self.heads.exp().view(1, 1, 4, 1)
        return (rate * x).sigmoid().square().mean()


@pytest.mark.parametrize("rows", [1, 2])
def test_a_gradient_loses_the_dim_of_one_row_a_rank(rows: int) -> None:
    """Where a rank has one row, autograd leaves out the sum over rows of what was broadcast."""
    program = mc.trace(Decay().double(), Plan(dp=4), (torch.randn(rows, 3, 4, 2, dtype=torch.float64),))
    coverage = check_spread(program)
    assert coverage.checked and not coverage.unproved
    assert program.facts >= {Fact.DIFFERENTIATED, Fact.GRADS_SYNCED}


class Layer(nn.Module):
    """One part of a model between an embedding and a loss of tokens."""

    def __init__(self, part: nn.Module, use: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.part, self.head, self.use = nn.Embedding(16, 8), part, nn.Linear(8, 16), use
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.use(self.part, x)
        return F.cross_entropy(self.head(x + self.down(self.up(x).relu())).flatten(0, 1), labels.flatten())


def proved(model: nn.Module, plan: Plan) -> None:
    ids, labels = torch.randint(0, 16, (4, 6)), torch.randint(0, 16, (4, 6))
    coverage = check_spread(mc.trace(model.double(), plan, {"ids": ids, "labels": labels}))
    assert coverage.checked and coverage.proved > 0 and not coverage.unproved, coverage


SEQUENCE = Plan(dp=1, tp=2, sequence_parallel=True)


@pytest.mark.parametrize(
    "more", [{}, {"add_bias_kv": True, "add_zero_attn": True, "bias": False}], ids=["plain", "more keys"]
)
def test_one_head_a_rank_comes_beside_the_batch(more: dict[str, bool]) -> None:
    """``[s, b, heads * width] -> [s, b * heads, width]`` changes no local shape, but which dim is cut."""
    part = nn.MultiheadAttention(8, 2, batch_first=True, **more)
    proved(Layer(part, lambda part, x: part(x, x, x, need_weights=bool(more))[0]), SEQUENCE)


def test_parts_of_one_bias_are_put_together_before_they_are_added_up() -> None:
    """Queries of one value, keys of another: the gradient of their bias is a row of several, in a row of gradients."""
    part = nn.MultiheadAttention(8, 2, batch_first=True)
    proved(Layer(part, lambda part, x: part(x, x.tanh(), x.tanh(), need_weights=False)[0]), SEQUENCE)


def test_a_zero_gradient_among_others_in_one_collective() -> None:
    """A cell without a state: the weight of the state has a gradient of zeros."""
    proved(Layer(nn.RNNCell(8, 8), lambda part, x: part(x.flatten(0, 1)).view_as(x)), Plan(dp=2))


def test_what_is_filled_with_a_number_goes_with_parts() -> None:
    proved(Layer(nn.Linear(8, 8), lambda part, x: torch.lerp(x, part(x), part(x).sigmoid())), Plan(dp=2))


def test_all_ranks_have_the_bounds_that_parts_are_sorted_by() -> None:
    bounds = torch.linspace(-1, 1, 5).double()
    part = nn.Embedding(6, 8)
    proved(Layer(part, lambda part, x: part(torch.bucketize(x[..., 0].detach(), bounds))), SEQUENCE)


class PerSequence(Layer):
    """The worst sequence alone: its gradient is the same for all tokens of a sequence."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.use(self.part, self.embed(ids)))
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return losses.view_as(labels).mean(1).max()


def test_equal_elements_of_a_dim_are_parts_of_it_where_it_is_flattened() -> None:
    proved(PerSequence(nn.Linear(8, 8), lambda part, x: part(x)), SEQUENCE)


@pytest.mark.parametrize(
    ("use", "plan"),
    [
        (lambda part, x: x @ torch.linalg.matrix_exp(part.weight * 0.1), Plan(dp=2)),
        (lambda part, x: part(x).logcumsumexp(1), SEQUENCE),
    ],
    ids=["matrix_exp", "logcumsumexp"],
)
def test_gradients_that_are_linear_only_as_a_whole(use: Callable[[nn.Module, Tensor], Tensor], plan: Plan) -> None:
    proved(Layer(nn.Linear(8, 8), use), plan)


class OfSequences(Layer):
    """The likelihood of a whole sequence: its gradient comes to one class of each token."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.use(self.part, self.embed(ids))).log_softmax(-1)
        found = logits.gather(-1, labels[..., None])[..., 0].sum(1)
        return -F.logsigmoid(found[::2] - found[1::2]).mean()


def test_equal_elements_stay_so_in_a_gradient_among_zeros() -> None:
    proved(OfSequences(nn.Linear(8, 8), lambda part, x: part(x)), SEQUENCE)


class ByHeads(nn.Module):
    """Attention as an einsum over heads, of which a rank has one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3)), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (2, 4)) for linear in self.qkv)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
        return self.out(torch.einsum("bhqk,bkhd->bqhd", scores, v).flatten(2))


def test_einsum_leaves_out_the_dim_of_one_head() -> None:
    proved(Layer(ByHeads(), lambda part, x: part(x)), SEQUENCE)


def over_time(part: nn.Module, x: Tensor) -> Tensor:
    """A recurrence by hand, whose first state is zero."""
    state, found = torch.zeros_like(x[:, 0]), []
    for step in range(x.shape[1]):
        state = torch.tanh(part(state) + x[:, step])
        found.append(state)
    return torch.stack(found, 1)


def cell(part: nn.Module, x: Tensor) -> Tensor:
    """Of the gates' gradients, that of what is forgotten is zero at the first step."""
    found: Tensor = part(x.flatten(0, 1))[0].view_as(x)
    return found


@pytest.mark.parametrize(("make", "use"), [(nn.Linear, over_time), (nn.LSTMCell, cell)], ids=["recurrence", "LSTM"])
def test_what_is_made_of_zeros_is_the_same_for_all_rows(make: Callable[..., nn.Module], use: Any) -> None:
    proved(Layer(make(8, 8), use), Plan(dp=2))


class Softened(Layer):
    """Targets that are probabilities."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.use(self.part, self.embed(ids))).flatten(0, 1)
        soft = F.one_hot(labels.flatten(), logits.shape[-1]).to(logits.dtype) * 0.9 + 0.1 / logits.shape[-1]
        return F.cross_entropy(logits, soft)


def test_a_mean_over_probabilities_divides_by_the_rows_of_all_ranks() -> None:
    proved(Softened(nn.Linear(8, 8), lambda part, x: part(x)), Plan(dp=2))


def planted(model: nn.Module, plan: Plan) -> None:
    """No collective may be left out of the program, taken twice or taken over another axis of a part of the ranks."""
    ids, labels = torch.randint(0, 16, (plan.num_data_ranks, 6)), torch.randint(0, 16, (plan.num_data_ranks, 6))
    program = mc.trace(model.double(), plan, {"ids": ids[:1], "labels": labels[:1]})
    assert not check_spread(program).unproved
    kinds = [mutant for mutant in mutants(program) if mutant.kind in ("drop", "double", "scale", "gradient")]
    assert len(kinds) > 10
    for mutant in kinds:
        with pytest.raises(VerifyError):
            check_spread(mutated(program, mutant))


class ByPosition(Layer):
    """Weights by position, and one sequence a rank: the gradient of a row is that of every row."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.use(self.part, self.embed(ids)))
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
        return (losses / torch.arange(1, labels.shape[1] + 1)).mean()


def test_the_gradient_of_one_row_a_rank_is_that_of_every_row() -> None:
    planted(ByPosition(nn.Linear(8, 8), lambda part, x: part(x)), Plan(dp=4))
