"""Plan: every rule names field, value, rule and the nearest legal values, and everything survives TOML."""

import dataclasses
import pickle

import pytest

from moecompile.errors import MoeCompileError, PlanError
from moecompile.plan import Plan, torchrun_line


def message(make) -> str:
    with pytest.raises(PlanError) as caught:
        make()
    text = str(caught.value)
    assert text.endswith("."), text
    assert "\n" not in text
    return text


def test_defaults_are_one_process():
    plan = Plan(dp=1)
    assert (plan.world_size, plan.stage_size, plan.edp, plan.num_data_ranks) == (1, 1, 1, 1)
    assert plan.etp == 1


def test_error_is_both_ours_and_a_value_error():
    with pytest.raises(ValueError):
        Plan(ep=0)
    with pytest.raises(MoeCompileError):
        Plan(ep=0)


def test_frozen_and_hashable():
    plan = Plan(dp=2, tp=2, batch_dims={"ids": 1}, overrides={"lm_head": "replicate"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.ep = 4
    assert {plan: 1}[Plan(dp=2, tp=2, batch_dims={"ids": 1}, overrides={"lm_head": "replicate"})] == 1
    assert pickle.loads(pickle.dumps(plan)) == plan
    with pytest.raises(TypeError):
        plan.batch_dims["ids"] = 0


def test_a_plan_keeps_its_own_copy_of_a_mapping():
    dims = {"ids": 1}
    plan = Plan(batch_dims=dims)
    dims["ids"] = 0
    assert plan.batch_dims["ids"] == 1


def test_override_order_is_part_of_the_plan():
    one = Plan(tp=2, overrides={"*.mlp": "column", "*.0.mlp": "row"})
    other = Plan(tp=2, overrides={"*.0.mlp": "row", "*.mlp": "column"})
    assert one != other


# Degrees -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dp", "tp", "cp", "pp", "ep", "etp"])
@pytest.mark.parametrize("value", [0, -3, 1.5, "2", True])
def test_degree_that_is_no_degree(name, value):
    text = message(lambda: Plan(**{name: value}))
    assert f"Plan({name}={value!r})" in text
    assert "whole number of at least 1" in text
    nearest = 2 if value == 1.5 else 1
    assert f"nearest legal value of {name}: {nearest}" in text


def test_degree_other_than_dp_must_not_be_none():
    assert "Plan(ep=None)" in message(lambda: Plan(ep=None))


def test_ep_3_on_4_ranks():
    for make in (lambda: Plan(dp=4, ep=3), lambda: Plan(ep=3).resolve(4)):
        text = message(make)
        assert "Plan(ep=3)" in text
        assert "tp*cp*dp = 1*1*4 = 4" in text
        assert "nearest legal values of ep: 2 or 4" in text
    assert "torchrun --nproc-per-node=3 train.py" in message(lambda: Plan(ep=3).resolve(4))
    assert "make dp a multiple of 3" in message(lambda: Plan(dp=4, ep=3))


def test_wrong_product_blames_etp_when_etp_alone_does_not_fit():
    text = message(lambda: Plan(dp=4, etp=3, ep=2))
    assert "Plan(etp=3)" in text
    assert "etp*ep*edp = 3*2*edp must equal" in text
    assert "nearest legal value of etp: 2" in text


def test_the_advised_dp_is_legal():
    assert "make dp a multiple of 6" in message(lambda: Plan(dp=4, tp=2, etp=4, ep=3))
    assert Plan(dp=6, tp=2, etp=4, ep=3).edp == 1


def test_folding_may_cut_expert_groups_across_tp():
    plan = Plan(dp=2, tp=2, ep=4)
    assert (plan.world_size, plan.edp) == (4, 1)


# World size ----------------------------------------------------------------------------------------


def test_resolve_fills_dp():
    plan = Plan(tp=2, pp=2, ep=4).resolve(16)
    assert (plan.dp, plan.edp, plan.world_size) == (4, 2, 16)
    assert plan.resolve(16) is plan


def test_wrong_world_size_says_the_right_torchrun_line():
    text = message(lambda: Plan(dp=4, ep=2).resolve(6))
    assert "the world size is 6" in text
    assert "pp*dp*cp*tp = 4 ranks" in text
    assert "`torchrun --nproc-per-node=4 train.py`" in text


@pytest.mark.parametrize(("world_size", "nearest"), [(7, "4 or 8"), (3, "4")])
def test_world_size_that_tp_does_not_divide(world_size, nearest):
    text = message(lambda: Plan(tp=2, ep=4).resolve(world_size))
    assert "pp*cp*tp = 1*1*2" in text
    assert f"nearest legal world sizes: {nearest}, " in text
    assert "`torchrun --nproc-per-node=4 train.py`" in text
    Plan(tp=2, ep=4).resolve(4)


@pytest.mark.parametrize("world_size", [0, -1, 2.0, None])
def test_world_size_that_is_no_number_of_ranks(world_size):
    assert f"the world size is {world_size!r}" in message(lambda: Plan().resolve(world_size))


def test_sizes_need_dp():
    for read in ("world_size", "stage_size", "edp", "num_data_ranks"):
        assert "plan.resolve(world_size)" in message(lambda read=read: getattr(Plan(ep=2), read))


def test_torchrun_line_spreads_large_worlds_over_machines():
    assert torchrun_line(8) == "torchrun --nproc-per-node=8 train.py"
    assert torchrun_line(1024) == "torchrun --nnodes=128 --nproc-per-node=8 train.py"


# Ranks ---------------------------------------------------------------------------------------------


def test_coordinates_by_hand():
    plan = Plan(pp=2, dp=2, tp=3, ep=2, etp=3)
    # rank 10 = ((1*2 + 1)*1 + 0)*3 + 1 - in stage 1 it is number 4 = 1*3 + 1 on both sides
    assert plan.coordinates(10)._asdict() == {
        "pp": 1,
        "dp": 1,
        "cp": 0,
        "tp": 1,
        "edp": 0,
        "ep": 1,
        "etp": 1,
    }
    assert plan.data_rank(10) == 1


def test_data_ranks_ignore_the_expert_side():
    ranks = range(8)
    for plan in (Plan(dp=4, tp=2), Plan(dp=4, tp=2, ep=8), Plan(dp=4, tp=2, ep=2, etp=2)):
        assert [plan.data_rank(rank) for rank in ranks] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert plan.num_data_ranks == 4


@pytest.mark.parametrize("rank", [-1, 4, 1.0])
def test_rank_outside_the_plan(rank):
    assert "from 0 to 3" in message(lambda: Plan(dp=4).coordinates(rank))


# Options -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"dispatch": "all2all"}, ["Plan(dispatch='all2all')", "'allgather'", "nearest: 'alltoall'"]),
        ({"router_dtype": "bf16"}, ["Plan(router_dtype='bf16')", "'fp32', 'fp64'"]),
        ({"reduce_dtype": "fp16"}, ["Plan(reduce_dtype='fp16')", "'bf16'"]),
        ({"balance_scope": "rank"}, ["Plan(balance_scope='rank')", "'global', 'local'"]),
        ({"capacity_scope": "lokal"}, ["Plan(capacity_scope='lokal')", "nearest: 'local'"]),
        ({"strict": 1}, ["Plan(strict=1)", "True or False"]),
        ({"deterministic": None}, ["Plan(deterministic=None)", "True or False"]),
        ({"microbatches": 0}, ["Plan(microbatches=0)", "nearest legal value of microbatches: 1"]),
        ({"timeout": 0}, ["Plan(timeout=0)", "above 0"]),
        ({"timeout": float("nan")}, ["Plan(timeout=nan)", "finite"]),
        ({"timeout": True}, ["Plan(timeout=True)", "seconds"]),
        ({"passes": "  "}, ["Plan(passes='  ')", "not empty"]),
        ({"schedule": "1f1b"}, ["Plan(schedule='1f1b')", "pp=1", "pp >= 2"]),
        ({"layout": "Et|tL"}, ["Plan(layout='Et|tL')", "pp=1", "pp >= 2"]),
        ({"sequence_parallel": True}, ["Plan(sequence_parallel=True)", "tp=1", "tp >= 2"]),
        ({"batch_dims": {"ids": -1}}, ["batch_dims", "'ids': -1", "at least 0"]),
        ({"batch_dims": {"": 0}}, ["batch_dims", "not empty"]),
        ({"batch_dims": 3}, ["Plan(batch_dims=3)", "must map"]),
        ({"overrides": {"lm_head": ""}}, ["overrides", "'lm_head'", "'replicate', 'column', 'row'"]),
        ({"overrides": {"lm_head": "rows"}}, ["{'lm_head': 'rows'}", "nearest: 'row'"]),
        ({"overrides": {"lm_head": "row"}}, ["Plan(overrides={'lm_head': 'row'})", "tp=1", "tp >= 2"]),
    ],
)
def test_option_rules(options, parts):
    text = message(lambda: Plan(**options))
    for part in parts:
        assert part in text


