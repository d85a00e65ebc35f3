"""The ops that communicate: on gloo ranks against one process, alone on one rank, and their errors."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.library import opcheck

from moecompile import ops
from tests.support.ops_oracle import rand

ROOT = Path(__file__).resolve().parents[2]
CHECKS = [
    "even",
    "uneven",
    "rank-without-tokens",
    "rank-without-rows",
    "no-tokens",
    "dtypes",
    "collectives",
    "sizes",
    "uneven-rows",
]


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_on_gloo_ranks(world: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.ops_gloo_worker", str(tmp_path / "store")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        texts = [process.communicate(timeout=120)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for text, process in zip(texts, ranks, strict=True):
        assert process.returncode == 0, text
        assert [line for line in text.splitlines() if line.startswith("ok ")] == [f"ok {c}" for c in CHECKS]


@pytest.fixture
def lone_rank() -> Iterator[str]:
    """The name of a gloo group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name  # type: ignore[union-attr]
    dist.destroy_process_group()


def test_opcheck_on_one_rank(lone_rank: str) -> None:
    rows = rand(5, 3, grad=True)
    sizes = torch.tensor([5])
    counts = torch.tensor([2, 0, 3])
    opcheck(ops.exchange_counts, (counts, 1, lone_rank))
    opcheck(ops.dispatch, (rows, sizes, sizes, 5, lone_rank))
    opcheck(ops.combine, (rows, sizes, sizes, 5, lone_rank))
    opcheck(ops.all_reduce, (rows, "sum", lone_rank))
    opcheck(ops.all_gather, (rows, 1, lone_rank))
    opcheck(ops.all_to_all, (rows, 1, 0, 1, lone_rank))
    opcheck(ops.reduce_scatter, (rows, 1, lone_rank))
    opcheck(ops.rotate, (rows, 1, 1, lone_rank))
    opcheck(ops.zigzag_exchange, (rand(4, 3, grad=True), 1, 0, 2, True, lone_rank))
    opcheck(ops.sizes_to_host, (counts, counts[None]))
    opcheck(ops.all_gather_rows, (rows, sizes, 5, lone_rank))
    opcheck(ops.reduce_scatter_rows, (rows, sizes, 5, lone_rank))
    opcheck(ops.gathered_sizes_to_host, (counts, counts[None], counts[None], 1))


def test_no_op_returns_its_own_input(lone_rank: str) -> None:
    x, sizes = torch.ones(3, 2), torch.tensor([3])
    for out in (
        ops.dispatch(x, sizes, sizes, 3, lone_rank),
        ops.combine(x, sizes, sizes, 3, lone_rank),
        ops.all_reduce(x, "sum", lone_rank),
        ops.all_gather(x, 1, lone_rank),
        ops.reduce_scatter(x, 1, lone_rank),
        ops.rotate(x, 1, 1, lone_rank),
        ops.all_gather_rows(x, sizes, 3, lone_rank),
        ops.reduce_scatter_rows(x, sizes, 3, lone_rank),
    ):
        out.zero_()
    assert (x == 1).all()
    counts = torch.tensor([1, 2])
    received = ops.exchange_counts(counts, 1, lone_rank)
    for out in (received, *ops.sizes_to_host(counts, received)):
        out.zero_()
    assert counts.tolist() == [1, 2]


def test_sizes_to_host() -> None:
    received = torch.tensor([[1, 2, 0], [0, 0, 5]])
    send, recv, tokens = ops.sizes_to_host(torch.tensor([4, 0, 1, 2, 2, 2]), received)
    assert send.tolist() == [5, 6] and recv.tolist() == [3, 5] and tokens.tolist() == received.tolist()
    tokens.zero_()
    assert recv.tolist() == [3, 5] and received.sum() == 8
    with pytest.raises(ValueError, match="pass what exchange_counts returned"):
        ops.sizes_to_host(torch.tensor([1, 2]), received)


def test_gathered_sizes_to_host() -> None:
    """Two ranks of ep with two experts each, two of etp."""
    received, gathered = torch.tensor([[1, 2], [0, 5]]), torch.tensor([[1, 2], [0, 5], [3, 0], [4, 4]])
    send, recv, sizes, tokens = ops.gathered_sizes_to_host(torch.tensor([4, 0, 1, 2]), received, gathered, 2)
    assert send.tolist() == [4, 3] and recv.tolist() == [3, 5] and sizes.tolist() == [8, 11]
    assert tokens.tolist() == gathered.tolist()
    tokens.zero_()
    assert gathered.sum() == 19
    with pytest.raises(ValueError, match="pass the all_gather of received"):
        ops.gathered_sizes_to_host(torch.tensor([4, 0, 1, 2]), received, gathered[:3], 2)


def test_axis_arguments_are_where_the_table_says() -> None:
    assert frozenset(ops.AXIS_ARGUMENT) == ops.COLLECTIVES
    for overload, position in ops.AXIS_ARGUMENT.items():
        assert overload._schema.arguments[position].name == "axis"
    with_axis = {
        op
        for name in ops.__all__
        if isinstance(op := getattr(ops, name), torch._ops.OpOverload)
        and any(a.name == "axis" for a in op._schema.arguments)
    }
    assert with_axis == ops.COLLECTIVES


def test_errors_say_what_to_do(lone_rank: str) -> None:
    x, sizes = torch.ones(3, 2), torch.tensor([3])
    cases = [
        (lambda: ops.all_reduce(x, "sum", "ep"), "bind the mesh axes of the program"),
        (lambda: ops.all_gather(x, 2, lone_rank), "bind the program to the mesh it was built for"),
        (lambda: ops.all_reduce(x, "avg", lone_rank), "write an average as a sum and a division"),
        (lambda: ops.reduce_scatter(x, 2, lone_rank), "pad it"),
        (lambda: ops.all_gather(torch.tensor(1.0), 1, lone_rank), "reshape it to"),
        (lambda: ops.exchange_counts(torch.tensor([1, 2, 3]), 2, lone_rank), "choose ep from the divisors"),
        (lambda: ops.dispatch(x, sizes - 1, sizes, 3, lone_rank), "pass the sizes of this exchange"),
        (lambda: ops.dispatch(x, sizes, sizes, 4, lone_rank), "pass the sizes of this exchange"),
        (lambda: ops.dispatch(x, sizes.float(), sizes, 3, lone_rank), "convert it with"),
        (lambda: ops.combine(x, sizes[None], sizes, 3, lone_rank), "pass what sizes_to_host returned"),
        (lambda: ops.all_gather_rows(x, sizes, 4, lone_rank), "gather the counts of this very routing first"),
        (lambda: ops.reduce_scatter_rows(x, sizes - 1, 2, lone_rank), "gather the counts of this very routing first"),
        (lambda: ops.all_gather_rows(x, sizes[None], 3, lone_rank), "pass what gathered_sizes_to_host returned"),
        (lambda: ops.combine(x, sizes.repeat(2), sizes, 3, lone_rank), "bind the program to the mesh"),
    ]
    for call, advice in cases:
        with pytest.raises(ValueError, match=advice):
            call()
