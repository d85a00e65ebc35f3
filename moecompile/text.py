"""Read a saved program back: run its Python statement by statement on recording proxies, then compute fake values anew.

Loading a program executes the file, as importing a module would: load only what you would run. Nothing is unpickled;
the description of inputs and outputs is read as literals.
"""

from __future__ import annotations

import ast
import base64
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer
from torch.overrides import TorchFunctionMode

from . import graph as graphs
from . import meta, ops
from .compat import FakeTensorMode, TreeSpec, rename_node, treespec_loads
from .errors import CaptureError
from .layout import parse as parse_layout
from .mesh import Mesh
from .pass_base import Fact
from .placement.gather import Gather
from .placement.types import parse as parse_placement
from .plan import Plan
from .printer import BACKWARD, DTYPES, FORWARD
from .program import Input, InputKind, Level, Output, OutputKind, Program

_FORMAT = 1
_TYPE = re.compile(r"^(\w+)\[([\d, ]*)\]$")
_ONE = r"(?:R|(?:(?:S\(\d+(?:,outer=\d+)?\)|P|V)@[\w+]+ ?)+)"
_PLACED = re.compile(f"^{_ONE}$")
_EACH_PLACED = re.compile(rf"^\({_ONE}(?:, {_ONE})*\)$")
_STAGE = re.compile(r"^stage (\d+)$")
_COMMENT = re.compile(r"  # (.*)$")


def load(path: str | os.PathLike[str]) -> Program:
    """The program in a file that `Program.save` wrote, also after edits by hand. Executes the file.

    Raises CaptureError, naming file and line, for a text that is not a program or that computes impossible shapes. What
    an edit does to the meaning is not judged here: run the program and compare.
    """
    source = Path(path).read_text(encoding="utf-8")
    return _Reader(source, str(path)).program()


class _Recorder(TorchFunctionMode):
    """Turns every call of torch into a node, also one that no proxy is an argument of, such as ``zeros``."""

    def __init__(self, tracer: GraphAppendingTracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, type):
            return func(*args, **(kwargs or {}))
        return self.tracer.create_proxy("call_function", func, tuple(args), dict(kwargs or {}))


