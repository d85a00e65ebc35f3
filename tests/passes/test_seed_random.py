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
from tests.support.parity import slice_for
from tests.support.thinned import thinned


class Noisy(nn.Module):
    """The usual random ops around a small MoE model."""

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
        logits = self.head(x) * (1 + 0.1 * torch.randn_like(self.head(x)))  # made like what has a gradient
        loss: Tensor = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return loss + self.inner(ids, labels)["loss"]


class Dropping(nn.Module):
    """A transformer layer that drops in every place where people drop: embedding, attention weights, residuals, inside the MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCAB, 16, dtype=torch.float64)
        self.qkv, self.out = nn.Linear(16, 48, dtype=torch.float64), nn.Linear(16, 16, dtype=torch.float64)
        self.up, self.down = nn.Linear(16, 32, dtype=torch.float64), nn.Linear(32, 16, dtype=torch.float64)
        self.moe = models.MoeLayer(models.Config("ops", hidden=16)).double()
        self.head = nn.Linear(16, models.VOCAB, dtype=torch.float64)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = F.dropout(self.embed(ids), 0.2)
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        hidden = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        weights = (query @ key.transpose(-1, -2) / 2).masked_fill(hidden, float("-inf")).softmax(-1)
        seen = F.dropout(weights, 0.2) @ value
        x = x + F.dropout(self.out(seen.transpose(1, 2).flatten(2)), 0.2)
        x = x + F.dropout(self.down(F.dropout(F.relu(self.up(x)), 0.2)), 0.2)
        x = x + F.dropout(self.moe(F.layer_norm(x, (16,)), None)[0], 0.2)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


class Rare(nn.Module):
    """Other draws: in place, integers, choices, dropout of channels and of self-normalising layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.build(models.Config(style="ops", layers=1))
        self.head = nn.Linear(models.VOCAB, models.VOCAB, dtype=torch.float64)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = F.one_hot(ids, models.VOCAB).double()
        kept = x.new_empty(x.shape[0], 1, 1).bernoulli_(0.7)
        x = x * kept.div_(0.7) + 0.1 * torch.empty_like(x).normal_() + 0.1 * torch.normal(x, 0.5)
        x = x * (torch.rand(ids.shape) > 0.2)[..., None] + 0.1 * torch.randint(0, 5, ids.shape)[..., None]
        x = x + 0.1 * torch.multinomial(x.detach().softmax(-1).flatten(0, 1), 2).sum(-1).view_as(ids)[..., None]
        logits = F.rrelu(F.alpha_dropout(F.dropout1d(self.head(x), 0.2), 0.2, True), training=True)
        loss: Tensor = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return loss + self.inner(ids, labels)["loss"]


def _run(model: nn.Module, plan: mc.Plan, seed: int) -> mc.simulate.Simulated:  # type: ignore[name-defined]
    batch = models.tokens(8, 8, 1, ignored=0.2)
    torch.manual_seed(seed)
    return mc.simulate_ranks(model, plan, [slice_for(batch, plan, rank) for rank in range(plan.world_size)])


PLANS = [
    mc.Plan(dp=2),
    mc.Plan(dp=4, ep=2),
    mc.Plan(dp=8, ep=4),
    mc.Plan(dp=1, cp=2),
    mc.Plan(dp=2, cp=2, ep=2),
    mc.Plan(dp=2, tp=2, ep=4),
    mc.Plan(dp=1, tp=2, ep=2, sequence_parallel=True),
    mc.Plan(dp=2, cp=2, tp=2, ep=4, sequence_parallel=True),
]


LAYOUTS = {
    f"{name}-{plan}": (kind, plan)
    for name, kind in (("every random op", Noisy), ("dropout everywhere", Dropping), ("rare ones", Rare))
    for plan in PLANS
}


@pytest.mark.parametrize(("kind", "plan"), thinned(LAYOUTS, every=4))
def test_every_layout_draws_the_same_numbers(kind: type[nn.Module], plan: mc.Plan) -> None:
    model = kind()
    one, many = _run(model, mc.Plan(dp=1), 5), _run(model, plan, 5)
    torch.testing.assert_close(many.loss, one.loss, rtol=1e-12, atol=0)
    assert one.grads.keys() == many.grads.keys()
    for name, grad in one.grads.items():
        torch.testing.assert_close(many.grads[name], grad, rtol=1e-9, atol=1e-13)
    assert (_run(model, plan, 6).loss - one.loss).abs() > 1e-6, "another seed must draw other numbers"


def test_numbers_are_uniform_and_uncorrelated() -> None:
    like, seed = torch.zeros(512, 512), torch.tensor(11)
    found = ops.uniform(like, ops.fold_seed(seed, 0), [], [], [], [])
    other = ops.uniform(like, ops.fold_seed(seed, 1), [], [], [], [])
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
    whole = ops.uniform(torch.zeros(8, 12, 3), seed, [], [], [], [])
    for rank in range(2):
        index = torch.tensor(rank)
        part = ops.local_slice(whole, index, dim, outer, 2)
        torch.testing.assert_close(
            ops.uniform(torch.zeros_like(part), seed, [index], [dim], [outer], [2]), part, rtol=0, atol=0
        )


