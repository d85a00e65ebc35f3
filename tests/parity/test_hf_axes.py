"""Hugging Face models on tp, sp and cp: kinds of attention, masks, packed sequences, adapters, and the structure of what they return."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import moecompile as mc
from moecompile.placement.types import Shard
from moecompile.plan import Plan
from moecompile.program import InputKind, Program
from moecompile.simulate import Simulated
from tests.support import hf_models
from tests.support.parity import difference, slice_for
from tests.support.pool import Ranks, parallel
from tests.support.thinned import thinned

pytestmark = pytest.mark.timeout(240)
TP, CP = Plan(dp=1, tp=2, ep=2), Plan(dp=1, cp=2, ep=2)
SP, WIDE = Plan(dp=1, tp=2, ep=2, sequence_parallel=True), Plan(dp=1, tp=4, ep=2)
PLANS = {"tp": TP, "cp": CP, "sp": SP}
# norms, rotary embeddings, routers and the loss are computed in fp32 inside: another order of sums moves their roundings
RTOL = 1e-6


def padded(side: str) -> dict[str, Tensor]:
    """Sequences of different lengths, filled up at one side; what is filled has no label."""
    batch = hf_models.batch()
    mask = torch.ones_like(batch["input_ids"])
    for row, count in enumerate((3, 5)):
        part = slice(0, count) if side == "left" else slice(-count, None)
        mask[row, part], batch["labels"][row, part] = 0, -100
    return batch | {"attention_mask": mask}


def packed() -> dict[str, Tensor]:
    """Several sequences in each row: positions begin anew, and nobody sees the sequence before."""
    batch = hf_models.batch()
    positions = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
    return batch | {"position_ids": positions.contiguous()}


def check(model: nn.Module, plan: Plan, batch: dict[str, Tensor]) -> Simulated:
    """Loss and every gradient of simulated ranks against the plain model."""
    alone = copy.deepcopy(model)
    loss = alone(**batch).loss
    loss.backward()
    found = mc.simulate_ranks(model, plan, [slice_for(batch, plan, rank) for rank in range(plan.world_size)])
    torch.testing.assert_close(found.loss, loss.detach(), rtol=1e-6, atol=0)  # Hugging Face computes the loss in fp32
    wanted = {name: param.grad for name, param in alone.named_parameters() if param.grad is not None}
    assert set(wanted) <= set(found.grads)
    for name, grad in wanted.items():
        if grad is not None and grad.count_nonzero():
            assert float((found.grads[name] - grad).norm()) <= RTOL * float(grad.norm()) + 1e-13, name
    return found


def cut(program: Program, axis: str = "tp") -> dict[str, Shard]:
    return {
        item.fqns[0]: placed
        for item in program.inputs
        if item.kind is InputKind.PARAM
        for name, placed in item.placements
        if name == axis and isinstance(placed, Shard)
    }


def build(name: str, **options: Any) -> nn.Module:
    return hf_models.build(name, **options).double()


MASKS = {
    f"{batch}-{attention}-{name}": (batch, attention, plan)
    for batch, attention in (
        ("left", "sdpa"),
        ("right", "sdpa"),
        ("packed", "sdpa"),
        ("right", "eager"),
        ("packed", "eager"),
    )
    for name, plan in PLANS.items()
}


# Every plan with one kind of attention; with the other among the slow ones.
ATTENTIONS = {
    f"{name}-{kind}": (kind, plan)
    for at, (name, plan) in enumerate(PLANS.items())
    for kind in (("sdpa", "eager"), ("eager", "sdpa"))[at % 2]
}


@pytest.mark.parametrize(("batch", "attention", "plan"), thinned(MASKS))
def test_masks_and_packed_sequences(plan: Plan, attention: str, batch: str) -> None:
    model = build("mixtral", num_hidden_layers=1, attn_implementation=attention)
    found = check(model, plan, packed() if batch == "packed" else padded(batch))
    assert found.program.gathers == []


@pytest.mark.parametrize(("attention", "plan"), thinned(ATTENTIONS))
def test_sliding_windows(plan: Plan, attention: str) -> None:
    model = build("mixtral", num_hidden_layers=1, sliding_window=3, attn_implementation=attention)
    found = check(model, plan, hf_models.batch())
    assert found.program.gathers == []


FAMILIES = {
    f"{family}-{name}": (family, plan)
    for family in ("qwen3_moe", "gpt_oss", "deepseek_v3")
    for name, plan in PLANS.items()
}


@pytest.mark.parametrize(("family", "plan"), thinned(FAMILIES))
def test_families(family: str, plan: Plan) -> None:
    """Norms on heads; sinks beside the keys' scores; latent attention behind a dense layer."""
    found = check(build(family), plan, padded("right"))
    attention = [name for name in cut(found.program) if ".self_attn." in name]
    assert bool(attention) is (plan.tp > 1)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_fewer_heads_of_keys_than_ranks(attention: str) -> None:
    """Two heads of keys on four ranks: they stay whole beside the cut queries."""
    model = build("mixtral", num_hidden_layers=1, attn_implementation=attention)
    for batch in (hf_models.batch(), padded("right")):
        names = {
            name.rpartition("self_attn.")[2] for name in cut(check(model, WIDE, batch).program) if "self_attn" in name
        }
        assert names == {"q_proj.weight", "o_proj.weight"}


