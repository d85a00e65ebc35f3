"""Mesh: groups by hand for the plans of the demo, and the errors."""

import pytest

from moecompile.errors import PlanError
from moecompile.mesh import AXES, Mesh, is_axis, joined
from moecompile.plan import Plan


def test_dp_by_ep():
    mesh = Mesh(Plan(dp=4, ep=2))
    assert mesh.groups("dp") == ((0, 1, 2, 3),)
    assert mesh.groups("ep") == ((0, 1), (2, 3))
    assert mesh.groups("edp") == ((0, 2), (1, 3))
    assert mesh.groups("etp") == ((0,), (1,), (2,), (3,))
    assert mesh.groups("world") == ((0, 1, 2, 3),)
    assert mesh.group_ranks("edp", 3) == (1, 3)
    assert mesh.axis_index("edp", 3) == 1
    assert mesh.axis_index("world", 3) == 3
    assert mesh.sizes == {
        "pp": 1,
        "dp": 4,
        "cp": 1,
        "tp": 1,
        "edp": 2,
        "ep": 2,
        "etp": 1,
        "world": 4,
    }


def test_expert_groups_cross_tp():
    mesh = Mesh(Plan(dp=2, tp=2, ep=4))
    assert mesh.groups("tp") == ((0, 1), (2, 3))
    assert mesh.groups("dp") == ((0, 2), (1, 3))
    assert mesh.groups("ep") == ((0, 1, 2, 3),)


def test_stages_come_first():
    mesh = Mesh(Plan(pp=2, dp=2, cp=2, ep=2, etp=2))
    assert mesh.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups("cp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups("etp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups("ep") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups("world") == (tuple(range(8)),)


def test_large_world_needs_no_devices():
    mesh = Mesh(Plan(pp=4, dp=32, tp=8, ep=64).resolve(1024))
    assert mesh.world_size == 1024
    assert len(mesh.groups("ep")) == 16
    assert mesh.group_ranks("ep", 1023) == tuple(range(960, 1024))


def test_plan_must_be_resolved():
    with pytest.raises(PlanError, match=r"call plan\.resolve\(world_size\) first"):
        Mesh(Plan(ep=2))


@pytest.mark.parametrize("ask", ["size", "groups"])
def test_unknown_axis(ask):
    with pytest.raises(PlanError, match="mesh axis 'data' does not exist; use one of pp, dp"):
        getattr(Mesh(Plan(dp=2)), ask)("data")


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_outside_the_world(axis, rank):
    mesh = Mesh(Plan(dp=2))
    with pytest.raises(PlanError, match="ranks go from 0 to 1"):
        mesh.group_ranks(axis, rank)
    with pytest.raises(PlanError, match="ranks go from 0 to 1"):
        mesh.axis_index(axis, rank)


def test_equal_plans_make_equal_meshes():
    assert {Mesh(Plan(dp=2)): 1}[Mesh(Plan().resolve(2))] == 1


# ---- axes of several axes ----------------------------------------------------------------------------------------------


def test_several_axes_make_one():
    mesh = Mesh(Plan(dp=2, cp=2, tp=2, ep=4))
    assert mesh.size("dp+tp") == 4
    assert mesh.groups("dp+tp") == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert mesh.groups("cp+tp") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups("dp+cp") == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert mesh.groups("dp+cp+tp") == mesh.groups("edp+ep") == (tuple(range(8)),)
    assert mesh.group_ranks("dp+tp", 6) == (2, 3, 6, 7)
    assert [mesh.axis_index("dp+tp", rank) for rank in (2, 3, 6, 7)] == [0, 1, 2, 3]


def test_several_axes_stay_in_their_stage():
    mesh = Mesh(Plan(pp=2, dp=2, tp=2, ep=2))
    assert mesh.groups("dp+tp") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups("edp+ep") == ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize(
    ("axes", "name"),
    [
        (["tp"], "tp"),
        (["tp", "dp"], "dp+tp"),
        (["tp", "cp", "dp"], "dp+cp+tp"),
        (["etp", "edp"], "edp+etp"),
        (["pp", "ep"], "pp+ep"),
    ],
)
def test_joined_names_follow_the_mesh(axes, name):
    assert joined(axes) == name and is_axis(name)


def test_axes_of_two_meshes_do_not_join():
    with pytest.raises(PlanError, match="the axes ep, tp are not of one mesh; join those of"):
        joined(["tp", "ep"])


@pytest.mark.parametrize("name", ["tp+dp", "dp+ep", "dp+dp", "dp+", "+", "world+dp", "dp+data", ""])
def test_what_is_no_axis(name):
    assert not is_axis(name)
    with pytest.raises(PlanError, match="does not exist; use one of pp, dp"):
        Mesh(Plan(dp=2)).size(name)
