"""The examples run, the plain ones know nothing of ranks, and what the documents show is what happens."""

import ast
import contextlib
import importlib.util
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PLAIN = ["qwen3_moe_plain", "module_list_experts"]
README = ROOT / "README.md"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def output_of(name: str, ranks: int, *argv: str) -> list[str]:
    """The lines ``step ...`` that an example prints, in one process or on several local ranks."""
    path = str(ROOT / "examples" / f"{name}.py")
    start = f"from moecompile.launch import launch\nlaunch({path!r}, {ranks}, *{list(argv)!r}, timeout=200)"
    # A file, because ranks import the main module of their parent.
    command = [sys.executable, path, *argv] if ranks == 1 else [sys.executable, "-c", start]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    found = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=280)
    assert found.returncode == 0, found.stderr[-3000:]
    return [line for line in found.stdout.splitlines() if line.startswith("step ")]


def numbers(lines: list[str]) -> list[list[float]]:
    return [[float(word) for word in re.findall(r"\d+\.\d+", line)] for line in lines]


@pytest.mark.parametrize("name", PLAIN)
def test_plain_models_know_nothing_of_ranks(name):
    source = (ROOT / "examples" / f"{name}.py").read_text()
    code = source.split('"""', 2)[2]
    assert "moecompile" not in code
    assert "distributed" not in code


@pytest.mark.parametrize("name", PLAIN)
def test_plain_models_train_alone(name, capsys):
    load(name).main(steps=6)
    losses = [row[0] for row in numbers(capsys.readouterr().out.splitlines())]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.3


def test_the_size_that_is_promised():
    parameters = sum(parameter.numel() for parameter in load("qwen3_moe_plain").build().parameters())
    assert 3e6 < parameters < 5e6


@pytest.mark.parametrize(
    ("name", "argv"),
    [
        pytest.param("train", ("--steps", "3"), id="train", marks=pytest.mark.slow),
        pytest.param("hf_mixtral", (), id="hf_mixtral", marks=pytest.mark.slow),
        pytest.param("hf_trainer", (), id="hf_trainer", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_print_what_one_process_prints(name, argv):
    if name.startswith("hf"):
        pytest.importorskip("transformers")
    alone, two = numbers(output_of(name, 1, *argv)), numbers(output_of(name, 2, *argv))
    assert len(alone) >= 3
    for ours, theirs in zip(two, alone, strict=True):
        # float32, and AdamW divides small gradients by their own size
        assert ours == pytest.approx(theirs, rel=2e-4)


# ---- documents -----------------------------------------------------------------------------------------------


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="other releases trace some ops differently")
def test_readme_shows_the_example_and_what_it_prints():
    """To refresh: python tests/repo/test_examples.py"""
    assert README.read_text() == fresh_readme(), "run: python tests/repo/test_examples.py"


def fresh_readme() -> str:
    """README.md with the example's source and its output put in."""
    source = (ROOT / "examples" / "readme_example.py").read_text().split('"""', 2)[2]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / "readme_example.py")]
    printed = subprocess.run(command, env=env, text=True, capture_output=True, check=True, timeout=120).stdout
    text = README.read_text()
    for name, content in (("example", source), ("output", printed)):
        start, end = f"<!-- {name} -->\n```python\n", f"```\n<!-- end of {name} -->"
        before, rest = text.split(start)
        text = before + start + content.strip() + "\n" + end + rest.split(end)[1]
    before, rest = text.split("<!-- files -->\n")
    return f"{before}<!-- files -->\n{file_map()}\n<!-- end of files -->{rest.split('<!-- end of files -->')[1]}"


FOLDERS = {
    "moecompile": "the compiler: plan, graph, pipeline, verifier, printer, public functions, command line",
    "passes": "one rewrite per file (import name `moecompile.passes`)",
    "runtime": "what executes (import name `moecompile.runtime`)",
    "examples": "runnable programs",
    "benchmarks": "measurements, each printing what it compares",
}


def file_map() -> str:
    """One line per file of the product, from the first sentence of its docstring."""
    lines = []
    for folder, what in FOLDERS.items():
        lines += ["", f"**`{folder}/`** {what}", "", "| file | what it is |", "|---|---|"]
        for path in sorted((ROOT / folder).iterdir()):
            module = path / "__init__.py" if path.is_dir() else path
            if module.suffix == ".py" and module.is_file() and not path.is_symlink() and path.name != "__init__.py":
                name = f"{path.name}/" if path.is_dir() else path.name
                lines.append(f"| [`{name}`]({folder}/{path.name}) | {first_sentence(module)} |")
    return "\n".join(lines[1:])


def first_sentence(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    sentence = " ".join(docstring.split("\n\n")[0].split())
    assert sentence, f"{path} has no docstring"
    return re.split(r"(?<=\.) ", sentence)[0].replace("``", "`").replace("|", "\\|")


def test_the_tutorial_runs():
    code = blocks((ROOT / "docs" / "writing_passes.md").read_text(), "python")
    assert len(code) == 2
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        exec("\n".join(code), {"__name__": "tutorial"})
    first, _, diff = told.getvalue().partition("\n")
    assert first == "1"
    assert re.search(r"^-.*reshape\.default\(x, \[-1\]\)", diff, re.MULTILINE)
    assert re.search(r"^\+.*reshape\.default\(x, \[2, ", diff, re.MULTILINE)


def test_links_of_the_documents_lead_somewhere():
    for page in [README, *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


if __name__ == "__main__":
    README.write_text(fresh_readme())
