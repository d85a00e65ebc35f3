"""From the words of a command line to a model, its arguments and a plan."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moecompile.errors import CaptureError, PlanError
from moecompile.plan import Plan

_LEAF = re.compile(r"\s*(\w+)\s*=\s*(\w+)\s*\[([\d\s,]*)\]\s*(?:<\s*(\d+))?\s*(?:,|$)")
_INTEGERS = {"int64": torch.int64, "int32": torch.int32, "bool": torch.bool}
_FLOATS = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def load_object(text: str, what: str) -> Any:
    """The object that ``package.module:name`` names; the current folder is importable. CaptureError where it is not."""
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise CaptureError(
            f"--{what} {text!r} is not of the form package.module:name; write for example my_model:build."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except ImportError as error:
        raise CaptureError(
            f"--{what} {text!r}: importing {module} failed ({error}); run this where `python -c 'import {module}'` works."
        ) from error
    except AttributeError as error:
        raise CaptureError(
            f"--{what} {text!r}: {module} has no {name!r}; name something defined in that module."
        ) from error
    return found


def load_model(text: str) -> nn.Module:
    """The model behind ``package.module:name``, where name is a module or a function without arguments that returns one."""
    found = load_object(text, "model")
    made = found if isinstance(found, nn.Module) else found() if callable(found) else found
    if not isinstance(made, nn.Module):
        raise CaptureError(
            f"--model {text!r} gave a {type(made).__name__}; it must be an nn.Module or a function that returns one."
        )
    return made


def load_example(text: str) -> Any:
    """What one rank passes to the model: from a shape spec, or from ``package.module:function``.

    A spec is ``name=dtype[sizes]`` by commas, integers below a bound: ``input_ids=int64[2,16]<256,labels=int64[2,16]<256``.
    A function of one argument is returned as it is: it gives the arguments of each data rank.
    """
    if "[" not in text:
        found = load_object(text, "example")
        return found if takes_rank(found) or not callable(found) else found()
    generator = torch.Generator().manual_seed(0)
    made: dict[str, torch.Tensor] = {}
    at = 0
    while at < len(text):
        leaf = _LEAF.match(text, at)
        if leaf is None or leaf.group(2) not in _INTEGERS | _FLOATS:
            raise CaptureError(
                f"--example: cannot read {text[at : at + 40]!r}; write name=dtype[sizes], for example input_ids=int64[2,16]<256, with "
                f"one of {', '.join(_INTEGERS | _FLOATS)}."
            )
        made[leaf.group(1)] = _random(leaf.group(2), leaf.group(3), leaf.group(4), generator)
        at = leaf.end()
    return made


_TOKENS = {"input_ids", "ids", "tokens", "labels", "targets"}


def usual_example(model: nn.Module) -> dict[str, torch.Tensor]:
    """What one rank may pass where nothing is said: two sequences of 16 token ids, and labels where the forward takes some.

    CaptureError for a model without an embedding, or with an argument that is not known by its name.
    """
    known = inspect.signature(model.forward).parameters
    names = [name for name, item in known.items() if name in _TOKENS or (item.default is item.empty and item.kind < 2)]
    vocabularies = [item.num_embeddings for item in model.modules() if isinstance(item, nn.Embedding)]
    if not names or not vocabularies or not _TOKENS.issuperset(names):
        raise CaptureError(
            f"--example is needed: {type(model).__name__}.forward{inspect.signature(model.forward)} does not take token ids alone; "
            "write name=dtype[sizes], for example x=float32[8,64]."
        )
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(vocabularies[0], (2, 16), generator=generator) for name in names}


def takes_rank(example: Any) -> bool:
    """Whether it is a function of the data rank."""
    return callable(example) and len(inspect.signature(example).parameters) == 1


def one_example(example: Any) -> Any:
    """What rank 0 passes."""
    return example(0) if takes_rank(example) else example


def _random(dtype: str, sizes: str, bound: str | None, generator: torch.Generator) -> torch.Tensor:
    shape = [int(size) for size in sizes.split(",") if size.strip()]
    if dtype in _INTEGERS:
        return torch.randint(0, int(bound or 2), shape, generator=generator).to(_INTEGERS[dtype])
    return torch.randn(shape, generator=generator).to(_FLOATS[dtype])


def load_plan(text: str | None, degrees: Mapping[str, int | None]) -> Plan:
    """A TOML file, or fields as ``dp=4,ep=2``; ``degrees`` given on their own win. PlanError for what is no plan."""
    values = {name: value for name, value in degrees.items() if value is not None}
    if text is None:
        return Plan(**values)  # type: ignore[arg-type]
    if Path(text).is_file():
        plan = Plan.from_toml(Path(text).read_text())
    elif "=" in text:
        plan = Plan.from_toml("\n".join(_toml_line(part) for part in text.split(",")))
    else:
        raise PlanError(f"--plan {text!r} is neither a file nor fields such as dp=4,ep=2; write one of the two.")
    given = {name: getattr(plan, name) for name in Plan.__dataclass_fields__}
    return Plan(**{**given, **values})


def _toml_line(part: str) -> str:
    key, _, raw = (piece.strip() for piece in part.partition("="))
    literal = raw in ("true", "false") or re.fullmatch(r"-?\d+(\.\d+)?", raw)
    return f"{key} = {raw}" if literal else f'{key} = "{raw}"'