def test_options_that_depend_on_degrees_are_fine_with_them():
    plan = Plan(tp=2, pp=2, sequence_parallel=True, schedule="1f1b", layout="Et|tL")
    assert plan.schedule == "1f1b"


# Model ---------------------------------------------------------------------------------------------


def test_six_experts_over_four_ranks():
    text = message(lambda: Plan(ep=4).check_model(num_experts=6, name="layers.0.mlp"))
    assert "Plan(ep=4): ep must divide the 6 experts of layers.0.mlp" in text
    assert "nearest legal values of ep: 3 or 6" in text


def test_legal_values_of_ep_also_fold():
    text = message(lambda: Plan(dp=4, ep=4).check_model(num_experts=6))
    assert "nearest legal value of ep: 2." in text
    Plan(dp=4, ep=2).check_model(num_experts=6)


def test_more_ranks_than_experts():
    text = message(lambda: Plan(dp=8, ep=8).check_model(num_experts=4, name="mlp"))
    assert "Plan(ep=8): ep must not exceed the 4 experts of mlp" in text
    assert "nearest legal value of ep: 4" in text


def test_tp_does_not_divide_heads():
    text = message(lambda: Plan(tp=4).check_model(num_heads=6, name="attn"))
    assert "Plan(tp=4): tp must divide the 6 heads of attn" in text
    assert "nearest legal values of tp: 3 or 6" in text
    text = message(lambda: Plan(tp=4).check_model(num_heads=8, num_kv_heads=2, name="attn"))
    assert "2 key-value heads" in text
    assert "nearest legal value of tp: 2." in text


