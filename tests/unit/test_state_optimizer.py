"""Optimizer state under plain names: every elementwise optimizer, across plans, to and from a single process; and the guard."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import moecompile as mc
from moecompile.optimizer_probe import fresh_state, is_elementwise
from moecompile.plan import Plan
from tests.support.models import Config, build, tokens
from tests.support.parity import slice_for
from tests.support.pool import Ranks, parallel
from tests.support.thinned import thinned

pytestmark = pytest.mark.timeout(200)
LOOP, STACKED = Config("loop", layers=1, bias=True), Config("stacked", layers=1)
BOTH = pytest.mark.parametrize("config", [LOOP, STACKED], ids=["loop", "stacked"])
STARTS = {
    f"{when}-{name}": (config, when == "early")
    for name, config in (("loop", LOOP), ("stacked", STACKED))
    for when in ("early", "late")
}
PLAN = Plan(dp=2, ep=2)
BATCHES = [tokens(8, 5, seed, ignored=0.2) for seed in range(4)]
ONE = Plan(dp=1)

Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "sgd-momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-5),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-5, foreach=True),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-5, fused=True),
    "adam-amsgrad": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01), eps=1e-5, amsgrad=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, eps=1e-5, centered=True, momentum=0.5),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01, eps=1e-5, initial_accumulator_value=0.1),
    "adagrad-fused": lambda params: torch.optim.Adagrad(params, lr=0.01, eps=1e-5, fused=True),
}


def steps(model: Any, opt: torch.optim.Optimizer, batches: list[Any], plan: Plan, rank: int) -> None:
    for batch in batches:
        model(**slice_for(batch, plan, rank))["loss"].backward()
        opt.step()
        opt.zero_grad()


def reference(config: Config, make: Make, count: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(config)
    opt = make(model.parameters())
    steps(model, opt, BATCHES[:count], ONE, 0)
    return model, opt


def whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


# ---- every optimizer -----------------------------------------------------------------------------------------------------


def two_steps_each(rank: int, config: Config, early: bool) -> dict[str, tuple[dict[str, Tensor], dict[str, Any]]]:
    """Weights and gathered state after two steps, by optimizer; all are built before the first call, or after it."""
    found = {}
    model = build(config)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    with parallel(model, PLAN) as made:
        if not early:
            made(**slice_for(BATCHES[0], PLAN, rank))
        opts = {key: make(model.parameters()) for key, make in OPTIMIZERS.items()}
        for key, opt in opts.items():
            made.load_state_dict(start)
            steps(made, opt, BATCHES[:2], PLAN, rank)
            state = mc.optimizer_state_dict(made, opt)
            state["state"] = {name: {k: whole(v) for k, v in held.items()} for name, held in state["state"].items()}
            found[key] = (mc.full_state_dict(made), state)
    return found


@pytest.mark.parametrize(("config", "early"), thinned(STARTS, keep=("early-loop", "late-stacked")))
def test_every_optimizer_steps_and_shows_its_state(ranks: Ranks, config: Config, early: bool) -> None:
    """Empty parameters of other ranks' experts do not disturb default, foreach and fused kernels."""
    found = ranks.run(2, two_steps_each, config, early, timeout=180)
    for key, make in OPTIMIZERS.items():
        model, opt = reference(config, make, 2)
        expected = get_optimizer_state_dict(model, opt)
        for each in found:
            weights, state = each[key]
            for name, value in model.state_dict().items():
                assert torch.allclose(weights[name], value, rtol=1e-9, atol=1e-12), (key, name)
            kept = {name: held for name, held in expected["state"].items() if held}
            assert set(state["state"]) == set(kept), key
            for name, held in kept.items():
                assert set(held) == set(state["state"][name])
                for entry, value in held.items():
                    torch.testing.assert_close(state["state"][name][entry], value, rtol=1e-9, atol=1e-12)
            assert state["param_groups"] == expected["param_groups"]


# ---- across plans and processes ------------------------------------------------------------------------------------------


def save(rank: int, config: Config, folder: str, names: list[str]) -> None:
    model = build(config)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    with parallel(model, PLAN) as made:
        for key in names:
            made.load_state_dict(start)
            opt = OPTIMIZERS[key](model.parameters())
            steps(made, opt, BATCHES[:2], PLAN, rank)
            state = {"model": made.state_dict(), "optim": mc.optimizer_state_dict(made, opt)}
            dcp.save(state, checkpoint_id=f"{folder}/{key}")


