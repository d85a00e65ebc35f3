"""The two meshes of a plan: which ranks stand together on each axis.

Both meshes lie over the same ranks.  Attention side `pp x dp x cp x tp`, expert side `pp x edp x ep x etp`,
last axis fastest.  A group of an axis holds the ranks that differ in that coordinate and agree in the others
of its own mesh, in the order of the coordinate.  Several axes of one mesh make one, too: `dp+tp`, last
fastest.  Plain arithmetic: no torch, no processes, any rank count.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from moecompile.errors import PlanError
from moecompile.plan import Coordinates, Plan

ATTENTION_AXES = ("pp", "dp", "cp", "tp")
EXPERT_AXES = ("pp", "edp", "ep", "etp")
AXES = ("pp", "dp", "cp", "tp", "edp", "ep", "etp", "world")

Group = tuple[int, ...]


@dataclass(frozen=True)
class Mesh:
    """Rank arithmetic over a plan whose dp is known; `world` is the axis of all ranks.

    Raises PlanError for a plan that is not resolved, an unknown axis, or a rank outside the world.
    """

    plan: Plan

    def __post_init__(self) -> None:
        # Raises for dp=None: better here than in whatever first asks for a group.
        assert self.plan.world_size >= 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.plan.world_size

    @property
    def sizes(self) -> dict[str, int]:
        """Number of ranks in a group of each axis, by axis name."""
        return {axis: self.size(axis) for axis in AXES}

    def size(self, axis: str) -> int:
        """Number of ranks in each group of `axis`."""
        _check_axis(axis)
        if axis == "world":
            return self.world_size
        return math.prod(getattr(self.plan, part) for part in axis.split("+"))

    def groups(self, axis: str) -> tuple[Group, ...]:
        """Every group of `axis`, ordered by first rank; together they hold each rank once."""
        _check_axis(axis)
        return tuple(sorted(_groups_by_key(self.plan, axis).values()))

    def group_ranks(self, axis: str, rank: int) -> Group:
        """The group of `axis` that `rank` is in, in the order of the axis."""
        _check_axis(axis)
        return _groups_by_key(self.plan, axis)[_key(self.plan.coordinates(rank), axis)]

    def axis_index(self, axis: str, rank: int) -> int:
        """The place of `rank` in its group of `axis`."""
        _check_axis(axis)
        coordinates, index = self.plan.coordinates(rank), 0
        if axis == "world":
            return rank
        for part in axis.split("+"):
            index = index * self.size(part) + int(getattr(coordinates, part))
        return index

    def coordinates(self, rank: int) -> Coordinates:
        """Index of `rank` on every axis but `world`."""
        return self.plan.coordinates(rank)


def joined(axes: Iterable[str]) -> str:
    """The axis that several axes of one mesh make together, in the order of the mesh."""
    wanted = set(axes)
    for mesh in (ATTENTION_AXES, EXPERT_AXES):
        if wanted <= set(mesh):
            return "+".join(axis for axis in mesh if axis in wanted)
    raise PlanError(
        f"the axes {', '.join(sorted(wanted))} are not of one mesh; join those of {ATTENTION_AXES} or {EXPERT_AXES}."
    )


def is_axis(name: str) -> bool:
    """Whether a mesh has an axis of this name."""
    parts = name.split("+")
    if len(parts) == 1:
        return name in AXES
    return any(name == "+".join(axis for axis in mesh if axis in parts) for mesh in (ATTENTION_AXES, EXPERT_AXES))


def _check_axis(axis: str) -> None:
    if not is_axis(axis):
        raise PlanError(f"mesh axis {axis!r} does not exist; use one of {', '.join(AXES)}.")


def _key(coordinates: Coordinates, axis: str) -> tuple[int, ...]:
    """What the ranks of one group have in common: their coordinates on the other axes of the same mesh."""
    if axis == "world":
        return ()
    parts = axis.split("+")
    mesh = EXPERT_AXES if parts[-1] in EXPERT_AXES and parts[-1] != "pp" else ATTENTION_AXES
    return tuple(getattr(coordinates, other) for other in mesh if other not in parts)


# Plans are few and hashable, and every collective of a graph asks for its group.
@lru_cache(maxsize=256)
def _groups_by_key(plan: Plan, axis: str) -> dict[tuple[int, ...], Group]:
    members: dict[tuple[int, ...], list[int]] = {}
    # Ranks ascend with every coordinate, so each list comes out in the order of the axis.
    for rank in range(plan.world_size):
        members.setdefault(_key(plan.coordinates(rank), axis), []).append(rank)
    return {key: tuple(ranks) for key, ranks in members.items()}
