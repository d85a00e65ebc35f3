"""One rank of the gloo checks of the collective ops: `python -m tests.support.ops_gloo_worker STORE RANK WORLD`.

Prints one line `ok NAME` per check; an exception ends the process with its traceback.
"""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from moecompile import ops
from tests.support.ops_oracle import assert_same, expert_loop, poisoned_memory, rand, routing

E, IN, HID, K = 6, 4, 5, 2


def layer(x: Tensor, ids: Tensor, probs: Tensor, w1: Tensor, w2: Tensor, world: int, axis: str) -> Tensor:
    """The expert-parallel layer, written with the ops as the compiler writes it."""
    rows, counts, row_map = ops.permute(x, ids, E)
    send, recv, tokens = ops.sizes_to_host(counts, ops.exchange_counts(counts, world, axis))
    rows = ops.dispatch(rows, send, recv, int(recv.sum()), axis)
    h = torch.nn.functional.silu(ops.grouped_linear(rows, tokens, w1))
    rows = ops.combine(ops.grouped_linear(h, tokens, w2), recv, send, row_map.shape[0], axis)
    return ops.unpermute(rows, row_map, x.shape[0], ids.shape[1], probs)


def check_layer(rank: int, world: int, axis: str, tokens: list[int], idle: tuple[int, ...]) -> None:
    """Output and every gradient equal those of one process over all tokens."""
    total = sum(tokens)
    x, probs = rand(total, IN, seed=1, grad=True), rand(total, K, seed=2, grad=True)
    ids = routing(total, K, E, seed=3, idle=idle)
    w1, w2 = rand(E, HID, IN, seed=4, grad=True), rand(E, IN, HID, seed=5, grad=True)
    whole = expert_loop(x, ids, probs, w1, w2)
    used = 0 * sum(t.sum() for t in (x, probs, w1, w2))
    expected = torch.autograd.grad(whole.square().sum() + used, (x, probs, w1, w2))

    mine = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
    experts = slice(rank * E // world, (rank + 1) * E // world)
    local = [t.detach().clone().requires_grad_() for t in (x[mine], probs[mine], w1[experts], w2[experts])]
    with poisoned_memory():
        y = layer(local[0], ids[mine], *local[1:], world, axis)
        grads = torch.autograd.grad(y.square().sum(), local)
    assert_same(y, whole[mine], 1e-14)
    for got, want, part in zip(grads, expected, (mine, mine, experts, experts), strict=True):
        assert_same(got, want[part], 1e-13)


def check_bf16_and_vectors(rank: int, world: int, axis: str) -> None:
    send = torch.arange(world) + rank  # rank r sends r + p rows to rank p
    recv = rank + torch.arange(world)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for shape in ((3,), ()):
            rows = torch.full((int(send.sum()), *shape), rank, dtype=dtype)
            got = ops.dispatch(rows, send, recv, int(recv.sum()), axis)
            source = torch.arange(world).repeat_interleave(recv).to(dtype)
            assert torch.equal(got, source.view(-1, *[1] * len(shape)).expand(got.shape))
            assert torch.equal(ops.combine(got, recv, send, rows.shape[0], axis), rows)


def check_collectives(rank: int, world: int, axis: str) -> None:
    x = rand(2, 3, seed=rank, grad=True)
    before = x.detach().clone()
    all_x = [rand(2, 3, seed=r) for r in range(world)]
    total = torch.stack(all_x).sum(0)
    assert_same(ops.all_reduce(x, "sum", axis).detach(), total, 1e-15)
    assert_same(ops.all_reduce(x, "max", axis).detach(), torch.stack(all_x).amax(0))
    assert_same(ops.all_reduce(x, "min", axis).detach(), torch.stack(all_x).amin(0))
    assert torch.equal(x, before), "all_reduce changed its input"
    assert_same(ops.all_gather(x, world, axis).detach(), torch.cat(all_x))
    wide = rand(2 * world, 3, seed=10 + rank, grad=True)
    expected = sum(rand(2 * world, 3, seed=10 + r) for r in range(world))
    assert isinstance(expected, Tensor)
    part = slice(2 * rank, 2 * rank + 2)
    assert_same(ops.reduce_scatter(wide, world, axis).detach(), expected[part], 1e-15)
    assert ops.reduce_scatter(wide[:0], world, axis).shape == (0, 3)

    # from parts along dim 0 to parts along dim 1 of the same whole
    whole = torch.cat([rand(2, 3 * world, seed=30 + r) for r in range(world)])
    turned = ops.all_to_all(whole[part], world, 1, 0, axis)
    assert_same(turned, whole.chunk(world, 1)[rank])
    assert_same(ops.all_to_all(turned, world, 0, 1, axis), whole[part])
    rows = rand(2, 3 * world, seed=30 + rank, grad=True)
    for steps in (1, -1, world):
        assert_same(ops.rotate(x.T, world, steps, axis).detach(), all_x[(rank - steps) % world].T)

    # pieces r and 2n - 1 - r of 2n on rank r, and 2r and 2r + 1
    pieces = rand(3, 2, 2 * world, 2, seed=60).flatten(1, 2)
    sliced = ops.zigzag_slice(pieces.flatten(1), torch.tensor(rank), 1, 2, world)
    in_order = pieces.flatten(1).reshape(3, 2, world, -1)[:, :, rank].flatten(1)
    assert_same(ops.zigzag_exchange(sliced, world, 1, 2, False, axis), in_order)
    assert_same(ops.zigzag_exchange(in_order, world, 1, 2, True, axis), sliced)

    # Adjoints: sum over ranks of <y_r, op(x)_r> equals sum over ranks of <op^T(y)_r, x_r>, with op^T from autograd.
    operators: list[tuple[Callable[[Tensor], Tensor], Tensor]] = [
        (lambda t: ops.all_reduce(t, "sum", axis), x),
        (lambda t: ops.all_gather(t, world, axis), x),
        (lambda t: ops.reduce_scatter(t, world, axis), wide),
        (lambda t: ops.all_to_all(t, world, 1, 0, axis), rows),
        (lambda t: ops.rotate(t, world, 1, axis), rows),
        (lambda t: ops.zigzag_exchange(t, world, 0, 1, True, axis), rows),
        (lambda t: ops.zigzag_exchange(t.T, world, 1, 1, False, axis), rows),
    ]
    for op, value in operators:
        out = op(value)
        y = rand(*out.shape, seed=20 + rank)
        (grad,) = torch.autograd.grad(out, value, y)
        sides = torch.stack([(y * out.detach()).sum(), (grad * value.detach()).sum()])
        sides = ops.all_reduce(sides, "sum", axis)
        assert_same(sides[0], sides[1], 1e-13)
    try:
        torch.autograd.grad(ops.all_reduce(x, "max", axis).sum(), x)
    except ValueError as error:
        assert "detach the reduced value" in str(error)
    else:
        raise AssertionError("the gradient of a maximum was answered")


def check_sizes_of_both_sides(rank: int, world: int, axis: str) -> None:
    """Every rank expects one row too many from rank 0, which plain gloo answers with garbage."""
    send = torch.ones(world, dtype=torch.int64)
    recv = send.clone()
    recv[0] += 1
    rows = torch.ones(world, 2)
    previous = ops.set_size_checks(True)
    try:
        ops.dispatch(rows, send, send, world, axis)  # agreeing sizes pass
        ops.dispatch(rows, send, recv, world + 1, axis)
    except ValueError as error:
        assert "exchange the counts of this very routing" in str(error)
    else:
        raise AssertionError("sizes that disagree went through")
    finally:
        assert ops.set_size_checks(previous) is True


def check_uneven_rows(rank: int, world: int, axis: str) -> None:
    """Rank r has 2 r rows, so the first has none. Both ops are each other's adjoint."""
    sizes = 2 * torch.arange(world)
    own, total = int(sizes[rank]), int(sizes.sum())
    mine = rand(own, 3, seed=30 + rank, grad=True)
    every = [rand(int(size), 3, seed=30 + r) for r, size in enumerate(sizes)]
    out = ops.all_gather_rows(mine, sizes, total, axis)
    assert_same(out.detach(), torch.cat(every))
    wide = rand(total, 3, seed=40 + rank, grad=True)
    summed = torch.stack([rand(total, 3, seed=40 + r) for r in range(world)]).sum(0)
    home = ops.reduce_scatter_rows(wide, sizes, own, axis)
    assert_same(home.detach(), summed.split(sizes.tolist())[rank], 1e-15)
    for value, made in ((mine, out), (wide, home)):
        y = rand(*made.shape, seed=50 + rank)
        (grad,) = torch.autograd.grad(made, value, y)
        sides = torch.stack([(y * made.detach()).sum(), (grad * value.detach()).sum()])
        sides = ops.all_reduce(sides, "sum", axis)
        assert_same(sides[0], sides[1], 1e-13)


def main(store: str, rank: int, world: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    axis = dist.group.WORLD.group_name  # type: ignore[union-attr]
    checks: dict[str, Callable[[], None]] = {
        "even": lambda: check_layer(rank, world, axis, [5] * world, ()),
        "uneven": lambda: check_layer(rank, world, axis, [1 + 4 * r for r in range(world)], ()),
        "rank-without-tokens": lambda: check_layer(rank, world, axis, [0] + [6] * (world - 1), ()),
        "rank-without-rows": lambda: check_layer(rank, world, axis, [4] * world, tuple(range(E // world))),
        "no-tokens": lambda: check_layer(rank, world, axis, [0] * world, ()),
        "dtypes": lambda: check_bf16_and_vectors(rank, world, axis),
        "collectives": lambda: check_collectives(rank, world, axis),
        "sizes": lambda: check_sizes_of_both_sides(rank, world, axis),
        "uneven-rows": lambda: check_uneven_rows(rank, world, axis),
    }
    for name, check in checks.items():
        check()
        print("ok", name, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
