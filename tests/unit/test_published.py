"""The published configurations: legal, of the published sizes, and laid out as their tables say."""

from __future__ import annotations

import pytest

from moecompile.layout import check, parse
from moecompile.published import Published, published
from moecompile.timeline import most_live, order
from tests.support.published import DISTINCT, trace

WORLDS = [256, 256, 256, 1024, 256, 256]
CHUNKS = [4, 4, 4, 4, 6, 6]
STEPS = [8192, 8192, 4096, 8192, 3072, 3072]
ROWS = list(zip(published(), WORLDS, CHUNKS, STEPS, strict=True))


@pytest.mark.parametrize(("row", "world", "chunks", "step"), ROWS, ids=[f"{row.model} {row.gpus}" for row, *_ in ROWS])
def test_row(row: Published, world: int, chunks: int, step: int) -> None:
    plan = row.plan
    plan.check_supported()
    assert plan.world_size == world and row.rows * plan.microbatches * plan.num_data_ranks == step == row.batch
    assert plan.layout is not None
    layout = parse(plan.layout)
    check(layout, plan.pp, row.layers)
    assert len(layout.stages) == chunks * plan.pp
    for rank in range(plan.pp):
        found = most_live(order("interleaved-1f1b", rank, plan.pp, plan.microbatches, chunks))
        assert found == 2 * (plan.pp - rank - 1) + (chunks - 1) * plan.pp + 1


def test_live_chunks_of_the_table_with_four_stages_a_rank() -> None:
    plan = published()[0].plan
    assert [most_live(order("interleaved-1f1b", rank, 4, plan.microbatches, 4)) for rank in range(4)] == [
        19,
        17,
        15,
        13,
    ]


@pytest.mark.slow
@pytest.mark.timeout(3600)  # against hangs; on a busy machine a trace waits for its turn
@pytest.mark.parametrize("row", DISTINCT, ids=lambda row: f"{row.model} {row.gpus}")
def test_traced_in_one_process(row: Published) -> None:
    """All layers of the model at a small width; between stages only the residual stream travels."""
    _, stages = trace(row)
    assert len(stages) == len(parse(row.plan.layout or "").stages)
    assert [len(stage.received) for stage in stages] == [0, *[1] * (len(stages) - 1)]
    assert [len(stage.sent_grads) for stage in stages] == [0, *[1] * (len(stages) - 1)]
