"""The command line: what each subcommand prints, its exit codes, and one sentence for an error."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from moecompile.cli import main
from moecompile.cli.list_passes import markdown
from moecompile.cli.loading import load_example, load_model, load_plan
from moecompile.errors import CaptureError, PlanError
from moecompile.passes import ALL_PASSES
from moecompile.plan import Plan
from tests.support.models import Config, build

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = "input_ids=int64[2,8]<32,labels=int64[2,8]<32"
MODEL = "tests.unit.test_cli:tiny"


def tiny() -> nn.Module:
    """A language model with four experts in the ModuleList style, in a few thousand parameters."""
    sys.path.insert(0, str(ROOT / "examples"))
    from module_list_experts import LanguageModel

    torch.manual_seed(0)
    return LanguageModel(
        vocab_size=32, hidden_size=16, num_layers=1, num_heads=2, expert_size=8, num_experts=4, top_k=2, max_len=8
    )


def run(*argv: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """The command line as a process of its own, from the root of the checkout."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    command = [sys.executable, "-m", "moecompile", *argv]
    return subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=timeout)


@pytest.mark.parametrize("command", ["demo", "inspect", "passes", "verify"])
def test_help_has_an_example(command, capsys):
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    assert f"example:\n  moecompile {command}" in capsys.readouterr().out


def test_no_command_is_an_error(capsys):
    with pytest.raises(SystemExit) as left:
        main([])
    assert left.value.code == 2
    assert "command" in capsys.readouterr().err


# ---- passes --------------------------------------------------------------------------------------------------


