"""Layout strings: what is printed is read back, every split is complete, and every fault shows its place."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moecompile.errors import PlanError
from moecompile.layout import BALANCED, EVEN, Layout, balanced, check, check_plan, even, parse

WORDS = st.lists(st.text("EtmL", max_size=6), min_size=1, max_size=12).map(lambda words: Layout(tuple(words)))
LEGAL = st.lists(st.integers(0, 4), min_size=1, max_size=12).map(
    lambda counts: Layout(
        tuple("E" * (at == 0) + "t" * n + "L" * (at == len(counts) - 1) for at, n in enumerate(counts))
    )
)


@given(WORDS)
def test_the_printed_text_is_read_back(layout: Layout) -> None:
    assert parse(str(layout)) == layout


@given(WORDS, st.text(", \n", max_size=3))
def test_commas_and_blanks_mean_nothing(layout: Layout, between: str) -> None:
    assert parse(between.join("|".join(layout.stages))) == layout


@given(st.integers(1, 60), st.integers(1, 12))
def test_an_even_split_is_complete_and_even(layers: int, stages: int) -> None:
    if layers < stages:
        with pytest.raises(PlanError, match="cannot be split evenly"):
            even(layers, stages)
        return
    found = even(layers, stages)
    check(found, stages, layers)
    counts = [stage.count("t") for stage in found.stages]
    assert max(counts) - min(counts) <= 1 and counts == sorted(counts, reverse=True)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 4), st.integers(0, 9), st.integers(0, 9))
def test_no_contiguous_split_beats_the_balanced_one(costs: list[int], stages: int, first: int, last: int) -> None:
    if len(costs) < stages:
        return
    found = balanced(costs, stages, first, last)
    check(found, stages, len(costs))

    def dearest(borders: tuple[int, ...]) -> float:
        ends = [0, *borders, len(costs)]
        sums = [sum(costs[ends[at] : ends[at + 1]]) for at in range(stages)]
        sums[0] += first
        sums[-1] += last
        return max(sums)

    counts = [stage.count("t") for stage in found.stages]
    mine = tuple(sum(counts[: at + 1]) for at in range(stages - 1))
    assert dearest(mine) == min(dearest(one) for one in combinations(range(1, len(costs)), stages - 1))


@given(LEGAL)
def test_stages_of_layers_ascend(layout: Layout) -> None:
    check(layout, 1, layout.num_layers)
    places = layout.layer_stages()
    assert places == sorted(places) and len(places) == layout.num_layers


def test_the_published_layout_of_deepseek_v3() -> None:
    """PP16 x VPP2: 61 decoder layers; embedding and 3 decoder first, mtp and loss last."""
    text = "Et*3|(tt|)*29,m|L"
    layout = parse(text)
    check(layout, 16, 61, 1)
    assert str(layout) == text and len(layout.stages) == 32
    rows = [line.split("  ") for line in layout.table(16).splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells[0] == ["rank", "chunk 0", "chunk 1"]
    assert cells[1] == ["0", "embedding, 3 decoder", "2 decoder"]
    assert cells[2:15] == [[str(rank), "2 decoder", "2 decoder"] for rank in range(1, 14)]
    assert cells[15:] == [["14", "2 decoder", "1 mtp"], ["15", "2 decoder", "loss"]]


@pytest.mark.parametrize(
    ("text", "pp", "at", "said"),
    [
        ("Et|tL)", 2, 5, "closes nothing"),
        ("E(t|L", 2, 1, "never closed"),
        ("Ex|L", 2, 1, "is no cell"),
        ("*3", 1, 0, "follows nothing"),
        ("Et*|L", 2, 2, "whole number"),
        ("Et*0|L", 2, 2, "whole number"),
        ("E(t*999)*999|L", 2, 1, "more than"),
        ("Et|t|L", 2, 5, "must divide the number of stages, 3"),
        ("tE|L", 2, 0, "comes first"),
        ("Et|EL", 2, 3, "comes first"),
        ("t|L", 2, 0, "does not begin"),
        ("EL|tL", 2, 0, "comes last"),
        ("Et|t", 2, 3, "does not end"),
        ("Et|mt|t|L", 2, 3, "after an mtp layer"),
        ("Et|t|tm|mL", 2, 8, "several stages"),
        ("Et|m||L", 2, 3, "not its rank's last"),
        ("Et|t|m|L", 2, 5, "first pipeline rank"),
        ("Et|tL", 2, 3, "2 decoder layers (t) for a model of 4"),
        ("Et*2|tt|m|mL", 1, None, "several stages"),
        ("Et*3|tmL", 2, 5, "1 mtp layers (m) for a model of 0"),
    ],
)
def test_a_fault_shows_its_place(text: str, pp: int, at: int | None, said: str) -> None:
    with pytest.raises(PlanError) as found:
        check(parse(text), pp, 4)
    message, *shown = str(found.value).splitlines()
    assert said in message and (at is None or shown[1].index("^") - 2 == at)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"schedule": "2f2b"}, "'gpipe', '1f1b', 'interleaved-1f1b'"),
        ({"schedule": "interleaved-1f1b"}, "a layout of 4 stages"),
        ({"layout": "Et|t|t|tL"}, "schedule='interleaved-1f1b'"),
        ({"microbatches": 1}, "at least 2 microbatches"),
        ({"microbatches": 5, "schedule": "interleaved-1f1b", "layout": "Et|t|t|tL"}, "use 4 or 6"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError) as found:
        check_plan(2, **{"layout": None, "schedule": None, "microbatches": 4, **settings})  # type: ignore[arg-type]
    assert said in str(found.value)


@pytest.mark.parametrize("layout", [None, EVEN, BALANCED, "Et|tL"])
def test_settings_that_do(layout: str | None) -> None:
    check_plan(2, layout, None, 2)
    check_plan(2, layout, "gpipe", 1)
