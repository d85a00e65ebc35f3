"""The rows of the package: a file imports from its own row or a lower one, without cycles.

Table-driven and by name: the row of `moecompile.ops.routing` is the row of `ops`.  A name that is not in the
table joins others (row 8), so a new low-level module fails here as soon as somebody below row 8 imports it.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

import moecompile

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "moecompile"

ROW = {
    **dict.fromkeys(["errors", "compat", "fields"], 0),
    **dict.fromkeys(["plan_fields", "layout", "timeline", "timeline_figure", "published", "plan", "mesh", "cost"], 1),
    **dict.fromkeys(["ops", "meta"], 2),
    **dict.fromkeys(["graph", "draws", "printer", "placement", "tracing", "program", "stages", "flops"], 3),
    "pass_base": 4,
    **dict.fromkeys(["verify", "capture", "recognition"], 5),
    "pipeline": 6,
    **dict.fromkeys(["passes", "runtime"], 7),
}
TOP_ROW = 8

NO_TORCH = {"errors", "plan_fields", "layout", "timeline", "published", "plan", "mesh", "cost"}
OPTIONAL = {"transformers", "peft", "accelerate", "transformer_engine", "deep_ep", "triton"}
# Documented in torch's reference under a private-looking name.
PUBLIC_ALL_THE_SAME = {"torch._check"}
APART = {("passes", "runtime"), ("runtime", "passes")}


@dataclass(frozen=True)
class Import:
    """One import: `module` is absolute, `names` what is taken from it, `top` whether it is unindented."""

    module: str
    names: tuple[str, ...]
    top: bool
    line: int


def files() -> dict[str, Path]:
    """Every product module by import name.  The real directories are read, not the symlinks to them."""
    found: dict[str, Path] = {}
    for folder, prefix in ((PACKAGE, ()), ("passes", (PACKAGE,)), ("runtime", (PACKAGE,))):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if prefix == () and len(parts) > 1 and parts[1] in ("passes", "runtime"):
                continue  # seen through a symlink
            names = prefix + parts
            found[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return found


FILES = files()
# `moecompile/__init__.py` names submodules as text; its stub says the same to type checkers.
CHECKED = [name for name in FILES if name != PACKAGE]


def part(module: str) -> str:
    """`moecompile.ops.routing` -> `ops`, what the table knows."""
    return module.split(".")[1]


def row(module: str) -> int:
    return ROW.get(part(module), TOP_ROW)


def imports(module: str) -> list[Import]:
    return imports_of(FILES[module].read_text(), module, FILES[module].name == "__init__.py")


def imports_of(source: str, module: str, is_package: bool) -> list[Import]:
    tree = ast.parse(source)
    top = set(tree.body)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, (), node in top, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            found.append(Import(base, tuple(alias.name for alias in node.names), node in top, node.lineno))
    return found


def targets(found: Import) -> set[str]:
    """The product modules an import reaches: `from moecompile.ops import routing` reaches the submodule."""
    if found.module != PACKAGE and not found.module.startswith(PACKAGE + "."):
        return set()
    submodules = {f"{found.module}.{name}" for name in found.names} & set(FILES)
    rest = len(found.names) > len(submodules) or not found.names
    return submodules | ({found.module} if rest else set())


def faults(module: str, found: list[Import]) -> list[str]:
    """What the imports of one module break, one sentence each."""
    said = []
    for item in found:
        where = f"{module} line {item.line}"
        if item.module.split(".")[0] in ("passes", "runtime"):
            said.append(f"{where}: write moecompile.{item.module}, not {item.module}")
        if item.module.split(".")[0] in OPTIONAL and item.top:
            said.append(f"{where}: optional package {item.module} must be imported where it is used")
        if part(module) in NO_TORCH and item.module.split(".")[0] == "torch":
            said.append(f"{where}: {part(module)} must not import torch")
        private = any(word.startswith("_") and word != "__future__" for word in item.module.split("."))
        private |= any(name.startswith("_") for name in item.names)
        if item.module.split(".")[0] == "torch" and private and part(module) != "compat":
            said.append(f"{where}: private torch API only through moecompile.compat")
        for target in sorted(targets(item)):
            # `from moecompile import verify` is the public function, whatever module has that name.
            if target == PACKAGE or (item.module == PACKAGE and part(target) in moecompile.__all__):
                said.append(f"{where}: import from the submodule, not from bare {PACKAGE}")
                continue
            if not item.top:
                said.append(f"{where}: import {target} at the top of the file")
            if row(target) > row(module):
                said.append(f"{where}: row {row(module)} must not import {target} of row {row(target)}")
            if (part(module), part(target)) in APART:
                said.append(f"{where}: passes and runtime must not import each other")
            if is_pass(module) and is_pass(target):
                said.append(f"{where}: a pass must not import another pass")
    return said


def is_pass(module: str) -> bool:
    return part(module) == "passes" and module != f"{PACKAGE}.passes"


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Every set of modules that import each other in a circle, found by walking from each module."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        stack = list(edges[start])
        while stack:
            here = stack.pop()
            if here not in seen:
                seen.add(here)
                stack += edges.get(here, ())
        return seen

    reached = {name: reach(name) for name in edges}
    circles = {
        tuple(sorted(n for n in reached[name] if name in reached.get(n, ()))) for name in edges if name in reached[name]
    }
    return [list(circle) for circle in sorted(circles)]


@pytest.mark.parametrize("module", CHECKED)
def test_module_keeps_to_its_row(module):
    assert faults(module, imports(module)) == []


def test_no_import_cycles():
    edges = {name: set().union(*(targets(item) for item in imports(name))) - {name} for name in CHECKED}
    assert cycles(edges) == []


@pytest.mark.parametrize("module", [name for name in CHECKED if part(name) != "compat"])
def test_no_private_torch_attributes(module):
    """`torch._C.x` reaches private API without an import; `torch.ops.aten._softmax` is an operator's name."""
    found = []
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Attribute):
            words = ast.unparse(node).split(".")
            dunder = node.attr.startswith("__") and node.attr.endswith("__")
            if words[0] == "torch" and words[1] != "ops" and node.attr.startswith("_") and not dunder:
                found += [f"line {node.lineno}: {'.'.join(words)}"] * (".".join(words) not in PUBLIC_ALL_THE_SAME)
    assert found == []