def test_passes_lists_every_pass(capsys):
    assert main(["passes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [item["name"] for item in found] == [kind.name for kind in ALL_PASSES]
    assert all(item["sentence"].endswith(".") for item in found)
    dispatch = next(item for item in found if item["name"] == "insert-dispatch")
    assert dispatch["options"]["backend"] == "alltoall | allgather"
    assert "EXPERTS_SHARDED" in dispatch["requires"]
    assert dispatch["provides"] == ["TOKENS_DISPATCHED"]


def test_passes_as_a_table(capsys):
    assert main(["passes"]) == 0
    told = capsys.readouterr().out
    assert all(kind.name in told for kind in ALL_PASSES)


def test_the_page_of_passes_is_fresh():
    page = ROOT / "docs" / "passes.md"
    assert page.read_text() == markdown(), "run: python -m moecompile passes --markdown > docs/passes.md"


# ---- inspect -------------------------------------------------------------------------------------------------


def test_inspect_names_every_layer(capsys):
    assert main(["inspect", "--model", MODEL, "--example", EXAMPLE, "--dp", "2", "--ep", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (layer,) = found["layers"]
    assert layer["module"] == "blocks.0.moe"
    assert (
        layer["source"].startswith("examples/module_list_experts.py:") or "module_list_experts.py:" in layer["source"]
    )
    assert (layer["experts"], layer["experts_per_rank"], layer["top_k"]) == (4, 2, 2)
    assert layer["parameters"] == 4 * (16 * 8 + 8 + 8 * 16 + 16)
    assert found["passes"][0]["pass"] == "recognize-moe"
    assert found["world_size"] == 2


def neighbours() -> nn.Module:
    """A model with a line that no rank can compute by itself."""
    return build(Config("loop", layers=1, neighbour="added"))


def test_inspect_names_what_is_gathered(capsys):
    argv = [
        "inspect",
        "--model",
        "tests.unit.test_cli:neighbours",
        "--example",
        "ids=int64[2,4]<32,labels=int64[2,4]<32",
        "--dp",
        "2",
    ]
    assert main(argv) == 0
    told = capsys.readouterr().out
    assert "lines that run whole on every rank: 1, 1,536 bytes per step" in told
    assert "aten.roll.default  tests/support/models.py:" in told and "it runs along the batch" in told
    assert main([*argv, "--json"]) == 0
    (item,) = json.loads(capsys.readouterr().out)["gathers"]
    assert (item["op"], item["axis"], item["bytes_per_step"]) == ("aten.roll.default", "dp", 1536)
    assert main([*argv[:-2], "--plan", "dp=2,strict=true"]) == 2
    assert "strict=True" in capsys.readouterr().err


def described() -> nn.Module:
    """Routers of two kinds, shared experts, and a mixture that is no MoE layer."""
    from tests.support.described_model import Model

    return Model()


def test_inspect_describes_router_and_shared_experts(capsys):
    argv = [
        "inspect",
        "--model",
        "tests.unit.test_cli:described",
        "--example",
        "x=float32[8,8]",
        "--dp",
        "2",
        "--ep",
        "2",
    ]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    plain, grouped, dropping = found["layers"]
    assert plain["router"] == {
        "kind": "softmax", "where": "before top-k", "bias": False, "groups": 0, "normalized": True, "noise": False,
    }  # fmt: skip
    assert plain["shared_experts"] == [] and plain["capacity"] is None
    assert (grouped["router"]["kind"], grouped["router"]["bias"], grouped["router"]["groups"]) == ("sigmoid", True, 2)
    assert all(name.startswith("grouped.shared.") for name in grouped["shared_experts"]) and grouped["shared_experts"]
    assert (dropping["router"]["kind"], dropping["router"]["where"]) == ("softmax", "after top-k")
    assert dropping["capacity"] == 3
    (other,) = found["not_layers"]
    assert "stand side by side" in other["reason"] and ".py:" in other["source"]
    assert main(argv) == 0
    told = capsys.readouterr().out
    assert "router: softmax before top-k, renormalized; no shared experts; dropless" in told
    assert "router: sigmoid before top-k, 2 groups, selection bias; shared experts: grouped.shared; dropless" in told
    assert "router: softmax after top-k; no shared experts; capacity 3 tokens an expert" in told
    assert "no MoE layer, runs data-parallel: the 4 parts of mixture.experts.* stand side by side" in told


def test_inspect_says_what_is_refused(capsys):
    argv = [
        "inspect",
        "--model",
        "tests.support.moe_look_alikes:ShiftedRows",
        "--example",
        "x=float32[8,8]",
        "--ep",
        "2",
    ]
    assert main([*argv, "--dp", "2"]) == 2
    told = capsys.readouterr().err
    assert "moe_look_alikes.py:" in told and "routes tokens to experts, but" in told and "accepted forms" in told
    assert main([*argv, "--dp", "2", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)["refused"]
    assert re.fullmatch(r"tests/support/moe_\w+\.py:\d+", found["source"]) and "accepted forms" in found["reason"]


def test_inspect_without_an_example(capsys):
    assert main(["inspect", "--model", MODEL, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["layers"]) == 1
    assert main(["inspect", "--model", "tests.support.moe_look_alikes:ShiftedRows"]) == 2
    assert "--example is needed: ShiftedRows.forward(x: " in capsys.readouterr().err


def test_inspect_in_words_and_the_program(capsys):
    assert main(["inspect", "--model", MODEL, "--example", EXAMPLE, "--plan", "dp=2,ep=2", "--print"]) == 0
    told = capsys.readouterr().out
    assert "1 MoE layers; Plan(dp=2, ep=2): 2 ranks" in told
    assert "4 experts, 2 a rank, top-2" in told
    assert "torch.ops.moe.dispatch" in told


# ---- verify --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_verify_passes_and_fails(tmp_path):
    """Equal as it is; without the reduction of gradients the exit code and the table say so."""
    right = run("verify", "--model", MODEL, "--example", EXAMPLE, "--dp", "2", "--ep", "2", "--json")
    assert right.returncode == 0, right.stderr
    found = json.loads(right.stdout)
    assert found["ok"] is True
    assert {row["kind"] for row in found["rows"]} == {"loss", "gradient", "norm", "weight"}
    assert max(row["error"] for row in found["rows"]) < 1e-9

    plan = tmp_path / "plan.toml"
    passes = "recognize-moe,shard-dense,shard-experts,insert-dispatch,differentiate,sync-loss,lower-ops"
    plan.write_text(f'dp = 2\nep = 2\npasses = "{passes}"\n')
    wrong = run("verify", "--model", MODEL, "--example", EXAMPLE, "--plan", str(plan), "--json")
    assert wrong.returncode == 1, wrong.stderr
    rows = json.loads(wrong.stdout)["rows"]
    bad = {row["name"] for row in rows if row["kind"] == "gradient" and row["error"] > 1e-9}
    assert "head.weight" in bad
    assert not any("experts" in name for name in bad), "expert gradients need no reduction when edp is 1"


# ---- words to values -----------------------------------------------------------------------------------------


def test_plan_from_words_and_files(tmp_path):
    assert load_plan("dp=4,ep=2", {}) == Plan(dp=4, ep=2)
    assert load_plan("dp=4,ep=2,dispatch=allgather,strict=true", {"ep": 4}) == Plan(
        dp=4, ep=4, dispatch="allgather", strict=True
    )
    file = tmp_path / "plan.toml"
    file.write_text(Plan(dp=8, ep=4).to_toml())
    assert load_plan(str(file), {"dp": None}) == Plan(dp=8, ep=4)
    assert load_plan(None, {"dp": 2, "ep": None}) == Plan(dp=2)
    with pytest.raises(PlanError, match="neither a file nor fields"):
        load_plan("fast", {})
    with pytest.raises(PlanError, match="no field 'de'"):
        load_plan("de=4", {})


def test_example_from_a_spec():
    found = load_example("input_ids=int64[2, 8]<5, x=float32[3], mask=bool[2,8]")
    assert {name: (tuple(item.shape), item.dtype) for name, item in found.items()} == {
        "input_ids": ((2, 8), torch.int64),
        "x": ((3,), torch.float32),
        "mask": ((2, 8), torch.bool),
    }
    assert found["input_ids"].max() < 5
    with pytest.raises(CaptureError, match="input_ids=int64"):
        load_example("input_ids=[2,8]")
    with pytest.raises(CaptureError, match="one of int64"):
        load_example("input_ids=int3[2,8]")


def test_models_that_are_none():
    assert isinstance(load_model(MODEL), nn.Module)
    with pytest.raises(CaptureError, match=r"package\.module:name"):
        load_model("model")
    with pytest.raises(CaptureError, match="importing nowhere failed"):
        load_model("nowhere:build")
    with pytest.raises(CaptureError, match="has no 'nothing'"):
        load_model("moecompile.plan:nothing")
    with pytest.raises(CaptureError, match="gave a Plan"):
        load_model("moecompile.plan:Plan")


def test_errors_are_one_sentence(capsys):
    argv = ["inspect", "--model", MODEL, "--example", EXAMPLE, "--dp", "3", "--ep", "3"]
    assert main(argv) == 2
    told = capsys.readouterr().err
    assert told.startswith("moecompile inspect: ")
    assert "ep must divide the 4 experts" in told or "4 experts" in told
    assert "Traceback" not in told
    assert main([*argv, "--traceback"]) == 2
    assert "Traceback" in capsys.readouterr().err
