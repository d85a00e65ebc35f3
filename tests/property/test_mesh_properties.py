"""Folding, over all kinds of legal plans: ranks and coordinates map one to one, groups cut up the world."""

import math

from hypothesis import given
from hypothesis import strategies as st

from moecompile.errors import PlanError
from moecompile.mesh import ATTENTION_AXES, AXES, EXPERT_AXES, Mesh, joined
from moecompile.plan import Plan

degrees = st.integers(1, 4)


@st.composite
def plans(draw) -> Plan:
    """A legal plan: ep and etp are drawn freely, then dp makes the stage a multiple of them."""
    tp, cp, pp, ep, etp = (draw(degrees) for _ in range(5))
    step = math.lcm(tp * cp, ep * etp) // (tp * cp)
    return Plan(dp=step * draw(st.integers(1, 2)), tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)


def rank_of(sizes: tuple[int, ...], index: tuple[int, ...]) -> int:
    rank = 0
    for size, i in zip(sizes, index, strict=True):
        assert 0 <= i < size
        rank = rank * size + i
    return rank


@given(plans())
def test_both_sides_cover_the_same_ranks(plan):
    assert plan.tp * plan.cp * plan.dp == plan.etp * plan.ep * plan.edp
    assert plan.world_size == plan.pp * plan.etp * plan.ep * plan.edp


@given(plans())
def test_coordinates_are_two_bijections(plan):
    for axes in (ATTENTION_AXES, EXPERT_AXES):
        sizes = tuple(getattr(plan, axis) for axis in axes)
        for rank in range(plan.world_size):
            index = tuple(getattr(plan.coordinates(rank), axis) for axis in axes)
            assert rank_of(sizes, index) == rank


@given(plans())
def test_groups_partition_the_world(plan):
    mesh = Mesh(plan)
    for axis in AXES:
        groups = mesh.groups(axis)
        assert all(len(group) == mesh.size(axis) for group in groups)
        assert sorted(rank for group in groups for rank in group) == list(range(plan.world_size))
        assert list(groups) == sorted(groups)


@given(plans(), st.data())
def test_group_order_is_the_axis_index(plan, data):
    mesh = Mesh(plan)
    rank = data.draw(st.integers(0, plan.world_size - 1))
    for axis in AXES:
        group = mesh.group_ranks(axis, rank)
        assert group in mesh.groups(axis)
        assert group[mesh.axis_index(axis, rank)] == rank


@given(plans(), st.data())
def test_a_group_differs_in_one_coordinate_only(plan, data):
    mesh = Mesh(plan)
    rank = data.draw(st.integers(0, plan.world_size - 1))
    here = mesh.coordinates(rank)
    for axis in AXES[:-1]:
        own = ATTENTION_AXES if axis in ATTENTION_AXES else EXPERT_AXES
        for peer in mesh.group_ranks(axis, rank):
            there = mesh.coordinates(peer)
            assert all(getattr(there, other) == getattr(here, other) for other in own if other != axis)


@st.composite
def joint_axes(draw) -> tuple[str, tuple[str, ...]]:
    """Some axes of one mesh, by the name they have together, and that mesh."""
    axes = draw(st.sampled_from([ATTENTION_AXES, EXPERT_AXES]))
    return joined(draw(st.permutations(axes))[: draw(st.integers(1, len(axes)))]), axes


@given(plans(), joint_axes(), st.data())
def test_joint_groups_hold_all_ranks_that_agree_on_the_other_axes(plan, joint, data):
    name, axes = joint
    mesh, parts = Mesh(plan), name.split("+")
    assert mesh.size(name) == math.prod(mesh.size(axis) for axis in parts)
    assert sorted(rank for group in mesh.groups(name) for rank in group) == list(range(plan.world_size))
    rank = data.draw(st.integers(0, plan.world_size - 1))
    here = mesh.coordinates(rank)
    agree = [
        peer
        for peer in range(plan.world_size)
        if all(getattr(mesh.coordinates(peer), other) == getattr(here, other) for other in axes if other not in parts)
    ]
    group = mesh.group_ranks(name, rank)
    assert list(group) == agree  # ascending: the last axis is the fastest
    assert group[mesh.axis_index(name, rank)] == rank


@given(plans(), joint_axes(), st.data())
def test_a_joint_group_is_made_of_groups_of_each_of_its_axes(plan, joint, data):
    name, mesh = joint[0], Mesh(plan)
    rank = data.draw(st.integers(0, plan.world_size - 1))
    group = set(mesh.group_ranks(name, rank))
    for axis in name.split("+"):
        assert all(set(mesh.group_ranks(axis, peer)) <= group for peer in group)


@given(plans())
def test_data_rank_is_shared_by_exactly_the_ranks_of_one_batch_slice(plan):
    slices = [plan.data_rank(rank) for rank in range(plan.world_size)]
    assert sorted(set(slices)) == list(range(plan.num_data_ranks))
    assert all(slices.count(i) == plan.world_size // plan.num_data_ranks for i in set(slices))


@given(plans())
def test_resolve_finds_dp_again(plan):
    assert Plan(tp=plan.tp, cp=plan.cp, pp=plan.pp, ep=plan.ep, etp=plan.etp).resolve(plan.world_size) == plan


@given(degrees, degrees, degrees, degrees, degrees, st.integers(1, 64))
def test_resolve_is_legal_or_refused(tp, cp, pp, ep, etp, world_size):
    fits = world_size % (pp * cp * tp) == 0 and world_size // pp % (ep * etp) == 0
    try:
        plan = Plan(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp).resolve(world_size)
    except PlanError as error:
        assert not fits
        # Whatever world size the message proposes must work.
        proposed = int(str(error).split("--nproc-per-node=")[1].split()[0])
        nodes = str(error).split("--nnodes=")
        proposed *= int(nodes[1].split()[0]) if len(nodes) > 1 else 1
        assert Plan(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp).resolve(proposed).world_size == proposed
    else:
        assert fits
        assert plan.world_size == world_size


texts = st.text(min_size=1).filter(str.strip)


@given(
    plans(),
    st.booleans(),
    st.floats(min_value=1e-3, max_value=1e20),
    st.dictionaries(texts, st.none() | st.integers(0, 5)),
    st.dictionaries(texts, st.sampled_from(["replicate", "column", "row"])),
    st.none() | texts,
)
def test_toml_round_trip(plan, strict, timeout, batch_dims, overrides, passes):
    full = Plan(
        dp=plan.dp,
        ep=plan.ep,
        tp=plan.tp,
        cp=plan.cp,
        etp=plan.etp,
        strict=strict,
        timeout=timeout,
        batch_dims=batch_dims,
        overrides=overrides if plan.tp > 1 else {},
        passes=passes,
    )
    again = Plan.from_toml(full.to_toml())
    assert again == full
    assert hash(again) == hash(full)
