"""What a capture gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from moecompile.compat import TreeSpec, tree_unflatten
from moecompile.program import Input, Output


@dataclass
class Captured:
    """One call of a model as a graph.

    Placeholders of ``graph_module`` line up with ``inputs`` and its output tuple with ``outputs``.  ``in_spec``
    flattens ``(args, kwargs)``; ``out_spec`` with ``out_template`` rebuilds the return value: the template holds its
    leaves that are no tensors.  ``loss_index`` is the loss's place in ``outputs``, None for a call that returns no
    loss.  ``shared`` maps a parameter or buffer name to the other names of the same tensor.  ``constants`` holds the
    value of each CONSTANT input by its name.
    """

    graph_module: GraphModule
    inputs: list[Input]
    outputs: list[Output]
    in_spec: TreeSpec
    out_spec: TreeSpec
    out_template: tuple[Any, ...]
    loss_index: int | None
    shared: dict[str, tuple[str, ...]] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)

    def rebuild(self, values: Sequence[Any]) -> Any:
        """The model's return value from one value per element of ``outputs``."""
        leaves = list(self.out_template)
        for output, value in zip(self.outputs, values, strict=True):
            if output.leaf >= 0:
                leaves[output.leaf] = value
        return tree_unflatten(leaves, self.out_spec)
