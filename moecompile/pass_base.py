"""What a pass is: a frozen dataclass whose fields are its options, with the facts it needs, adds and ends."""

from __future__ import annotations

import abc
import dataclasses
import enum
import types
import typing
from dataclasses import dataclass
from typing import Any, ClassVar, get_args, get_origin

import torch
from torch.fx import GraphModule, Node

from .compat import FakeTensorMode
from .errors import PassError
from .mesh import Mesh
from .plan import Plan
from .program import Input, Level, Program


class Fact(enum.Enum):
    """A statement about a graph; the value is its meaning."""

    MOE_OPS = "every MoE layer is written in moe:: ops (permute, grouped_linear, unpermute)"
    TOKENS_SHARDED = "every value has a placement on the data axes and local shapes"
    LOSS_SHARES = "the loss output is this rank's unique share of the loss"
    EXPERTS_SHARDED = "every expert weight is cut over ep and etp"
    TOKENS_DISPATCHED = "each routed row is computed on the rank that owns its expert"
    DIFFERENTIATED = "the graph holds forward, loss and backward"
    PARAMS_SHARDED = "parameters are shards over the data axes, gathered before use; their gradients are scattered"
    GRADS_SYNCED = "each gradient is reduced exactly once over the axes that replicate its parameter"
    LOWERED = "moe:: compute ops are replaced by one backend's own"


class Numerics(enum.Enum):
    """How the numbers of a rewritten graph relate to those before."""

    BITWISE = "the same bits"
    REASSOCIATING = "equal up to the order of sums"
    LOSSY = "another precision, by request"


class Scope(enum.Enum):
    """What a pass needs to see at once."""

    LAYER = "one layer"
    PROGRAM = "the whole program"


@dataclass
class PassContext:
    """What a pass may read besides the graph, and the interface of the graph, which it keeps in step."""

    program: Program
    mode: FakeTensorMode
    declined: list[str] = dataclasses.field(default_factory=list)

    @property
    def plan(self) -> Plan:
        return self.program.plan

    @property
    def mesh(self) -> Mesh:
        return self.program.mesh

    def add_input(self, item: Input, dtype: torch.dtype) -> Node:
        """A scalar placeholder behind the others, with ``item`` as its description; both get the name the graph gives it."""
        last = self.program.placeholders()[-1]
        with self.program.graph.inserting_after(last):
            node = self.program.graph.placeholder(item.name)
        with self.mode:
            node.meta["val"] = torch.empty((), dtype=dtype)
        self.program.inputs.append(dataclasses.replace(item, name=node.name))
        return node

    def decline(self, name: str, reason: str) -> None:
        """Record once why a pass left something as it was."""
        self.declined.append(f"{name}: {reason}")


@dataclass(frozen=True)
class Pass(abc.ABC):
    """One rewrite. Subclasses are frozen dataclasses; their fields are the options of the text form, each with a default.

    ``run`` changes the graph (and ``ctx.program.inputs`` and ``outputs``) and returns the number of rewrites; with 0 the
    graph's text is what it was. Linting, verification, timing and history belong to the pipeline.
    """

    name: ClassVar[str]
    level: ClassVar[Level | None] = Level.MODEL  # None: either level
    requires: ClassVar[frozenset[Fact]] = frozenset()
    provides: ClassVar[frozenset[Fact]] = frozenset()
    removes: ClassVar[frozenset[Fact]] = frozenset()
    excludes: ClassVar[frozenset[Fact]] = frozenset()  # facts that must not hold yet
    numerics: ClassVar[Numerics] = Numerics.BITWISE
    scope: ClassVar[Scope] = Scope.PROGRAM

    @abc.abstractmethod
    def run(self, graph: GraphModule, ctx: PassContext) -> int:
        """Rewrite ``graph`` in place; return how many rewrites were made."""

    @property
    def text(self) -> str:
        """The pass with the options that differ from their defaults, as the pipeline parser reads it."""
        options = [
            f"{option_name(field.name)}={_show(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"{self.name}{{{','.join(options)}}}" if options else self.name

    @classmethod
    def from_options(cls, options: dict[str, str]) -> Pass:
        """Build the pass from text options; unknown names and wrong types are a PassError that lists what is accepted."""
        hints = typing.get_type_hints(cls)
        fields = {option_name(field.name): field for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for key, raw in options.items():
            if key not in fields:
                known = ", ".join(fields) or "none"
                raise PassError(f"{cls.name}: option '{key}' is not known; the options of this pass are: {known}.")
            name = fields[key].name
            values[name] = _read(cls.name, key, raw, hints[name])
        return cls(**values)


def option_name(field: str) -> str:
    """How a field is called in text; one that would hide an attribute of the class, such as ``level``, ends in an underscore."""
    return field.rstrip("_").replace("_", "-")


def _show(found: Any) -> str:
    if isinstance(found, bool):
        return "true" if found else "false"
    return str(found)


def _read(pass_name: str, key: str, raw: str, kind: Any) -> Any:
    """Turn option text into the field's type: bool, int, float, str, Literal or an optional of these."""
    origin = get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        if raw == "none":
            return None
        kind = next(arg for arg in get_args(kind) if arg is not type(None))
        origin = get_origin(kind)
    if origin is typing.Literal:
        accepted = [str(choice) for choice in get_args(kind)]
        if raw not in accepted:
            raise PassError(f"{pass_name}: {key}={raw} is not one of {', '.join(accepted)}; choose one of these.")
        return get_args(kind)[accepted.index(raw)]
    if kind is bool:
        if raw not in ("true", "false"):
            raise PassError(f"{pass_name}: {key}={raw} must be true or false.")
        return raw == "true"
    try:
        return kind(raw)
    except ValueError:
        raise PassError(
            f"{pass_name}: {key}={raw} is not of type {kind.__name__}; give a value like {kind()!r}."
        ) from None
