"""What the user asks for: parallel degrees and options, checked before anything else happens.

A `Plan` is plain data.  It imports no torch, starts no process and reads no environment, so that a wrong plan
fails in milliseconds, and a plan for 1024 ranks can be looked at on a laptop.

The same ranks are cut twice.  Attention side: `pp x dp x cp x tp`, tp fastest.  Expert side:
`pp x edp x ep x etp`, etp fastest.  Inside one pipeline stage both are the same ranks, so
`tp*cp*dp == etp*ep*edp` gives `edp`.
"""

import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeGuard

from moecompile import layout as layouts
from moecompile.errors import PlanError
from moecompile.plan_fields import FrozenMap, nearest, to_toml, unknown_field

DEGREES = ("dp", "tp", "cp", "pp", "ep", "etp")
# what `overrides` says of linears: whole on every rank, cut by outputs, cut by inputs
REPLICATED, COLUMN, ROW = ROLES = ("replicate", "column", "row")

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "dispatch": ("alltoall", "allgather", "deepep", "hybridep"),
    "router_dtype": (None, "fp32", "fp64"),
    "reduce_dtype": (None, "bf16", "fp32", "fp64"),
    "balance_scope": ("global", "local"),
    "capacity_scope": ("global", "local"),
}
_FLAGS = ("sequence_parallel", "strict", "deterministic")
_TEXTS = ("schedule", "layout", "passes")

# TOML has no null: a batch argument that is equal on all ranks is written with this word.
_SAME_ON_ALL_RANKS = "same"


class Coordinates(NamedTuple):
    """Where one rank sits: its index on every axis of both meshes."""

    pp: int
    dp: int
    cp: int
    tp: int
    edp: int
    ep: int
    etp: int


