"""State outside of a model's modules that steers its forward is refused; what only counts or is cached is not."""

from __future__ import annotations

import collections
import functools
import itertools
import random
import re
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moecompile.capture import capture_model, compare_capture
from moecompile.errors import CaptureError
from tests.support.captured_call import targets

calls = 0
seen: list[Any] = []
ticks = itertools.count()


class Tracker:
    total = 0

    def __init__(self) -> None:
        self.calls, self.losses, self.cache = 0, [], {}
        self.recent: collections.deque[int] = collections.deque(maxlen=3)

    def late(self) -> bool:
        self.calls += 1
        return self.calls > 5


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


def closing() -> Callable[[], int]:
    count = 0

    def step() -> int:
        nonlocal count
        count += 1
        return count

    return step


def alternating() -> Iterator[bool]:
    while True:
        yield from [True] * 9
        yield False


class Model(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.body = nn.Linear(4, 4), body
        self.tracker, self.slotted, self.step = Tracker(), Slotted(), closing()
        self.space = types.SimpleNamespace(calls=0)
        self.nested = [{"inner": Tracker()}]
        self.cycle, self.dice = itertools.cycle([True, True, False]), random.Random(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def in_object(self: Any, x: Tensor) -> Tensor:
    return x if self.tracker.late() else self.linear(x)


def in_slots(self: Any, x: Tensor) -> Tensor:
    self.slotted.calls += 1
    return x if self.slotted.calls == 7 else self.linear(x)


def in_namespace(self: Any, x: Tensor) -> Tensor:
    self.space.calls += 1
    return x * min(self.space.calls, 1) + self.linear(x)


def in_nested(self: Any, x: Tensor) -> Tensor:
    return x if self.nested[0]["inner"].late() else self.linear(x)


def in_closure(self: Any, x: Tensor) -> Tensor:
    return x if self.step() % 10 == 9 else self.linear(x)


def in_global(self: Any, x: Tensor) -> Tensor:
    global calls
    calls += 1
    return x if calls > 50 else self.linear(x)


def in_class(self: Any, x: Tensor) -> Tensor:
    Tracker.total += 1
    return x if Tracker.total > 50 else self.linear(x)


def in_list(self: Any, x: Tensor) -> Tensor:
    seen.append(x.shape[0])
    return x if len(seen) > 50 else self.linear(x)


def in_deque(self: Any, x: Tensor) -> Tensor:
    self.tracker.recent.append(len(self.tracker.recent))
    return x if sum(self.tracker.recent) > 5 else self.linear(x)


def in_default(self: Any, x: Tensor, held: dict[str, int] = {"n": 0}) -> Tensor:  # noqa: B006
    held["n"] += 1
    return x if held["n"] > 9 else self.linear(x)


def in_count(self: Any, x: Tensor) -> Tensor:
    return x if next(ticks) > 50 else self.linear(x)


turns = alternating()


def in_generator(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) if next(turns) else x


def in_cycle(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) if next(self.cycle) else x


def by_chance(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) if random.random() < 2 else x


def by_numpy(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) if np.random.rand() < 2 else x


def by_own_dice(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) if self.dice.random() < 2 else x


STEERED: dict[Callable[[Any, Tensor], Tensor], str] = {
    in_object: r"changes inner\.tracker\.calls \(from 0 to 2\)",
    in_slots: r"changes inner\.slotted\.calls",
    in_namespace: r"changes inner\.space\.calls",
    in_nested: r"changes inner\.nested\[0\]\['inner'\]\.calls",
    in_closure: r"changes 'count' of closing",
    in_global: r"changes module test_capture_surroundings\.calls",
    in_class: r"changes .*Tracker\.total",
    in_list: r"changes module test_capture_surroundings\.seen\[\d\]",
    in_deque: r"changes inner\.tracker\.recent",
    in_default: r"changes a default of in_default\[0\]\['n'\]",
    in_count: r"takes the next value of module test_capture_surroundings\.ticks",
    in_generator: r"takes the next value of module test_capture_surroundings\.turns",
    in_cycle: r"takes the next value of inner\.cycle",
    by_chance: "takes the next value of Python's random numbers",
    by_numpy: "takes the next value of NumPy's random numbers",
    by_own_dice: r"takes the next value of inner\.dice",
}


def made(body: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model(body)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.inner(x)
            return found

    return Outer()


@pytest.mark.parametrize("body", list(STEERED), ids=lambda body: body.__name__)
def test_refused_with_a_line(body: Callable[[Any, Tensor], Tensor]) -> None:
    """None of them shows in the first three calls."""
    with pytest.raises(
        CaptureError, match=rf"test_capture_surroundings\.py:\d+: the forward {STEERED[body]}.*as an argument"
    ):
        capture_model(made(body), (torch.ones(3, 4),), {})


def test_a_refusal_leaves_everything_as_it_was() -> None:
    before = calls, Tracker.total, list(seen), in_default.__defaults__
    for body in (in_object, in_nested, in_global, in_class, in_list, in_default, in_closure, in_deque):
        model = made(body)
        with pytest.raises(CaptureError):
            capture_model(model, (torch.ones(3, 4),), {})
        inner: Any = model.inner
        assert inner.tracker.calls == inner.nested[0]["inner"].calls == 0 and type(inner.tracker.calls) is int
        assert not inner.tracker.recent and inner.step() == 1
    assert (calls, Tracker.total, seen, in_default.__defaults__) == before


def counts_only(self: Any, x: Tensor) -> Tensor:
    self.tracker.calls += 1
    self.step()
    return self.linear(x)


def caches(self: Any, x: Tensor) -> Tensor:
    length = self.tracker.cache.setdefault(x.shape[0], x.shape[0] + 1)
    return self.linear(x) * length


def works_in_a_list(self: Any, x: Tensor) -> Tensor:
    self.tracker.losses.append(self.linear(x))
    found: Tensor = self.tracker.losses.pop()
    return found


@pytest.mark.parametrize("body", [counts_only, caches, works_in_a_list], ids=lambda body: body.__name__)
def test_harmless(body: Callable[[Any, Tensor], Tensor]) -> None:
    model = made(body)
    captured = capture_model(model, (torch.ones(3, 4),), {})
    assert "aten.linear.default" in targets(captured)
    inner: Any = model.inner
    assert inner.tracker.calls == 0 and inner.tracker.losses == [] and inner.tracker.cache == {}
    assert compare_capture(model, captured, (torch.ones(3, 4),), {}, 1) == ""
    assert inner.tracker.calls == 0 and inner.tracker.cache == {}


class Monitor(threading.Thread):
    """A progress bar's, say: its numbers change whenever it wakes up."""

    woken = 0


MONITOR = Monitor()


def beside_a_thread(self: Any, x: Tensor) -> Tensor:
    MONITOR.woken += 1
    return self.linear(x)


def beside_a_full_cache(self: Any, x: Tensor) -> Tensor:
    for at in range(600):  # more than `re` keeps: it forgets older ones
        re.match(f"layer{at}", "layer")
    return self.linear(x)


def test_what_the_standard_library_keeps_is_its_own() -> None:
    captured = capture_model(made(beside_a_full_cache), (torch.ones(3, 4),), {})
    assert "aten.linear.default" in targets(captured)


def test_what_a_thread_holds_is_its_own() -> None:
    """That it changed during a forward does not say that the forward did it."""
    captured = capture_model(made(beside_a_thread), (torch.ones(3, 4),), {})
    assert "aten.linear.default" in targets(captured) and MONITOR.woken > 0


def leaves_in_object(self: Any, x: Tensor) -> Tensor:
    self.tracker.last = self.linear(x)
    found: Tensor = self.tracker.last
    return found


def leaves_in_list(self: Any, x: Tensor) -> Tensor:
    seen.append(self.linear(x).sum())
    return self.linear(x)


def test_a_tensor_left_behind_is_not_stale() -> None:
    model = made(leaves_in_object)
    capture_model(model, (torch.ones(3, 4),), {})
    inner: Any = model.inner
    with pytest.raises(CaptureError, match=r"test_capture_surroundings.py:\d+: .*'inner\.tracker\.last'.*return it"):
        inner.tracker.last + 1
    capture_model(model, (torch.ones(3, 4),), {})
    capture_model(made(leaves_in_list), (torch.ones(3, 4),), {})
    with pytest.raises(CaptureError, match="keeps no such tensor after the call"):
        sum(seen)
    seen.clear()


def carries_a_tensor(self: Any, x: Tensor) -> Tensor:
    self.tracker.cache["mean"] = 0.9 * self.tracker.cache["mean"] + self.linear(x).mean()
    found: Tensor = x * self.tracker.cache["mean"]
    return found


def test_a_tensor_in_the_place_of_another_is_refused() -> None:
    model = made(carries_a_tensor)
    first: Any = torch.zeros(())
    inner: Any = model.inner
    inner.tracker.cache["mean"] = first
    with pytest.raises(CaptureError, match=r"changes inner\.tracker\.cache\['mean'\]"):
        capture_model(model, (torch.ones(3, 4),), {})
    assert inner.tracker.cache["mean"] is first


def test_a_loss_function_is_looked_at() -> None:
    count = 0

    def loss_fn(output: Tensor, x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return output.sum() * (1 if count < 20 else 2)

    model = made(lambda self, x: self.linear(x))
    with pytest.raises(CaptureError, match=r"changes 'count' of .*loss_fn"):
        capture_model(model, (torch.ones(3, 4),), {}, loss_fn=loss_fn)
    with pytest.raises(CaptureError, match=r"changes 'count' of .*loss_fn"):
        capture_model(model, (torch.ones(3, 4),), {}, loss_fn=functools.partial(loss_fn))
    assert count == 0


def test_a_plain_model_with_a_recurrence_runs_after_its_capture() -> None:
    """`nn.GRU` lists its weights in an attribute, anew when they were exchanged, as a capture does."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turns = nn.GRU(4, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.turns(x)[0].sum()

    model, x = Recurrent().double(), torch.rand(2, 3, 4, dtype=torch.float64)
    before = model(x)
    capture_model(model, (x,), {})
    assert torch.equal(model(x), before)
