"""Cases from the field in which gradients or the loss were wrong: 01, 03, 09, 13, 16, 29. Each test names its case."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import moecompile as mc
from moecompile.plan import Plan
from tests.support.models import Config, TinyMoe, build, choose, push_to, tokens
from tests.support.parity import Batch, LockStep, compare, difference, plain

FP32 = 2e-5  # three steps in fp32, sums in another order


# ---- 01 and 03: factors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["loop", "stacked"])
def test_case_01_expert_gradients_are_not_multiplied_by_ep(style: str) -> None:
    """One layer, four experts, top 2, 32 tokens, fp32: 16 on each of two ranks give the gradients of one process."""
    config = Config(style, layers=1, dtype=torch.float32)  # type: ignore[arg-type]
    batch = tokens(8, 4, 0)
    reference = plain(build(config), [batch]).steps[0]
    found = LockStep(build(config), Plan(dp=2, ep=2), batch).step(batch)
    experts = [name for name in reference.grads if ".experts." in name]
    assert len(experts) == (12 if style == "loop" else 2)
    for name in experts:
        assert difference(name, found.grads[name], reference.grads[name]) < 1e-6
        ratio = found.grads[name].norm() / reference.grads[name].norm()
        assert abs(float(ratio) - 1) < 1e-6


FOLDINGS = [(world, ep) for world in (1, 2, 4) for ep in (1, 2, 4) if ep <= world]


@pytest.mark.parametrize(("world", "ep"), FOLDINGS, ids=[f"dp{world}-ep{ep}" for world, ep in FOLDINGS])
def test_case_03_no_ratio_of_axes_is_left_over(world: int, ep: int) -> None:
    """Every folding of dp over ep and edp: three steps of SGD in fp32 end at the weights of one rank.

    A wrong factor fails with the gradients it is on and its size, which is the ratio of two axes.
    """
    config = Config("loop", experts=4, shared=True, aux=0.1, dtype=torch.float32)
    batches = [tokens(8, 4, seed, ignored=0.3) for seed in range(3)]
    plan = Plan(dp=world, ep=ep)
    assert plan.edp * plan.ep == plan.world_size == world
    found = LockStep(build(config), plan, batches[0], optimizer="sgd").run(batches)
    compare(found, plain(build(config), batches, optimizer="sgd"), rtol=FP32)


# ---- 09 and 13: accumulation ---------------------------------------------------------------------------------------------


@pytest.fixture
def one_rank() -> Iterator[TinyMoe]:
    """A model under a plan of one rank, which needs no processes."""
    yield mc.parallelize(build(Config("loop", aux=0.1)), Plan(dp=1))  # type: ignore[misc]


def grads_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def accumulated(model: torch.nn.Module, batches: list[Batch], divide_by: int) -> dict[str, Tensor]:
    model.zero_grad()
    for batch in batches:
        (model(**batch)["loss"] / divide_by).backward()
    return grads_of(model)


def same_gradients(found: dict[str, Tensor], reference: dict[str, Tensor], rtol: float = 1e-12) -> None:
    assert set(found) == set(reference)
    for name, expected in reference.items():
        assert difference(name, found[name], expected) < rtol, name


def test_case_09_the_router_is_not_regularised_once_per_microbatch(one_rank: TinyMoe) -> None:
    """Four equal micro-batches, accumulated by the user, give the router the gradient of one of them."""
    batch = tokens(4, 5, 0)
    reference = accumulated(build(Config("loop", aux=0.1)), [batch], 1)
    found = accumulated(one_rank, [batch] * 4, 4)
    same_gradients(found, reference)
    without = accumulated(build(Config("loop", aux=0.0)), [batch], 1)
    router = "layers.0.moe.router.weight"
    assert difference(router, without[router], reference[router]) > 1e-3  # the balance loss has a say


def test_case_09_with_microbatches() -> None:
    """The same under ``Plan(microbatches=4)``: one call of four equal parts."""
    batch = tokens(4, 5, 0)
    model = mc.parallelize(build(Config("loop", aux=0.1)), Plan(dp=1, microbatches=4))
    found = accumulated(model, [{name: value.repeat(4, 1) for name, value in batch.items()}], 1)
    same_gradients(found, accumulated(build(Config("loop", aux=0.1)), [batch], 1))


SMALL = Config("loop", experts=2, shared=True)  # four tokens are too few for four experts


def uneven() -> tuple[Batch, Batch]:
    """Two micro-batches with three valid labels and one."""
    first, second = tokens(1, 4, 1), tokens(1, 4, 2)
    first["labels"][0, 3] = -100
    second["labels"][0, 1:] = -100
    return first, second


def joined(*parts: Batch) -> Batch:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def test_case_13_a_users_own_loop_means_what_the_plain_loop_means() -> None:
    """The average of two averages, as in the plain loop, and not the average over four tokens."""
    parts = list(uneven())
    reference = accumulated(build(SMALL), parts, 2)
    same_gradients(accumulated(mc.parallelize(build(SMALL), Plan(dp=1)), parts, 2), reference)
    together = accumulated(build(SMALL), [joined(*parts)], 1)
    assert difference("head", reference["head.weight"], together["head.weight"]) > 1e-2


class TokenLosses(TinyMoe):
    """The loss of token t is the number ``want[t]``, through a cross entropy over two logits that depend on the model."""

    def forward(self, ids: Tensor, labels: Tensor, want: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(ids, labels)["logits"]
        # softmax of (0, log(e^want - 1)) puts e^-want on the first of two classes; the model itself adds nothing here
        pair = torch.stack([torch.zeros_like(want), torch.log(torch.expm1(want))], -1)
        pair = pair + (logits[..., :1] - logits[..., :1].detach())
        classes = torch.where(labels == -100, labels, torch.zeros_like(labels))
        loss = torch.nn.functional.cross_entropy(pair.reshape(-1, 2), classes.reshape(-1), ignore_index=-100)
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize(("microbatches", "expected"), [(2, 2.0), (1, 2.0)])
def test_case_13_microbatches_are_averaged_over_tokens(microbatches: int, expected: float) -> None:
    """Losses 1, 1, 1 and 5: two for the step, and not three."""
    batch = joined(*uneven())
    batch["want"] = torch.tensor([[1.0, 1.0, 1.0, 9.0], [5.0, 9.0, 9.0, 9.0]], dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = mc.parallelize(TokenLosses(Config("loop")).double(), Plan(dp=1, microbatches=microbatches))
    out = model(**batch)
    assert abs(out["loss"].item() - expected) < 1e-12


def test_case_13_microbatches_give_the_gradient_of_the_single_batch() -> None:
    """The oracle for valid tokens: without a balance loss, two micro-batches are one batch."""
    batch = joined(*uneven())
    model = mc.parallelize(build(SMALL), Plan(dp=1, microbatches=2))
    reference_model = build(SMALL)
    reference = accumulated(reference_model, [batch], 1)
    out = model(**batch)
    out["loss"].backward()
    same_gradients(grads_of(model), reference)
    assert difference("loss", out["loss"], reference_model(**batch)["loss"]) < 1e-12


def test_case_13_a_microbatch_without_labels_adds_nothing() -> None:
    """No NaN from 0 / 0: the other micro-batch alone decides."""
    first, second = tokens(2, 4, 1), tokens(2, 4, 2)
    second["labels"][:] = -100
    config = Config("loop")
    model = mc.parallelize(build(config), Plan(dp=1, microbatches=2))
    found = accumulated(model, [joined(first, second)], 1)
    same_gradients(found, accumulated(build(config), [joined(first, second)], 1))


# ---- 16: garbage in memory -----------------------------------------------------------------------------------------------


def poison() -> None:
    """Leave freed blocks of every size these models use full of NaN."""
    blocks = [torch.full((size,), float("nan"), dtype=dtype) for dtype in (torch.float32, torch.float64) for size in
              (8, 16, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048) for _ in range(8)]  # fmt: skip
    del blocks


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"])
def test_case_16_idle_experts_over_dirty_memory(dtype: torch.dtype) -> None:
    """Two idle experts, NaN in every freed block and in whatever `torch.empty` hands out; three steps equal the loop's."""
    config = Config("loop", aux=0.1, hidden=16, inner=16, dtype=dtype)
    push = push_to(choose(4, 6, 2, [0, 3]), 4, dtype)
    batches = [tokens(4, 6, seed) | {"push": push} for seed in range(3)]
    reference = plain(build(config), batches)
    model = mc.parallelize(build(config), Plan(dp=1))
    stepper = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5, weight_decay=0.1)
    rtol = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    try:
        for batch, step in zip(batches, reference.steps, strict=True):
            poison()
            out = model(**batch)
            out["loss"].backward()
            found = grads_of(model)
            assert set(found) == set(step.grads)
            for name, expected in step.grads.items():
                idle = ".experts.1." in name or ".experts.2." in name
                assert difference(name, found[name].as_subclass(Tensor), expected, zero=idle) < rtol, name
            stepper.step()
            stepper.zero_grad()
    finally:
        torch.use_deterministic_algorithms(False)
    for name, param in model.named_parameters():
        assert difference(name, param.detach(), reference.weights[name]) < rtol, name


