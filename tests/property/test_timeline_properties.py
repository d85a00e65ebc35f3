"""Schedules never stop half-way, keep as many microbatches alive as the closed forms say, and are torch's own orders."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from moecompile.timeline import Action, bubble, most_live, order, svg, text, timeline
from moecompile.timeline_figure import figure, save


@settings(deadline=None)
@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), st.integers(0, 8))
def test_every_microbatch_goes_forward_and_back_once(schedule: str, pp: int, more: int) -> None:
    rows = timeline(schedule, pp, pp + more)
    for rank, row in enumerate(rows):
        wanted = {Action(kind, rank, at) for kind in "FB" for at in range(pp + more)}
        assert {item.action for item in row} == wanted and len(row) == len(wanted)
        assert all(first.end <= then.start for first, then in pairwise(row))


@settings(deadline=None)
@given(st.integers(2, 6), st.integers(2, 5), st.integers(1, 4))
def test_interleaved(pp: int, chunks: int, rounds: int) -> None:
    rows = timeline("interleaved-1f1b", pp, rounds * pp, chunks)
    for rank, row in enumerate(rows):
        stages = range(rank, pp * chunks, pp)
        wanted = {Action(kind, stage, at) for kind in "FB" for stage in stages for at in range(rounds * pp)}
        assert {item.action for item in row} == wanted and len(row) == len(wanted)


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 6])
def test_live_chunks_follow_the_closed_forms(pp: int, chunks: int) -> None:
    for rank in range(pp):
        schedule = "1f1b" if chunks == 1 else "interleaved-1f1b"
        found = most_live(order(schedule, rank, pp, 4 * pp, chunks))
        assert found == (pp - rank if chunks == 1 else 2 * (pp - rank - 1) + (chunks - 1) * pp + 1)


@settings(deadline=None)
@given(st.integers(2, 8), st.integers(1, 4))
def test_bubbles_follow_the_closed_form(pp: int, rounds: int) -> None:
    """``(pp-1) / (m + pp-1)`` of the time, with ``m`` microbatches."""
    count = rounds * pp
    for schedule in ("gpipe", "1f1b"):
        assert bubble(timeline(schedule, pp, count)) == pytest.approx((pp - 1) / (count + pp - 1))
    assert bubble(timeline("interleaved-1f1b", pp, count, 2)) == pytest.approx((pp - 1) / (2 * count + pp - 1))


class Stage:
    """As much of a stage as a schedule asks for when it is made."""

    group, has_backward = None, True

    def __init__(self, index: int, pp: int, chunks: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, pp * chunks, pp, index % pp
        self.is_first, self.is_last = index == 0, index == pp * chunks - 1
        self.submod, self.device = torch.nn.Identity(), torch.device("cpu")


@pytest.mark.parametrize(("pp", "chunks", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 3, 4), (2, 3, 6)])
def test_the_order_is_torchs_own(pp: int, chunks: int, microbatches: int) -> None:
    stages: Any = [Stage(at, pp, chunks) for at in range(0, pp * chunks, pp)]
    made = ScheduleInterleaved1F1B(stages, microbatches, loss_fn=lambda out, target: out)
    for rank in range(pp):
        theirs = [str(action) for action in made.pipeline_order[rank] if action is not None]
        assert [str(action) for action in order("interleaved-1f1b", rank, pp, microbatches, chunks)] == theirs


def test_text_and_picture() -> None:
    rows = timeline("1f1b", 2, 2)
    assert text(rows).splitlines() == [
        "rank 0  0F0 0F1 .   .   0B0 =   .   0B1 =",
        "rank 1  .   1F0 1B0 =   1F1 1B1 =   .   .",
    ]
    picture = ET.fromstring(svg(rows))
    rects = [item for item in picture.iter() if item.tag.endswith("rect")]
    assert len(rects) == sum(map(len, rows)) == 8


def test_figure(tmp_path: Path) -> None:
    rows = timeline("interleaved-1f1b", 2, 4, 2)
    made = figure(rows, "interleaved")
    (axes,) = made.axes
    assert len(axes.patches) == len(axes.texts) == sum(map(len, rows)) == 32
    assert axes.get_title() == "interleaved: bubble 11%"
    save(rows, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