@dataclass
class _Reader:
    """One file being read; errors name it and the line."""

    source: str
    path: str

    def program(self) -> Program:
        tree = self._parse()
        data = self._data(tree)
        plan = Plan.from_toml(data["plan"])
        self.lines = self.source.splitlines()
        self.mode = graphs.fake_mode()
        facts = frozenset(Fact[name] for name in data["facts"])
        self.halfway = Fact.EXPERTS_SHARDED in facts and Fact.TOKENS_DISPATCHED not in facts
        function = self._function(tree)
        graph = self._trace(tree, function, data["inputs"])
        inputs, outputs = [_input(item) for item in data["inputs"]], [_output(item) for item in data["outputs"]]
        results: Any = graph.output_node().args[0]
        if len(results) != len(outputs):
            raise self._error(
                function.body[-1],
                f"the function returns {len(results)} values for {len(outputs)} described outputs; keep both in step",
            )
        return Program(
            graphs.as_module(graph),
            inputs,
            outputs,
            plan,
            Mesh(plan),
            level=Level[data["level"].upper()],
            facts=facts,
            in_spec=self._spec(data["in_spec"]),
            out_spec=self._spec(data["out_spec"]),
            out_template=tuple(data["out_template"]),
            constants={name: _tensor(*found) for name, found in data["constants"].items()},
            layers=list(data["layers"]),
            unrouted=list(data["unrouted"]),
            gathers=[Gather(**item) for item in data.get("gathers", ())],
            pipeline=data["pipeline"],
            layout=parse_layout(data["layout"]) if data.get("layout") else None,
        )

    def _error(self, at: ast.AST | None, message: str) -> CaptureError:
        place = f"{self.path}:{at.lineno}" if at is not None and hasattr(at, "lineno") else self.path
        return CaptureError(f"load: {place}: {message}.")

    # -- parts of the file -------------------------------------------------------------------------------------------
    def _parse(self) -> ast.Module:
        try:
            return ast.parse(self.source, self.path)
        except SyntaxError as error:
            raise CaptureError(f"load: {self.path}:{error.lineno}: this is not Python ({error.msg}).") from error

    def _data(self, tree: ast.Module) -> dict[str, Any]:
        for statement in tree.body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "PROGRAM":
                try:
                    found: dict[str, Any] = ast.literal_eval(statement.value)
                except ValueError as error:
                    raise self._error(statement, f"PROGRAM must hold literals only ({error})") from error
                if found.get("format") != _FORMAT:
                    raise self._error(
                        statement,
                        f"the format is {found.get('format')}, this version reads {_FORMAT}; save the program again",
                    )
                return found
        raise self._error(None, "there is no PROGRAM; give a file that Program.save wrote, not what print shows")

    def _function(self, tree: ast.Module) -> ast.FunctionDef:
        for statement in tree.body:
            if isinstance(statement, ast.FunctionDef) and statement.name == "forward":
                if isinstance(statement.body[-1], ast.Return):
                    return statement
                raise self._error(statement, "the function must end in a return")
        raise self._error(None, "there is no function 'forward'")

    def _spec(self, text: str | None) -> TreeSpec | None:
        if text is None:
            return None
        try:
            return treespec_loads(text)
        except NotImplementedError as error:
            raise self._error(
                None,
                f"the call has types that are not known here ({error}); import the model's library first",
            ) from error

    # -- tracing -----------------------------------------------------------------------------------------------------
    def _trace(self, tree: ast.Module, function: ast.FunctionDef, inputs: list[dict[str, Any]]) -> Graph:
        """Run the function on proxies, one statement after the other, so that each node gets its variable's name."""
        space: dict[str, Any] = {}
        for item in tree.body:
            if isinstance(item, ast.Import | ast.ImportFrom):
                self._run(item, ast.Module([item], []), space)
        graph = Graph()
        tracer = GraphAppendingTracer(graph)
        names = [arg.arg for arg in function.args.args]
        if len(names) != len(inputs):
            raise self._error(
                function, f"the function takes {len(names)} inputs, but {len(inputs)} are described; keep both in step"
            )
        for name, described in zip(names, inputs, strict=True):
            node = graph.placeholder(name)
            node.meta["val"] = _fake(described, self.mode)
            meta.set_placements(node, _placements(described))
            meta.set_stage(node, described.get("stage"))
            space[name] = Proxy(node, tracer)
        *statements, last = function.body
        for statement in statements:
            with _Recorder(tracer):
                self._run(statement, ast.Module([statement], []), space)
            self._describe(statement, graph, space)
        assert isinstance(last, ast.Return)
        with _Recorder(tracer):
            found = self._run(last, ast.Expression(last.value or ast.Tuple([], ast.Load())), space)
        self._describe(last, graph, space)
        graph.output(tuple(item.node if isinstance(item, Proxy) else item for item in found))
        graphs.tidy_names(graph)
        return graph

    def _run(self, at: ast.stmt, code: ast.Module | ast.Expression, space: dict[str, Any]) -> Any:
        """Execute one piece of the file."""
        kind = "eval" if isinstance(code, ast.Expression) else "exec"
        try:
            return eval(compile(ast.fix_missing_locations(code), self.path, kind), space)
        except Exception as error:
            raise self._error(at, f"this line cannot be run ({type(error).__name__}: {error})") from error

    def _describe(self, statement: ast.stmt, graph: Graph, space: Mapping[str, Any]) -> None:
        """Value, name, module, placements and direction of the nodes that one statement made."""
        made = []
        for node in reversed(graph.nodes):
            if "val" in node.meta:
                break
            made.append(node)
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        found = space.get(target.id) if isinstance(target, ast.Name) else None
        if isinstance(target, ast.Name) and isinstance(found, Proxy) and found.node in made:
            rename_node(found.node, target.id)
        for node in reversed(made):
            if node.op != "call_function":
                raise self._error(
                    statement, f"'{node.target}' is not a function; call torch.ops.* instead of methods and attributes"
                )
            try:
                node.meta["val"] = self._value(node)
            except Exception as error:
                raise self._error(
                    statement, f"'{node.name}' cannot be computed ({type(error).__name__}: {error})"
                ) from error
            self._read_comment(statement, node)

    def _value(self, node: Node) -> Any:
        """The fake value of a call. Between shard-experts and insert-dispatch a linear has one rank's experts, all rows."""
        if self.halfway and node.target is ops.grouped_linear:
            rows, weight = meta.tensor(node.args[0]), meta.tensor(node.args[2])  # type: ignore[arg-type]
            with self.mode:
                return rows.new_empty(rows.shape[0], weight.shape[1])
        return graphs.compute(node.target, node.args, node.kwargs, self.mode)  # type: ignore[arg-type]

    def _read_comment(self, statement: ast.stmt, node: Node) -> None:
        """What the comment behind a statement says, as the printer wrote it; an edited line may have none."""
        end = statement.end_lineno or statement.lineno
        direction = next((line.strip() for line in reversed(self.lines[:end]) if line.strip() in _SECTIONS), FORWARD)
        meta.set_direction(node, _SECTIONS[direction])
        comment = _COMMENT.search(self.lines[end - 1])
        for part in comment.group(1).split("  ")[1:] if comment else []:
            if _PLACED.match(part):
                meta.set_placements(node, _placed(part))
            elif _EACH_PLACED.match(part):
                meta.set_item_placements(node, [_placed(item) for item in part[1:-1].split(", ")])
            elif stage := _STAGE.match(part):
                meta.set_stage(node, int(stage.group(1)))
            elif not part.startswith(("moves ", "at ")):
                meta.set_module_path(node, part)


