"""How many microbatches a rank keeps alive, counted from the tensors that are still in memory while it runs."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from moecompile.plan import Plan
from moecompile.timeline import most_live, order
from tests.support.models import Config, build, tokens
from tests.support.parity import slice_for
from tests.support.pool import Ranks, parallel

pytestmark = pytest.mark.timeout(260)


class Census:
    """Storages that forwards saved, by stage and microbatch; ``most`` microbatches had one that lived at the same time.

    Weights, the batch and views of them live anyway and do not count.
    """

    def __init__(self, stages: list[Any]) -> None:
        self.saved: dict[tuple[int, int], list[StorageWeakRef]] = {}
        self.most = 0
        for stage in stages:
            self._watch(stage)

    def _watch(self, stage: Any) -> None:
        run = stage.forward_one_chunk

        def counted(chunk: int, *args: Any, **kwargs: Any) -> Any:
            result = run(chunk, *args, **kwargs)
            given = {_storage(value) for value in stage.feed[chunk].values() if isinstance(value, Tensor)}
            found = {_storage(value): value for value in stage._values[chunk].values() if _storage(value) not in given}
            self.saved[stage.stage_index, chunk] = [StorageWeakRef(value.untyped_storage()) for value in found.values()]
            assert found, f"stage {stage.stage_index} saves nothing"
            self.most = max(self.most, self.alive())
            return result

        stage.forward_one_chunk = counted

    def alive(self) -> int:
        return sum(any(not item.expired() for item in kept) for kept in self.saved.values())


def _storage(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def count(rank: int, config: Config, plan: Plan) -> tuple[int, int, int]:
    """Most living microbatches in a second step, what the stages say of themselves, and what is left afterwards."""
    batch = slice_for(tokens(plan.microbatches, 8, 0), plan, rank)
    with parallel(build(config), plan) as model:
        model(**batch)["loss"].backward()
        stages = model.prepare((), batch).pipeline.stages
        census = Census(stages)
        model(**batch)["loss"].backward()
        return census.most, sum(stage.most_live for stage in stages), census.alive()


def wanted(schedule: str, rank: int, pp: int, microbatches: int, chunks: int) -> int:
    if schedule == "gpipe":
        return microbatches
    return pp - rank if chunks == 1 else 2 * (pp - rank - 1) + (chunks - 1) * pp + 1


CASES = [
    pytest.param("1f1b", 4, 1, id="1f1b-pp4"),
    pytest.param("gpipe", 4, 1, id="gpipe-pp4", marks=pytest.mark.slow),
    pytest.param("interleaved-1f1b", 2, 2, id="interleaved-pp2"),
    pytest.param("interleaved-1f1b", 4, 2, id="interleaved-pp4", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("schedule", "pp", "chunks"), CASES)
def test_live_microbatches_follow_the_closed_forms(ranks: Ranks, schedule: str, pp: int, chunks: int) -> None:
    layout = "even" if chunks == 1 else "|".join(["Et", *["t"] * (pp * chunks - 2), "tL"])
    plan = Plan(dp=1, pp=pp, microbatches=2 * pp, schedule=schedule, layout=layout)
    found = ranks.run(pp, count, Config("ops", layers=pp * chunks), plan, timeout=230.0)
    for rank, (most, own, left) in enumerate(found):
        closed = wanted(schedule, rank, pp, 2 * pp, chunks)
        assert most == closed == most_live(order(schedule, rank, pp, 2 * pp, chunks))
        assert left == 0
        assert own == closed if chunks == 1 else own >= closed  # of several stages each has its own peak
