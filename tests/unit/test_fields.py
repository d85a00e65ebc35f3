"""Dataclasses and namespaces as a model's results: taken apart, put together again, and unknown to the user's own pytrees."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moecompile as mc
from moecompile.compat import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads
from moecompile.fields import with_fields


@dataclass
class States:
    layers: list[Tensor]
    step: int = 3
    doubled: int = field(init=False)

    def __post_init__(self) -> None:
        self.step += 1
        self.doubled = 2 * self.step


@dataclass(frozen=True)
class Results:
    loss: Tensor
    states: States
    more: SimpleNamespace
    name: str = "results"


@dataclass(slots=True)
class Narrow:
    loss: Tensor
    logits: Tensor | None = None


class Returns(nn.Module):
    """``wrap`` makes the return value of the loss and the hidden states."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.wrap = nn.Linear(4, 4), wrap

    def forward(self, x: Tensor) -> Any:
        hidden = self.linear(x)
        return self.wrap(hidden.square().mean(), hidden)


def results(loss: Tensor, hidden: Tensor) -> Results:
    return Results(loss, States([hidden, hidden.tanh()]), SimpleNamespace(mean=hidden.mean(1), kind="plain"))


def test_a_nested_dataclass_comes_back_as_it_was() -> None:
    made = results(torch.tensor(1.0), torch.ones(2, 4))
    leaves, spec = tree_flatten(with_fields(made))
    assert len([leaf for leaf in leaves if isinstance(leaf, Tensor)]) == 4
    again = tree_unflatten(leaves, spec)
    assert type(again) is Results and type(again.states) is States and type(again.more) is SimpleNamespace
    assert (again.name, again.states.step, again.states.doubled, again.more.kind) == ("results", 4, 8, "plain")
    assert again.states.layers[1] is made.states.layers[1]
    assert treespec_loads(treespec_dumps(spec)) == spec


def test_nothing_is_registered_for_the_users_class() -> None:
    made = Narrow(torch.ones(()))
    with_fields(made)
    assert tree_flatten(made)[0] == [made]
    plain = States([], 1)
    assert with_fields([plain])[0] is plain, "holds no tensor: a constant like any other"


def test_a_class_that_cannot_be_named_has_no_text() -> None:
    @dataclass
    class Local:
        loss: Tensor

    _, spec = tree_flatten(with_fields(Local(torch.ones(()))))
    with pytest.raises(NotImplementedError, match="Local is defined in a function"):
        treespec_dumps(spec)
    _, spec = tree_flatten(with_fields(Narrow(torch.ones(()))))
    with pytest.raises(NotImplementedError, match="Wide"):
        treespec_loads(treespec_dumps(spec).replace("Narrow", "Wide"))


@pytest.mark.parametrize(
    "wrap", [results, Narrow, lambda loss, hidden: {"in": [Narrow(hidden, loss * 2)], "loss": loss}]
)
def test_a_model_that_returns_one(wrap: Any) -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    plain, model = Returns(wrap), mc.parallelize(Returns(wrap), mc.Plan(dp=1))
    wanted, found = plain(x), model(x)
    assert type(found) is type(wanted)
    one, other = (tree_flatten(with_fields(value))[0] for value in (found, wanted))
    assert len(one) == len(other)
    for here, there in zip(one, other, strict=True):
        assert torch.equal(here, there) if isinstance(here, Tensor) else here == there
    for value in (found, wanted):
        (value["loss"] if isinstance(value, dict) else value.loss).backward()
    assert torch.equal(model.linear.weight.grad, plain.linear.weight.grad)