def load(
    rank: int, config: Config, plan: Plan, folder: str, names: list[str], early: bool
) -> dict[str, dict[str, Tensor]]:
    """Two more steps each. ``early``: all states are loaded while the model and the optimizers are whole, and cut with it."""
    found = {}
    model = build(Config(**{**vars(config), "seed": 9}))
    opts = {key: OPTIMIZERS[key](model.parameters()) for key in names}
    with parallel(model, plan) as made:
        if not early:
            made(**slice_for(BATCHES[0], plan, rank))
        weights = {}
        for key, opt in opts.items():
            state = {"model": made.state_dict(), "optim": mc.optimizer_state_dict(made, opt)}
            dcp.load(state, checkpoint_id=f"{folder}/{key}")
            mc.load_optimizer_state_dict(made, opt, state["optim"])
            weights[key] = copy.deepcopy(state["model"])
        for key, opt in opts.items():
            made.load_state_dict(weights[key])
            steps(made, opt, BATCHES[2:], plan, rank)
            found[key] = mc.full_state_dict(made)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("config", [LOOP, STACKED], ids=["loop", "stacked"])
def test_case_33_moments_survive_a_change_of_plan(ranks: Ranks, config: Config, tmp_path: Path) -> None:
    names = ["sgd-momentum", "adamw-fused", "adam-amsgrad", "rmsprop", "adagrad"]
    ranks.run(2, save, config, str(tmp_path), names, timeout=180)
    expected = {key: reference(config, OPTIMIZERS[key], 4)[0].state_dict() for key in names}
    found = ranks.run(2, load, config, Plan(dp=2), str(tmp_path), names, True, timeout=180)
    found += ranks.run(4, load, config, Plan(dp=4, ep=4), str(tmp_path), names, False, timeout=180)
    found += ranks.run(4, load, config, Plan(dp=4, ep=2), str(tmp_path), names[1:2], True, timeout=180)
    for each in found:
        for key, weights in each.items():
            for name, value in weights.items():
                torch.testing.assert_close(value, expected[key][name], rtol=1e-9, atol=1e-12)
    # plain code goes on with torch's own functions
    for key in names:
        model = build(Config(**{**vars(config), "seed": 9}))
        opt = OPTIMIZERS[key](model.parameters())
        state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, opt)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, checkpoint_id=f"{tmp_path}/{key}", no_dist=True)
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, opt, state["optim"])
        steps(model, opt, BATCHES[2:], ONE, 0)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, expected[key][name], rtol=1e-9, atol=1e-12)


def from_plain(
    rank: int, config: Config, states: list[Any], weights: dict[str, Tensor], early: bool
) -> list[dict[str, Tensor]]:
    found = []
    model = build(config)
    with parallel(model, PLAN) as made:
        if not early:
            made(**slice_for(BATCHES[0], PLAN, rank))
        opts = [torch.optim.AdamW(grouped(model), lr=1.0) for _ in states]
        for opt, state in zip(opts, states, strict=True):
            mc.load_optimizer_state_dict(made, opt, state)
        for opt in opts:
            made.load_state_dict(weights)
            steps(made, opt, BATCHES[2:], PLAN, rank)
            found.append(mc.full_state_dict(made))
    return found


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with their own settings; the second has no weight decay."""
    norms = [param for name, param in model.named_parameters() if "norm" in name]
    rest = [param for name, param in model.named_parameters() if "norm" not in name]
    return [{"params": rest, "lr": 0.01, "weight_decay": 0.1}, {"params": norms, "lr": 0.02, "weight_decay": 0.0}]


@BOTH
@pytest.mark.parametrize("early", [True, False], ids=["before", "after"])
def test_state_of_a_plain_optimizer(ranks: Ranks, config: Config, early: bool) -> None:
    """Numbered as ``state_dict()`` does, or named as torch's checkpoint functions do; groups keep their settings."""
    model = build(config)
    opt = torch.optim.AdamW(grouped(model), lr=1.0, eps=1e-5)
    steps(model, opt, BATCHES[:2], ONE, 0)
    states = copy.deepcopy([opt.state_dict(), get_optimizer_state_dict(model, opt)])
    weights = copy.deepcopy(model.state_dict())
    steps(model, opt, BATCHES[2:], ONE, 0)
    for found in ranks.run(2, from_plain, config, states, weights, early):
        for each in found:
            for name, value in model.state_dict().items():
                torch.testing.assert_close(each[name], value, rtol=1e-9, atol=1e-12)