@pytest.mark.parametrize("second", [(0, 1), (0, 2), (1, 1), (2, 1)])
@pytest.mark.parametrize("first", [(0, 1), (0, 2), (1, 3)])
def test_a_part_of_a_part(first: tuple[int, int], second: tuple[int, int]) -> None:
    """Two axes cut one after the other, the same dim or another."""
    seed = torch.tensor(3)
    whole = ops.uniform(torch.zeros(8, 12, 4), seed, [], [], [], [])
    for one in range(2):
        for two in range(2):
            index = [torch.tensor(one), torch.tensor(two)]
            part = ops.local_slice(ops.local_slice(whole, index[0], *first, 2), index[1], *second, 2)
            dims, outers = zip(first, second, strict=True)
            drawn = ops.uniform(torch.zeros_like(part), seed, index, dims, outers, [2, 2])
            torch.testing.assert_close(drawn, part, rtol=0, atol=0)


def test_lists_of_other_lengths_are_refused() -> None:
    zero = torch.tensor(0)
    with pytest.raises(ValueError, match="pass lists of one length"):
        ops.uniform(torch.zeros(2), zero, [zero], [], [1], [2])
    with pytest.raises(ValueError, match="pass lists of one length"):
        ops.global_rows(torch.arange(2), [zero], [2], [], [2])


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


ONES = torch.full((64, 64, 64), 1.0)
CHANCES = torch.tensor([0.1, 0.2, 0.3, 0.4]).repeat(1 << 16, 1)
DRAWS = {
    "normal": lambda x: torch.empty_like(x).normal_(2.0, 0.5),
    "normal of tensors": lambda x: torch.normal(2 * x, x / 2),
    "normal of a shape": lambda x: torch.normal(2.0, 0.5, x.shape),
    "log normal": lambda x: torch.empty_like(x).log_normal_(0.1, 0.3),
    "uniform": lambda x: torch.empty_like(x).uniform_(-1, 3),
    "exponential": lambda x: torch.empty_like(x).exponential_(4.0),
    "geometric": lambda x: torch.empty_like(x).geometric_(0.3),
    "cauchy, its bulk": lambda x: torch.empty_like(x).cauchy_(1.0, 0.5).clamp(-1, 3),
    "bernoulli": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "bernoulli of chances": lambda x: torch.empty_like(x).bernoulli_(0.3 * x),
    "random": lambda x: torch.empty_like(x).random_(7),
    "random between": lambda x: torch.empty_like(x).random_(-3, 7),
    "randint": lambda x: torch.randint(2, 9, x.shape).float(),
    "randint of many": lambda x: torch.randint_like(x, 1 << 24),
    "places of randperm": lambda x: torch.randperm(x.numel())[: x.numel() // 2].float(),
    "multinomial, one": lambda x: torch.multinomial(CHANCES, 1).float(),
    "multinomial, two": lambda x: torch.multinomial(CHANCES, 2).float(),
    "multinomial, with replacement": lambda x: torch.multinomial(CHANCES, 3, True).float(),
    "rrelu": lambda x: F.rrelu(-x, 0.1, 0.5, True),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout2d": lambda x: F.dropout2d(x.reshape(4096, 64, 1, 1), 0.3),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "feature alpha dropout": lambda x: F.feature_alpha_dropout(x, 0.3, True),
}


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_have_the_distribution_of_torchs(name: str) -> None:
    """Mean, spread and extent of many, and the share of each where there are few, beside torch's own draw."""

    class Drawn(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return DRAWS[name](x)

    torch.manual_seed(0)
    wanted = Drawn()(ONES)
    program = mc.trace(Drawn(), mc.Plan(dp=1), (ONES,))
    assert graphs.find(program.graph, ops.uniform), "drawn by torch's generator"
    found = mc.simulate_ranks(Drawn(), mc.Plan(dp=1), [(ONES,)]).outputs[0][0]
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    spread = float(wanted.std())
    assert abs(float(found.mean() - wanted.mean())) < 0.02 * spread and abs(float(found.std()) / spread - 1) < 0.03
    found, wanted = found.float().round(decimals=4), wanted.float().round(decimals=4)
    if len(values := wanted.unique()) < 12:
        assert torch.equal(found.unique(), values)
        shares = [torch.tensor([(item == one).float().mean() for one in values]) for item in (found, wanted)]
        assert (shares[0] - shares[1]).abs().max() < 0.01
    quantiles = [item.flatten().sort().values[:: item.numel() // 9][1:-1] for item in (found, wanted)]
    torch.testing.assert_close(*quantiles, rtol=0.05, atol=0.05)


def test_what_has_no_formula_is_refused() -> None:
    class Drawn(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randint_like(x, 1 << 25)

    with pytest.raises(mc.PassError, match="random numbers would differ from those of one process"):
        mc.trace(Drawn(), mc.Plan(dp=2), (torch.zeros(2, 4),))


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
    assert entry.rewrites == 7
    assert len(graphs.find(program.graph, ops.uniform)) == 9, "a normal number takes two uniform ones"
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
