"""The return value of a traced call: its tensors, the rest of its structure, and which tensor is the loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from moecompile.capture.attributes import Attributes
from moecompile.capture.batch import hides_tensors
from moecompile.capture.buffers import Buffers
from moecompile.capture.hf_cache import is_cache, register_cache
from moecompile.compat import TreeSpec, tree_flatten
from moecompile.errors import CaptureError
from moecompile.fields import with_fields
from moecompile.program import Output, OutputKind


@dataclass
class Results:
    """Filled while tracing; a plain object, because export undoes what a module's forward assigns to itself."""

    out_spec: TreeSpec | None = None
    template: tuple[Any, ...] = ()
    outputs: list[Output] = field(default_factory=list)
    attributes: Attributes = field(default_factory=Attributes)
    buffers: Buffers = field(default_factory=lambda: Buffers({}))

    @property
    def loss_index(self) -> int | None:
        """Place of the loss in ``outputs``."""
        kinds = [item.kind for item in self.outputs]
        return kinds.index(OutputKind.LOSS) if OutputKind.LOSS in kinds else None

    def collect(self, output: Any, loss: Any, has_loss_fn: bool, model: str) -> tuple[torch.Tensor, ...]:
        """The tensors of ``output``, after ``loss`` where a loss function made it, and what was assigned to buffers.

        The rest is noted here.
        """
        leaves, self.out_spec = tree_flatten(with_fields(output))
        if any(is_cache(leaf) for leaf in leaves):
            register_cache()
            leaves, self.out_spec = tree_flatten(with_fields(output))
        _check_leaves(leaves, model)
        self.template = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        self.outputs = [Output(OutputKind.LOSS, name="loss")] if has_loss_fn else []
        tensors = [_checked_loss(loss)] if has_loss_fn else []
        found = None if has_loss_fn else find_loss(output)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                is_loss = leaf is found and self.loss_index is None
                self.outputs.append(Output(OutputKind.LOSS if is_loss else OutputKind.USER, leaf=index))
                tensors.append(leaf)
        for name, value in self.buffers.finish().items():
            self.outputs.append(Output(OutputKind.BUFFER, name))
            tensors.append(value)
        return tuple(tensors)


def find_loss(output: Any) -> torch.Tensor | None:
    """``output.loss``, ``output["loss"]``, a bare 0-d floating tensor, or a 0-d floating first element; else None."""
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, dict):
        found = output.get("loss")
    if found is None and isinstance(output, (tuple, list)) and output:
        found = output[0]
    if found is None:
        found = output
    return found if _is_scalar(found) else None


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()


def _checked_loss(loss: Any) -> torch.Tensor:
    if not _is_scalar(loss):
        found = f"a {type(loss).__name__}"
        if isinstance(loss, torch.Tensor):
            found = f"a {loss.dtype} tensor of shape {tuple(loss.shape)}"
        raise CaptureError(
            f"loss_fn returned {found}, but a 0-d floating tensor is needed; reduce it with sum() or mean()."
        )
    return loss  # type: ignore[no-any-return]


def _check_leaves(leaves: list[Any], model: str) -> None:
    for leaf in leaves:
        if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise CaptureError(f"{model}.forward returns a number read out of a tensor; return the tensor itself.")
        if hides_tensors(leaf):
            raise CaptureError(
                f"{model}.forward returns a {type(leaf).__name__} that holds tensors; return tensors in tuples, lists, "
                f"dicts or dataclasses (where it is a cache: pass use_cache=False)."
            )
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise CaptureError(f"{model}.forward returns no tensor; return the loss or the output.")
