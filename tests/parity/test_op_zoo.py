"""Every kind of layer, operation, loss and result in a small MoE: all ranks give what one process gives, or refuse in the expected words.

The tables are in tests/support/op_zoo_*.py. A few kinds run always; all of them under every plan among the slow tests.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import moecompile as mc
from moecompile.plan import Plan
from tests.support import op_zoo_layers, op_zoo_losses, op_zoo_math, op_zoo_random, op_zoo_results
from tests.support.op_zoo import PLANS, Kind, Zoo, after, batch, plain_step, worst
from tests.support.op_zoo_refused import REFUSED
from tests.support.parity import ParityError, Step, global_norm

TABLES = (op_zoo_layers.KINDS, op_zoo_math.KINDS, op_zoo_losses.KINDS, op_zoo_random.KINDS, op_zoo_results.KINDS)
KINDS = {
    name: replace(kind, refused={**kind.refused, **REFUSED.get(name, {})})
    for table in TABLES
    for name, kind in table.items()
}
ZOO = Zoo(KINDS)

SAMPLE = {
    "nn.BatchNorm1d without statistics": "dp2 ep2",
    "recurrence": "tp2 sp",
    "nn.MultiheadAttention padded": "dp4 ep2 etp2",
    "attention packed": "cp2",
    "long convolution": "cp2",
    "drop path random": "dp4 ep2 etp2",
    "token drop random": "dp4 ep2 etp2",
    "scatter": "cp2",
    "cumsum of tokens": "dp4 ep2 etp2",
    "sort of the batch": "dp2 ep2",
    "segments": "dp4 ep2 etp2",
    "complex turn by position": "cp2",
    "custom function of the batch": "dp2 ep2",
    "weight singular values": "zero3",
    "loss masked by tokens": "dp4 ep2 etp2",
    "loss where index": "dp2 ep2",
    "loss ctc_loss": "dp2 ep2",
    "last sequence": "dp4 ep2 etp2",
    "std of the batch": "dp4 ep2 etp2",
    "loss barlow": "tp2 sp",
    "result accuracy of valid tokens": "cp2",
}


@pytest.mark.parametrize("name", SAMPLE)
def test_sample(name: str) -> None:
    assert ZOO.check(name, SAMPLE[name]) == ("refused" if KINDS[name].words(SAMPLE[name]) else "exact")


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", KINDS)
def test_every_kind(name: str, plan: str) -> None:
    ZOO.check(name, plan)


MICROBATCHED = ["nn.GRU", "nn.LayerNorm of tokens and width", "attention causal", "film", "checkpoint", "weight qr"]


@pytest.mark.slow
@pytest.mark.parametrize("name", MICROBATCHED)
def test_microbatches(name: str) -> None:
    """Two parts of the batch one after the other, the loss averaged over them."""
    model, plain = mc.parallelize(ZOO.model(name), Plan(dp=1, microbatches=2)), ZOO.model(name)
    loss = model(**batch())["loss"]
    loss.backward()
    parts = [plain(**{key: value.chunk(2)[at] for key, value in batch().items()})["loss"] / 2 for at in range(2)]
    sum(parts).backward()  # type: ignore[union-attr]
    grads, wanted = ({key: item.grad for key, item in one.named_parameters()} for one in (model, plain))
    found = Step(loss.detach(), {}, grads, global_norm(grads))
    assert worst(found, Step(sum(parts).detach(), {}, wanted, global_norm(wanted))) < 1e-12  # type: ignore[union-attr]


def test_every_table_has_its_own_names() -> None:
    assert len(KINDS) == sum(map(len, TABLES)) > 380 and set(REFUSED) <= set(KINDS)
    assert all(set(kind.refused) <= {"*", *PLANS} for kind in KINDS.values())


def branching(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x) if x.sum() > 0 else x


def test_other_outcomes_than_the_tables_say_are_errors() -> None:
    kinds = {
        "unlisted": Kind(lambda: nn.Linear(8, 8), branching),
        "other words": Kind(lambda: nn.Linear(8, 8), branching, refused={"*": "has a backward hook"}),
        "listed": Kind(lambda: nn.Linear(8, 8), branching, refused={"*": "depends on tensor values", "dp1": ""}),
        "right": after(lambda h, x: h.relu(), refused={"*": "depends on tensor values"}),
    }
    zoo = Zoo(kinds)
    assert zoo.check("listed", "dp2 ep2") == "refused"
    for name, plan in (("unlisted", "dp2 ep2"), ("other words", "dp2 ep2"), ("listed", "dp1")):
        with pytest.raises(ParityError, match="refused with other words"):
            zoo.check(name, plan)
    with pytest.raises(ParityError, match="is no longer refused"):
        zoo.check("right", "dp1")


def test_the_comparison_notices() -> None:
    reference = plain_step(ZOO.model("nn.ReLU"))
    assert worst(reference, reference) == 0
    one = "part.0.weight"
    wrong = {**reference.grads, one: reference.grads[one] * (1 + 1e-7)}
    less = {name: grad for name, grad in reference.grads.items() if name != one}
    for grads, said in ((wrong, f"gradient of {one} differs"), (less, f"only one side has gradients of .'{one}'")):
        with pytest.raises(ParityError, match=said):
            worst(Step(reference.loss, reference.outputs, grads, reference.norm), reference)
    logits = {"logits": reference.outputs["logits"] + 1e-6}
    with pytest.raises(ParityError, match="result logits differs"):
        worst(Step(reference.loss, logits, reference.grads, reference.norm), reference)
    nothing = torch.full((), torch.nan, dtype=torch.float64)
    with pytest.raises(ParityError, match="the loss differs by inf"):
        worst(reference, Step(nothing, reference.outputs, reference.grads, reference.norm))
