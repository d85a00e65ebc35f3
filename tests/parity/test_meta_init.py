"""Models built on the meta device: the same weights for every layout, equal to one process's, and only this rank's share kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import moecompile as mc
from moecompile.errors import CaptureError
from moecompile.meta_init import initialize, materialize
from moecompile.plan import Plan
from tests.support.models import Config, TinyMoe, tokens
from tests.support.parity import slice_for
from tests.support.pool import Ranks, parallel

pytestmark = pytest.mark.timeout(150)
BATCH = tokens(8, 5, 0)
LOOP = Config("loop", bias=True)
PP = Plan(dp=1, pp=2, microbatches=2)
PLANS = [Plan(dp=2, ep=2), Plan(dp=2), Plan(dp=4, ep=2), Plan(dp=4, ep=4), PP]


def on_meta(make: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.device("meta"):
        return make(*args, **kwargs)


def tiny(config: Config) -> TinyMoe:
    """The test model with a stock norm: the hand-written one has nothing that would fill it."""
    model = TinyMoe(config)
    for layer in model.layers:
        layer.norm_2 = nn.RMSNorm(config.hidden)
    return model.to(config.dtype)


def tiny_32(config: Config) -> TinyMoe:
    """Drawn in fp32, as the constructors draw."""
    return tiny(replace(config, dtype=torch.float32))


def normal(module: nn.Module) -> None:
    """A user's init_fn: parameters of its own, in place."""
    for param in module.parameters(recurse=False):
        nn.init.normal_(param, std=0.3)


def drawn(rank: int, config: Config, plan: Plan, init: bool) -> tuple[dict[str, Tensor], int, bool, Tensor]:
    """The weights after a first call, how many elements this rank holds, and whether an early optimizer still fits."""
    model = on_meta(tiny, config)
    torch.manual_seed(7)
    torch.rand(rank + 1)  # another position in the stream on each rank: only the seed may count
    state = torch.get_rng_state()
    with parallel(model, plan, init_fn=normal if init else None) as made:
        stepper = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        held = list(model.parameters())
        loss = made(**slice_for(BATCH, plan, rank))["loss"]
        untouched = torch.equal(torch.get_rng_state(), state)
        full = mc.full_state_dict(made)
        loss.backward()
        stepper.step()
        moved = all(
            not torch.equal(full[name], new) for name, new in mc.full_state_dict(made).items() if "norm" not in name
        )
        same = all(one is other for one, other in zip(held, model.parameters(), strict=True))
        return full, sum(param.numel() for param in model.parameters()), same and moved and untouched, loss.detach()


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_case_35_every_layout_draws_the_weights_of_one_process(ranks: Ranks, plan: Plan) -> None:
    """reset_parameters of stock modules: also equal to building the model on the CPU with that seed."""
    found = ranks.run(plan.world_size, drawn, LOOP, plan, False)
    alone = on_meta(tiny, LOOP)
    torch.manual_seed(7)
    reference = initialize(alone)
    torch.manual_seed(7)
    built = tiny_32(LOOP)
    alone_32 = on_meta(tiny_32, LOOP)
    torch.manual_seed(7)
    assert all(
        torch.equal(initialize(alone_32).state_dict()[name], value) for name, value in built.state_dict().items()
    )
    loss = reference(**BATCH)["loss"]
    for full, _, healthy, its_loss in found:
        assert healthy
        assert list(full) == list(reference.state_dict())
        assert all(torch.equal(full[name], value) for name, value in reference.state_dict().items())
        torch.testing.assert_close(its_loss, loss.detach(), rtol=1e-12, atol=0)
    experts = [value for name, value in found[0][0].items() if ".experts." in name and value.dim() == 2]
    assert not any(torch.equal(one, two) for at, one in enumerate(experts) for two in experts[at + 1 :])
    per_expert = 3 * LOOP.hidden * LOOP.inner + 2 * LOOP.inner + LOOP.hidden
    dropped = LOOP.layers * LOOP.experts * per_expert * (plan.ep - 1) // plan.ep
    whole = sum(param.numel() for param in reference.parameters())
    counts = [count for _, count, _, _ in found]
    if plan.pp == 1:
        assert counts == [whole - dropped] * plan.world_size
    else:  # each stage has its own
        assert max(counts) < whole and sum(counts) == (whole - dropped) * plan.stage_size