@dataclass(frozen=True)
class Plan:
    """How one model is spread over ranks.  Frozen, hashable, and legal in itself once it exists.

    Degrees: `dp=None` is filled in by `resolve(world_size)`; the others default to 1.  `batch_dims` maps an
    argument name to the dim that data ranks split, or to None for an argument that is equal on all ranks;
    `overrides` maps a pattern of module paths to what tp does with the linears there: "replicate", "column" or "row"; the
    later of two that match wins.  `passes` is a whole pipeline, or `+` and passes that the usual one
    gets in addition.  `strict` refuses a line of the model that no placement
    rule can compute in parts; without it the line is gathered, runs whole on every rank and is reported.
    `router_dtype` and `reduce_dtype` of None keep the model's own; gradients are summed over ranks and microbatches in
    `reduce_dtype` and rounded once.  `deterministic` runs steps with torch's deterministic algorithms: twice the same bits.
    `timeout` is in seconds.

    Raises PlanError naming field, value, rule and the nearest legal values.
    """

    dp: int | None = None
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    dispatch: str = "alltoall"
    microbatches: int = 1
    schedule: str | None = None
    layout: str | None = None
    passes: str | None = None
    strict: bool = False
    router_dtype: str | None = None
    reduce_dtype: str | None = None
    balance_scope: str = "global"
    capacity_scope: str = "global"
    deterministic: bool = False
    timeout: float = 300.0
    batch_dims: Mapping[str, int | None] = field(default_factory=FrozenMap)
    overrides: Mapping[str, str] = field(default_factory=FrozenMap)

    def __new__(cls, *args: object, **values: object) -> "Plan":
        known = [item.name for item in fields(cls)]
        for name, value in values.items():
            if name not in known:
                raise unknown_field(f"Plan({name}={value!r})", name, known)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in (*DEGREES, "microbatches"):
            if name != "dp" or self.dp is not None:
                _check_count(name, getattr(self, name))
        _check_options(self)
        object.__setattr__(self, "timeout", _checked_timeout(self.timeout))
        object.__setattr__(self, "batch_dims", _checked_batch_dims(self.batch_dims))
        object.__setattr__(self, "overrides", _checked_overrides(self.overrides))
        _check_dependent_options(self)
        if self.dp is not None:
            least_dp = self.least_world_size // (self.pp * self.cp * self.tp)
            _check_folding(self, self.dp, f", or make dp a multiple of {least_dp}")

    @property
    def stage_size(self) -> int:
        """Number of ranks in one pipeline stage, `tp*cp*dp`."""
        return self.tp * self.cp * self._known_dp()

    @property
    def edp(self) -> int:
        """Number of copies of each expert: the data-parallel degree on the expert side."""
        return self.stage_size // (self.etp * self.ep)

    @property
    def world_size(self) -> int:
        """Number of ranks the plan runs on."""
        return self.pp * self.stage_size

    @property
    def num_data_ranks(self) -> int:
        """Number of distinct slices of the batch; ep, etp and edp never affect it."""
        return self._known_dp()

    def coordinates(self, rank: int) -> Coordinates:
        """Index of `rank = ((pp_i*dp + dp_i)*cp + cp_i)*tp + tp_i` on every axis of both meshes."""
        if not _is_int(rank) or not 0 <= rank < self.world_size:
            raise PlanError(f"rank {rank!r} is not on this plan; ranks go from 0 to {self.world_size - 1}.")
        pp_i, in_stage = divmod(rank, self.stage_size)
        outer, tp_i = divmod(in_stage, self.tp)
        dp_i, cp_i = divmod(outer, self.cp)
        outer, etp_i = divmod(in_stage, self.etp)
        edp_i, ep_i = divmod(outer, self.ep)
        return Coordinates(pp=pp_i, dp=dp_i, cp=cp_i, tp=tp_i, edp=edp_i, ep=ep_i, etp=etp_i)

    def data_rank(self, rank: int) -> int:
        """Which slice of the batch `rank` passes: ranks with equal answers pass the same tensors."""
        return self.coordinates(rank).dp

    def resolve(self, world_size: int) -> "Plan":
        """This plan with `dp` filled in; PlanError with the right torchrun line if it cannot be."""
        if not _is_int(world_size) or world_size < 1:
            raise PlanError(f"the world size is {world_size!r}; it must be a whole number of at least 1.")
        if self.dp is not None:
            if self.world_size != world_size:
                raise PlanError(
                    f"the world size is {world_size}, but {self} needs pp*dp*cp*tp = {self.world_size} "
                    f"ranks; start it with `{torchrun_line(self.world_size)}`, or leave dp out to derive it."
                )
            return self
        least = self.least_world_size
        if world_size % (self.pp * self.cp * self.tp) != 0:
            below = world_size // least * least
            fits = [below, below + least] if below else [least]
            raise PlanError(
                f"the world size is {world_size}, which pp*cp*tp = {self.pp}*{self.cp}*{self.tp} of {self} "
                f"does not divide; nearest legal world sizes: {_listed(fits)}, so start it with "
                f"`{torchrun_line(fits[0])}`."
            )
        dp = world_size // (self.pp * self.cp * self.tp)
        _check_folding(self, dp, f", or start `{torchrun_line(least)}` (or another multiple of {least} ranks)")
        return replace(self, dp=dp)

    def check_model(
        self,
        *,
        num_experts: int | None = None,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        expert_width: int | None = None,
        name: str = "the model",
    ) -> None:
        """Check degrees against the sizes of a module called `name`; sizes left out are not checked."""
        if num_experts is not None and num_experts % self.ep != 0:
            legal = [ep for ep in _divisors(num_experts) if self.dp is None or self._folds(ep=ep)]
            rule = (
                f"ep must not exceed the {num_experts} experts of {name}"
                if self.ep > num_experts
                else f"ep must divide the {num_experts} experts of {name}"
            )
            raise _degree_error("ep", self.ep, rule, legal)
        if expert_width is not None and expert_width % self.etp != 0:
            legal = [etp for etp in _divisors(expert_width) if self.dp is None or self._folds(etp=etp)]
            raise _degree_error(
                "etp", self.etp, f"etp must divide the width {expert_width} of the experts of {name}", legal
            )
        for what, number in (("heads", num_heads), ("key-value heads", num_kv_heads)):
            if number is not None and number % self.tp != 0:
                rule = f"tp must divide the {number} {what} of {name}"
                both = _divisors(math.gcd(number, num_heads or number))
                legal = [tp for tp in both if self.dp is None or self._folds(tp=tp)]
                raise _degree_error("tp", self.tp, rule, legal or both)

    def check_overrides(self, module_names: Iterable[str]) -> None:
        """PlanError for the first override pattern that matches none of `module_names`."""
        names = list(module_names)
        for pattern in self.overrides:
            if not any(fnmatchcase(name, pattern) for name in names):
                near = nearest(pattern, names) or (f"; one is called {names[-1]!r}" if names else "")
                raise PlanError(f"Plan(overrides=...): pattern {pattern!r} matches no module of the model{near}.")

    def check_supported(self) -> None:
        """PlanError, in one sentence, for a legal plan that this release cannot run."""
        if self.pp > 1:
            layouts.check_plan(self.pp, self.layout, self.schedule, self.microbatches)
        if self.dispatch not in ("alltoall", "allgather"):
            raise _unsupported("dispatch", self.dispatch, "the backends 'alltoall' and 'allgather'; use one of them")
        if self.capacity_scope != "global":
            said = "the meaning of one process only; leave capacity_scope out"
            raise _unsupported("capacity_scope", self.capacity_scope, said)
        if self.reduce_dtype is not None and self.pp > 1:
            raise _unsupported(
                "reduce_dtype",
                self.reduce_dtype,
                "pipeline stages that sum gradients in their own type; leave reduce_dtype out",
            )

    def to_toml(self) -> str:
        """The whole plan as TOML; `Plan.from_toml` of it equals this plan."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        dims = {name: _SAME_ON_ALL_RANKS if dim is None else dim for name, dim in self.batch_dims.items()}
        return to_toml({**values, "batch_dims": dims})

    @classmethod
    def from_toml(cls, text: str) -> "Plan":
        """The plan that `text` describes; absent fields keep their defaults, unknown ones raise PlanError."""
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise PlanError(f"Plan.from_toml: the text is not TOML: {error}.") from error
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise unknown_field("Plan.from_toml", name, known)
        if isinstance(values.get("batch_dims"), dict):
            dims = values["batch_dims"].items()
            values["batch_dims"] = {name: None if dim == _SAME_ON_ALL_RANKS else dim for name, dim in dims}
        return cls(**values)

    def __str__(self) -> str:
        """Only what differs from the defaults, as the call that makes the plan."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        said = (f"{name}={value!r}" for name, value in values.items() if value != getattr(_DEFAULTS, name))
        return f"Plan({', '.join(said)})"

    def _known_dp(self) -> int:
        if self.dp is None:
            raise PlanError(f"{self} has dp=None, so its sizes are not known; call plan.resolve(world_size) first.")
        return self.dp

    def _folds(self, *, tp: int | None = None, ep: int | None = None, etp: int | None = None) -> bool:
        """Whether this plan would still fold with another tp, ep or etp."""
        return (tp or self.tp) * self.cp * self._known_dp() % ((etp or self.etp) * (ep or self.ep)) == 0

    @property
    def least_world_size(self) -> int:
        """The smallest world size that fits all degrees but dp; every fitting size is a multiple of it."""
        return self.pp * math.lcm(self.cp * self.tp, self.etp * self.ep)


