"""What a plan says about single linears: which are to stay whole, and which are to be cut by columns or rows.

A pattern is held against the paths of modules, and the names of weights that linears have. ``replicate`` holds for every linear in what
is matched, such as an attention block; ``column`` and ``row`` name linears themselves. Of two patterns that match, the later wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch.fx import Graph, Node

from .. import meta
from ..errors import PlanError
from ..plan import COLUMN, REPLICATED, ROW, Plan
from .chains import Linear, linears, products
from .types import Shard


@dataclass(frozen=True)
class Single:
    """A linear that is cut by itself because the plan says so: its result, or what it reads, is moved for it."""

    linear: Linear
    role: str

    def placements(self) -> Iterator[tuple[Node, Shard]]:
        """How its parameters are cut."""
        if self.role == ROW:
            yield self.linear.weight, Shard(self.linear.in_dim)
            return
        yield self.linear.weight, Shard(self.linear.out_dim)
        if self.linear.bias is not None:
            yield self.linear.bias, Shard(0)


def find_roles(
    graph: Graph, plan: Plan, params: set[Node], names: Mapping[Node, Sequence[str]], ranks: int
) -> dict[Node, str]:
    """The role of every linear that the plan names, by its node.

    ``params`` may be cut; ``names`` are those of all parameters. A PlanError for a pattern that matches nothing, or
    something that is no linear, and for a cut that ``ranks`` or the model do not allow.
    """
    if not plan.overrides:
        return {}
    called = {linear.node: _names(linear, names) for linear in products(graph, set(names))}
    known = _modules(graph, names).union(*called.values())
    plan.check_overrides(sorted(known))
    free = linears(graph, params)
    found: dict[Node, str] = {}
    for pattern, role in plan.overrides.items():
        matched = sorted(name for name in known if fnmatchcase(name, pattern))
        said = f"Plan(overrides={{{pattern!r}: {role!r}}})"
        if role == REPLICATED:
            here = _inside(said, matched, called)
        else:
            here = _themselves(said, matched, called)
            for node in here:
                _check_cut(said, node, role, free, ranks)
        found |= dict.fromkeys(here, role)
    return found


def _names(linear: Linear, names: Mapping[Node, Sequence[str]]) -> set[str]:
    """What a linear may be called: its weight, the module that holds this, and the module that calls it."""
    weight = names[linear.weight][0]
    return {weight, weight.rpartition(".")[0], meta.module_path(linear.node)} - {""}


def _modules(graph: Graph, names: Mapping[Node, Sequence[str]]) -> set[str]:
    """Paths of all modules that hold a parameter or compute something."""
    leaves = {name.rpartition(".")[0] for each in names.values() for name in each}
    leaves |= {path for node in graph.nodes for path in meta.module_paths(node)}
    words = [leaf.split(".") for leaf in leaves if leaf]
    return {".".join(parts[: end + 1]) for parts in words for end in range(len(parts))}


def _inside(said: str, matched: Sequence[str], called: Mapping[Node, set[str]]) -> list[Node]:
    """All linears in the modules that are matched."""
    found = [
        node for node, names in called.items() if any(_is_in(name, module) for name in names for module in matched)
    ]
    if not found:
        raise PlanError(
            f"{said}: the pattern matches '{matched[0]}', in which there is no linear; tp cuts nothing there, so leave it out."
        )
    return found


def _themselves(said: str, matched: Sequence[str], called: Mapping[Node, set[str]]) -> list[Node]:
    """The linears that are matched, and nothing else is."""
    for name in matched:
        if not any(name in names for names in called.values()):
            raise PlanError(
                f"{said}: the pattern matches '{name}', which is no linear; write a pattern that matches linears alone."
            )
    return [node for node, names in called.items() if not names.isdisjoint(matched)]


def _is_in(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def _check_cut(said: str, node: Node, role: str, free: Mapping[Node, Linear], ranks: int) -> None:
    linear = free.get(node)
    if linear is None:
        raise PlanError(
            f"{said}: the weight or bias of {meta.where(node)} is read in several places or is cut already, so it cannot be cut for this "
            f"one; leave it out, or write replicate."
        )
    size = int(meta.tensor(linear.weight).shape[linear.in_dim if role == ROW else linear.out_dim])
    if size % ranks:
        what, other = ("inputs", COLUMN) if role == ROW else ("outputs", ROW)
        raise PlanError(
            f"{said}: {meta.where(node)} has {size} {what}, which tp={ranks} does not divide; write {other} or replicate."
        )