# ---- adapters -----------------------------------------------------------------------------------------------------------


def adapted(targets: list[str]) -> nn.Module:
    """Frozen weights, and low-rank updates that are not zero."""
    made = get_peft_model(
        build("qwen3_moe", num_hidden_layers=1), LoraConfig(r=2, lora_alpha=4, target_modules=targets)
    )
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, param in made.named_parameters():
            if "lora_B" in name:
                param.copy_(0.05 * torch.randn(param.shape, generator=source, dtype=param.dtype))
    return made.double()


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize(
    "targets", thinned({"q-v": ["q_proj", "v_proj"], "all": ["q_proj", "k_proj", "v_proj", "o_proj"]}, keep=("all",))
)
def test_adapters_on_attention(targets: list[str], plan: Plan) -> None:
    """Exact, whatever is cut and whatever stays whole; frozen weights have no gradient."""
    found = check(adapted(targets), plan, hf_models.batch())
    assert found.grads and all("lora" in name for name in found.grads)


@pytest.mark.parametrize("plan", [TP, SP], ids=["tp", "sp"])
def test_case_32_adapters_on_experts(plan: Plan) -> None:
    """A low-rank update of expert weights, which are cut over ep, on tokens that are cut over tp; a shared expert beside them."""
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = build("deepseek_v3", num_hidden_layers=1, first_k_dense_replace=0)
    made = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=["o_proj"], target_parameters=names))
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, param in made.named_parameters():
            if "lora_B" in name:
                param.copy_(0.05 * torch.randn(param.shape, generator=source, dtype=param.dtype))
    found = check(made.double(), plan, hf_models.batch())
    assert sum("experts" in name for name in found.grads) == 4
    assert any("shared_experts" in name for name in cut(found.program))


# ---- what a call returns -------------------------------------------------------------------------------------------------


def returned(rank: int, plan: Plan) -> dict[str, Any]:
    model = hf_models.build("mixtral", num_hidden_layers=1, output_router_logits=True).double()
    found: dict[str, Any] = {}
    with parallel(model, plan) as made:
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                out = made(**slice_for(hf_models.batch(size=4), plan, rank))
            if grad:
                out.loss.backward()
            spread = {"logits": out.logits, "router_logits": out.router_logits[0]}
            found[f"type {grad}"], found[f"keys {grad}"] = type(out).__name__, list(out.keys())
            found[f"cut {grad}"] = sorted(name for name, value in spread.items() if isinstance(value, DTensor))
            found[f"whole {grad}"] = {
                name: (value.full_tensor() if isinstance(value, DTensor) else value).detach()
                for name, value in spread.items()
            }
    return found


BOTH = Plan(dp=1, cp=2, tp=2, ep=2, sequence_parallel=True)
CUT = {
    "dp2-tp2": [],
    "sp": ["logits", "router_logits"],
    "cp": ["logits", "router_logits"],
    "cp-sp": ["logits", "router_logits"],
}


@pytest.mark.parametrize(
    ("name", "plan"),
    thinned(
        {"dp2-tp2": ("dp2-tp2", Plan(dp=2, tp=2, ep=4)), "sp": ("sp", SP), "cp": ("cp", CP), "cp-sp": ("cp-sp", BOTH)},
        keep=("sp", "cp"),
    ),
)
def test_the_output_keeps_its_structure(ranks: Ranks, name: str, plan: Plan) -> None:
    """Logits of each sequence, and router logits of all tokens in a row, as the plain model gives them for this data rank's batch."""
    alone = hf_models.build("mixtral", num_hidden_layers=1, output_router_logits=True).double()
    batch = hf_models.batch(size=4)
    for rank, found in enumerate(ranks.run(plan.world_size, returned, plan, timeout=180.0)):
        out = alone(**slice_for(batch, plan, rank))
        for grad in (True, False):
            assert found[f"type {grad}"] == type(out).__name__ and found[f"keys {grad}"] == list(out.keys())
            assert found[f"cut {grad}"] == CUT[name], name
            whole = found[f"whole {grad}"]
            assert difference("logits", whole["logits"], out.logits) < RTOL
            assert difference("router_logits", whole["router_logits"], out.router_logits[0]) < RTOL
