"""What runs inside a rank that the launcher started.

It takes a task, answers with a result or an error, and does not outlive its parent.  This module, and nothing of
the parent's side, is what a fresh rank imports first.
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

# Held back from a rank until it can answer them its own way.
STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}


@dataclass(frozen=True)
class Task:
    """What a rank is to do: ``target`` is a function, called as ``target(rank, *args)``, or a script's path."""

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


@dataclass(frozen=True)
class Setup:
    """What a rank knows from its start. ``ends_with_thread``: its parent's thread lives as long as the parent."""

    rank: int
    world_size: int
    backend: str | None
    parent: int
    ends_with_thread: bool
    dump_file: str


def rank_main(pipe: Connection, setup: Setup) -> None:
    """A rank's life: set up, answer tasks until the parent closes the pipe, leave."""
    # A group of its own: the parent can kill the rank with everything it starts, and a terminal's Ctrl-C goes to
    # the parent alone.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    _die_with_parent(setup)
    threading.Thread(target=_watch_parent, args=(setup.parent,), daemon=True).start()
    with open(setup.dump_file, "w") as dump:
        faulthandler.register(signal.SIGUSR1, file=dump, all_threads=True)
        while True:
            try:
                payload = pipe.recv_bytes()
            except EOFError:
                break
            reply = _answer(payload, setup)
            sys.stdout.flush()
            sys.stderr.flush()
            # The parent may have gone, or stopped listening after another rank's failure.
            with contextlib.suppress(BrokenPipeError):
                pipe.send_bytes(pickle.dumps(reply))
    if dist.is_initialized():
        dist.destroy_process_group()


def _answer(payload: bytes, setup: Setup) -> Reply:
    """Run one task. Whatever it raises becomes a reply."""
    rank = setup.rank
    try:
        if setup.backend is not None and not dist.is_initialized():
            dist.init_process_group(setup.backend, rank=rank, world_size=setup.world_size, timeout=timedelta(minutes=5))
        task: Task = pickle.loads(payload)
        if isinstance(task.target, str):
            _run_script(task.target, task.args)
            result = None
        else:
            result = task.target(rank, *task.args)
        return Reply(rank, result=_sent(task.target, result))
    except BaseException as error:  # SystemExit and KeyboardInterrupt of user code included
        return Reply(
            rank,
            error=f"{type(error).__name__}: {error}",
            trace="".join(traceback.format_exception(error)),
            exception=_pickled(error),
            peer_fault=is_peer_fault(error),
            moment=time.monotonic(),
        )


def _sent(target: Any, result: Any) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:
        name = getattr(target, "__qualname__", target)
        raise TypeError(f"what {name} returns cannot be sent back ({error}); return plain data or tensors.") from error


def _run_script(path: str, args: Sequence[Any]) -> None:
    sys.argv = [path, *map(str, args)]
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as left:
        if left.code not in (None, 0):
            raise


def _die_with_parent(setup: Setup) -> None:
    """Let the kernel kill this process when its parent ends, at whatever point both are (Linux only)."""
    # The kernel means the thread that started us, which in a pool may end long before its process.
    if sys.platform == "linux" and setup.ends_with_thread:
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != setup.parent:  # it went while we started
        os._exit(1)


def _watch_parent(parent: int) -> None:
    """Look twice a second whether the parent lives, for where the kernel was not asked to tell."""
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
    """The exception in these bytes, None where there is none or its class cannot be found here."""
    try:
        found = pickle.loads(data) if data else None
    except Exception:
        return None
    return found if isinstance(found, BaseException) else None
