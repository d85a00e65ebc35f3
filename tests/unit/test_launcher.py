"""The local launcher: results, failures that name the rank, and no process left behind, whatever happens."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from moecompile.runtime.launcher import RankError, RankPool, launch
from moecompile.runtime.rank_process import _sent

ROOT = Path(__file__).resolve().parents[2]


def sum_of_ranks(rank: int, start: int) -> tuple[int, float, int]:
    total = torch.tensor(float(start + rank))
    dist.all_reduce(total)
    return rank, float(total), torch.get_num_threads()


def raise_on_rank_1(rank: int) -> None:
    if rank == 1:
        raise ValueError("boom on purpose")
    dist.barrier()


def die_on_rank_0(rank: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def wait_for_ever(rank: int) -> None:
    if rank == 1:
        time.sleep(600)


def process_id(rank: int) -> int:
    return os.getpid()


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(pids: list[int], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not all(map(gone, pids)):
        assert time.monotonic() < end, f"still alive: {[pid for pid in pids if not gone(pid)]}"
        time.sleep(0.05)


@pytest.mark.timeout(60)
def test_results_come_in_rank_order_from_one_process_group() -> None:
    results = launch(sum_of_ranks, 2, 10, timeout=50)
    assert results == [(0, 21.0, 1), (1, 21.0, 1)]


@pytest.mark.timeout(60)
def test_an_error_on_one_rank_ends_the_run_with_its_own_traceback() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 of 2 failed: ValueError: boom on purpose") as caught:
        launch(raise_on_rank_1, 2)
    assert time.monotonic() - start < 30  # the other rank would wait in its barrier for minutes
    assert caught.value.rank == 1
    assert "in raise_on_rank_1" in caught.value.rank_traceback
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.timeout(60)
def test_a_killed_rank_is_named_and_not_the_ranks_that_waited_for_it() -> None:
    with pytest.raises(RankError, match="rank 0 of 2 failed: the process was killed by SIGKILL") as caught:
        launch(die_on_rank_0, 2)
    assert caught.value.rank == 0
    assert "What the ranks waiting for it saw:\nrank 1: " in str(caught.value)


@pytest.mark.timeout(60)
def test_a_hang_ends_at_the_timeout() -> None:
    with pytest.raises(TimeoutError, match="of 2 did not return within 2 s, and all ranks were stopped"):
        launch(wait_for_ever, 2, timeout=2)


@pytest.mark.timeout(60)
def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(TypeError, match="use a function at module level"):
        launch(lambda rank: None, 1)


def test_a_result_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(TypeError, match=r"what wait_for_ever returns cannot be sent back.*plain data"):
        _sent(wait_for_ever, lambda: None)


def test_a_program_without_a_file_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", "<stdin>", raising=False)
    with pytest.raises(RuntimeError, match=r"without a file.*import it from there, or use simulate_ranks"):
        launch(wait_for_ever, 2)
    monkeypatch.delattr(main, "__file__")
    monkeypatch.setattr(wait_for_ever, "__module__", "__main__")
    with pytest.raises(RuntimeError, match="without a file"):
        RankPool(2).run(wait_for_ever)


@pytest.mark.parametrize("size", [0, -1, 2.5, "2", None])
def test_a_number_of_ranks_that_is_none(size: Any) -> None:
    with pytest.raises(ValueError, match="a whole number of at least one rank"):
        launch(wait_for_ever, size)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_program_that_starts_ranks_on_import_is_told_of_the_guard(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("from math import sqrt\nfrom moecompile.runtime.launcher import launch\nlaunch(sqrt, 1)\n")
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=50)
    assert 'has to stand under `if __name__ == "__main__":`' in found.stderr


@pytest.mark.timeout(60)
def test_a_script_runs_under_torchruns_environment(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, pathlib\n"
        "import torch.distributed as dist\n"
        "if __name__ == '__main__':\n"
        "    dist.init_process_group('gloo')\n"
        "    out = pathlib.Path(sys.argv[1]) / f'{dist.get_rank()}.txt'\n"
        "    out.write_text(f\"{os.environ['LOCAL_RANK']} of {dist.get_world_size()}\")\n"
        "    dist.barrier()\n"
        "    sys.exit(3 if sys.argv[2] == 'fail' and dist.get_rank() == 1 else 0)\n"
    )
    assert launch(script, 2, tmp_path, "work", timeout=50) == [None, None]
    assert (tmp_path / "0.txt").read_text() == "0 of 2"
    assert (tmp_path / "1.txt").read_text() == "1 of 2"
    with pytest.raises(RankError, match="rank 1 of 2 failed: SystemExit: 3"):
        launch(script, 2, tmp_path, "fail", timeout=50)


PARENT = """
import os, time
from pathlib import Path
from moecompile.runtime.launcher import launch

def work(rank, folder):
    (Path(folder) / f"{rank}.tmp").write_text(str(os.getpid()))
    (Path(folder) / f"{rank}.tmp").rename(Path(folder) / f"{rank}.pid")
    time.sleep(600)

if __name__ == "__main__":
    launch(work, 2, os.path.dirname(__file__))
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL],
    ids=lambda n: n.name,
)
def test_a_signal_to_the_parent_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A suite that runs in the background ignores Ctrl-C, and what it starts would inherit that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
    )
    files = [tmp_path / f"{rank}.pid" for rank in range(2)]
    while not all(file.exists() for file in files):
        assert parent.poll() is None, parent.stderr.read() if parent.stderr else ""
        time.sleep(0.05)
    everyone = [parent.pid, *[child.pid for child in psutil.Process(parent.pid).children(recursive=True)]]
    assert {int(file.read_text()) for file in files} < set(everyone)
    if number == signal.SIGINT:  # a terminal sends Ctrl-C to everyone in the foreground
        os.killpg(parent.pid, number)
    else:
        parent.send_signal(number)
    _, said = parent.communicate(timeout=15)
    wait_until_gone(everyone)
    assert parent.returncode != 0
    # Only the parent may speak of the interruption, once.
    assert said.count("Traceback") <= (1 if number == signal.SIGINT else 0), said


@pytest.mark.timeout(90)
def test_a_pool_keeps_its_ranks_until_a_call_fails() -> None:
    with RankPool(2, timeout=40) as pool:
        first = pool.run(process_id)
        assert pool.run(sum_of_ranks, 1) == [(0, 3.0, 1), (1, 3.0, 1)]
        assert pool.run(process_id) == first == pool.pids
        with pytest.raises(RankError, match="rank 1 of 2 failed: ValueError"):
            pool.run(raise_on_rank_1)
        wait_until_gone(first)
        second = pool.run(process_id)
        assert not set(first) & set(second)
        with pytest.raises(TimeoutError, match="rank 1 of 2 did not return within 1 s") as hang:
            pool.run(wait_for_ever, timeout=1)
        assert "in wait_for_ever" in str(hang.value)
        wait_until_gone(second)
        assert pool.pids == []
    assert pool.pids == []
