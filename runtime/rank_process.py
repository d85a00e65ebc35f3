"""What runs inside a rank that the launcher started: take a task, answer with a result or an error, follow the parent.

Apart from the launcher because this module, and nothing of the parent's side, is what a fresh rank imports first.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moecompile.runtime.faults import is_peer_fault


@dataclass(frozen=True)
class Task:
    """What a rank is asked to do: ``target`` is a function called as ``target(rank, *args)``, or the path of a script."""

    target: Callable[..., Any] | str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Reply:
    """What a rank sends back: a pickled result, or an error with the moment it happened."""

    rank: int
    result: bytes | None = None
    error: str = ""
    trace: str = ""
    exception: bytes | None = None
    peer_fault: bool = False
    moment: float = 0.0


def rank_main(pipe: Connection, rank: int, world_size: int, backend: str | None, parent: int, dump_file: str) -> None:
    """A rank's life: set up, answer tasks until the parent closes the pipe, leave."""
    os.setpgid(
        0, 0
    )  # so that the parent can kill the rank with everything it starts, and a terminal's Ctrl-C goes to the parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _die_with_parent(parent)
    threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    with open(dump_file, "w") as dump:
        faulthandler.register(signal.SIGUSR1, file=dump, all_threads=True)
        while True:
            try:
                payload = pipe.recv_bytes()
            except EOFError:
                break
            reply = _answer(payload, rank, world_size, backend)
            sys.stdout.flush()
            sys.stderr.flush()
            # The parent may have gone, or stopped listening after another rank's failure.
            with contextlib.suppress(BrokenPipeError):
                pipe.send_bytes(pickle.dumps(reply))
    if dist.is_initialized():
        dist.destroy_process_group()


def _answer(payload: bytes, rank: int, world_size: int, backend: str | None) -> Reply:
    """Run one task. Whatever it raises becomes a reply."""
    try:
        if backend is not None and not dist.is_initialized():
            dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timedelta(minutes=5))
        task: Task = pickle.loads(payload)
        if isinstance(task.target, str):
            _run_script(task.target, task.args)
            result = None
        else:
            result = task.target(rank, *task.args)
        return Reply(rank, result=pickle.dumps(result))
    except BaseException as error:  # SystemExit and KeyboardInterrupt of user code included
        return Reply(
            rank,
            error=f"{type(error).__name__}: {error}",
            trace="".join(traceback.format_exception(error)),
            exception=_pickled(error),
            peer_fault=is_peer_fault(error),
            moment=time.monotonic(),
        )


def _run_script(path: str, args: Sequence[Any]) -> None:
    sys.argv = [path, *map(str, args)]
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as left:
        if left.code not in (None, 0):
            raise


def _die_with_parent(parent: int) -> None:
    """Linux: the kernel kills this process when the thread that started it ends, at whatever point both are."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it went while we started
        os._exit(1)


def _watch_parent(parent: int) -> None:
    """Where the kernel does not tell (no prctl, or the starting thread ended), look twice a second whether the parent lives."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def _pickled(error: BaseException) -> bytes | None:
    """The exception as bytes, if it survives the round trip (classes with odd constructors do not)."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def unpickled(data: bytes | None) -> BaseException | None:
    try:
        found = pickle.loads(data) if data else None
    except Exception:  # the class may be importable in the rank only
        return None
    return found if isinstance(found, BaseException) else None
