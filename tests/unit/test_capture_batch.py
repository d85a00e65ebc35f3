"""Which arguments data ranks split, and the call at the global shape."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from moecompile.capture import batch_inputs, capture_model, globalize
from moecompile.errors import CaptureError
from tests.support.loop_models import H, WhereLoop


def call() -> tuple[tuple[Tensor, float], dict[str, object]]:
    args = (torch.zeros(4, 7), 0.5)
    kwargs = {
        "mask": torch.ones(4, 7),
        "table": torch.zeros(9, 4),
        "nested": {"pair": [torch.zeros(4), torch.zeros(())]},
    }
    return args, kwargs


def test_dim_0_of_the_first_tensor_decides() -> None:
    # leaves: args[0], 0.5, mask, table, pair[0], pair[1]
    assert batch_inputs(*call()) == {0: 0, 2: 0, 4: 0}


def test_overrides_by_name() -> None:
    found = batch_inputs(*call(), {"table": 1, "mask": None, "nested": None})
    assert found == {0: 0, 3: 1}


def test_positional_arguments_go_by_the_names_of_forward() -> None:
    def forward(ids: Tensor, scale: float, **kwargs: object) -> None: ...

    assert batch_inputs(*call(), {"ids": 1}, forward=forward)[0] == 1


@pytest.mark.parametrize(
    ("batch_dims", "message"),
    [({"labels": 0}, "names 'labels'.*its arguments are arg0, arg1, mask"), ({"mask": 2}, "mask is split along dim 2")],
)
def test_overrides_that_fit_nothing_are_refused(batch_dims: dict[str, int], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        batch_inputs(*call(), batch_dims)


def test_global_call_has_global_shapes_and_takes_no_memory() -> None:
    args, kwargs = globalize(*call(), 1000, {"table": 1})
    assert args[0].shape == (4000, 7) and args[1] == 0.5
    assert kwargs["mask"].shape == (4000, 7) and kwargs["table"].shape == (9, 4000)
    assert kwargs["nested"]["pair"][0].shape == (4000,) and kwargs["nested"]["pair"][1].shape == ()
    assert args[0].untyped_storage().nbytes() <= 8


def test_type_and_requires_grad_survive() -> None:
    args, _ = globalize((torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True),), {}, 2)
    assert args[0].dtype is torch.bfloat16 and args[0].requires_grad and args[0].shape == (4, 3)


def test_a_global_call_can_be_captured() -> None:
    args, kwargs = globalize((torch.zeros(8, H),), {}, 1 << 20)
    captured = capture_model(WhereLoop(), args, kwargs)
    assert captured.inputs[-1].shape == (8 << 20, H)


@pytest.mark.parametrize("held", [torch.zeros(2), [torch.zeros(2)]], ids=["tensor", "list"])
def test_tensors_in_an_object_are_not_taken_for_constants(held: object) -> None:
    """The object may look the same in the next call, and its tensors be others."""
    with pytest.raises(
        CaptureError, match=r"the argument mask is a SimpleNamespace that holds tensors.*tuples, lists or dicts"
    ):
        batch_inputs((torch.zeros(2, 3),), {"mask": SimpleNamespace(inner=held)})
    assert batch_inputs((torch.zeros(2, 3),), {"mask": SimpleNamespace(inner=3)}) == {0: 0}