# ---- 29: which expert is whose -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experts", "world", "ep", "chosen"),
    [(4, 2, 2, [2, 3]), (6, 3, 3, [2, 3]), (6, 3, 3, [4, 5]), (6, 6, 3, [1, 4]), (8, 4, 4, [5, 7])],
    ids=["E4-ep2", "E6-ep3-middle", "E6-ep3-last", "E6-ep3-edp2", "E8-ep4"],
)
@pytest.mark.parametrize("dispatch", ["alltoall", "allgather"])
def test_case_29_every_rank_uses_its_own_experts(
    experts: int, world: int, ep: int, chosen: list[int], dispatch: str
) -> None:
    """All tokens go to two experts with distinct weights: the output is the plain one's, and other experts have no part."""
    config = Config("stacked", experts=experts, layers=1)
    push = push_to(choose(world, 5, 2, chosen), experts)
    batches = [tokens(world, 5, seed) | {"push": push} for seed in range(2)]
    lock_step = LockStep(build(config), Plan(dp=world, ep=ep, dispatch=dispatch), batches[0])
    reference = plain(build(config), batches)
    compare(lock_step.run(batches), reference)
    model = build(config)
    with torch.no_grad():
        model.layers[0].moe.experts.w_out[chosen] = 0
    silent = plain(copy.deepcopy(model), batches[:1]).steps[0].outputs["logits"]
    assert difference("logits", silent, reference.steps[0].outputs["logits"]) > 1e-2  # the experts do matter
