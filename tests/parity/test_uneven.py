"""Case 37: a batch that microbatches do not divide, or that has fewer rows than these, is what one process computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moecompile as mc
from moecompile.compilation import microbatch_sizes
from moecompile.placement.types import Shard
from moecompile.plan import Plan
from moecompile.program import OutputKind
from moecompile.uneven import UnevenCall
from tests.parity import test_stages as stages
from tests.support.models import Config, tokens
from tests.support.parity import difference
from tests.support.pool import Ranks, parallel
from tests.support.staged import microbatches
from tests.support.thinned import thinned

pytestmark = pytest.mark.timeout(300)
CONFIG = Config("loop", layers=2, aux=0.1, tied=True)


def batches(*rows: int) -> list[dict[str, Tensor]]:
    return [tokens(count, 4, seed, ignored=0.3) for seed, count in enumerate(rows)]


@pytest.mark.parametrize(
    ("rows", "parts", "sizes"),
    [
        (8, 4, [(2, 4)]),
        (8, 3, [(3, 2), (2, 1)]),
        (7, 4, [(2, 3), (1, 1)]),
        (3, 4, [(1, 3)]),
        (5, 1, [(5, 1)]),
        (1, 2, [(1, 1)]),
    ],
)
def test_sizes(rows: int, parts: int, sizes: list[tuple[int, int]]) -> None:
    """Those of ``torch.tensor_split``, without empty ones."""
    assert microbatch_sizes((torch.zeros(rows, 2),), {}, Plan(microbatches=parts)) == sizes
    found = [len(part) for part in torch.arange(rows).tensor_split(parts) if len(part)]
    assert found == [size for size, number in sizes for _ in range(number)]


def test_no_rows_and_tensors_of_several_sizes_are_refused() -> None:
    plan = Plan(microbatches=2, batch_dims={"b": 1})
    with pytest.raises(mc.PlanError, match=r"0 rows, but microbatches=2 needs .* pass 2 rows"):
        microbatch_sizes((torch.zeros(0, 2),), {}, Plan(microbatches=2))
    with pytest.raises(mc.PlanError, match=r"3 rows in one tensor and 4 in another, .* pass 2 rows"):
        microbatch_sizes((), {"a": torch.zeros(3), "b": torch.zeros(2, 4)}, plan)
    assert microbatch_sizes((), {"a": torch.zeros(4), "b": torch.zeros(2, 8)}, plan) == [(2, 2)]


@pytest.mark.parametrize("parts", thinned({"2": 2, "3": 3, "4": 4}, keep=("3",)))
def test_one_rank(parts: int) -> None:
    """Steps of 7, 8 and 2 rows: even ones between uneven ones."""
    plan, steps = Plan(dp=1, microbatches=parts), batches(7, 8, 2)
    found = stages.train(0, CONFIG, plan, 0.05, batches=steps)
    stages.compare(found, stages.reference(CONFIG, plan, 0.05, steps))


# steps of 8, 7 and 2 rows a data rank; the last one has fewer than the schedules need
PLANS = {
    "pp": Plan(dp=1, pp=2, microbatches=3),
    "pp-gpipe": Plan(dp=1, pp=2, microbatches=3, schedule="gpipe"),
    "pp-interleaved": Plan(dp=1, pp=2, microbatches=4, schedule="interleaved-1f1b", layout="E|t|t|L"),
    "pp-dp-ep": Plan(dp=2, pp=2, ep=2, microbatches=3),
    "dp-ep": Plan(dp=2, ep=2, microbatches=3),
    "1-pp-dp": Plan(dp=2, pp=2, microbatches=3, passes="+shard-params{level=1}"),
    "3-dp": Plan(dp=2, microbatches=3, passes="+shard-params"),
    "1-dp": Plan(dp=2, microbatches=3, passes="+shard-params{level=1}"),
    "pp-tp": Plan(dp=1, pp=2, tp=2, microbatches=3),
}


@pytest.mark.parametrize("plan", thinned(PLANS, keep=("pp-interleaved",)))
def test_ranks(ranks: Ranks, plan: Plan) -> None:
    of = plan.num_data_ranks
    stages.check(ranks, CONFIG, plan, batches=batches(8 * of, 7 * of, 2 * of))


class Returns(nn.Module):
    """Rows, a mean over them, a loss with a mean that is none over tokens, and a part of it that depends on no row."""

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(4, 4, dtype=torch.float64)
        self.bias = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        self.whole = whole

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Any]:
        out = self.inner(x) + self.bias
        loss = (
            nn.functional.cross_entropy(out, target)
            + 0.1 * out.square().mean()
            + 0.01 * self.inner.weight.square().sum()
        )
        return {"loss": loss, "rows": out, "mean": out.mean(), **({"most": out.argmax()} if self.whole else {})}


def example(rows: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(rows)
    target = torch.randint(4, (rows,), generator=source)
    target[::3] = -100
    return {"x": torch.randn(rows, 4, generator=source, dtype=torch.float64), "target": target}


@pytest.fixture
def model() -> Iterator[Any]:
    with parallel(Returns(), Plan(dp=1, microbatches=3)) as made:
        yield made


@pytest.mark.parametrize("rows", [2, 6, 7, 8])
def test_every_other_mean_is_one_over_rows(model: Any, rows: int) -> None:
    """The whole batch at once, since no term looks at several rows; results by row are put together."""
    plain, batch = Returns(), example(rows)
    wanted, found = plain(**batch), model(**batch)
    (2.0 * wanted["loss"]).backward()
    (2.0 * found["loss"]).backward()
    for name, value in wanted.items():
        assert difference(name, found[name].detach(), value.detach()) < 1e-14
    for name, param in plain.named_parameters():
        assert param.grad is not None
        assert difference(name, model.get_parameter(name).grad, param.grad) < 1e-13


def test_evaluation(model: Any) -> None:
    with torch.no_grad():
        found, wanted = model(**example(7)), Returns()(**example(7))
    assert all(difference(name, found[name], value) < 1e-14 for name, value in wanted.items())


def test_whole_numbers_that_are_no_rows_are_refused() -> None:
    with (
        parallel(Returns(whole=True), Plan(dp=1, microbatches=3)) as made,
        pytest.raises(mc.CaptureError, match="microbatches=3 cannot put whole numbers together"),
    ):
        made(**example(2))


def test_one_process_runs_the_same_microbatches() -> None:
    """The oracle cuts as ranks do."""
    parts = microbatches(example(14), Plan(dp=2, microbatches=3))
    assert [len(part["x"]) for part in parts] == [6, 4, 4]


class Constants(nn.Module):
    """Its own numbers of rows stand in the graph."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0] * 2, -1).reshape(-1, 4) / x.shape[0]


