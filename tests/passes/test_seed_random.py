"""seed-random: the same numbers under every layout, and numbers that look random."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moecompile as mc
from moecompile import graph as graphs
from moecompile import ops
from moecompile.passes.seed_random import SeedRandom
from tests.support import models


class Noisy(nn.Module):
    """Every random op that the pass knows, around a small MoE model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.build(models.Config(style="ops", layers=1))
        self.head = nn.Linear(models.VOCAB, models.VOCAB, dtype=torch.float64)
        self.dropout = nn.Dropout(0.3)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.dropout(F.one_hot(ids, models.VOCAB).double())
        x = x * torch.empty_like(x).uniform_(0.9, 1.1) + 0.1 * torch.randn_like(x)
        x = x + 0.1 * torch.rand_like(x) + 0.1 * torch.bernoulli(x.sigmoid())
        x = x + 0.1 * torch.empty_like(x).exponential_(2.0)
        logits = self.head(x)
        loss: Tensor = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return loss + self.inner(ids, labels)["loss"]


def _run(model: nn.Module, dp: int, ep: int, seed: int) -> mc.simulate.Simulated:  # type: ignore[name-defined]
    batch = models.tokens(8, 6, 1, ignored=0.2)
    size = 8 // dp
    torch.manual_seed(seed)
    return mc.simulate_ranks(
        model,
        mc.Plan(dp=dp, ep=ep),
        [{name: item[r * size : (r + 1) * size] for name, item in batch.items()} for r in range(dp)],
    )


@pytest.mark.parametrize(("dp", "ep"), [(2, 1), (4, 2), (8, 4)])
def test_every_layout_draws_the_same_numbers(dp: int, ep: int) -> None:
    model = Noisy()
    one, many = _run(model, 1, 1, 5), _run(model, dp, ep, 5)
    torch.testing.assert_close(many.loss, one.loss, rtol=1e-12, atol=0)
    assert one.grads.keys() == many.grads.keys()
    for name, grad in one.grads.items():
        torch.testing.assert_close(many.grads[name], grad, rtol=1e-9, atol=1e-13)
    assert (_run(model, dp, ep, 6).loss - one.loss).abs() > 1e-6, "another seed must draw other numbers"


def test_numbers_are_uniform_and_uncorrelated() -> None:
    like, seed = torch.zeros(512, 512), torch.tensor(11)
    zero = torch.tensor(0)
    found = ops.uniform(like, ops.fold_seed(seed, 0), zero, 0, 1, 1)
    other = ops.uniform(like, ops.fold_seed(seed, 1), zero, 0, 1, 1)
    assert found.min() >= 0 and found.max() < 1
    assert abs(found.mean() - 0.5) < 5e-3
    assert abs(found.var() * 12 - 1) < 1e-2
    flat = found.flatten()
    for shifted in (flat.roll(1), flat.roll(512), other.flatten()):
        assert torch.corrcoef(torch.stack([flat, shifted]))[0, 1].abs() < 1e-2


@pytest.mark.parametrize("outer", [1, 2])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_part_is_the_part_of_the_whole(dim: int, outer: int) -> None:
    seed = torch.tensor(3)
    whole = ops.uniform(torch.zeros(8, 12, 3), seed, torch.tensor(0), 0, 1, 1)
    for rank in range(2):
        index = torch.tensor(rank)
        part = ops.local_slice(whole, index, dim, outer, 2)
        torch.testing.assert_close(
            ops.uniform(torch.zeros_like(part), seed, index, dim, outer, 2), part, rtol=0, atol=0
        )


def test_dropout_keeps_the_mean_and_the_rate() -> None:
    class Dropout(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.25, True)

    torch.manual_seed(0)
    found = mc.simulate_ranks(Dropout(), mc.Plan(dp=2), [(torch.ones(64, 64),)] * 2)
    values = torch.cat([output[0] for output in found.outputs])
    assert sorted(set(values.flatten().tolist())) == pytest.approx([0.0, 1 / 0.75])
    assert abs((values == 0).float().mean() - 0.25) < 0.02
    assert not torch.equal(*[output[0] for output in found.outputs]), "two ranks must not drop the same places"


def test_exponential_numbers_have_their_rate_and_are_never_zero() -> None:
    class Drawn(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.empty_like(x).exponential_(4.0)

    torch.manual_seed(0)
    values = mc.simulate_ranks(Drawn(), mc.Plan(dp=1), [(torch.ones(256, 256),)]).outputs[0][0]
    assert values.min() > 0 and abs(values.mean() * 4 - 1) < 2e-2 and abs(values.var() * 16 - 1) < 5e-2


def test_no_random_op_is_left_and_a_quiet_model_is_not_touched() -> None:
    batch = models.tokens(2, 6, 1)
    program = mc.trace(Noisy(), mc.Plan(dp=2), batch)
    entry = next(item for item in program.history if item.pass_text == "seed-random")
    assert entry.rewrites == 6
    assert len(graphs.find(program.graph, ops.uniform)) == 7, "a normal number takes two uniform ones"
    quiet = mc.trace(models.build(models.Config(style="ops")), mc.Plan(dp=2), batch)
    assert next(item for item in quiet.history if item.pass_text == "seed-random").diff == ""


def test_effect_is_missed_when_the_pass_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SeedRandom, "run", lambda self, graph, ctx: 0)
    with pytest.raises(mc.PassError, match=r"layout-invariant|placement rule|random"):
        mc.trace(Noisy(), mc.Plan(dp=2), models.tokens(2, 6, 1))


def test_attention_dropout_inside_the_fused_op_is_refused() -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)

    with pytest.raises(mc.PassError, match="set the attention dropout to 0"):
        mc.trace(Attention(), mc.Plan(dp=2), (torch.zeros(2, 2, 4, 8),))
