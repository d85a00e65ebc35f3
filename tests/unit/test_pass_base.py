"""A pass is a frozen dataclass: options as text, and what the table of passes promises."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
from torch.fx import GraphModule

from moecompile.errors import PassError
from moecompile.pass_base import Fact, Numerics, Pass, PassContext, Scope
from moecompile.passes import ALL_PASSES, PASSES
from tests.support import golden


@dataclass(frozen=True)
class Sample(Pass):
    """One option of each kind."""

    flag: bool = True
    count: int = 3
    ratio: float = 0.5
    mode: Literal["fast", "safe"] = "fast"
    limit: int | None = None
    label: str = "x"

    name: ClassVar[str] = "sample"

    def run(self, graph: GraphModule, ctx: PassContext) -> int:
        return 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, Sample()),
        ({"flag": "false"}, Sample(flag=False)),
        ({"count": "-4"}, Sample(count=-4)),
        ({"ratio": "0.001"}, Sample(ratio=0.001)),
        ({"mode": "safe"}, Sample(mode="safe")),
        ({"limit": "7"}, Sample(limit=7)),
        ({"limit": "none"}, Sample()),
        ({"label": "a.b"}, Sample(label="a.b")),
    ],
)
def test_options_are_typed(options: dict[str, str], expected: Sample) -> None:
    found = Sample.from_options(options)
    assert found == expected
    changed = {field.name for field in dataclasses.fields(Sample) if getattr(found, field.name) != field.default}
    assert found.text == ("sample" if not changed else f"sample{{{','.join(f'{k}={options[k]}' for k in options)}}}")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"speed": "1"},
            "option 'speed' is not known; the options of this pass are: flag, count, ratio, mode, limit, label",
        ),
        ({"flag": "yes"}, "flag=yes must be true or false"),
        ({"count": "many"}, "count=many is not of type int; give a value like 0"),
        ({"mode": "slow"}, "mode=slow is not one of fast, safe; choose one of these"),
        ({"limit": "low"}, "limit=low is not of type int"),
    ],
)
def test_wrong_options_say_what_is_right(options: dict[str, str], told: str) -> None:
    with pytest.raises(PassError, match=re.escape(told)):
        Sample.from_options(options)


def test_a_pass_without_options_says_so() -> None:
    with pytest.raises(PassError, match="the options of this pass are: none"):
        PASSES["shard-dense"].from_options({"x": "1"})


@pytest.mark.parametrize("kind", ALL_PASSES, ids=[kind.name for kind in ALL_PASSES])
def test_every_pass_keeps_the_conventions(kind: type[Pass]) -> None:
    """Class, file and name agree; options have defaults; numerics and scope are declared values."""
    words = kind.name.split("-")
    assert kind.__name__ == "".join(word.capitalize() for word in words)
    assert kind.__module__ == f"moecompile.passes.{'_'.join(words)}"
    assert kind.__doc__ and kind.__doc__.split("\n")[0].endswith(".")
    assert all(field.default is not dataclasses.MISSING for field in dataclasses.fields(kind))
    assert isinstance(kind.numerics, Numerics) and isinstance(kind.scope, Scope)
    assert kind() == kind() and hash(kind()) == hash(kind())
    assert not kind.requires & kind.excludes and not kind.provides & kind.removes
    with pytest.raises(dataclasses.FrozenInstanceError):
        kind().anything = 1  # type: ignore[attr-defined]


def test_every_fact_says_what_it_means_and_somebody_provides_it() -> None:
    provided = frozenset[Fact]().union(*(kind.provides for kind in ALL_PASSES))
    assert provided == set(Fact)
    assert len({fact.value for fact in Fact}) == len(Fact)


def test_what_a_pass_left_alone_is_noted() -> None:
    ctx = PassContext(golden.captured(), None)  # type: ignore[arg-type]
    ctx.decline("sample", "there was no need")
    assert ctx.declined == ["sample: there was no need"]
    assert (ctx.plan, ctx.mesh.size("ep")) == (golden.PLAN, 2)