@pytest.mark.parametrize("rows", [5, 6])
def test_a_call_without_loss_takes_all_rows_at_once(rows: int) -> None:
    x = example(rows)["x"]
    with parallel(Constants(), Plan(dp=1, microbatches=2)) as made:
        assert torch.equal(made(x), Constants()(x))


def stub(program: Any) -> Any:
    """A call of ranks in pairs."""
    return SimpleNamespace(program=program, parts=1, groups=SimpleNamespace(size=lambda axis: 2))


def test_results_that_several_axes_cut_along_the_batch_are_refused() -> None:
    """Microbatches of several sizes make no tensor that DTensor can describe."""
    program = mc.trace(Returns(), Plan(dp=1, microbatches=3), example(7))
    at = next(at for at, item in enumerate(program.outputs) if item.kind is OutputKind.USER)
    for axis, dim in (("tp", 1), ("tp", 0)):
        program.outputs[at] = replace(program.outputs[at], placements=(("dp", Shard(0)), (axis, Shard(dim))))
        if dim:
            UnevenCall([stub(program)], [3])
        else:
            with pytest.raises(
                mc.PlanError, match=r"cut over tp along the dim of the batch.* pass a multiple of 3 rows"
            ):
                UnevenCall([stub(program)], [3])


def test_a_model_that_is_another_one_for_fewer_rows_is_refused() -> None:
    first, other = (mc.trace(Returns(), Plan(dp=1, microbatches=3), example(rows)) for rows in (7, 3))
    UnevenCall([stub(first), stub(other)], [3, 1])
    other.outputs.pop()
    with pytest.raises(mc.CaptureError, match=r"another one for the smaller of them; pass a multiple of 3 rows"):
        UnevenCall([stub(first), stub(other)], [3, 1])
