"""Every way of writing an MoE layer trains expert-parallel exactly as it does in one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moecompile import ops
from moecompile.plan import Plan
from tests.support import moe_styles as styles
from tests.support.moe_odd_styles import ODD
from tests.support.moe_published_styles import PUBLISHED
from tests.support.moe_stacked_styles import STACKED
from tests.support.moe_weight_styles import WEIGHED
from tests.support.moe_wider_styles import WIDER
from tests.support.parity import Batch, LockStep, compare, plain

PLAN = Plan(dp=2, ep=2)


class Trained(nn.Module):
    """A layer between two norms, with a loss whose labels do not come from the tokens."""

    def __init__(self, kind: type[styles.Layer]) -> None:
        super().__init__()
        self.before, self.layer = nn.LayerNorm(styles.WIDTH), kind()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = x + self.layer(self.before(x))
        return {"loss": (out - labels).square().mean()}


def model_of(kind: type[styles.Layer]) -> Trained:
    torch.manual_seed(0)
    return Trained(kind).double()


def batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(2, 32, styles.WIDTH, generator=generator, dtype=torch.float64)
    draw[0, 16:] = draw[0, 16:17]  # all of one rank's tokens go to the same experts
    return {"x": draw[0], "labels": draw[1]}


STYLES = [*styles.SEPARATE, *STACKED, *WIDER, *ODD, *PUBLISHED, *WEIGHED]


@pytest.mark.parametrize("kind", STYLES, ids=lambda kind: kind.__name__)
def test_style(kind: type[styles.Layer]) -> None:
    batches = [batch(0)]
    reference = plain(model_of(kind), batches)
    idle = [name for name, grad in reference.steps[0].grads.items() if not grad.any()]
    run = LockStep(model_of(kind), PLAN, batches[0])
    assert len([node for node in run.program.graph.nodes if node.target is ops.dispatch]) >= 1
    compare(run.run(batches), reference, zero=idle)


FOLDED = (Plan(dp=4, ep=2, etp=2), Plan(dp=1, tp=2, ep=2))


@pytest.mark.parametrize("plan", FOLDED, ids=str)
@pytest.mark.parametrize("kind", WEIGHED, ids=lambda kind: kind.__name__)
def test_weights_under_other_plans(kind: type[styles.Layer], plan: Plan) -> None:
    batches = [batch(0)]
    reference = plain(model_of(kind), batches)
    idle = [name for name, grad in reference.steps[0].grads.items() if not grad.any()]
    compare(LockStep(model_of(kind), plan, batches[0]).run(batches), reference, zero=idle)
