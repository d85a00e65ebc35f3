"""`import moecompile` is light, and every public name is there when asked for."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import moecompile

ROOT = Path(__file__).resolve().parents[2]


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_and_plans_need_no_torch():
    heavy = run(
        "import sys, moecompile, moecompile.mesh\n"
        "moecompile.mesh.Mesh(moecompile.Plan(dp=4, ep=2)).groups('ep')\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "print(loaded & {'torch', 'numpy', 'sympy', 'rich', 'matplotlib'})"
    )
    assert heavy == "set()"


def test_import_is_small():
    """Counts modules instead of seconds, which depend on the load of the machine."""
    before, after = run(
        "import sys; before = len(sys.modules)\nimport moecompile\nprint(before, len(sys.modules))"
    ).split()
    assert int(after) - int(before) < 30


def test_every_public_name_loads():
    for name in moecompile.__all__:
        value = getattr(moecompile, name)
        assert callable(value), name
    assert set(moecompile.__all__) <= set(dir(moecompile))


def test_public_names_survive_the_import_of_a_submodule_of_that_name():
    """Importing `moecompile.verify` binds the module on the package unless the package refuses."""
    for name in moecompile.__all__:
        if (ROOT / "moecompile" / f"{name}.py").exists():
            importlib.import_module(f"moecompile.{name}")
            assert callable(getattr(moecompile, name)), name


def test_unknown_name_is_an_attribute_error():
    assert not hasattr(moecompile, "no_such_name")


def test_stub_and_table_say_the_same():
    """Type checkers read `__init__.pyi`, Python reads the table of `__init__.py`."""
    tree = ast.parse((ROOT / "moecompile" / "__init__.pyi").read_text())
    stub = {alias.asname: node.module for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    table = {name: f"moecompile.{module}" for name, module in moecompile._DEFINED_IN.items()}
    assert stub == table
