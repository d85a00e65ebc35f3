"""What `mc.metrics` tells: the load of every expert and what the loss holds for each router, over the global batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moecompile as mc
from moecompile import pipeline as pipelines
from moecompile.compilation import Request, as_program, capture
from moecompile.passes import PASSES
from moecompile.plan import Plan
from tests.support import hf_models
from tests.support.models import VOCAB, Block, Config, build, tokens
from tests.support.moe_styles import EXPERTS, WIDTH, Layer
from tests.support.moe_wider_styles import DroppedLoop, SwitchCapacity
from tests.support.parity import slice_for
from tests.support.pool import Ranks, parallel

pytestmark = pytest.mark.timeout(150)
CONFIG = Config("loop", layers=4, aux=0.1)
LAYERS = ["layers.0.moe.experts", "layers.2.moe.experts", "layers.3.moe.experts"]
BATCH = tokens(8, 5, 3, ignored=0.2)


class Mixed(nn.Module):
    """Four layers of which three are MoE. ``way``: how their balance losses get into the loss."""

    def __init__(self, way: str = "chain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.embed = nn.Embedding(VOCAB, CONFIG.hidden)
        self.layers = nn.ModuleList(
            nn.Linear(CONFIG.hidden, CONFIG.hidden) if at == 1 else Block(CONFIG) for at in range(CONFIG.layers)
        )
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, found = self.embed(ids), []
        for layer in self.layers:
            if isinstance(layer, Block):
                x, extra = layer(x, None)
                found.append(extra)
            else:
                x = x + layer(x)
        loss = F.cross_entropy((x @ self.embed.weight.t()).flatten(0, 1), labels.flatten(), ignore_index=-100)
        if self.way == "chain":
            for extra in found:
                loss = loss + CONFIG.aux * extra
        elif self.way == "mean":
            loss = loss + torch.stack(found).mean() * (3 * CONFIG.aux)
        elif self.way == "minus":
            loss = loss - (-sum(found)) / (1 / CONFIG.aux) + 2.0
        return loss, found


def _metrics(rank: int, plan: Plan) -> Any:
    with parallel(Mixed(), plan) as model:
        model(**slice_for(BATCH, plan, rank))[0].backward()
        found = mc.metrics(model)
        return {
            name: (item.tokens_per_expert, item.imbalance, item.dropped, item.aux) for name, item in found.items()
        }, found.aux


@pytest.mark.parametrize("plan", [Plan(dp=2, ep=2), Plan(dp=2)], ids=["ep2", "dp2"])
def test_case_12_the_mean_is_over_moe_layers(ranks: Ranks, plan: Plan) -> None:
    _, balance = Mixed()(**BATCH)
    expected = [CONFIG.aux * item.item() for item in balance]
    for layers, mean in ranks.run(2, _metrics, plan):
        assert list(layers) == LAYERS
        assert [item[3] for item in layers.values()] == pytest.approx(expected, rel=1e-12)
        assert mean == pytest.approx(sum(expected) / 3, rel=1e-12)
        for load, imbalance, dropped, _ in layers.values():
            assert load.sum() == 8 * 5 * CONFIG.top_k and dropped == 0
            assert imbalance == pytest.approx(float(load.max() / load.double().mean()))


@pytest.mark.parametrize("way", ["chain", "mean", "minus", "none"])
@pytest.mark.parametrize("dp", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_however_the_terms_get_into_the_loss(way: str, dp: int) -> None:
    model = Mixed(way)
    found = mc.simulate_ranks(model, Plan(dp=dp), [slice_for(BATCH, Plan(dp=dp), rank) for rank in range(dp)])
    loss, balance = model(**BATCH)
    values = {name: value for name, value in found.metrics.items() if name.endswith(".aux")}
    if way == "none":
        assert values == {}
        return
    assert list(values) == [f"{name}.aux" for name in LAYERS]
    for value, plain in zip(values.values(), balance, strict=True):
        torch.testing.assert_close(value, CONFIG.aux * plain.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(found.loss, loss.detach(), rtol=1e-12, atol=0)


def test_behind_shard_dense_each_rank_returns_its_share() -> None:
    """Both orders are legal and give the same numbers."""
    plan, text = Plan(dp=2), "recognize-moe,{},shard-experts,insert-dispatch,differentiate,sync-loss,sync-grads"
    batches = [slice_for(BATCH, plan, rank) for rank in range(2)]
    values = []
    for order in ("record-metrics,shard-dense", "shard-dense,record-metrics"):
        request = Request((), batches[0], plan)
        program = as_program(capture(Mixed(), request), request)
        pipelines.run(program, pipelines.parse(text.format(order), PASSES), PASSES)
        values.append(mc.simulate_ranks(Mixed(), plan, batches, program=program).metrics)
    assert values[0].keys() == values[1].keys() and len(values[0]) == 6
    for name, value in values[0].items():
        torch.testing.assert_close(values[1][name], value, rtol=1e-12, atol=0)


def test_a_model_without_moe_layers_reports_none() -> None:
    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x).square().mean()

    model = mc.parallelize(Dense(), Plan(dp=1))
    model(torch.randn(2, 4)).backward()
    assert mc.metrics(model) == {} and mc.metrics(model).aux is None


def test_a_model_without_balance_loss_reports_its_load_only() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build(Config("loop", layers=1))

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            logits = self.inner(ids, labels)["logits"]
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    model = mc.parallelize(Plain(), Plan(dp=1))
    model(**BATCH).backward()
    (found,) = mc.metrics(model).values()
    assert found.aux is None and mc.metrics(model).aux is None and int(found.tokens_per_expert.sum()) == 80


class NullAndCapacity(DroppedLoop):
    """The last option is no expert, and each expert takes its first tokens only."""

    limit = 3

    def make(self) -> None:
        super().make()
        self.gate = nn.Linear(WIDTH, EXPERTS + 1)


class Summed(nn.Module):
    def __init__(self, kind: type[Layer]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = kind()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().sum()


@pytest.mark.parametrize("kind", [DroppedLoop, SwitchCapacity, NullAndCapacity])
def test_dropped_choices_are_counted_over_the_global_batch(kind: type[Layer]) -> None:
    model, x = Summed(kind), torch.randn(24, WIDTH, dtype=torch.float64)
    ids = model.layer.route(x)[1]
    load = torch.bincount(ids.flatten(), minlength=EXPERTS)[:EXPERTS]
    lost = int((load - load.clamp(max=kind.limit)).sum())  # type: ignore[attr-defined]
    assert lost > 0
    for ranks in (1, 2):
        found = mc.simulate_ranks(model, Plan(dp=ranks, ep=ranks), [(part,) for part in x.chunk(ranks)])
        assert [int(value) for name, value in found.metrics.items() if name.endswith(".dropped")] == [lost]
        (served,) = [value for name, value in found.metrics.items() if name.endswith(".tokens_per_expert")]
        assert served.tolist() == load.clamp(max=kind.limit).tolist()  # type: ignore[attr-defined]
    alone = mc.parallelize(model, Plan(dp=1))
    alone(x).backward()
    (layer,) = mc.metrics(alone).values()
    assert layer.dropped == lost and layer.tokens_per_expert.sum() == int((ids < EXPERTS).sum()) - lost


def test_microbatches_are_averaged() -> None:
    model = mc.parallelize(Mixed(), Plan(dp=1, microbatches=2))
    model(**BATCH)[0].backward()
    halves = [Mixed()(**{name: value.chunk(2)[at] for name, value in BATCH.items()})[1] for at in range(2)]
    expected = [CONFIG.aux * (one.item() + other.item()) / 2 for one, other in zip(*halves, strict=True)]
    assert [item.aux for item in mc.metrics(model).values()] == pytest.approx(expected, rel=1e-12)


def test_the_joint_loss_of_transformers_counts_in_equal_parts() -> None:
    pytest.importorskip("transformers")
    model = hf_models.build("mixtral").double()
    given: dict[str, Any] = {**hf_models.batch(size=4), "output_router_logits": True, "use_cache": False}
    out = model(**given)
    batches = [{k: v.chunk(2)[r] if isinstance(v, Tensor) else v for k, v in given.items()} for r in range(2)]
    found = mc.simulate_ranks(model, Plan(dp=2), batches)
    values = [value for name, value in found.metrics.items() if name.endswith(".aux")]
    assert len(values) == model.config.num_hidden_layers
    wanted = model.config.router_aux_loss_coef * out.aux_loss.detach().double() / len(values)
    for value in values:
        torch.testing.assert_close(value.double(), wanted, rtol=1e-6, atol=0)  # it counts in float32