def test_model_that_fits():
    Plan(tp=2, ep=4).check_model(num_experts=8, num_heads=8, num_kv_heads=2)
    Plan(tp=2, ep=4).check_model()


def test_override_pattern_that_matches_nothing():
    plan = Plan(tp=2, overrides={"layers.*.mlp": "replicate", "lm_haed": "replicate"})
    text = message(lambda: plan.check_overrides(["layers.0.mlp", "lm_head"]))
    assert "'lm_haed' matches no module" in text
    assert "nearest: 'lm_head'" in text
    plan.check_overrides(["layers.0.mlp", "lm_haed"])


# What this release runs ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"dispatch": "deepep"}, "Plan(dispatch='deepep')"),
        ({"capacity_scope": "local"}, "the meaning of one process only"),
    ],
)
def test_legal_plan_that_this_release_cannot_run(options, part):
    plan = Plan(**options)
    text = message(plan.check_supported)
    assert part in text
    assert "this release" in text
    assert text.count(". ") == 0


def test_plans_of_this_release():
    Plan(dp=2, pp=2, ep=2, microbatches=2).check_supported()
    for dispatch in ("alltoall", "allgather"):
        Plan(dp=4, ep=2, dispatch=dispatch, microbatches=2, router_dtype="fp32").check_supported()


# Text ----------------------------------------------------------------------------------------------


def test_toml_by_eye():
    plan = Plan(dp=4, tp=2, timeout=60, batch_dims={"mask": None, "ids": 0}, overrides={'a."b"': "row", "*": "column"})
    text = plan.to_toml()
    assert "dp = 4\n" in text
    assert "strict = false\n" in text
    assert "timeout = 60.0\n" in text
    assert '[batch_dims]\n"mask" = "same"\n"ids" = 0\n' in text
    assert '[overrides]\n"a.\\"b\\"" = "row"\n"*" = "column"\n' in text
    assert Plan.from_toml(text) == plan


def test_toml_keeps_dp_open():
    assert Plan.from_toml(Plan(ep=2).to_toml()) == Plan(ep=2)
    assert "\ndp" not in "\n" + Plan(ep=2).to_toml()


def test_toml_with_only_what_differs():
    assert Plan.from_toml('ep = 2\ndispatch = "allgather"\n') == Plan(ep=2, dispatch="allgather")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("epp = 2", "no field 'epp'; nearest: 'pp' or 'ep'"),
        ("ep = ", "not TOML"),
        ("ep = 0", "Plan(ep=0)"),
        ("batch_dims = 3", "Plan(batch_dims=3)"),
        ('batch_dims = {ids = "other"}', "'ids': 'other'"),
    ],
)
def test_toml_that_is_no_plan(text, part):
    assert part in message(lambda: Plan.from_toml(text))


def test_str_says_what_differs():
    assert str(Plan(dp=4, ep=2)) == "Plan(dp=4, ep=2)"
    assert str(Plan()) == "Plan()"


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"edp": 2}, r"Plan(edp=2): edp, the number of copies of each expert, follows from the other degrees"),
        ({"microbatch": 2}, "Plan(microbatch=2): a plan has no field 'microbatch'; nearest: 'microbatches'."),
        ({"zero": 1}, "a plan has no field 'zero'; its fields are dp, tp, cp,"),
    ],
)
def test_fields_that_no_plan_has(values, part):
    assert part in message(lambda: Plan(**values))
    assert part in message(lambda: dataclasses.replace(Plan(), **values))
