"""The demo as a user starts it: equal losses, a hard failure when they differ, and nothing left behind."""

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from moecompile import api, flops
from moecompile.demo import Settings, corpus
from moecompile.demo.layer_text import layer_text
from moecompile.demo.run import TOLERANCE
from moecompile.errors import PlanError
from moecompile.plan import Plan
from tests.unit.test_cli import tiny

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--model", "module-list", "--plan", "dp=2,ep=2", "--batch", "4", "--seq-len", "16"]


def start(*argv: str) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "moecompile", "demo", *SMALL, *argv]
    # A suite that runs in the background ignores Ctrl-C, and what it starts would inherit that.
    listen = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(
        command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=listen
    )


def wait_for_step(process: subprocess.Popen[str], number: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if re.match(rf"step +{number} ", line):
            return
    raise AssertionError(f"the demo ended before step {number}: {process.stderr.read() if process.stderr else ''}")


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive, f"left behind: {alive}"


def test_a_short_run(tmp_path):
    process = start("--steps", "12", "--out", str(tmp_path))
    told, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    steps = re.findall(r"step +(\d+)  loss ([\d.]+)  one process ([\d.]+)  difference ([\d.e+-]+)", told)
    assert [int(step) for step, *_ in steps] == list(range(12))
    assert all(float(gap) <= TOLERANCE[torch.float64] for *_, gap in steps)
    losses = [float(loss) for _, loss, *_ in steps]
    assert sum(losses[-4:]) < sum(losses[:4]), "training lowers the loss"
    for wanted in (
        "tokens/s a rank",
        "MFU",
        "tokens per expert",
        "moe.dispatch",
        "moe.combine",
        "equal to one process",
    ):
        assert wanted in told
    assert (tmp_path / "loss.png").stat().st_size > 1000


def test_a_difference_ends_the_run(tmp_path):
    """Gradients that no rank reduces: the first step agrees, the second does not."""
    plan = tmp_path / "plan.toml"
    passes = "recognize-moe,record-metrics,shard-dense,shard-experts,insert-dispatch,differentiate,sync-loss,lower-ops"
    plan.write_text(f'dp = 2\nep = 2\npasses = "{passes}"\n')
    process = start("--steps", "4", "--plan", str(plan), "--out", str(tmp_path))
    told, errors = process.communicate(timeout=200)
    assert process.returncode == 2, told
    assert re.search(r"at step [123] the loss is .* on 2 ranks and .* in one process", errors)
    assert "Traceback" not in errors


def test_ctrl_c_leaves_no_process():
    process = start("--steps", "100000", "--no-reference")
    wait_for_step(process, 1)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    asked = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - asked < 15
    assert process.returncode == 130, errors
    assert "no process is left" in errors
    assert_gone(children)


@pytest.mark.slow  # the launcher's own tests have it every time
def test_a_dying_rank_ends_the_run_at_once():
    process = start("--steps", "100000", "--no-reference")
    wait_for_step(process, 1)
    children = psutil.Process(process.pid).children(recursive=True)
    ranks = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    assert len(ranks) == 2
    killed = time.monotonic()
    ranks[1].kill()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - killed < 20
    assert process.returncode == 2
    assert re.search(r"rank \d of 2 failed: the process was killed by SIGKILL", errors)
    assert_gone(children)


# ---- its parts -----------------------------------------------------------------------------------------------


def test_the_text_depends_on_the_step_alone():
    text = corpus.load(max_bytes=100_000)
    assert text.numel() == 100_000
    assert text.dtype == torch.uint8
    whole = corpus.windows(text, 3, 8, 16)
    assert whole.shape == (8, 17)
    assert torch.equal(whole, corpus.windows(text, 3, 8, 16))
    assert not torch.equal(whole, corpus.windows(text, 4, 8, 16))
    again = torch.cat([corpus.windows(text, 6, 4, 16), corpus.windows(text, 7, 4, 16)])
    assert torch.equal(whole, again), "the place in the text is counted in rows, whatever the batch is"


def test_flops_of_a_linear_model_and_its_backward():
    """A plain product: forward one matmul, backward two, each 2 * rows * in * out."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 4, bias=False))
    plan = Plan(dp=1, passes="recognize-moe,shard-dense,differentiate")
    program = api.trace(model, plan, (torch.ones(5, 8),), loss_fn=lambda out, x: out.sum())
    first, second = 2 * 5 * 8 * 16, 2 * 5 * 16 * 4
    assert flops.count(program) == 2 * first + 3 * second  # the input needs no gradient


def test_flops_of_experts_count_each_row_once():
    model = tiny()
    call = {"input_ids": torch.zeros(2, 8, dtype=torch.long), "labels": torch.zeros(2, 8, dtype=torch.long)}
    plan = Plan(dp=1, passes="recognize-moe,shard-dense,shard-experts")
    program = api.trace(model, plan, call)
    tokens, width = 16, 16
    dense = 2 * tokens * width * (3 * width + width + 4 + 32)  # qkv, out, gate, head
    experts = 2 * (tokens * 2) * width * 8 * 2
    attention = 2 * 2 * 2 * 2 * 8 * 8 * 8  # two products, B = 2, two heads of 8, 8 x 8 places
    assert flops.count(program) == dense + experts + attention


def test_a_batch_that_cannot_be_cut():
    with pytest.raises(PlanError, match="use --batch 4"):
        Settings(plan=Plan(dp=4, ep=4), batch=6).job()


@pytest.mark.skipif(torch.cuda.device_count() >= 4, reason="this machine has the GPUs")
def test_gpus_that_are_not_there():
    with pytest.raises(PlanError, match="needs 4 GPUs"):
        Settings(device="cuda").job()


def test_layer_text_names_what_moves():
    call = {"input_ids": torch.zeros(2, 8, dtype=torch.long), "labels": torch.zeros(2, 8, dtype=torch.long)}
    plan = Plan(dp=2, ep=2, passes="recognize-moe,shard-dense,shard-experts,insert-dispatch")
    text = layer_text(api.trace(tiny(), plan, call))
    assert text.startswith("# blocks.0.moe, the same text on all 2 ranks")
    (dispatch,) = [line for line in text.splitlines() if line.startswith("dispatch = ")]
    assert re.fullmatch(
        r"dispatch = moe\.dispatch\(rows, send, recv, \w+, 'ep'\)  # f32\[u\d+, 16\]  V@ep  moves 2048 B", dispatch
    )
    assert re.search(r"^tokens_per_expert = permute\w*\[1\]  # i64\[4\]  P@dp$", text, re.MULTILINE)
