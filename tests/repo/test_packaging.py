"""However the package arrives, Python and type checkers find `moecompile.passes` and `moecompile.runtime`.

Every test works on a copy of the checkout, from another directory, so that nothing is found by accident.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUBPACKAGES = ("passes", "runtime")

# Prints where the three packages were found; run in a process of its own and in a spawned child of it.
WHERE = """
import multiprocessing
import moecompile, moecompile.passes, moecompile.runtime

def where():
    return [m.__file__ for m in (moecompile, moecompile.passes, moecompile.runtime)]

def child(queue):
    queue.put(where())

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    process.join()
    print("\\n".join(where() + queue.get()))
"""

USER_CODE = """
import moecompile.passes
import moecompile.runtime
from moecompile import Plan
from moecompile.mesh import Mesh

size: int = Mesh(Plan(dp=2)).world_size
wrong: str = Mesh(Plan(dp=2)).world_size
"""


def run(*command: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**clean, **env},
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done


def output(*command: str | Path, cwd: Path, **env: str) -> str:
    done = run(*command, cwd=cwd, **env)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of what packaging reads, symlinks kept as symlinks."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("moecompile", *SUBPACKAGES):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture
def elsewhere(tmp_path) -> Path:
    """A directory that holds only the user's script."""
    (tmp_path / "where.py").write_text(WHERE)
    (tmp_path / "user_code.py").write_text(USER_CODE)
    return tmp_path


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory) -> Path:
    # Built from a copy of its own: setuptools leaves a build directory behind.
    source = tmp_path_factory.mktemp("wheel-source") / "src"
    shutil.copytree(checkout, source, symlinks=True)
    target = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", target, source)
    output(*pip, cwd=target)
    return next(target.glob("moecompile-*.whl"))


def fresh_python(folder: Path) -> Path:
    """A new environment that sees the packages of this one, but not this one's editable installs."""
    venv.create(folder, symlinks=True)
    site = next((folder / "lib").glob("python3*/site-packages"))
    (site / "parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def install(python: Path, *what: str | Path) -> None:
    options = ("--no-deps", "--no-build-isolation", "--ignore-installed", "--no-index")
    output(sys.executable, "-m", "pip", "--python", python, "install", *options, *what, cwd=python.parent)


def found_in(where: str) -> set[Path]:
    lines = where.split()
    assert len(lines) == 6, "three packages in the parent and three in the spawned child"
    assert lines[:3] == lines[3:]
    return {Path(line) for line in lines}


def test_symlinks_are_relative():
    for name in SUBPACKAGES:
        link = ROOT / "moecompile" / name
        assert link.is_symlink()
        assert os.readlink(link) == f"../{name}"


def test_package_map_and_packages_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    mapped = project["tool"]["setuptools"]["package-dir"]
    assert mapped == {"moecompile": "moecompile"} | {f"moecompile.{name}": name for name in SUBPACKAGES}
    # A folder of modules without __init__.py works from a checkout and is missing from a wheel.
    for name in ("moecompile", *SUBPACKAGES):
        for path in (ROOT / name).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), path.parent


def test_uninstalled_checkout_and_spawned_process(checkout, elsewhere):
    found = found_in(output(sys.executable, "where.py", cwd=elsewhere, PYTHONPATH=str(checkout)))
    assert all(path.is_relative_to(checkout / "moecompile") for path in found)


@pytest.mark.slow
def test_editable_install(checkout, elsewhere):
    python = fresh_python(elsewhere / "env")
    install(python, "--editable", checkout)
    found = found_in(output(python, "where.py", cwd=elsewhere))
    assert all(path.resolve().is_relative_to(checkout) for path in found)


@pytest.mark.slow
def test_wheel_holds_every_module_once(wheel):
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    modules = set()
    for folder in ("moecompile", *SUBPACKAGES):
        prefix = Path("moecompile") if folder in SUBPACKAGES else Path()
        modules |= {str(prefix / path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py")}
    assert sorted(name for name in names if name.endswith(".py")) == sorted(modules)
    assert {"moecompile/py.typed", "moecompile/__init__.pyi"} <= set(names)
    assert all(name.startswith("moecompile/") for name in names)


@pytest.mark.slow
def test_installed_wheel(wheel, elsewhere):
    python = fresh_python(elsewhere / "env")
    install(python, wheel)
    found = found_in(output(python, "where.py", cwd=elsewhere))
    assert all(path.is_relative_to(elsewhere / "env") for path in found)
    assert (elsewhere / "env" / "bin" / "moecompile").exists()


def check_user_code(done: subprocess.CompletedProcess[str]) -> None:
    """The packages resolve and their types are read: the one deliberate mistake is the only error."""
    errors = [line for line in done.stdout.splitlines() if "error" in line and "user_code.py" in line]
    assert len(errors) == 1, done.stdout + done.stderr
    assert "user_code.py:8" in errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("arrival", ["checkout", "wheel"])
def test_mypy_resolves(arrival, checkout, wheel, elsewhere):
    mypy = (sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir", elsewhere)
    if arrival == "checkout":
        check_user_code(run(*mypy, "user_code.py", cwd=elsewhere, MYPYPATH=str(checkout)))
    else:
        python = fresh_python(elsewhere / "env")
        install(python, wheel)
        check_user_code(run(*mypy, "--python-executable", python, "user_code.py", cwd=elsewhere))


@pytest.mark.slow
@pytest.mark.parametrize("arrival", ["checkout", "wheel"])
def test_pyright_resolves(arrival, checkout, wheel, elsewhere):
    if arrival == "checkout":
        config = f'{{"extraPaths": ["{checkout}"], "include": ["user_code.py"]}}'
        python = Path(sys.executable)
    else:
        config = '{"include": ["user_code.py"]}'
        python = fresh_python(elsewhere / "env")
        install(python, wheel)
    (elsewhere / "pyrightconfig.json").write_text(config)
    check_user_code(run(sys.executable, "-m", "pyright", "--pythonpath", python, cwd=elsewhere))
