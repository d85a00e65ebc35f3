"""Capture of hand-written per-expert loops: the graph is right on batches that leave experts empty, too."""

import pytest
import torch
from torch import nn

from moecompile import meta
from moecompile.capture import capture_model
from moecompile.errors import CaptureError
from tests.support.captured_call import assert_matches_eager, run_captured, targets
from tests.support.loop_models import LAYERS, E, H, Layer, WhereLoop


def layer(kind: type[Layer]) -> Layer:
    torch.manual_seed(0)
    return kind()


def loss_fn(output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (output * output.detach().sin()).sum()


def uneven(seed: int) -> torch.Tensor:
    """All rows equal but one: most experts get no token, some get one."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, H, generator=generator).repeat(11, 1)
    x[0] = torch.randn(H, generator=generator)
    return x


@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_loop_matches_eager_on_other_batches(kind: type[Layer]) -> None:
    model = layer(kind)
    captured = capture_model(model, (torch.empty(11, H),), {}, loss_fn=loss_fn)
    for x in (torch.randn(11, H, generator=torch.Generator().manual_seed(3)), uneven(1), uneven(2)):
        assert_matches_eager(captured, model, x, loss_of=lambda out: (out * out.detach().sin()).sum())


@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_every_expert_is_in_the_graph_and_nothing_is_in_place(kind: type[Layer]) -> None:
    captured = capture_model(layer(kind), (torch.empty(11, H),), {})
    ops = targets(captured)
    assert ops.count("aten.linear.default") == 2 * E + 1
    nodes = [node for node in captured.graph_module.graph.nodes if node.op == "placeholder"]
    used = {name for node, item in zip(nodes, captured.inputs, strict=True) if node.users for name in item.fqns}
    assert {f"experts.{index}.up.weight" for index in range(E)} <= used
    aten = [op.removeprefix("aten.").split(".")[0] for op in ops if op.startswith("aten.")]
    assert not [op for op in aten if (op.endswith("_") and not op.endswith("__")) or op.startswith("_assert")]


def test_a_test_for_emptiness_that_has_nothing_to_do_with_routing_is_not_answered() -> None:
    class Skips(WhereLoop):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if (x > 100).any():
                return x
            return super().forward(x)

    with pytest.raises(CaptureError, match="depends on tensor values"):
        capture_model(layer(Skips), (torch.empty(11, H),), {})


def test_a_count_compared_with_anything_but_zero_is_not_answered() -> None:
    class Threshold(WhereLoop):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            _, ids = self.route(x)
            if (ids == 0).sum() > 3:
                return x
            return super().forward(x)

    with pytest.raises(CaptureError, match="depends on tensor values"):
        capture_model(layer(Threshold), (torch.empty(11, H),), {})


def test_len_of_an_experts_rows_is_a_number_of_each_call() -> None:
    class Measured(WhereLoop):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            _, ids = self.route(x)
            return x * len(torch.where(ids == 0)[0])

    model = layer(Measured)
    captured = capture_model(model, (torch.empty(11, H),), {})
    for seed in range(3):
        x = torch.randn(11, H, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(run_captured(captured, model, x)[0], model(x))


def test_node_metadata_names_module_and_line() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = WhereLoop()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.moe(x)

    captured = capture_model(Outer(), (torch.empty(5, H),), {})
    linears = [node for node in captured.graph_module.graph.nodes if node.name.startswith("linear")]
    assert [meta.module_path(node) for node in linears[:2]] == ["moe.router", "moe.experts.0.up"]
    adds = [node for node in captured.graph_module.graph.nodes if node.name.startswith("index_add")]
    assert "loop_models.py" in meta.source(adds[0])
    for node in captured.graph_module.graph.nodes:
        assert node.op == "output" or "val" in node.meta


def test_a_tensor_passed_twice_stays_two_inputs() -> None:
    class Two(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return (a - 2 * b).sum()

    x = torch.ones(3)
    captured = capture_model(Two(), (x, x), {})
    assert [item.name for item in captured.inputs] == ["a", "b"]
    (loss,) = run_captured(captured, Two(), torch.ones(3), torch.zeros(3))
    assert float(loss) == 3.0
