"""Questions about values that torch's own functions ask, and rows chosen by a mask dim by dim."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecompile.capture import capture_model
from moecompile.errors import CaptureError


class Model(nn.Module):
    def __init__(self, body: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.body = nn.Linear(4, 4), body

    def forward(self, x: Tensor) -> Any:
        return self.body(self.linear(x), x)


def example() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "body",
    [
        lambda h, x: F.gaussian_nll_loss(h, x, h.exp()),
        lambda h, x: F.gaussian_nll_loss(h, x, h.abs(), True, reduction="sum"),
        lambda h, x: torch.cov(h) + h.cov(correction=0),
        lambda h, x: torch.corrcoef(h),
        lambda h, x: torch.distributions.Categorical(logits=h).entropy(),
        lambda h, x: torch.distributions.Normal(h, h.exp()).log_prob(x),
    ],
)
def test_a_check_of_torch_is_taken_to_hold(body: Any) -> None:
    model = Model(body)
    captured = capture_model(model, (example(),), {})
    found = captured.graph_module(*model.parameters(), example())[0]
    torch.testing.assert_close(found, model(example()))


def checked(h: Tensor, x: Tensor) -> Tensor:
    if (h < -100).any():
        raise ValueError("a check of the user's own is control flow")
    return h


def branches(h: Tensor, x: Tensor) -> Tensor:
    return h if (h > 0).any() else x


@pytest.mark.parametrize("body", [checked, branches])
def test_what_users_ask_stays_control_flow(body: Any) -> None:
    with pytest.raises(CaptureError, match=rf"{__file__}:\d+: a branch, a size or a number depends on tensor values"):
        capture_model(Model(body), (example(),), {})


def test_sizes_that_an_op_reads_from_tensors_are_named() -> None:
    def lengths(h: Tensor, x: Tensor) -> Tensor:
        return F.ctc_loss(h.log_softmax(-1)[:, None], torch.ones(1, 2).long(), torch.tensor([3]), (x[:1, 0] > 9) + 1)

    with pytest.raises(CaptureError, match=r"_ctc_loss.* depend on tensor values.*compute it from them outside"):
        capture_model(Model(lengths), (example(),), {})


@pytest.mark.parametrize("rows", [lambda mask: torch.where(mask), lambda mask: mask.nonzero(as_tuple=True)])
def test_places_of_a_mask_come_from_nonzero(rows: Any) -> None:
    captured = capture_model(Model(lambda h, x: h[rows(x > 0)].sum()), (example(),), {})
    targets = {node.target for node in captured.graph_module.graph.nodes}
    assert torch.ops.aten.nonzero.default in targets and torch.ops.aten.where.default not in targets
