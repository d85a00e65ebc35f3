"""Parts of recognition: what is rewritten before layers are looked for, decisions made in parts, bodies that keep zeros."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecompile import graph as graphs
from moecompile.capture import capture_model
from moecompile.compilation import Request, as_program
from moecompile.errors import CaptureError
from moecompile.plan import Plan
from moecompile.program import Program
from moecompile.recognition import find_layers
from moecompile.recognition.choices import find_choices, joined
from moecompile.recognition.convolutions import as_products
from moecompile.recognition.formula import places
from moecompile.recognition.unjoin import unjoin
from tests.support import moe_odd_styles as odd
from tests.support import moe_styles as styles
from tests.support import moe_wider_styles as wider

aten = torch.ops.aten


def program_of(model: nn.Module, tokens: int = 13) -> Program:
    args = (torch.randn(tokens, styles.WIDTH, dtype=torch.float64),)
    return as_program(capture_model(model.double(), args, {}), Request(args, {}, Plan(dp=1)))


def test_convolutions_over_picked_rows_become_products() -> None:
    program = program_of(odd.ConvExperts())
    assert as_products(program.graph, graphs.mode_of(program.graph)) == 2 * styles.EXPERTS
    assert not graphs.find(program.graph, aten.conv1d.default)
    assert len(graphs.find(program.graph, aten.linear.default)) == 2 * styles.EXPERTS + 1


class Images(nn.Module):
    """1x1 convolutions of known sizes, and larger ones."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.three = nn.Conv1d(styles.WIDTH, 4, 1), nn.Conv1d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        picked = x[torch.nonzero(x.topk(1)[1][:, 0] == 0).squeeze(1)]
        return self.three(self.one(x[:, :, None].expand(-1, -1, 4))).sum() + picked.sum()


def test_other_convolutions_stay() -> None:
    program = program_of(Images())
    assert as_products(program.graph, graphs.mode_of(program.graph)) == 0


def test_rows_in_turns_are_taken_apart() -> None:
    program = program_of(odd.InTurns())
    assert unjoin(program.graph, graphs.mode_of(program.graph)) == 1
    assert len(graphs.find(program.graph, aten.silu.default)) == styles.EXPERTS
    for node in graphs.find(program.graph, aten.linear.default)[1 + styles.EXPERTS :]:
        assert node.args[0].target is aten.mul.Tensor  # type: ignore[union-attr]


class Shifted(odd.InTurns):
    """The rows are cut elsewhere than they were joined."""

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.route(x)
        order = ids.flatten().sort(0)[1]
        counts = F.one_hot(ids.flatten(), styles.EXPERTS).sum(0).tolist()
        rows = torch.cat([F.linear(p, self.first[e]) for e, p in enumerate(x[order // 2].split(counts))])
        parts = rows.tanh()[:, : styles.INNER].split(counts[::-1])
        rows = torch.cat([F.linear(p, self.second[e]) for e, p in enumerate(parts)])
        return torch.zeros_like(x).index_add(0, order // 2, rows * w.flatten()[order][:, None])


def test_rows_cut_elsewhere_stay_joined() -> None:
    program = program_of(Shifted())
    assert unjoin(program.graph, graphs.mode_of(program.graph)) == 0


@pytest.mark.parametrize(("kind", "apart"), [(odd.SideBySide, False), (odd.OneByOne, True)])
def test_decisions_made_in_parts(kind: type[styles.Layer], apart: bool) -> None:
    whole, parts = joined(find_choices(program_of(kind()).graph))[0]
    assert (whole.top_k, whole.num_options, len(parts), bool(whole.parts)) == (2, styles.EXPERTS, 2, apart)
    assert not joined(find_choices(program_of(styles.WhereLoop()).graph))


def test_places_in_both_orders() -> None:
    ids = torch.tensor([[0, 1], [1, 0], [0, 2]])
    assert places(ids, 3, by_choice=False).tolist() == [[0, 0], [1, 1], [2, 0]]
    assert places(ids, 3, by_choice=True).tolist() == [[0, 1], [0, 2], [1, 0]]


def test_one_module_in_the_place_of_two_experts_is_named() -> None:
    layer = styles.WhereLoop()
    layer.experts[2] = layer.experts[0]
    program = program_of(layer)
    with pytest.raises(
        CaptureError, match=rf"2 of its {styles.EXPERTS} options lead to one and the same expert, experts.0;.*deepcopy"
    ):
        find_layers(program.graph, dict(program.items()), program.constants)


def body_keeps_zero(act: Callable[[], nn.Module], *, bias: bool = False) -> bool:
    layer = styles.WhereLoop()
    layer.experts = nn.ModuleList(
        [
            nn.Sequential(nn.Linear(styles.WIDTH, 12, bias=False), act(), nn.Linear(12, styles.WIDTH, bias=bias))
            for _ in range(styles.EXPERTS)
        ]
    )
    program = program_of(layer)
    (found,) = find_layers(program.graph, dict(program.items()), program.constants)
    return found.body.keeps_zero()


@pytest.mark.parametrize("act", [nn.GELU, nn.SiLU, nn.ReLU, nn.Tanh, nn.Mish, nn.ELU, nn.Dropout, nn.Identity])
def test_experts_that_give_nothing_for_nothing(act: Callable[[], nn.Module]) -> None:
    assert body_keeps_zero(act)
    assert not body_keeps_zero(act, bias=True)


@pytest.mark.parametrize("act", [nn.Sigmoid, nn.Softplus, lambda: nn.Softmax(-1)])
def test_experts_that_give_something_for_nothing(act: Callable[[], nn.Module]) -> None:
    assert not body_keeps_zero(act)


def test_capacity_is_read_as_a_number_and_an_order() -> None:
    program = program_of(wider.DroppedLoop())
    (layer,) = find_layers(program.graph, dict(program.items()), program.constants)
    assert layer.match.keep is not None and layer.match.keep.capacity == wider.DroppedLoop.limit
    assert layer.match.keep.mask is None and not layer.match.keep.by_choice
