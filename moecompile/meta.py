"""The only typed access to ``node.meta``.

FX keeps per-node facts in a free-form dictionary. Every key the compiler reads or writes is named here once, so that a
misspelt key is an attribute error and not a silent default.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import Node

_PLACEMENTS = "moe_placements"
_ITEMS = "moe_item_placements"
_DIRECTION = "moe_direction"
_TWIN = "moe_twin"
_DIFFERENTIATED = "moe_differentiated"
_STAGE = "moe_stage"
_WHOLE = "moe_whole"
_DEFERRED = "moe_deferred"
_LOCAL = "moe_local_numbers"
_LAYER = re.compile(r"^(?P<prefix>.*?\.)?(?P<index>\d+)$")


class Direction(enum.Enum):
    """Which half of the step a node belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"


def value(node: Node) -> Any:
    """The fake value of ``node``: a fake tensor, a SymInt or a tuple of them."""
    try:
        return node.meta["val"]
    except KeyError:
        raise KeyError(f"node {node.name} carries no value: it was created without graph.call()") from None


def tensor(node: Node) -> torch.Tensor:
    """The fake tensor of ``node``; a TypeError when the node holds something else."""
    found = value(node)
    if not isinstance(found, torch.Tensor):
        raise TypeError(f"node {node.name} holds a {type(found).__name__}, a tensor was expected")
    return found


def is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def placements(node: Node) -> dict[str, Any]:
    """Placement per mesh axis; an axis that is absent means replicated."""
    return cast(dict[str, Any], node.meta.get(_PLACEMENTS, {}))


def has_placements(node: Node) -> bool:
    """Whether placements were recorded; nodes that autograd made have none."""
    return _PLACEMENTS in node.meta


def set_placements(node: Node, found: dict[str, Any]) -> None:
    node.meta[_PLACEMENTS] = dict(found)


def item_placements(node: Node) -> list[dict[str, Any]]:
    """Placements of each element of a node that holds a tuple; empty where they are not known."""
    return list(node.meta.get(_ITEMS, ()))


def set_item_placements(node: Node, found: Sequence[dict[str, Any]]) -> None:
    node.meta[_ITEMS] = [dict(item) for item in found]


def clear_placements(node: Node) -> None:
    """Forget where a node lives: it is not known."""
    node.meta.pop(_PLACEMENTS, None)
    node.meta.pop(_ITEMS, None)


def copy_placements(node: Node, source: Node) -> None:
    """Let a node live where another does, if that is known."""
    for key in (_PLACEMENTS, _ITEMS):
        if key in source.meta:
            node.meta[key] = source.meta[key].copy()


def direction(node: Node) -> Direction:
    return cast(Direction, node.meta.get(_DIRECTION, Direction.FORWARD))


def set_direction(node: Node, found: Direction) -> None:
    node.meta[_DIRECTION] = found


def twin(node: Node) -> str | None:
    """Name of the forward node that a backward node differentiates, where known."""
    return cast("str | None", node.meta.get(_TWIN))


def set_twin(node: Node, name: str) -> None:
    node.meta[_TWIN] = name


def is_differentiated(node: Node) -> bool:
    """Whether autograd passed this collective of the forward, so that the backward has to hold its transpose."""
    return bool(node.meta.get(_DIFFERENTIATED, False))


def mark_differentiated(node: Node) -> None:
    node.meta[_DIFFERENTIATED] = True


def stage(node: Node) -> int | None:
    """The pipeline stage that computes a node; None in a program without stages."""
    return cast("int | None", node.meta.get(_STAGE))


def set_stage(node: Node, found: int | None) -> None:
    if found is not None:
        node.meta[_STAGE] = found


def whole(node: Node) -> str | None:
    """The parameter, held as shards, whose whole a node is that may be kept from call to call; None for any other node."""
    return cast("str | None", node.meta.get(_WHOLE))


def set_whole(node: Node, name: str) -> None:
    node.meta[_WHOLE] = name


def is_deferred(node: Node) -> bool:
    """Whether a node is due once a step, on the sum over microbatches; so is what depends on it."""
    return bool(node.meta.get(_DEFERRED, False))


def defer(node: Node) -> None:
    node.meta[_DEFERRED] = True


def clear_marks(node: Node) -> None:
    """A node that is made in the likeness of another is neither a parameter nor put off."""
    node.meta.pop(_WHOLE, None)
    node.meta.pop(_DEFERRED, None)


def module_path(node: Node) -> str:
    """Dotted path of the innermost user module that made the node, '' outside all modules."""
    stack = node.meta.get("nn_module_stack") or {}
    path = ""
    for entry in stack.values():
        path = entry[0]
    return path


def set_module_path(node: Node, path: str) -> None:
    """Place a node in a module and in all that enclose it; what they were called in the user's code is not known."""
    words = path.split(".") if path else []
    prefixes = [".".join(words[: end + 1]) for end in range(len(words))]
    node.meta["nn_module_stack"] = {prefix: (prefix, "") for prefix in prefixes}


def move_modules(node: Node, old: str, new: str) -> None:
    """Let a copy of a layer say that it is the layer ``new``, where the original says ``old``."""

    def moved(path: str) -> str:
        return new + path[len(old) :] if path == old or path.startswith(old + ".") else path

    stack = node.meta.get("nn_module_stack") or {}
    node.meta["nn_module_stack"] = {key: (moved(entry[0]), *entry[1:]) for key, entry in stack.items()}


def module_paths(node: Node) -> list[str]:
    """All enclosing module paths, outermost first."""
    return [entry[0] for entry in (node.meta.get("nn_module_stack") or {}).values()]


def layer(node: Node) -> str | None:
    """Path of the outermost enclosing module that is an item of a list, such as ``model.layers.3``."""
    for path in module_paths(node):
        if _LAYER.match(path) and "." in path:
            return path
    return None


def source(node: Node) -> str:
    """``file:line`` of the user's code, '' where unknown; torch's own frames are passed over."""
    trace = node.meta.get("stack_trace") or ""
    found = re.findall(r'File "([^"]+)", line (\d+)', trace)
    for file, line in reversed(found):
        if "/torch/" not in file and "<" not in file:
            return f"{file}:{line}"
    return ""


def where(node: Node) -> str:
    """Human-readable place of a node for an error: module path, op and file:line."""
    path, at = module_path(node), source(node)
    text = f"{node.name} in {path}" if path else node.name
    return f"{text} ({at})" if at else text


def local_numbers(node: Node) -> dict[int, Any]:
    """Arguments by their place among all leaves that the same call has at one rank's batch size, where they are others."""
    return cast(dict[int, Any], node.meta.get(_LOCAL, {}))


def set_local_numbers(node: Node, numbers: dict[int, Any]) -> None:
    node.meta[_LOCAL] = numbers


def copy_meta(node: Node) -> dict[str, Any]:
    """A copy of ``node.meta`` whose nested dictionaries are its own (``node_copy`` shares them)."""
    return {key: dict(item) if isinstance(item, dict) else item for key, item in node.meta.items()}