def torchrun_line(world_size: int) -> str:
    """The torchrun command that starts `world_size` ranks, on machines of eight where that fits."""
    if world_size > 8 and world_size % 8 == 0:
        return f"torchrun --nnodes={world_size // 8} --nproc-per-node=8 train.py"
    return f"torchrun --nproc-per-node={world_size} train.py"


def _check_folding(plan: Plan, dp: int, advice: str) -> None:
    """The expert side must cut the ranks of a stage evenly; blames ep unless etp alone does not fit."""
    stage = plan.tp * plan.cp * dp
    if stage % (plan.etp * plan.ep) == 0:
        return
    name, other = ("ep", plan.etp) if stage % plan.etp == 0 else ("etp", plan.ep)
    legal = _divisors(stage // other if stage % other == 0 else stage)
    rule = (
        f"etp*ep*edp = {plan.etp}*{plan.ep}*edp must equal tp*cp*dp = {plan.tp}*{plan.cp}*{dp} = {stage}, "
        f"the ranks of one pipeline stage"
    )
    raise _degree_error(name, getattr(plan, name), rule, legal, advice)


def _check_count(name: str, value: object) -> None:
    if not _is_int(value) or value < 1:
        what = "a degree" if name in DEGREES else "a count"
        whole = max(1, round(value)) if isinstance(value, float) and math.isfinite(value) else 1
        raise _degree_error(name, value, f"{what} must be a whole number of at least 1", [whole])


def _check_options(plan: Plan) -> None:
    for name, choices in _CHOICES.items():
        value = getattr(plan, name)
        if value not in choices:
            listed = ", ".join(repr(choice) for choice in choices)
            near = nearest(value, [choice for choice in choices if choice])
            raise PlanError(f"Plan({name}={value!r}): {name} must be one of {listed}{near}.")
    for name in _FLAGS:
        if not isinstance(getattr(plan, name), bool):
            raise PlanError(f"Plan({name}={getattr(plan, name)!r}): {name} must be True or False.")
    for name in _TEXTS:
        value = getattr(plan, name)
        if value is not None and not (isinstance(value, str) and value.strip()):
            raise PlanError(f"Plan({name}={value!r}): {name} must be None or a text that is not empty.")


def _check_dependent_options(plan: Plan) -> None:
    """A setting that another one makes meaningless is refused, never ignored."""
    if plan.sequence_parallel and plan.tp == 1:
        raise PlanError(
            "Plan(sequence_parallel=True): sequence_parallel splits the sequence over tp ranks and tp=1; "
            "use tp >= 2, or sequence_parallel=False."
        )
    if plan.overrides and plan.tp == 1:
        raise PlanError(
            f"Plan(overrides={dict(plan.overrides)!r}): overrides say what tp does with linears and tp=1; use tp >= 2, or leave "
            f"overrides out."
        )
    for name in ("schedule", "layout"):
        if getattr(plan, name) is not None and plan.pp == 1:
            raise PlanError(
                f"Plan({name}={getattr(plan, name)!r}): {name} orders pipeline stages and pp=1; use pp >= 2, "
                f"or leave {name} out."
            )


def _checked_timeout(value: object) -> float:
    if not (_is_int(value) or isinstance(value, float)) or not math.isfinite(value) or value <= 0:
        raise PlanError(f"Plan(timeout={value!r}): timeout must be a finite number of seconds above 0; try 300.")
    return float(value)


def _checked_batch_dims(value: object) -> FrozenMap[int | None]:
    dims = _frozen("batch_dims", value)
    for name, dim in dims.items():
        if dim is not None and (not _is_int(dim) or dim < 0):
            raise PlanError(
                f"Plan(batch_dims={{{name!r}: {dim!r}}}): the dim that data ranks split must be a whole "
                f"number of at least 0, or None for an argument equal on all ranks; try 0."
            )
    return dims


def _checked_overrides(value: object) -> FrozenMap[str]:
    overrides = _frozen("overrides", value)
    for pattern, placement in overrides.items():
        if placement not in ROLES:
            listed = ", ".join(map(repr, ROLES))
            raise PlanError(
                f"Plan(overrides={{{pattern!r}: {placement!r}}}): a placement must be one of {listed}{nearest(placement, ROLES)}."
            )
    return overrides


def _frozen(name: str, value: object) -> FrozenMap[Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) and key for key in value):
        raise PlanError(f"Plan({name}={value!r}): {name} must map names that are not empty; try {name}={{}}.")
    return FrozenMap(value)


def _degree_error(name: str, value: object, rule: str, legal: list[int], advice: str = "") -> PlanError:
    near = _nearest(value if _is_int(value) else legal[0], legal)
    values = "value" if len(near) == 1 else "values"
    return PlanError(f"Plan({name}={value!r}): {rule}; nearest legal {values} of {name}: {_listed(near)}{advice}.")


def _unsupported(name: str, value: object, has: str) -> PlanError:
    return PlanError(f"Plan({name}={value!r}): this release has {has}.")


def _nearest(value: int, legal: Iterable[int]) -> list[int]:
    """The largest legal value up to `value` and the smallest above it, as far as they exist."""
    ordered = sorted(set(legal))
    below = [item for item in ordered if item <= value]
    above = [item for item in ordered if item > value]
    return below[-1:] + above[:1]


def _divisors(number: int) -> list[int]:
    return [i for i in range(1, number + 1) if number % i == 0]


def _listed(values: Iterable[int]) -> str:
    return " or ".join(str(value) for value in values)


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


_DEFAULTS = Plan()