def test_init_fn_fills_stacked_experts(ranks: Ranks) -> None:
    config, plan = Config("stacked", tied=True), Plan(dp=2, ep=2)
    found = ranks.run(2, drawn, config, plan, True)
    torch.manual_seed(7)
    reference = tiny(config)
    torch.manual_seed(7)
    for module in reference.modules():
        normal(module)
    for full, _, healthy, _ in found:
        assert healthy
        assert all(torch.equal(full[name], value) for name, value in reference.state_dict().items())


def refused(rank: int, config: Config, plan: Plan) -> str:
    with parallel(on_meta(tiny, config), plan) as made:
        try:
            made(**slice_for(BATCH, plan, rank))
        except CaptureError as error:
            return str(error)
    return ""


def test_parameters_that_nothing_initialises_are_refused_by_name(ranks: Ranks) -> None:
    for said in ranks.run(2, refused, Config("stacked"), Plan(dp=2, ep=2)):
        assert "nothing initialises 'layers.0.moe.experts.w_in', 'layers.0.moe.experts.w_out'" in said
        assert "init_fn" in said


def with_other_seeds(rank: int, plan: Plan) -> str:
    torch.manual_seed(rank)
    with parallel(on_meta(tiny, LOOP), plan) as made:
        try:
            made(**slice_for(BATCH, plan, rank))
        except CaptureError as error:
            return str(error)
    return ""


def test_ranks_with_different_seeds_are_told(ranks: Ranks) -> None:
    for said in ranks.run(2, with_other_seeds, Plan(dp=2, ep=2)):
        assert "torch.initial_seed() 0" in said and "torch.initial_seed() 1" in said


def loaded_before_the_call(rank: int, plan: Plan, state: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    model = on_meta(tiny, LOOP)
    stepper = torch.optim.SGD(model.parameters(), lr=0.1)
    with parallel(model, plan) as made:
        made.load_state_dict(state)
        loss = made(**slice_for(BATCH, plan, rank))["loss"]
        loss.backward()
        stepper.step()
        return loss.item(), mc.full_state_dict(made)


def test_a_state_loaded_on_meta_replaces_initialisation(ranks: Ranks) -> None:
    reference = tiny(LOOP)
    state = {name: value.clone() for name, value in reference.state_dict().items()}
    stepper = torch.optim.SGD(reference.parameters(), lr=0.1)
    loss = reference(**BATCH)["loss"]
    loss.backward()
    stepper.step()
    for found, weights in ranks.run(2, loaded_before_the_call, Plan(dp=2, ep=2), state):
        assert abs(found - loss.item()) < 1e-12
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-11, atol=1e-13)


def resumed_from_meta(rank: int, plan: Plan, folder: str) -> tuple[str, float]:
    """The plain loop's way: a checkpoint goes into templates that have no memory, then into model and optimizer."""
    model = on_meta(tiny, LOOP)
    stepper = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    with parallel(model, plan) as made:
        state = {"model": made.state_dict(), "optim": mc.optimizer_state_dict(made, stepper)}
        dcp.load(state, checkpoint_id=folder)
        try:
            mc.load_optimizer_state_dict(made, stepper, state["optim"])
            said = ""
        except ValueError as error:
            said = str(error)
        made.load_state_dict(state["model"])
        mc.load_optimizer_state_dict(made, stepper, state["optim"])
        for batch in (BATCH, tokens(8, 5, 1)):
            loss = made(**slice_for(batch, plan, rank))["loss"]
            loss.backward()
            stepper.step()
            stepper.zero_grad()
        return said, loss.item()


def test_a_checkpoint_resumes_on_meta(ranks: Ranks, tmp_path: Path) -> None:
    model = tiny(LOOP)
    stepper = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for at, batch in enumerate((tokens(8, 5, 2), BATCH, tokens(8, 5, 1))):
        loss = model(**batch)["loss"]
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        losses.append(loss.item())
        if at == 0:
            state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, stepper)}
            dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    for said, found in ranks.run(2, resumed_from_meta, Plan(dp=2, ep=2), str(tmp_path)):
        assert "load the model's weights first" in said
        assert found == pytest.approx(losses[-1], rel=1e-11)


# ---- the walk, in one process ------------------------------------------------------------------------------------------