def partly_trained(rank: int, config: Config, folder: str) -> tuple[list[str], list[str], bool]:
    """Frozen parameters keep out, parameters without a step come back without state."""
    model = build(config)
    model.embed.weight.requires_grad_(False)
    unused = model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    with parallel(model, PLAN) as made:
        opt = torch.optim.AdamW(model.parameters())
        fresh = mc.optimizer_state_dict(made, opt)
        steps(made, opt, BATCHES[:1], PLAN, rank)
        saved = mc.optimizer_state_dict(made, opt)
        dcp.save({"optim": saved}, checkpoint_id=folder)
        other = torch.optim.AdamW(model.parameters(), lr=0.5)
        template = {"optim": mc.optimizer_state_dict(made, other)}
        dcp.load(template, checkpoint_id=folder)
        mc.load_optimizer_state_dict(made, other, template["optim"])
        same = all(
            torch.equal(other.state[param][key], value)
            for param, held in opt.state.items()
            for key, value in held.items()
        )
        ours = other.param_groups[0]["lr"] == 1e-3 and set(map(id, other.state)) == set(map(id, opt.state))
        assert unused is None
        zeros = saved["state"]["unused"]["exp_avg"]
        return sorted(fresh["state"]), sorted(saved["state"]), same and ours and not zeros.count_nonzero()


@BOTH
def test_parameters_without_state(ranks: Ranks, config: Config, tmp_path: Path) -> None:
    names = [name for name, _ in build(config).named_parameters() if name != "embed.weight"]
    for fresh, saved, same in ranks.run(2, partly_trained, config, str(tmp_path)):
        assert fresh == saved == sorted(["unused", *names]) and same


def wrong(rank: int, config: Config) -> list[str]:
    model = build(config)
    said = []
    with parallel(model, PLAN) as made:
        opt = torch.optim.AdamW(model.parameters())
        steps(made, opt, BATCHES[:1], PLAN, rank)
        good = mc.optimizer_state_dict(made, opt)
        name = next(name for name in good["state"] if ".experts." in name)
        rest = [key for key in good["param_groups"][0]["params"] if key != name]
        halves = [{**good["param_groups"][0], "params": part} for part in (rest[:3], [*rest[3:], name])]
        moments = {**good["state"][name], "exp_avg": torch.zeros(2, 2)}
        for state in (
            {**good, "param_groups": [{**good["param_groups"][0], "params": rest}]},
            {**good, "param_groups": halves},
            {**good, "state": {**good["state"], name: moments}},
            {"state": {}, "param_groups": [{"params": [0, 1]}]},
        ):
            try:
                mc.load_optimizer_state_dict(made, opt, state)
                said.append("loaded")
            except (ValueError, RuntimeError) as error:
                said.append(str(error))
        try:
            mc.optimizer_state_dict(made, torch.optim.SGD(nn.Linear(2, 2).parameters()))
        except ValueError as error:
            said.append(str(error))
    return said


@BOTH
def test_states_that_do_not_fit_are_errors(ranks: Ranks, config: Config) -> None:
    name = next(name for name, _ in build(config).named_parameters() if ".experts." in name)
    for lacking, split, shape, count, foreign in ranks.run(2, wrong, config):
        assert f"lacks '{name}'" in lacking
        assert "spans 2 groups" in split
        assert name in shape and "the plain model's is" in shape
        assert "is for 2 parameters" in count
        assert "no parameter of the model" in foreign


# ---- the guard -----------------------------------------------------------------------------------------------------------


class NormScaled(torch.optim.SGD):
    """Scales a step by the norm of its gradient: looks harmless, sees a share only."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * param.grad / (param.grad.norm() + 1))


class Signs(torch.optim.Optimizer):
    """An elementwise optimizer that torch does not have."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["mean"] = state.get("mean", torch.zeros_like(param)).lerp(param.grad, 0.1)
                    param.sub_(group["lr"] * state["mean"].sign())


def guarded(rank: int, config: Config) -> tuple[list[str], int]:
    said = []
    kinds: list[Make] = [
        lambda params: torch.optim.Adafactor(params),
        lambda params: torch.optim.LBFGS(params),
        lambda params: NormScaled(params, lr=0.1),
    ]
    for make in kinds:
        model = build(config)
        with parallel(model, PLAN) as made:
            opt = make(list(model.parameters()))
            loss = made(**slice_for(BATCHES[0], PLAN, rank))["loss"]
            loss.backward()
            before = {name: value.detach().clone() for name, value in model.named_parameters()}
            try:
                opt.step(loss.detach)
                said.append("stepped")
            except mc.PlanError as error:
                said.append(str(error))
            assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    model = build(config)
    with parallel(model, PLAN) as made:
        opt = Signs(model.parameters(), lr=0.1)
        steps(made, opt, BATCHES[:2], PLAN, rank)
        count = opt.count
        outside = [param for name, param in model.named_parameters() if ".experts." not in name and param.dim() == 2]
        steps(made, torch.optim.Muon(outside, lr=0.1), BATCHES[:1], PLAN, rank)
    model = build(config)
    early = torch.optim.AdamW(model.parameters())
    steps(model, early, BATCHES[:1], ONE, 0)
    with parallel(model, PLAN) as made:
        try:
            steps(made, early, BATCHES[:1], PLAN, rank)
            said.append("stepped")
        except mc.PlanError as error:
            said.append(str(error))
    return said, count


