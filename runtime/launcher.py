"""Start one process per rank on this machine, and never leave one behind.

`launch` runs a function or a script once; `RankPool` keeps its processes alive between calls, because a fresh
interpreter that imports torch costs seconds.  Both give every rank a gloo process group over 127.0.0.1, stop
the whole run within seconds of the first failure, and report that failure with the traceback of the rank it
happened on, not the connection-closed noise of the ranks that waited for it.

No process survives the caller: ranks are killed when the call ends in any way (return, error, Ctrl-C,
SIGTERM), and by themselves when the calling process disappears.  A script that calls `launch` needs the usual
``if __name__ == "__main__":`` guard, since each rank imports it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

from torch.multiprocessing import get_context

from moecompile.compat import TCPStore
from moecompile.runtime.rank_process import STOP_SIGNALS, Reply, Setup, Task, rank_main, unpickled

# When a rank died without a word, the others get this long to say where in the model they waited for it.
_GRACE_S = 4.0
# When an error with a traceback is in, only one that was raised even earlier could still matter.
_GRACE_REAL_S = 0.3
# A rank that has delivered its result gets this long to shut its interpreter down.
_EXIT_S = 10.0


class RankError(RuntimeError):
    """A rank failed.

    ``rank`` says which, ``rank_traceback`` holds its own traceback; the cause is its exception if it pickles.
    """

    def __init__(self, message: str, rank: int, rank_traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.rank_traceback = rank_traceback


def launch(
    fn: Callable[..., Any] | str | Path,
    world_size: int,
    *args: Any,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    backend: str | None = "gloo",
) -> list[Any]:
    """Run ``fn(rank, *args)`` on ``world_size`` local ranks and return their results in rank order.

    ``fn`` is an importable function, or the path of a script that is run as ``__main__`` with ``args`` as its
    command line, under the environment torchrun would give it (results are then None).  A function finds the
    default process group ready, on ``backend``; ``backend=None`` and scripts leave that to the code.  ``env``
    adds environment variables. Raises RankError for the first real failure and TimeoutError after ``timeout``
    seconds (None: no limit).
    """
    task = Task(str(fn) if isinstance(fn, (str, Path)) else fn, args)
    backend = None if isinstance(task.target, str) else backend
    _check_can_start(fn)
    with _sigterm_as_exit(), _Ranks(world_size, env or {}, backend) as ranks:
        results = ranks.call(task, timeout)
        ranks.finish()
        return results


class RankPool:
    """``world_size`` ranks that stay alive between calls; for test harnesses and notebooks.

    Processes start with the first `run`.  After a call that failed or ran out of time they are killed and the
    next call starts fresh ones, because nobody knows what state their process groups are in.  Usable as a
    context manager.
    """

    def __init__(
        self,
        world_size: int,
        *,
        timeout: float | None = 60.0,
        env: Mapping[str, str] | None = None,
        backend: str | None = "gloo",
    ) -> None:
        self.world_size = world_size
        self.timeout = timeout
        self._env = dict(env or {})
        self._backend = backend
        self._ranks: _Ranks | None = None
        atexit.register(self.close)

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Call ``fn(rank, *args)`` on every rank; results in rank order. Raises as `launch` does."""
        _check_can_start(fn)
        if self._ranks is None:
            self._ranks = _Ranks(self.world_size, self._env, self._backend)
        try:
            return self._ranks.call(Task(fn, args), timeout or self.timeout)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, [] while none runs."""
        return self._ranks.pids if self._ranks is not None else []

    def close(self) -> None:
        """Kill the ranks; the next `run` would start new ones."""
        if self._ranks is not None:
            self._ranks.kill()
            self._ranks = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        atexit.unregister(self.close)


class _Ranks:
    """The processes of one launch, each with a pipe; the parent hosts the rendezvous store."""

    def __init__(self, world_size: int, env: Mapping[str, str], backend: str | None) -> None:
        if not isinstance(world_size, int) or world_size < 1:
            raise ValueError(
                f"launch: world_size is {world_size!r}, but a whole number of at least one rank is needed."
            )
        self.world_size = world_size
        self.processes: list[SpawnProcess] = []
        self._pipes: list[Connection] = []
        self._dumps = TemporaryDirectory(prefix="moecompile-launch-")
        # The store lives here and not in rank 0, so that rank 0's death can still be told from others' and no
        # port is raced for.
        self._store, port = _loopback_store()
        context = get_context("spawn")
        try:
            for rank in range(world_size):
                mine, theirs = context.Pipe()
                self._pipes.append(mine)
                main = threading.current_thread() is threading.main_thread()
                setup = Setup(rank, world_size, backend, os.getpid(), main, str(self._dump_file(rank)))
                process = context.Process(target=rank_main, args=(theirs, setup), name=f"rank{rank}", daemon=False)
                with _environment(_rank_env(rank, world_size, port) | dict(env)), _stop_signals_held():
                    process.start()
                    self.processes.append(process)
                theirs.close()
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes if process.pid is not None]

    def call(self, task: Task, timeout: float | None) -> list[Any]:
        """Send the task to all ranks and wait for all replies."""
        try:
            payload = pickle.dumps(task)
        except Exception as error:
            raise TypeError(
                f"launch: {task.target!r} or one of its arguments cannot be sent to another process "
                f"({error}); use a function at module level and plain data or tensors."
            ) from error
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # a rank that is dead already is reported by _collect
                pipe.send_bytes(payload)
        deadline = None if timeout is None else time.monotonic() + timeout
        replies: dict[int, Reply] = {}
        while len(replies) < self.world_size:
            new = self._collect(replies, None if deadline is None else deadline - time.monotonic())
            if any(reply.result is None for reply in new):
                self._fail(replies)
            if not new and deadline is not None and time.monotonic() >= deadline:
                silent = set(range(self.world_size)) - set(replies)
                raise TimeoutError(
                    f"launch: rank {', '.join(map(str, sorted(silent)))} of {self.world_size} did not return "
                    f"within {timeout} s, and all ranks were stopped; raise the timeout if the work is that "
                    "long.\n" + self._stacks(silent)
                )
        return [pickle.loads(replies[rank].result or b"") for rank in range(self.world_size)]

    def _collect(self, replies: dict[int, Reply], timeout: float | None) -> list[Reply]:
        """Wait until a rank replies or dies, or time is up; adds to ``replies`` and returns the new ones."""
        pending = [rank for rank in range(self.world_size) if rank not in replies]
        sources: dict[Any, int] = {self._pipes[rank]: rank for rank in pending}
        sources |= {self.processes[rank].sentinel: rank for rank in pending}
        ready = {sources[source] for source in wait(list(sources), None if timeout is None else max(timeout, 0.0))}
        new = [self._receive(rank) for rank in sorted(ready)]
        replies.update({reply.rank: reply for reply in new})
        return new

    def _receive(self, rank: int) -> Reply:
        """The rank's reply; its death is one, too."""
        try:
            if self._pipes[rank].poll():
                reply = pickle.loads(self._pipes[rank].recv_bytes())
                assert isinstance(reply, Reply)
                return reply
        except (EOFError, OSError):
            pass
        self.processes[rank].join(_EXIT_S)
        code = self.processes[rank].exitcode
        how = f"exited with code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        if not self._dump_file(rank).exists():
            guard = 'if __name__ == "__main__":'
            how += (
                f" while it imported the program (see what it printed); what starts ranks has to stand under `{guard}`"
            )
        else:
            how += " before it returned"
        return Reply(rank, error=f"the process {how}", moment=time.monotonic())

    def _fail(self, replies: dict[int, Reply]) -> None:
        """Give the other ranks a moment to report, kill all, and raise the failure that came first."""
        end = time.monotonic() + _GRACE_S
        while len(replies) < self.world_size and time.monotonic() < end:
            if any(reply.trace and not reply.peer_fault for reply in replies.values()):
                end = min(end, time.monotonic() + _GRACE_REAL_S)
            self._collect(replies, end - time.monotonic())
        failures = [reply for reply in replies.values() if reply.result is None]
        first = min(failures, key=lambda reply: (reply.peer_fault, reply.moment))
        message = f"rank {first.rank} of {self.world_size} failed: {first.error}"
        others = [f"rank {reply.rank}: {reply.error}" for reply in failures if reply.peer_fault and reply is not first]
        if others:
            message += "\nWhat the ranks waiting for it saw:\n" + "\n".join(others)
        if first.trace:
            message += f"\n\n{first.trace.rstrip()}"
        silent = set(range(self.world_size)) - set(replies)
        if silent and (first.peer_fault or not first.trace):  # they may be what the others waited for
            message += "\n" + self._stacks(silent)
        self.kill()
        raise RankError(message, first.rank, first.trace) from unpickled(first.exception)

    def _stacks(self, ranks: set[int]) -> str:
        """The Python stack each of these ranks is in; they must be alive."""
        for rank in ranks:
            with contextlib.suppress(OSError):
                os.kill(self.pids[rank], signal.SIGUSR1)
        time.sleep(0.3)
        texts = []
        for rank in sorted(ranks):
            file = self._dump_file(rank)
            texts.append(f"rank {rank} was here:\n{file.read_text() if file.exists() else '(still starting)'}")
        return "\n".join(texts)

    def _dump_file(self, rank: int) -> Path:
        return Path(self._dumps.name) / f"rank{rank}.txt"

    def finish(self) -> None:
        """Let ranks that have returned leave by themselves, so that their exit handlers run."""
        for pipe in self._pipes:
            pipe.close()
        end = time.monotonic() + _EXIT_S
        for process in self.processes:
            process.join(max(end - time.monotonic(), 0.0))

    def kill(self) -> None:
        """Kill every rank and what it started; returns when all are gone. Safe to call twice."""
        for process in self.processes:
            for kill in (os.killpg, os.kill):  # a rank leads its own process group once it is up
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    if process.pid is not None and process.exitcode is None:
                        kill(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._dumps.cleanup()

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


# ---- around the start --------------------------------------------------------------------------------------


def _check_can_start(target: Callable[..., Any] | str | Path) -> None:
    """RuntimeError where ranks could not import the program that starts them, or the function that they are to run."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    named = getattr(target, "__module__", None) == "__main__"
    if (file is None and named) or (file or "").startswith("<"):
        raise RuntimeError(
            f"launch: {target!r} is to run, but ranks cannot import a program without a file (a prompt, a pipe, -c, a notebook); put the "
            "function into a file and import it from there, or use simulate_ranks, which needs no other processes."
        )


def _loopback_store() -> tuple[TCPStore, int]:
    """A store and its port, on 127.0.0.1 only; by itself TCPStore listens on every interface."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    port = int(listener.getsockname()[1])
    descriptor = listener.detach()  # the store owns it from here
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor), port


def _rank_env(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun sets, for one node; one thread per rank, and gloo on the loopback device."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is the parent's: rank 0 must not host another
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }


@contextlib.contextmanager
def _environment(extra: Mapping[str, str]) -> Iterator[None]:
    """``os.environ`` with ``extra`` while a process starts: torch reads it on import, before our code runs."""
    before = {name: os.environ.get(name) for name in extra}
    os.environ.update(extra)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _stop_signals_held() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until a rank is started and noted down; the rank inherits the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """SIGTERM unwinds the caller like Ctrl-C does, unless it has a handler or is not the main thread."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
