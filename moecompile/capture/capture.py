"""From a user's model and one call to a flat functional graph: `capture_model`.

The call is at the global batch shape; only shapes, types and devices of its tensors are used.  Parameters are replaced by
fake ones while tracing, so that a model on the meta device is captured for the device of its inputs, and nothing runs.
"""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from moecompile import graph as ir
from moecompile import meta
from moecompile.capture.autocast import Autocast
from moecompile.capture.batch import leaf_names
from moecompile.capture.build import Builder
from moecompile.capture.causal_mask import use_causal_attention
from moecompile.capture.hf_experts import split_experts
from moecompile.capture.loop_capture import LoopCapture
from moecompile.capture.loss import find_loss
from moecompile.capture.watch import watched
from moecompile.capture.where import raising_line
from moecompile.compat import GuardOnDataDependentSymNode, reparametrize_module
from moecompile.errors import CaptureError
from moecompile.program import Input, InputKind, Output, OutputKind

_ROOT = "model"  # attribute of the traced module that holds the user's model


class _Call(nn.Module):
    """The traced module: takes the call's tensors, calls the model, returns the tensors of its result."""

    def __init__(
        self, model: nn.Module, leaves: list[Any], spec: TreeSpec, loss_fn: Callable[..., Any] | None, results: _Results
    ) -> None:
        super().__init__()
        self.model = model
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        self._spec = spec
        self._loss_fn = loss_fn
        self._results = results

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        supply = iter(tensors)
        pairs = zip(self._leaves, self._is_tensor, strict=True)
        args, kwargs = tree_unflatten([next(supply) if is_tensor else leaf for leaf, is_tensor in pairs], self._spec)
        # Explained in here: export would print the graph so far for some of torch's errors.
        with _errors_explained(self.model), watched(self.model, list(tensors)):
            output = self.model(*args, **kwargs)
            loss = None if self._loss_fn is None else _checked_loss(self._loss_fn(output, *args, **kwargs))
        return self._results.collect(output, loss, type(self.model).__name__)


def capture_model(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, loss_fn: Callable[..., Any] | None = None
) -> Captured:
    """Trace ``model(*args, **kwargs)`` into one flat functional graph of composite ATen and ``moe::`` operators.

    Tensors in the arguments have the global batch shape; their values are never read.  Grad mode, training flags and
    autocast are those of the caller.  ``loss_fn(output, *args, **kwargs)``, where given, is traced after the model.
    The model and its configuration are left as they were.

    `CaptureError` for what no graph can express: side effects on parameters, buffers, attributes or inputs, control flow
    and numbers that depend on values, custom autograd functions.
    """
    leaves, in_spec = tree_flatten((args, kwargs))
    mode = ir.fake_mode()
    tensors = tuple(_fake_input(leaf, mode) for leaf in leaves if isinstance(leaf, torch.Tensor))
    results = _Results()
    call = _Call(model, leaves, in_spec, loss_fn, results)
    device = tensors[0].device if tensors else torch.device("cpu")
    names = _shared_names(model)
    with (
        _weights_faked(call, mode, device),
        split_experts(model),
        _torch_quiet(),
        _errors_explained(model),
        LoopCapture(),
    ):
        program = torch.export.export(call, tensors, strict=False)
    lifter = _Lifter(program, mode, names, leaf_names(args, kwargs, model.forward), leaves)
    return lifter.finish(type(model).__name__, results, in_spec)


def _fake_input(leaf: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A tensor of its own for every argument, also where the caller passes one tensor twice."""
    with mode:
        fake = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
    return fake.requires_grad_(leaf.requires_grad)


@contextlib.contextmanager
def _weights_faked(call: _Call, mode: FakeTensorMode, device: torch.device) -> Iterator[None]:
    """Fake parameters and buffers in place of the model's; those on the meta device move to ``device``."""
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            place = device if tensor.device.type == "meta" else tensor.device
            with mode:
                found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place)
            is_param = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(found, requires_grad=tensor.requires_grad) if is_param else found
        return made[id(tensor)]

    swap = {name: fake(tensor) for name, tensor in call.named_parameters(remove_duplicate=False)}
    swap.update({name: fake(tensor) for name, tensor in call.named_buffers(remove_duplicate=False)})
    with reparametrize_module(call, swap):
        yield


def _checked_loss(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0 or not loss.is_floating_point():
        found = (
            f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        )
        raise CaptureError(
            f"loss_fn returned {found}, but a 0-d floating tensor is needed; reduce it with sum() or mean()."
        )
    return loss