def test_nobody_imports_the_real_directories():
    """Tests, examples and benchmarks too: `import passes` would load every file a second time."""
    said = []
    for folder in ("tests", "examples", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            for item in imports_of(path.read_text(), path.stem, False):
                if item.module.split(".")[0] in ("passes", "runtime"):
                    said.append(f"{path.relative_to(ROOT)} line {item.line}: {item.module}")
    assert said == []


def test_the_real_directories_were_read():
    assert {part(name) for name in CHECKED} >= {"plan", "passes", "runtime", "ops"}


@pytest.mark.parametrize(
    ("module", "source", "part_of_fault"),
    [
        ("plan", "import torch", "must not import torch"),
        (
            "plan",
            "from moecompile.mesh import Mesh\nfrom moecompile.ops import COLLECTIVES",
            "row 1 must not",
        ),
        ("graph", "from moecompile.capture import x", "row 3 must not"),
        ("new_thing", "from moecompile.another import x", None),
        (
            "graph",
            "from moecompile.new_thing import x",
            "row 3 must not import moecompile.new_thing of row 8",
        ),
        ("passes.fuse", "from moecompile.runtime.launcher import x", "each other"),
        ("runtime.x", "import moecompile.passes", "each other"),
        ("passes.fuse", "from moecompile.passes.other import x", "another pass"),
        ("passes", "from moecompile.passes.other import x", None),
        ("passes.fuse", "from .other import x", "another pass"),
        ("api", "from passes.fuse import x", "write moecompile.passes.fuse"),
        ("api", "def f():\n    from moecompile.plan import Plan", "at the top"),
        ("api", "if x:\n    import moecompile.plan", "at the top"),
        ("api", "from moecompile import Plan", "bare moecompile"),
        ("api", "from moecompile import verify", "bare moecompile"),
        ("api", "from moecompile import meta", None),
        ("api", "import transformers", "where it is used"),
        ("api", "def f():\n    import transformers", None),
        ("ops.x", "from torch._subclasses import FakeTensorMode", "moecompile.compat"),
        ("ops.x", "from torch import _C", "moecompile.compat"),
        ("compat", "from torch._subclasses import FakeTensorMode", None),
        ("ops.x", "from torch.fx import Node", None),
    ],
)
def test_the_check_itself(module, source, part_of_fault):
    name = f"{PACKAGE}.{module}"
    said = faults(name, imports_of(source, name, module == "passes"))
    if part_of_fault is None:
        assert said == []
    else:
        assert len(said) >= 1
        assert any(part_of_fault in text for text in said), said


def test_the_cycle_check_itself():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
