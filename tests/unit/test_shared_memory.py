"""Shared memory between ranks of one host: the same bytes as gloo, and every fault is an error at once."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moecompile.mesh import Mesh
from moecompile.ops import transport
from moecompile.plan import Plan
from moecompile.runtime import shared_memory
from moecompile.runtime.launcher import launch
from moecompile.runtime.process_groups import ProcessGroups
from moecompile.runtime.shared_memory import SharedMemory, connect
from tests.support.pool import Ranks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]


def linked(timeout: float = 20.0) -> SharedMemory:
    link = connect(dist.group.WORLD, timeout)
    assert link is not None
    return link


def numbers(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    made = torch.randint(-9, 9, (count, 3), generator=torch.Generator().manual_seed(seed))
    return made.to(dtype)


def exchanges(rank: int) -> int:
    """Every collective beside gloo's, with sizes that grow and shrink, so that both slots move; returns how many agreed."""
    link, ranks, agreed = linked(), dist.get_world_size(), 0
    generator = torch.Generator().manual_seed(1)
    for turn, top in enumerate([0, 1, 5, 300, 7, 40_000, 2, 90_000, 0, 11]):
        sizes = torch.randint(0, top + 1, (ranks, ranks), generator=generator)
        ins, outs = sizes[rank].tolist(), sizes[:, rank].tolist()
        for dtype in DTYPES:
            x = numbers(sum(ins), dtype, turn * ranks + rank)
            found, wanted = numbers(sum(outs), dtype, 0), numbers(sum(outs), dtype, 0)
            link.all_to_all(found, x, outs, ins)
            if dtype is torch.bfloat16:  # gloo's exchange has no bfloat16
                parts: list[Any] = [None] * ranks
                dist.all_gather_object(parts, x.split(ins))
                wanted = torch.cat([part[rank] for part in parts])
            else:
                dist.all_to_all_single(wanted, x, outs, ins)
            assert torch.equal(found, wanted)
            mine = numbers(top, dtype, turn + rank)
            everyone = mine.new_empty(ranks * top, 3)
            link.all_gather(everyone, mine)
            assert torch.equal(everyone, torch.cat([numbers(top, dtype, turn + other) for other in range(ranks)]))
            agreed += 2
        for op in ("sum", "max", "min"):
            terms = [numbers(top, torch.float64, turn + other) for other in range(ranks)]
            mine = terms[rank].clone()
            link.all_reduce(mine, op)
            stacked = torch.stack(terms)
            wanted = {"sum": stacked.sum(0), "max": stacked.amax(0), "min": stacked.amin(0)}[op]
            assert torch.equal(mine, wanted)
            agreed += 1
    link.close()
    return agreed


@pytest.mark.parametrize("count", [2, 4])
def test_collectives_give_what_gloo_gives(ranks: Ranks, count: int) -> None:
    assert ranks.run(count, exchanges) == [130] * count


def rounded_sums(rank: int) -> Tensor:
    link = linked()
    x = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
    link.all_reduce(x, "sum")
    return x


def test_all_ranks_hold_the_same_bits_of_a_sum(ranks: Ranks) -> None:
    first, *others = ranks.run(4, rounded_sums)
    terms = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    assert torch.equal(first, terms[0] + terms[1] + terms[2] + terms[3])  # in rank order
    assert all(torch.equal(first, other) for other in others)


def slow_reader(rank: int) -> bool:
    """Rank 1 reads late: rank 0 must not write a slot again before."""
    link = linked()
    right = True
    for turn in range(12):
        if rank == 1:
            time.sleep(0.01)
        found = torch.empty(2, 100_000)
        link.all_gather(found.view(-1), torch.full((100_000,), float(turn * 10 + rank)))
        right = right and bool((found[0] == turn * 10).all() and (found[1] == turn * 10 + 1).all())
    return right


def test_a_slow_reader_loses_nothing(ranks: Ranks) -> None:
    assert ranks.run(2, slow_reader) == [True, True]


def told(act: Callable[[SharedMemory], None]) -> tuple[str, float]:
    link, start = linked(), time.monotonic()
    try:
        act(link)
    except (RuntimeError, ValueError) as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


def one_sends_more(rank: int) -> tuple[str, float]:
    return told(lambda link: link.all_gather(torch.empty(2 * (4 + rank)), torch.zeros(4 + rank)))


def one_leaves(rank: int) -> tuple[str, float]:
    return told(lambda link: link.close() if rank else link.all_gather(torch.empty(8), torch.zeros(4)))


def one_is_late(rank: int) -> tuple[str, float]:
    link = linked(timeout=0.3)
    if rank:
        time.sleep(1.0)
        return "", 0.0
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"timed out after 0\.3 s waiting for rank 1"):
        link.all_gather(torch.empty(8), torch.zeros(4))
    return "late", time.monotonic() - start


def test_sizes_of_both_sides_are_compared(ranks: Ranks) -> None:
    for message, _ in ranks.run(2, one_sends_more):
        assert "give every rank the same program and sizes" in message


def test_a_rank_that_leaves_ends_the_wait(ranks: Ranks) -> None:
    (message, seconds), _ = ranks.run(2, one_leaves)
    assert "connection closed by peer: rank 1" in message
    assert seconds < 5


def test_a_late_rank_is_a_timeout(ranks: Ranks) -> None:
    (message, seconds), _ = ranks.run(2, one_is_late)
    assert message == "late"
    assert seconds < 0.9


def one_dies(rank: int, path: str) -> None:
    link = linked()
    if rank:
        os._exit(0)
    start = time.monotonic()
    try:
        link.all_gather(torch.empty(8), torch.zeros(4))
    except RuntimeError as error:
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"{time.monotonic() - start} {error}")
    os._exit(0)


def test_a_rank_that_dies_ends_the_wait(tmp_path: Any) -> None:
    path = tmp_path / "said"
    with pytest.raises(Exception):  # noqa: B017 - the launcher's own word about a rank that vanished
        launch(one_dies, 2, str(path), timeout=30)
    seconds, said = path.read_text(encoding="utf-8").split(" ", 1)
    assert "connection closed by peer: rank 1" in said
    assert float(seconds) < 5


def groups_of(rank: int, supported: bool) -> tuple[bool, list[float]]:
    """Whether a process group got a link, and a sum over it."""
    elsewhere = not supported and rank == 1  # one rank on another host: nobody uses shared memory
    with mock.patch.object(shared_memory, "_supported", lambda: False) if elsewhere else contextlib.nullcontext():
        groups = ProcessGroups(Mesh(Plan(dp=2)))
        group = groups.group("dp")
    x = torch.tensor([1.0, rank])
    transport.all_reduce(x, "sum", group)
    has_link = group.group_name in transport._links
    groups.close()
    assert group.group_name not in transport._links
    return has_link, x.tolist()


@pytest.mark.parametrize("supported", [True, False])
def test_groups_use_shared_memory_where_all_ranks_can(ranks: Ranks, supported: bool) -> None:
    assert ranks.run(2, groups_of, supported) == [(supported, [2.0, 1.0])] * 2