_SECTIONS = {BACKWARD: meta.Direction.BACKWARD, FORWARD: meta.Direction.FORWARD}


# ---- the literals of PROGRAM ---------------------------------------------------------------------------------------


def _placed(text: str) -> dict[str, Any]:
    """``S(0)@dp V@ep`` and the like, as the printer writes it."""
    pairs = [item.rsplit("@", 1) for item in text.split()] if text != "R" else []
    return {axis: parse_placement(one) for one, axis in pairs}


def _placements(found: Mapping[str, Any]) -> dict[str, Any]:
    return {axis: parse_placement(text) for axis, text in found.get("placements", ())}


def _input(found: Mapping[str, Any]) -> Input:
    known = {key: item for key, item in found.items() if key not in ("value", "device", "strides", "stage")}
    return Input(**{**known, "kind": InputKind(found["kind"]), "placements": tuple(_placements(found).items())})


def _output(found: Mapping[str, Any]) -> Output:
    return Output(**{**found, "kind": OutputKind(found["kind"]), "placements": tuple(_placements(found).items())})


def _shape(text: str) -> tuple[list[int], torch.dtype]:
    found = _TYPE.match(text)
    if found is None or found.group(1) not in DTYPES:
        raise CaptureError(f"load: '{text}' is not the type of a tensor; write it like f32[2, 16].")
    return [int(size) for size in found.group(2).split(",") if size.strip()], DTYPES[found.group(1)]


def _fake(found: Mapping[str, Any], mode: FakeTensorMode) -> torch.Tensor:
    shape, dtype = _shape(found["value"])
    with mode:
        made = torch.empty(shape, dtype=dtype, device=found.get("device", "cpu"))
        return made.as_strided(shape, found["strides"]) if "strides" in found else made


def _tensor(text: str, packed: str) -> torch.Tensor:
    shape, dtype = _shape(text)
    raw = bytearray(zlib.decompress(base64.b85decode(packed)))
    return (torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)).reshape(shape)
