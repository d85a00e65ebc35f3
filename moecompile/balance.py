"""Aux-loss-free load balancing: routers that choose by score plus a bias, and the bias that follows the load.

DeepSeek-V3 (arXiv 2412.19437, section 2.1.2): after every optimizer step an expert that got more tokens than the mean has its bias
lowered by ``rate``, one that got fewer has it raised. The bias only chooses, so no gradient flows to it. It is a buffer of the user's
own model, found in the graph: the one that is added to the scores whose top-k feeds the experts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.fx import Node

from . import graph as graphs
from . import meta, ops
from .errors import CaptureError
from .program import InputKind, Output, Program
from .reduction import add_up, partial_axes
from .runtime.process_groups import ProcessGroups
from .weights import find

aten = torch.ops.aten
_COPIES = {
    aten.unsqueeze.default, aten.reshape.default, aten.view.default, aten.expand.default, aten._to_copy.default, aten.to.dtype,
    aten.detach.default, aten.squeeze.dim, aten.contiguous.default, aten.alias.default,
}  # fmt: skip


def expert_biases(program: Program) -> dict[str, str]:
    """Buffers that are added to a router's scores before it chooses, by the module of the experts. Layers without are left out."""
    buffers = {node: item.fqns[0] for node, item in program.items() if item.kind is InputKind.BUFFER}
    found: dict[str, str] = {}
    for permute in graphs.find(program.graph, ops.permute):
        tokens, ids, experts = permute.args[:3]
        assert isinstance(tokens, Node) and isinstance(ids, Node)
        before = graphs.ancestors(tokens)
        for node in graphs.ancestors(ids) - before:
            if node.target is not aten.add.Tensor:
                continue
            for arg in node.args[:2]:
                while isinstance(arg, Node) and arg.target in _COPIES:
                    arg = arg.args[0]
                if arg in buffers and meta.tensor(arg).numel() == experts and meta.tensor(arg).is_floating_point():  # type: ignore[arg-type]
                    found[meta.module_path(permute)] = buffers[arg]  # type: ignore[index]
    return found


class Balance:
    """What each expert got since its bias was last moved: this rank's share of the counts."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.biases: dict[str, str] = {}
        self._counts: dict[str, tuple[Tensor, tuple[str, ...]]] = {}

    def learn(self, program: Program) -> None:
        """Note the biases of a captured program. They stay in float32 from now on."""
        self.biases |= expert_biases(program)

    def add(self, counts: Mapping[str, Tensor], outputs: Mapping[str, Output]) -> None:
        """Add the tokens per expert of one training call, by layer."""
        for layer, count in counts.items():
            if layer in self.biases:
                before = self._counts.get(layer)
                total = count.detach() if before is None else before[0] + count.detach()
                self._counts[layer] = (total, partial_axes(outputs[layer]))

    def update(self, rate: float, groups: ProcessGroups) -> None:
        """Move every bias once by what was counted over all ranks since the last time; collective.

        Raises CaptureError where the model has no such router, or has not been trained on since.
        """
        if not self.biases:
            raise CaptureError(
                "no router of the model adds a buffer [num_experts] to its scores before it chooses, so there is no bias to move; "
                "register one (and call the model once), or balance with an auxiliary loss."
            )
        if not self._counts:
            raise CaptureError(
                "no tokens have been counted since the biases were last moved; call update_expert_bias once after each optimizer step."
            )
        with torch.no_grad():
            for axes in dict.fromkeys(axes for _, axes in self._counts.values()):
                layers = [layer for layer, (_, own) in self._counts.items() if own == axes]
                flat = torch.cat([self._counts[layer][0] for layer in layers])  # one exchange for all layers
                add_up(flat, axes, groups)
                parts = torch.split(flat, [len(self._counts[layer][0]) for layer in layers])
                for layer, count in zip(layers, parts, strict=True):
                    self._move(layer, count.double(), rate)
        self._counts.clear()

    def _move(self, layer: str, count: Tensor, rate: float) -> None:
        bias = find(self.model, self.biases[layer])
        step = torch.sign(count.mean() - count) * rate
        bias.add_(step.view(bias.shape).to(bias.device, bias.dtype))

    def kept(self) -> dict[str, Tensor]:
        """The biases as they are, to be put back after a conversion of the model."""
        return {name: find(self.model, name) for name in self.biases.values()}

    def restore(self, before: Mapping[str, Tensor]) -> None:
        """Biases that a conversion made narrower than float32 get their values back; they stay where they were moved to."""
        for name, value in before.items():
            path, _, last = name.rpartition(".")
            now = find(self.model, name)
            if now.dtype != value.dtype and now.dtype.itemsize < 4:
                kept = value.to(now.device, torch.float32)
                self.model.get_submodule(path)._buffers[last] = kept