def test_optimizers_that_need_the_whole_are_refused(ranks: Ranks) -> None:
    for said, count in ranks.run(2, guarded, LOOP):
        for name, one in zip(("Adafactor", "LBFGS", "NormScaled"), said[:3], strict=True):
            assert f"the optimizer {name}" in one and ".experts." in one and "AdamW or SGD" in one
        assert "from before the model was cut" in said[3] and "load_optimizer_state_dict" in said[3]
        assert count == 2


TWO_LAYERS = Config("loop", layers=2, bias=True)


def orthogonalised(rank: int, plan: Plan, early: bool) -> dict[str, Tensor]:
    """Muon for every matrix, over the weights of other ranks and stages, too."""
    model = build(TWO_LAYERS)
    with parallel(model, plan) as made:
        if not early:
            made(**slice_for(BATCHES[0], plan, plan.data_rank(rank)))
        matrices = [param for param in made.parameters() if param.dim() == 2]
        steps(made, torch.optim.Muon(matrices, lr=0.1), BATCHES[:2], plan, plan.data_rank(rank))
        return mc.full_state_dict(made)


@pytest.mark.parametrize(
    "plan",
    thinned({"ep": Plan(dp=2, ep=2), "pp": Plan(dp=1, pp=2, microbatches=2)}),
)
@pytest.mark.parametrize("early", [True, False], ids=["before", "after"])
def test_muon_takes_the_matrices_that_a_rank_has_whole(ranks: Ranks, plan: Plan, early: bool) -> None:
    alone = build(TWO_LAYERS)
    steps(
        alone,
        torch.optim.Muon([param for param in alone.parameters() if param.dim() == 2], lr=0.1),
        BATCHES[:2],
        ONE,
        0,
    )
    for found in ranks.run(2, orthogonalised, plan, early):
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


def averaged(model: Any, plan: Plan, rank: int) -> None:
    """Leaves the moving average of the weights in the model."""
    model(**slice_for(BATCHES[0], plan, rank))
    means = [param.detach().clone() for param in model.parameters()]
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in BATCHES[:2]:
        steps(model, opt, [batch], plan, rank)
        for mean, param in zip(means, model.parameters(), strict=True):
            mean.lerp_(param.detach(), 0.1)
    with torch.no_grad():
        for mean, param in zip(means, model.parameters(), strict=True):
            param.copy_(mean)


def averaged_on_rank(rank: int) -> dict[str, Tensor]:
    with parallel(build(LOOP), PLAN) as made:
        with pytest.raises(TypeError, match=r"clone model\.parameters\(\) after the first call"):
            torch.optim.swa_utils.AveragedModel(made)
        averaged(made, PLAN, rank)
        return mc.full_state_dict(made)


def test_an_average_of_the_weights(ranks: Ranks) -> None:
    """A copy of the model is refused with the way that works."""
    alone = build(LOOP)
    averaged(alone, ONE, 0)
    for found in ranks.run(2, averaged_on_rank):
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


# ---- probing, in one process ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "elementwise"),
    [
        *[(make, True) for make in OPTIMIZERS.values()],
        (lambda params: torch.optim.NAdam(params), True),
        (lambda params: Signs(params, lr=0.1), True),
        (lambda params: torch.optim.Adafactor(params), False),
        (lambda params: NormScaled(params, lr=0.1), False),
    ],
)
def test_the_probe_knows_elementwise_optimizers(make: Make, elementwise: bool) -> None:
    param = nn.Parameter(torch.randn(4, 3, 3))
    opt = make([param])
    torch.optim.lr_scheduler.StepLR(opt, 1)
    before, random, state = param.detach().clone(), torch.get_rng_state(), copy.deepcopy(opt.state_dict())
    assert is_elementwise(opt, opt.param_groups[0], param, 3) is elementwise
    assert torch.equal(param, before) and torch.equal(torch.get_rng_state(), random)
    assert str(opt.state_dict()) == str(state)


def test_fresh_state_is_what_a_first_step_makes() -> None:
    for key, make in OPTIMIZERS.items():
        param = nn.Parameter(torch.randn(4, 3))
        opt = make([param])
        made = fresh_state(opt, opt.param_groups[0], param, 2)
        param.grad = torch.randn(4, 3)
        opt.step()
        real = {name: value for name, value in opt.state[param].items() if value is not None}
        assert {name: (value.shape, value.dtype) for name, value in made.items() if isinstance(value, Tensor)} == {
            name: (value.shape, value.dtype) for name, value in real.items()
        }, key
