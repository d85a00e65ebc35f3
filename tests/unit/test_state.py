"""state_dict, load_state_dict, full_state_dict and full_grads of a model whose experts are cut."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor

import moecompile as mc
from moecompile.owned import OwnedTensor
from moecompile.plan import Plan
from tests.support.models import Config, build, choose, push_to, tokens
from tests.support.parity import Batch, slice_for
from tests.support.pool import Ranks, parallel
from tests.support.thinned import thinned

pytestmark = pytest.mark.timeout(150)
PLAN = Plan(dp=2, ep=2)
BATCH = tokens(8, 5, 0)
LOOP, STACKED = Config("loop", layers=1), Config("stacked", layers=1, tied=True)
BOTH = pytest.mark.parametrize("config", [LOOP, STACKED], ids=["loop", "stacked"])
THINNED = pytest.mark.parametrize("config", thinned({"loop": LOOP, "stacked": STACKED}))


def plain_state(config: Config) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in build(config).state_dict().items()}


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return list(found) == list(expected) and all(
        type(found[name]) is Tensor and torch.equal(found[name], value) for name, value in expected.items()
    )


# ---- to global shapes ----------------------------------------------------------------------------------------------------


def describe(rank: int, config: Config, plan: Plan, folder: str) -> dict[str, Any]:
    model = build(config)
    with parallel(model, plan) as made:
        before = equal(mc.full_state_dict(made), plain_state(config))
        made(**slice_for(BATCH, plan, rank))
        state = made.state_dict()
        kinds = {name: (type(value).__name__, tuple(value.shape)) for name, value in state.items()}
        shared = all(
            value.to_local() is None or value.to_local().data_ptr() == dict(model.named_parameters())[name].data_ptr()
            for name, value in state.items()
            if isinstance(value, (OwnedTensor, DTensor))
        )
        wholes = {
            name: value.full_tensor() for name, value in state.items() if isinstance(value, (OwnedTensor, DTensor))
        }
        dcp.save({"model": state}, checkpoint_id=folder)
        snapshot = mc.full_state_dict(made)
        copied = copy.deepcopy(state)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        copies = {name: item.full_tensor() for name, item in copied.items() if isinstance(item, (OwnedTensor, DTensor))}
        return {
            "before": before, "kinds": kinds, "shared": shared, "wholes": wholes, "snapshot": snapshot, "copies": copies,
            "held": sum(param.numel() for param in model.parameters()),
        }  # fmt: skip


@BOTH
@pytest.mark.parametrize("plan", thinned({"ep2": PLAN, "edp2": Plan(dp=4, ep=2)}, keep=("edp2",)))
def test_names_and_global_shapes_on_every_rank(ranks: Ranks, config: Config, plan: Plan, tmp_path: Path) -> None:
    expected = plain_state(config)
    for found in ranks.run(plan.world_size, describe, config, plan, str(tmp_path)):
        assert found["before"] and found["shared"]
        assert [(name, shape) for name, (_, shape) in found["kinds"].items()] == [
            (name, tuple(value.shape)) for name, value in expected.items()
        ]
        cut = {name: kind for name, (kind, _) in found["kinds"].items() if kind != "Tensor"}
        assert set(cut) == {name for name in expected if ".experts." in name}
        assert set(cut.values()) == {"OwnedTensor" if config is LOOP else "DTensor"}
        for wholes in (found["wholes"], found["copies"]):
            assert set(wholes) == set(cut)
            assert all(torch.equal(value, expected[name]) for name, value in wholes.items())
        assert equal(found["snapshot"], expected)
        assert (
            found["snapshot"]["embed.weight"].data_ptr() == found["snapshot"]["head.weight"].data_ptr()
            or config is LOOP
        )
        experts = sum(expected[name].numel() for name in cut)
        whole = sum(param.numel() for param in build(config).parameters())
        assert found["held"] == whole - experts + experts // 2

    written = dcp.FileSystemReader(str(tmp_path)).read_metadata().state_dict_metadata
    assert set(written) == {f"model.{name}" for name in expected}
    for name, value in expected.items():
        chunks = written[f"model.{name}"].chunks
        pieces = 2 if config is STACKED and ".experts." in name else 1
        assert sum(chunk.sizes.numel() for chunk in chunks) == value.numel() and len(chunks) == pieces
    read = {name: torch.full_like(value, float("nan")) for name, value in expected.items()}
    dcp.load({"model": read}, checkpoint_id=str(tmp_path), no_dist=True)
    assert equal(read, expected)
    dcp_to_torch_save(str(tmp_path), tmp_path / "whole.pt")
    build(config).load_state_dict(torch.load(tmp_path / "whole.pt")["model"])


def save_in_background(rank: int, config: Config, folder: str) -> None:
    with parallel(build(config), PLAN) as made:
        made(**slice_for(BATCH, PLAN, rank))
        future: Any = dcp.async_save({"model": made.state_dict()}, checkpoint_id=folder)
        future.result()


@THINNED
def test_async_save(ranks: Ranks, config: Config, tmp_path: Path) -> None:
    ranks.run(2, save_in_background, config, str(tmp_path))
    expected = plain_state(config)
    read = {name: torch.full_like(value, float("nan")) for name, value in expected.items()}
    dcp.load({"model": read}, checkpoint_id=str(tmp_path), no_dist=True)
    assert equal(read, expected)


# ---- from whole states and from other plans ------------------------------------------------------------------------------


def load_plain(rank: int, config: Config, plan: Plan, state: dict[str, Tensor], early: bool) -> tuple[bool, bool, bool]:
    model = build(Config(**{**vars(config), "seed": 9}))
    with parallel(model, plan) as made:
        held = dict(model.named_parameters())
        if not early:
            made(**slice_for(BATCH, plan, rank))
        places = {name: param.data_ptr() for name, param in held.items()}
        said = str(made.load_state_dict(state))
        kept = all(held[name] is param and places[name] == param.data_ptr() for name, param in model.named_parameters())
        made(**slice_for(BATCH, plan, rank))
        return kept, equal(mc.full_state_dict(made), state), "All keys matched" in said


@BOTH
@pytest.mark.parametrize("early", [True, False], ids=["before", "after"])
def test_the_plain_models_state_lands_in_place(ranks: Ranks, config: Config, early: bool) -> None:
    assert ranks.run(2, load_plain, config, PLAN, plain_state(config), early) == [(True, True, True)] * 2


def between_plans(rank: int, config: Config) -> list[bool]:
    """Two models side by side: from ep=2 to ep=4, to one that is not cut yet, and through a file of another module's."""
    source, target = build(config), build(Config(**{**vars(config), "seed": 9}))
    fresh = build(Config(**{**vars(config), "seed": 10}))
    four, two = Plan(dp=4, ep=4), Plan(dp=4, ep=2)
    expected = plain_state(config)
    with parallel(source, two) as a, parallel(target, four) as b, parallel(fresh, two) as c:
        for made, plan in ((a, two), (b, four)):
            made(**slice_for(BATCH, plan, rank))
        b.load_state_dict(a.state_dict())
        c.load_state_dict(b.state_dict())
        return [equal(mc.full_state_dict(made), expected) for made in (a, b, c)]


