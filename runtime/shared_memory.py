"""Collectives between CPU ranks of one host through shared memory: one copy in, one copy out, no socket.

Every rank owns a piece of anonymous memory that its peers map, too. A collective is one message of every rank: it writes its
message into its own memory, says so in a counter, waits for the peers' counters and copies what is meant for it. Two slots are
used in turn, so that a rank may write its next message while a slower peer still reads the last one.

The order "message, then counter" is seen by other cores only where stores stay in order: on x86. Elsewhere, and between hosts,
`connect` declines and gloo serves. A rank that waits sleeps in the kernel (futex), which the writer of the counter ends.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import secrets
import select
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Words (int64) at the start of a rank's memory.
_TOKEN, _PUBLISHED, _READ, _LEFT, _SLOTS = range(5)
_WORD = 8
_NUM_SLOTS = 2
_SPINS = 100  # looks at a counter before the first sleep: about 10 microseconds
_PATIENCE = 0.05  # seconds of sleep after which a waiting rank looks whether its peer is alive

_SYS_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1  # x86-64 Linux
_syscall = ctypes.CDLL(None).syscall


class SharedMemory:
    """This rank's link to the other ranks of one group; made by `connect`.

    A peer that ends or leaves while this rank waits for it is a RuntimeError that says so at once, one that does not come within
    ``timeout`` seconds another. What a peer sends is compared with what this rank expects.
    """

    def __init__(self, rank: int, num_ranks: int, timeout: float) -> None:
        self.rank, self.num_ranks, self.timeout = rank, num_ranks, timeout
        self._done = 0  # messages exchanged
        self._table = 2 * num_ranks  # of one slot: where each rank's part starts, and its bytes
        self._header = _aligned_page(_WORD * (_SLOTS + _NUM_SLOTS * self._table))
        self._room = [0] * _NUM_SLOTS  # bytes of each slot, and where it starts:
        self._start = [self._header] * _NUM_SLOTS
        self._own = _Memory(os.memfd_create("moecompile"), self._header)
        self._own.words[_TOKEN] = secrets.randbits(62)
        self._peers: dict[int, _Memory] = {}
        self._processes: dict[int, int] = {}  # pidfd -> rank

    @property
    def address(self) -> tuple[int, int, int]:
        """What a peer needs to find this rank's memory."""
        return os.getpid(), self._own.file, self._own.words[_TOKEN]

    def open(self, addresses: Sequence[tuple[int, int, int]]) -> None:
        """Map the peers' memory. OSError or ValueError where one is not on this host."""
        for rank, (process, file, token) in enumerate(addresses):
            if rank == self.rank:
                continue
            self._processes[os.pidfd_open(process)] = rank
            memory = _Memory(os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC), self._header)
            self._peers[rank] = memory
            if memory.words[_TOKEN] != token:
                raise ValueError(f"process {process} is not rank {rank}'s")

    def close(self) -> None:
        """Leave: peers that wait for this rank fail at once."""
        self._own.words[_LEFT] = 1
        for word in (_PUBLISHED, _READ):
            self._own.wake(word)
        for file in self._processes:
            os.close(file)
        for memory in (self._own, *self._peers.values()):
            os.close(memory.file)
        self._processes, self._peers = {}, {}

    # -- collectives -------------------------------------------------------------------------------------------------
    def all_to_all(self, out: Tensor, x: Tensor, outs: Sequence[int], ins: Sequence[int]) -> None:
        """See `moecompile.ops.transport.Link`."""
        sent, received = torch.split(x, list(ins)), torch.split(out, list(outs))
        self._send(sent)
        received[self.rank].copy_(sent[self.rank])
        for rank in self._others():
            self._receive(rank, received[rank])
        self._finish()

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """See `moecompile.ops.transport.Link`."""
        parts = out.view(self.num_ranks, *x.shape)
        self._send_all(x)
        parts[self.rank].copy_(x)
        for rank in self._others():
            self._receive(rank, parts[rank])
        self._finish()

    def all_reduce(self, x: Tensor, op: str) -> None:
        """Each rank reduces its part in rank order, then the parts are gathered: all ranks hold the same bits."""
        flat = x.view(-1)
        if flat.numel() < self.num_ranks**2:  # not worth two messages
            everyone = flat.new_empty(self.num_ranks, flat.numel())
            self.all_gather(everyone, flat)
            flat.copy_(_reduce(everyone.unbind(0), op))
            return
        parts = flat.tensor_split(self.num_ranks)
        own = parts[self.rank]
        self._send(parts)
        terms = {rank: self._peek(rank, own) for rank in self._others()} | {self.rank: own}
        total = _reduce([terms[rank] for rank in range(self.num_ranks)], op)
        self._finish()
        self._send_all(total)
        own.copy_(total)
        for rank in self._others():
            self._receive(rank, parts[rank])
        self._finish()

    # -- messages ----------------------------------------------------------------------------------------------------
    def _others(self) -> list[int]:
        """The peers, each rank beginning with another one."""
        return [(self.rank + step) % self.num_ranks for step in range(1, self.num_ranks)]

    def _send(self, parts: Sequence[Tensor]) -> None:
        """Publish a message with a part for every rank; this rank's own is not written."""
        sizes = [0 if rank == self.rank else _bytes(part) for rank, part in enumerate(parts)]
        at = self._reserve(sum(map(_aligned_part, sizes)))
        for rank, size in enumerate(sizes):
            self._list(rank, at, size)
            if size:
                self._own.tensor(at, parts[rank]).copy_(parts[rank])
            at += _aligned_part(size)
        self._own.count(_PUBLISHED, self._done + 1)

    def _send_all(self, part: Tensor) -> None:
        """Publish a message that is the same for every rank."""
        size = _bytes(part)
        at = self._reserve(size)
        for rank in self._others():
            self._list(rank, at, size)
        if size:
            self._own.tensor(at, part).copy_(part)
        self._own.count(_PUBLISHED, self._done + 1)

    def _list(self, rank: int, at: int, size: int) -> None:
        """Note where a rank finds its part of the message that is being written."""
        entry = _SLOTS + (self._done % _NUM_SLOTS) * self._table + 2 * rank
        self._own.words[entry], self._own.words[entry + 1] = at, size

    def _receive(self, rank: int, out: Tensor) -> None:
        """Copy what a peer's message holds for this rank."""
        out.copy_(self._peek(rank, out))

    def _peek(self, rank: int, like: Tensor) -> Tensor:
        """What a peer's message holds for this rank, where it lies; valid until `_finish`."""
        self._await(rank, _PUBLISHED, self._done + 1)
        words = self._peers[rank].words
        table = _SLOTS + (self._done % _NUM_SLOTS) * self._table + 2 * self.rank
        at, size = words[table], words[table + 1]
        if size != _bytes(like):
            raise ValueError(
                f"rank {self.rank} of its group expects {_bytes(like)} bytes from rank {rank}, which sends {size}; the ranks do not "
                "run the same collective: give every rank the same program and sizes."
            )
        return self._peers[rank].tensor(at, like) if size else like

    def _finish(self) -> None:
        self._done += 1
        self._own.count(_READ, self._done)

    def _reserve(self, size: int) -> int:
        """Where this message goes: its slot, behind everything else if that is too small, once nobody reads it any more."""
        for rank in self._others():
            self._await(rank, _READ, self._done + 1 - _NUM_SLOTS)
        slot = self._done % _NUM_SLOTS
        if size > self._room[slot]:
            self._room[slot] = _aligned_page(2 * size)
            self._start[slot] = self._own.grow(self._room[slot])
        return self._start[slot]

    def _await(self, rank: int, word: int, value: int) -> None:
        """Until a peer's counter has come to ``value``."""
        memory = self._peers[rank]
        words = memory.words
        for _ in range(_SPINS):
            if words[word] >= value:
                return
        end = time.monotonic() + self.timeout
        while (found := words[word]) < value:
            memory.sleep(word, found, _PATIENCE)
            if words[word] >= value:
                return
            ended = select.select(list(self._processes), [], [], 0)[0]
            if words[_LEFT] or any(self._processes[file] == rank for file in ended):
                if words[word] >= value:  # it was its last message
                    return
                raise RuntimeError(f"connection closed by peer: rank {rank} of the group has ended or left.")
            if time.monotonic() > end:
                raise RuntimeError(f"timed out after {self.timeout:g} s waiting for rank {rank} of the group.")


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Memory:
    """A mapped file that may grow: its words, and tensors inside."""

    def __init__(self, file: int, size: int) -> None:
        self.file = file
        if os.fstat(file).st_size < size:
            os.posix_fallocate(file, 0, size)
        self._map()

    def _map(self) -> None:
        self._mapped = mmap.mmap(self.file, 0)
        self.words = memoryview(self._mapped).cast("q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapped))

    def grow(self, size: int) -> int:
        """Add bytes at the end; returns where they start. OSError where memory is short."""
        start = len(self._mapped)
        os.posix_fallocate(self.file, start, size)
        self._map()
        return start

    def count(self, word: int, value: int) -> None:
        """Set a counter and wake who sleeps on it."""
        self.words[word] = value
        self.wake(word)

    def wake(self, word: int) -> None:
        """Wake all who sleep on a word."""
        _syscall(_SYS_FUTEX, ctypes.c_void_p(self._address + _WORD * word), _FUTEX_WAKE, 1 << 30)

    def sleep(self, word: int, value: int, seconds: float) -> None:
        """Until somebody wakes the word, at most so long; not at all if it is no longer ``value``."""
        # the kernel compares the lower half, which comes first
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        at = ctypes.c_void_p(self._address + _WORD * word)
        _syscall(_SYS_FUTEX, at, _FUTEX_WAIT, ctypes.c_uint32(value & 0xFFFFFFFF), ctypes.byref(limit))

    def tensor(self, at: int, like: Tensor) -> Tensor:
        """The bytes from ``at`` on, as a tensor like ``like``."""
        if at + like.numel() * like.element_size() > len(self._mapped):
            self._map()
        found = torch.frombuffer(self._mapped, dtype=like.dtype, count=like.numel(), offset=at)
        return found.view(like.shape)


def connect(group: dist.ProcessGroup, timeout: float) -> SharedMemory | None:
    """A link of all ranks of a gloo group; None on all of them where they do not share an x86 Linux host. Collective."""
    link: SharedMemory | None = None
    if _supported():
        try:
            link = SharedMemory(group.rank(), group.size(), timeout)
        except OSError:
            link = None
    addresses: list[tuple[int, int, int] | None] = [None] * group.size()
    dist.all_gather_object(addresses, None if link is None else link.address, group=group)
    found = [address for address in addresses if address is not None]
    opened = link is not None and len(found) == group.size() and _try(lambda: link.open(found))
    everyone = torch.tensor(int(opened))
    dist.all_reduce(everyone, dist.ReduceOp.MIN, group=group)  # nobody goes on before all have opened
    if link is not None and not everyone.item():
        link.close()
        return None
    return link


def _supported() -> bool:
    return platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")


def _try(act: Callable[[], None]) -> bool:
    try:
        act()
    except (OSError, ValueError):
        return False
    return True


def _reduce(terms: Sequence[Tensor], op: str) -> Tensor:
    """The terms, added (or compared) in order."""
    combine: Any = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op]
    total: Tensor = combine(terms[0], terms[1])
    for term in terms[2:]:
        combine(total, term, out=total)
    return total


def _bytes(part: Tensor) -> int:
    return part.numel() * part.element_size()


def _aligned_page(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _aligned_part(size: int) -> int:
    """Parts start at multiples of 64 bytes, whatever their type."""
    return -(-size // 64) * 64