class Reaching(nn.Module):
    """Its reset touches its children, as residual projections often are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 3)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.down.weight.mul_(0.5)
        nn.init.normal_(self.up.bias, std=0.1)


class Mixed(nn.Module):
    """Children and parameters of its own, padding, attention with a private reset, tied weights, buffers."""

    def __init__(self, tie: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3, padding_idx=0)
        self.parts = nn.ModuleList([Reaching(), Reaching()])
        self.norm = nn.BatchNorm1d(3)
        self.attention = nn.MultiheadAttention(4, 2)
        self.head = nn.Linear(3, 5, bias=False)
        if tie:
            self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.empty(2, 3))
        self.register_buffer("table", torch.arange(4.0, device="cpu"), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale)


def test_the_walk_draws_what_the_constructors_would() -> None:
    torch.manual_seed(3)
    built = Mixed()
    model = on_meta(Mixed)
    held = dict(model.named_parameters())
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert initialize(model) is model
    assert torch.equal(torch.get_rng_state(), before)
    for name, value in built.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert all(held[name] is param and param.requires_grad for name, param in model.named_parameters())
    assert torch.equal(model.table, torch.arange(4.0))


def test_tied_parameters_stay_tied_and_the_later_module_decides() -> None:
    model = on_meta(Mixed, tie=True)
    model.embed.weight.note = "kept"
    torch.manual_seed(3)
    initialize(model)
    assert model.head.weight is model.embed.weight and model.embed.weight.note == "kept"
    walked = Mixed(tie=True)
    torch.manual_seed(3)
    for module in (walked.embed, *(part for half in walked.parts for part in (half.up, half.down, half))):
        module.reset_parameters()
    walked.attention.out_proj.reset_parameters()
    walked.attention._reset_parameters()
    walked.head.reset_parameters()
    assert torch.equal(model.head.weight, walked.head.weight)


class Table(nn.Module):
    def __init__(self, fills: bool) -> None:
        super().__init__()
        self.fills = fills
        self.register_buffer("positions", torch.arange(6), persistent=False)
        self.register_buffer("mask", torch.ones(6, dtype=torch.bool), persistent=False)

    def reset_parameters(self) -> None:
        if self.fills:
            self.positions.copy_(torch.arange(6))
            self.mask.fill_(True)


def test_buffers_are_recomputed_or_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), on_meta(Table, True))
    initialize(model)
    assert model[1].positions.tolist() == [0, 1, 2, 3, 4, 5] and model[1].mask.all()
    with pytest.raises(CaptureError, match=r"nothing initialises '1.positions', '1.mask'.*device='cpu'"):
        initialize(nn.Sequential(nn.Linear(2, 2), on_meta(Table, False)))


def test_weights_that_exist_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), on_meta(nn.Linear, 2, 2))
    kept = model[0].weight.detach().clone()
    model[1].bias = nn.Parameter(torch.tensor([5.0, 6.0]))
    initialize(model)
    assert torch.equal(model[0].weight, kept)
    assert model[1].bias.tolist() == [5.0, 6.0] and not model[1].weight.is_meta


def test_one_module_at_a_time() -> None:
    """No more than the largest module is whole at once: what an initialiser sees beside its own tensors is meta or a share."""
    model = on_meta(lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)]))
    seen: list[list[int]] = []

    def spy(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            seen.append([0 if layer.weight.is_meta else layer.weight.numel() for layer in model])
        normal(module)

    materialize(model, {}, lambda name, value: value[:1].clone(), spy)
    assert seen == [[4] * at + [16] + [0] * (5 - at) for at in range(6)]


@pytest.mark.parametrize("tie", [False, True])
def test_hugging_face_models_replay_their_own_initialisation(tie: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        num_local_experts=4, vocab_size=32, tie_word_embeddings=tie,
    )  # fmt: skip
    built = transformers.MixtralForCausalLM(config)
    for module in built.modules():
        module._is_hf_initialized = False
    torch.manual_seed(0)
    built.initialize_weights()
    model = on_meta(transformers.MixtralForCausalLM, config)
    torch.manual_seed(0)
    initialize(model)
    for name, value in built.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert torch.equal(model.model.rotary_emb.inv_freq, built.model.rotary_emb.inv_freq)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tie
    ids = torch.arange(12).reshape(2, 6)
    assert torch.equal(model(input_ids=ids).logits, built(input_ids=ids).logits)


def test_adapters_on_meta_are_refused() -> None:
    peft = pytest.importorskip("peft")
    model = on_meta(lambda: peft.get_peft_model(nn.Sequential(nn.Linear(4, 4)), peft.LoraConfig(target_modules=["0"])))
    with pytest.raises(CaptureError, match="nothing says how adapters start"):
        initialize(model)
