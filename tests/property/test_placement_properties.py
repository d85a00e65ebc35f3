"""For any shapes, dims and placements, the sharder is right or refuses; and the harness that says so notices a broken rule."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moecompile.errors import PassError
from moecompile.placement import table
from moecompile.placement.call import Call, Decision
from moecompile.placement.shapes import local_shape, reshape_shard
from moecompile.placement.types import PARTIAL, REPLICATE, Partial, Placement, Replicate, Shard, parse
from tests.support.placement_check import Case, MismatchError, check, fn_case, op_case, parts, placements_of, reassemble

aten = torch.ops.aten

quick = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])
SHAPES = st.lists(SIZES, min_size=1, max_size=4)
RANKS = st.sampled_from([2, 4])


def real(shape: list[int]) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


@st.composite
def placed(draw: st.DrawFn, value: torch.Tensor, ranks: int) -> Placement:
    """Any placement a value can have, in any number of blocks."""
    found = placements_of(value, ranks)
    for dim, size in enumerate(value.shape):
        found += [Shard(dim, outer) for outer in (2, 3) if size and size % (outer * ranks) == 0]
    return draw(st.sampled_from(found))


def right_or_refused(draw: Any, case: Case) -> str:
    """Check one random placement of a case; '' where the sharder refuses. Then it is right once it is gathered."""
    ranks = draw(RANKS)
    places = [draw(placed(value, ranks)) for value in case.values]
    try:
        return check(case, places, ranks)
    except PassError:
        check(case, places, ranks, strict=False)
        return ""


# ---- arithmetic of cuts ------------------------------------------------------------------------------------------


@quick
@given(st.data())
def test_parts_and_reassemble_are_inverse(data):
    value, ranks = real(data.draw(SHAPES)), data.draw(RANKS)
    place = data.draw(placed(value, ranks))
    found = parts(value, place, ranks)
    assert torch.allclose(reassemble(found, place), value)
    if isinstance(place, Shard):
        assert all(list(part.shape) == local_shape(value.shape, [(place, ranks)]) for part in found)


@given(st.integers(0, 5), st.integers(1, 4), st.sampled_from([REPLICATE, PARTIAL, None]))
def test_placement_text_round_trips(dim, outer, other):
    place = other or Shard(dim, outer)
    assert parse(str(place)) == place


@quick
@given(st.data())
def test_a_reshaped_cut_holds_the_same_elements(data):
    """Reshaping the parts equals cutting the reshaped whole; and a plain first dim is never refused while it is kept."""
    shape, ranks = data.draw(SHAPES), data.draw(RANKS)
    value = torch.arange(torch.Size(shape).numel()).reshape(shape)
    place = data.draw(placed(value, ranks))
    if not isinstance(place, Shard):
        return
    numel, new = value.numel(), []
    while numel > 1:
        new.append(data.draw(st.sampled_from([size for size in range(1, numel + 1) if numel % size == 0])))
        numel //= new[-1]
    found = reshape_shard(place, shape, new, ranks)
    if found is None:
        assert new[:1] != shape[:1] or place.dim != 0
        return
    local = local_shape(new, [(found, ranks)])
    wanted = parts(value.reshape(new), found, ranks)
    got = [part.reshape(local) for part in parts(value, place, ranks)]
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


# ---- ops ---------------------------------------------------------------------------------------------------------


def _sub(draw: Any, shape: list[int]) -> list[int]:
    """A shape that broadcasts to ``shape``."""
    kept = shape[draw(st.integers(0, len(shape))) :]
    return [draw(st.sampled_from([size, 1])) for size in kept]


@quick
@given(
    st.data(),
    st.sampled_from([aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.div.Tensor, aten.maximum.default]),
)
def test_broadcasts(data, op):
    shape = data.draw(SHAPES)
    case = op_case(op, (real(shape), real(_sub(data.draw, shape)).abs() + 1))
    right_or_refused(data.draw, case)


@quick
@given(st.data(), st.sampled_from(["sum", "mean", "amax", "logsumexp", "var", "norm"]))
def test_reductions(data, name):
    shape = data.draw(SHAPES)
    dims = data.draw(
        st.lists(st.integers(-len(shape), len(shape) - 1), min_size=1, unique_by=lambda dim: dim % len(shape))
    )
    keep = data.draw(st.booleans())
    ops = {
        "sum": lambda x: x.sum(dims, keepdim=keep),
        "mean": lambda x: x.mean(dims, keepdim=keep),
        "amax": lambda x: x.amax(dims, keepdim=keep),
        "logsumexp": lambda x: x.logsumexp(dims, keepdim=keep),
        "var": lambda x: (x + 0).var(dims, correction=0, keepdim=keep),
        "norm": lambda x: torch.linalg.vector_norm(x, 2, dims, keep),
    }
    out = right_or_refused(data.draw, fn_case(ops[name], real(shape)))
    assert out or name not in ("sum", "mean")


@quick
@given(st.data())
def test_moves(data):
    """permute, expand, cat, stack, repeat, split, select, flip."""
    shape = data.draw(SHAPES)
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    order = data.draw(st.permutations(range(len(shape))))
    again = data.draw(st.integers(1, 3))
    cases = [
        lambda x: x.permute(order),
        lambda x: x.unsqueeze(dim).expand([-1] * len(shape) + [-1]),
        lambda x: torch.cat([x] * again, dim),
        lambda x: torch.stack([x * 2, x], dim),
        lambda x: x.repeat([again] * len(shape)),
        lambda x: torch.cat([x] * again, dim).split(x.shape[dim], dim)[-1],
        lambda x: x.select(dim, 0),
        lambda x: x.flip(dim).squeeze(),
        lambda x: x.repeat_interleave(again, dim),
    ]
    right_or_refused(data.draw, fn_case(data.draw(st.sampled_from(cases)), real(shape)))


@quick
@given(st.data())
def test_einsums(data):
    """Any product of two tensors over any labels."""
    sizes = dict(zip("abcd", data.draw(st.tuples(*[SIZES] * 4)), strict=True))
    labels = [data.draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True)) for _ in range(2)]
    named = sorted(set(labels[0] + labels[1]))
    out = data.draw(st.permutations(named))[: data.draw(st.integers(0, len(named)))]
    equation = f"{''.join(labels[0])},{''.join(labels[1])}->{''.join(out)}"
    values = [real([sizes[label] for label in group]) for group in labels]
    right_or_refused(data.draw, op_case(aten.einsum.default, (equation, values)))


@quick
@given(st.data())
def test_matmuls(data):
    batch, (m, k, n) = data.draw(st.lists(SIZES, max_size=2)), data.draw(st.tuples(SIZES, SIZES, SIZES))
    left = real([*_sub(data.draw, batch), m, k] if data.draw(st.booleans()) else [k])
    right = real([*_sub(data.draw, batch), k, n] if data.draw(st.booleans()) else [k])
    right_or_refused(data.draw, op_case(aten.matmul.default, (left, right)))


@quick
@given(st.data())
def test_cross_entropy(data):
    rows, classes, rest = data.draw(st.tuples(SIZES, st.sampled_from([2, 4]), st.lists(SIZES, max_size=1)))
    labels = torch.randint(0, classes, [rows, *rest])
    labels[torch.rand(labels.shape) < 0.4] = -100
    kwargs = {"reduction": data.draw(st.integers(0, 2)), "label_smoothing": data.draw(st.sampled_from([0.0, 0.3]))}
    right_or_refused(
        data.draw, op_case(aten.cross_entropy_loss.default, (real([rows, classes, *rest]), labels), kwargs)
    )


@quick
@given(st.data())
def test_gathers(data):
    shape = data.draw(SHAPES)
    dim = data.draw(st.integers(0, len(shape) - 1))
    picked = [*shape[:dim], data.draw(SIZES), *shape[dim + 1 :]]
    ids = torch.randint(0, shape[dim], picked)
    kind = data.draw(st.sampled_from([aten.gather.default, aten.scatter_add.default]))
    args = (real(shape), dim, ids) if kind is aten.gather.default else (real(shape), dim, ids, real(picked))
    right_or_refused(data.draw, op_case(kind, args))


# ---- the harness notices -----------------------------------------------------------------------------------------


def _other(place: Placement, ndim: int) -> Iterator[Placement]:
    """Wrong answers in place of a right one."""
    if not isinstance(place, Replicate):
        yield REPLICATE
    if not isinstance(place, Partial):
        yield PARTIAL
    if isinstance(place, Shard):
        yield replace(place, outer=place.outer * 2)
        if ndim > 1:
            yield replace(place, dim=(place.dim + 1) % ndim)


MUTANTS = {
    "linear": (
        op_case(aten.linear.default, (real([4, 4]), real([4, 4]))),
        ["S(0) R", "S(1) R", "P R", "R S(1)", "P P"],
    ),
    "add": (op_case(aten.add.Tensor, (real([4, 4]), real([4, 4]))), ["S(0) S(0)", "S(1) R", "P R", "P P"]),
    "exp": (op_case(aten.exp.default, (real([4, 4]),)), ["S(0)", "P"]),
    "sum": (op_case(aten.sum.dim_IntList, (real([4, 4]), [0])), ["S(0)", "S(1)", "P"]),
    "mean": (op_case(aten.mean.dim, (real([4, 4]), [0])), ["S(0)", "S(1)"]),
    "softmax": (op_case(aten.softmax.int, (real([4, 4]), 1)), ["S(0)", "P"]),
    "reshape": (op_case(aten.reshape.default, (real([4, 4]), [2, 2, 4])), ["S(0)", "S(1)", "P"]),
    "embedding": (
        op_case(aten.embedding.default, (real([5, 4]), torch.arange(16).reshape(4, 4).T % 4 + torch.arange(4) % 2)),
        ["R S(0)", "P R"],
    ),
    "loss": (
        op_case(aten.cross_entropy_loss.default, (real([4, 3]), torch.tensor([0, -100, -100, 2]))),
        ["S(0) S(0)", "P R"],
    ),
    "any": (op_case(aten.any.default, (torch.tensor([False, False, False, True]),)), ["S(0)"]),
}


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.parametrize("trusting", [False, True])
def test_a_wrong_placement_is_caught(name, trusting, monkeypatch):
    """Every placement a rule could claim instead of its own is refused or found wrong, and so is a conversion left out; also by a
    sharder that trusts its rules."""
    case, inputs = MUTANTS[name]
    target = next(node.target for node in case.graph.nodes if node.op == "call_function")
    rule = table.RULES.get(target) or table.rules_elementwise.fallback(target)
    tried = 0
    for text in inputs:
        assert check(case, text.split())
        truth = _truth(rule, case, text.split())
        ndim = case.graph.output_node().args[0][0].meta["val"].dim()
        mutants = [_mutant(rule, wrong, True) for wrong in _other(truth.out, ndim)]
        mutants += [_mutant(rule, None, False)] if truth.need else []
        for mutant in mutants:
            monkeypatch.setitem(table.RULES, target, mutant)
            if trusting:
                monkeypatch.setattr(table, "ABSORBS", frozenset([*table.RULES, target]))
            with pytest.raises((PassError, MismatchError, RuntimeError)):
                check(case, text.split())
            tried += 1
        monkeypatch.undo()
    assert tried >= len(inputs)


def _mutant(rule: Any, wrong: Placement | None, keep_needs: bool) -> Any:
    """The rule with another answer, or without its conversions."""

    def mutant(call: Call) -> Decision:
        found = rule(call)
        return Decision(wrong or found.out, found.need if keep_needs else {})

    return mutant


def _truth(rule: Any, case: Case, inputs: list[str]) -> Decision:
    node = next(node for node in case.graph.nodes if node.op == "call_function")
    holders = [item for item in case.graph.nodes if item.op == "placeholder"]
    known = dict(zip(holders, [parse(item) for item in inputs], strict=True))
    return rule(Call(node, "dp", 2, lambda item, axis: known[item]))