@BOTH
def test_states_of_other_plans(ranks: Ranks, config: Config) -> None:
    assert ranks.run(4, between_plans, config) == [[True] * 3] * 4


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.extra = inner, nn.Linear(2, 2)


def inside_another_module(rank: int, config: Config) -> tuple[bool, bool]:
    with parallel(build(config), PLAN) as made:
        made(**slice_for(BATCH, PLAN, rank))
        around = Around(made)
        state = around.state_dict()
        whole = Around(build(Config(**{**vars(config), "seed": 9}))).state_dict()
        names = list(state) == list(whole) and all(state[name].shape == whole[name].shape for name in whole)
        around.load_state_dict(whole)
        inner = {name.removeprefix("inner."): value for name, value in whole.items() if name.startswith("inner.")}
        return names, equal(mc.full_state_dict(made), inner)


@BOTH
def test_inside_another_module(ranks: Ranks, config: Config) -> None:
    assert ranks.run(2, inside_another_module, config) == [(True, True)] * 2


def wrong_states(rank: int, config: Config, state: dict[str, Tensor]) -> list[str]:
    name = next(name for name in state if ".experts." in name)
    missing = {key: value for key, value in state.items() if key != name}
    half = {**state, name: state[name][: len(state[name]) // 2]}
    transposed = {**state, name: state[name].transpose(-1, -2)}
    said = []
    with parallel(build(config), PLAN) as made:
        made(**slice_for(BATCH, PLAN, rank))
        for wrong in (missing, {**state, "another": torch.zeros(1)}, half, transposed):
            try:
                made.load_state_dict(wrong)
                said.append("loaded")
            except RuntimeError as error:
                said.append(str(error))
        skipped = made.load_state_dict(missing, strict=False)
        said.append(str(skipped.missing_keys))
        try:
            made.load_state_dict(state, assign=True)
        except ValueError as error:
            said.append(str(error))
    return said


@BOTH
def test_case_33_wrong_states_are_errors(ranks: Ranks, config: Config) -> None:
    state = plain_state(config)
    name = next(name for name in state if ".experts." in name)
    for missing, unknown, half, transposed, skipped, assign in ranks.run(2, wrong_states, config, state):
        assert "Missing key" in missing and name in missing
        assert "Unexpected key" in unknown and "another" in unknown
        assert name in half and "but the plain model's is" in half
        assert name in transposed and "pass the whole tensor" in transposed
        assert skipped == f"['{name}']"
        assert "use assign=False" in assign


def through_pickle(rank: int, config: Config) -> tuple[str, str]:
    """What happens if rank 0 pickles its own part and all ranks load that file."""
    with parallel(build(config), PLAN) as made:
        made(**slice_for(BATCH, PLAN, rank))
        file = io.BytesIO()
        saved = loaded = ""
        try:
            torch.save(made.state_dict(), file)
        except TypeError as error:
            return str(error), ""
        files = [file.getvalue()]
        dist.broadcast_object_list(files, 0)
        try:
            made.load_state_dict(torch.load(io.BytesIO(files[0]), weights_only=False))
        except RuntimeError as error:
            loaded = str(error)
    return saved, loaded


def test_case_33_one_ranks_pickled_part_is_never_taken_for_the_whole(ranks: Ranks) -> None:
    for saved, _ in ranks.run(2, through_pickle, LOOP):
        assert "moecompile.full_state_dict" in saved
    assert ["saved by another rank" in said for _, said in ranks.run(2, through_pickle, STACKED)] == [False, True]


# ---- gradients -----------------------------------------------------------------------------------------------------------


def grads_of(rank: int, config: Config, plan: Plan, batch: Batch) -> tuple[dict[str, Tensor | None], list[str]]:
    model = build(config)
    model.head.weight.requires_grad_(config.tied)
    said = []
    with parallel(model, plan) as made:
        with made.no_sync():
            made(**slice_for(batch, plan, rank))["loss"].backward()
        try:
            mc.full_grads(made)
        except RuntimeError as error:
            said.append(str(error))
        made(**slice_for(batch, plan, rank))["loss"].backward()
        found = mc.full_grads(made)
        if rank == 0:
            next(param for param in model.parameters() if param.grad is not None).grad = None
        try:
            mc.full_grads(made)
        except mc.CaptureError as error:
            said.append(str(error))
    return found, said


@THINNED
@pytest.mark.parametrize("plan", thinned({"ep2": PLAN, "edp2": Plan(dp=4, ep=2)}, keep=("edp2",)))
def test_case_16_full_grads(ranks: Ranks, config: Config, plan: Plan) -> None:
    """Experts 1 and 2 idle: exactly zero, not None; a frozen parameter has None."""
    choices = choose(8, 5, 2, [0, 3])
    batch = {**BATCH, "push": push_to(choices, 4)}
    model = build(config)
    model.head.weight.requires_grad_(config.tied)
    (2 * model(**batch)["loss"]).backward()
    for found, (unreduced, disagree) in ranks.run(plan.world_size, grads_of, config, plan, batch):
        assert "no_sync" in unreduced and "a gradient of" in disagree
        assert list(found) == [name for name, _ in model.named_parameters()]
        for name, param in model.named_parameters():
            value = found[name]
            idle = any(f".experts.{index}." in name for index in (1, 2))
            if not param.requires_grad:
                assert value is None
            elif idle:
                assert value is not None and value.shape == param.shape and not value.count_nonzero()
            else:
                assert type(value) is Tensor
                torch.testing.assert_close(value, param.grad, rtol=1e-11, atol=1e-14)
            if value is not None and config is STACKED and ".experts." in name:
                assert not value[1:3].count_nonzero()


# ---- conversion ----------------------------------------------------------------------------------------------------------


def converted(rank: int, config: Config, batch: Batch) -> tuple[list[float], set[torch.dtype], bool]:
    model = build(config)
    with parallel(model, PLAN) as made:
        losses = [made(**slice_for(batch, PLAN, rank))["loss"].item()]
        made.float()
        out = made(**slice_for(batch, PLAN, rank))["loss"]
        out.backward()
        kinds = {param.grad.dtype for param in model.parameters() if param.grad is not None}
        losses.append(out.item())
        made.to(torch.float64)
        kinds |= {param.grad.dtype for param in model.parameters() if param.grad is not None}
        made.zero_grad()
        stepper = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            out = made(**slice_for(batch, PLAN, rank))["loss"]
            out.backward()
            stepper.step()
            stepper.zero_grad()
            losses.append(out.item())
        own = made.bfloat16() is made and all(param.dtype == torch.bfloat16 for param in model.parameters())
        return losses, kinds, own


@BOTH
def test_conversions_restack(ranks: Ranks, config: Config) -> None:
    """The graph reads the converted weights, and steps after it land in them."""
    model = build(config)
    expected = [model(**BATCH)["loss"].item(), model.float()(**BATCH)["loss"].item()]
    model.double()
    stepper = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(**BATCH)["loss"]
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        expected.append(loss.item())
    for losses, kinds, own in ranks.run(2, converted, config, BATCH):
        assert kinds == {torch.float32, torch.float64} and own
        assert losses[0] == pytest.approx(expected[0], rel=1e-12)
        assert losses[1] == pytest.approx(expected[1], rel=1e-5)
        assert losses[2:] == pytest.approx(expected[2:], rel=1e-12)


def plain_modules(rank: int, config: Config, file: str) -> list[str]:
    """What the plain module, a submodule and files and copies of them say of parts."""
    model = build(config)
    with parallel(model, PLAN) as made:
        made(**slice_for(BATCH, PLAN, rank))
        wholes = plain_state(config)
        for found in (model.state_dict(), made.state_dict()):
            assert {name: tuple(value.shape) for name, value in found.items()} == {
                name: tuple(value.shape) for name, value in wholes.items()
            }
        layer = model.get_submodule("layers.0.moe").state_dict()
        assert all(value.shape == wholes[f"layers.0.moe.{name}"].shape for name, value in layer.items())
        said = []
        for attempt in (
            lambda: torch.save(model.state_dict(), file),
            lambda: copy.deepcopy(model),
            lambda: torch.save(model, file),
        ):
            try:
                attempt()
                said.append("done")
            except (RuntimeError, TypeError) as error:
                said.append(str(error))
        copy.deepcopy(model.get_submodule("head"))  # whole on every rank
        return said


def test_the_plain_module_gives_no_part_for_the_whole(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks.run(2, plain_modules, LOOP, str(tmp_path / "state")):
        assert all("full_state_dict(model)" in one for one in said), said
