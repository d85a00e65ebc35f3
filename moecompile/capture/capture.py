"""From a user's model and one call to a flat functional graph: `capture_model`.

The call is at the global batch shape; only shapes, types and devices of its tensors are used.  Parameters are
replaced by fake ones while tracing, so that a model on the meta device is captured for the device of its inputs, and
nothing runs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from moecompile import graph as ir
from moecompile.capture.attributes import Attributes, Carried, refuse_carried
from moecompile.capture.batch import leaf_names
from moecompile.capture.buffers import Buffers, shared_memory
from moecompile.capture.captured import Captured
from moecompile.capture.explain import errors_explained, torch_quiet
from moecompile.capture.hf_experts import split_experts
from moecompile.capture.lengths import lengths_known
from moecompile.capture.lift import Lifter, first_names
from moecompile.capture.loop_capture import LoopCapture
from moecompile.capture.marks import Marked
from moecompile.capture.results import Results
from moecompile.capture.surroundings import Surroundings
from moecompile.capture.watch import watched
from moecompile.capture.where import forward_line
from moecompile.compat import (
    FakeTensorMode,
    TreeSpec,
    code_when_asked,
    regions_kept,
    reparametrize_module,
    tree_flatten,
    tree_unflatten,
)
from moecompile.errors import CaptureError

_ROOT = "model"  # attribute of the traced module that holds the user's model


class _Call(nn.Module):
    """The traced module: takes the call's tensors, calls the model, returns the tensors of its result."""

    def __init__(
        self, model: nn.Module, leaves: list[Any], spec: TreeSpec, loss_fn: Callable[..., Any] | None, results: Results
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
        name = type(self.model).__name__
        # Explained in here: export would print the graph so far for some of torch's errors.
        watch = watched(self.model, list(tensors), self._results.attributes, self._results.buffers)
        with errors_explained(name), watch, lengths_known(), LoopCapture():
            output = self.model(*args, **kwargs)
            loss = None if self._loss_fn is None else self._loss_fn(output, *args, **kwargs)
        return self._results.collect(output, loss, self._loss_fn is not None, name)


def capture_model(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    loss_fn: Callable[..., Any] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> Captured:
    """Trace ``model(*args, **kwargs)`` into one flat functional graph of composite ATen and ``moe::`` operators.

    Tensors in the arguments have the global batch shape; their values are never read.  Grad mode, training flags and
    autocast are those of the caller.  ``loss_fn(output, *args, **kwargs)``, where given, is traced after the model.
    ``shapes`` gives the global shape of each parameter or buffer that has been cut already, by its name.  The model
    and its configuration are left as they were.

    What the forward writes into buffers is returned behind its results.

    `CaptureError` for what no graph can express: side effects on parameters, attributes or inputs, control flow and
    numbers that depend on values, custom autograd functions.
    """
    _refuse_backward_hooks(model)
    leaves, in_spec = tree_flatten((args, kwargs))
    mode = ir.fake_mode()
    names = first_names(model)
    traced = functools.partial(_traced, model, leaves, in_spec, mode, loss_fn, shapes or {})
    around = Surroundings(model, *([] if loss_fn is None else [loss_fn]))
    try:
        program, results = traced()
        _settled(model, program, results, around, traced)
        around.forget()
    except BaseException:
        around.restore()
        raise
    results.attributes.forget()
    lifter = Lifter(program, mode, _ROOT, names, leaves, leaf_names(args, kwargs, model.forward))
    captured = lifter.finish(type(model).__name__, results, in_spec)
    _let_gradients_be_dense(captured)
    return captured


def _let_gradients_be_dense(captured: Captured) -> None:
    """An embedding with ``sparse=True`` has the same gradient as one without, in a form that collectives do not sum."""
    for node in captured.graph_module.graph.nodes:
        if node.target is torch.ops.aten.embedding.default and len(node.args) > 4 and node.args[4]:
            node.args = (*node.args[:4], False)


def _refuse_backward_hooks(model: nn.Module) -> None:
    """Hooks of modules in the backward see gradients between modules, which a captured step does not hand out."""
    for path, module in model.named_modules():
        if torch.is_grad_enabled() and (module._backward_hooks or module._backward_pre_hooks):
            raise CaptureError(
                f"{forward_line(module)}: {path or 'the model'} has a backward hook, which a captured step would not call; hook parameters "
                "instead (param.register_hook), or write a torch.autograd.Function with that backward."
            )


def _settled(
    model: nn.Module,
    program: torch.export.ExportedProgram,
    results: Results,
    around: Surroundings,
    traced: Callable[..., tuple[torch.export.ExportedProgram, Results]],
) -> None:
    """What the forward remembers has to be settled after one call, and must not show in the graph: else `CaptureError`."""
    changed, plain = results.attributes.carried, around.changed()
    if not changed and not plain:
        return
    for item in changed:
        item.put(item.after)  # export may have put it back
    around.follow(plain)
    try:
        again, later = traced(followed=changed)
        for moved in later.attributes.carried:
            if moved.used:
                refuse_carried(model, moved)
        for state in around.moved(plain):
            state.refuse()
        if _text(again) != _text(program):
            refuse_carried(model, changed[0]) if changed else plain[0].refuse()
    except BaseException:
        results.attributes.restore()
        raise
    for item in changed:
        item.put(item.before)


def _traced(
    model: nn.Module,
    leaves: list[Any],
    in_spec: TreeSpec,
    mode: FakeTensorMode,
    loss_fn: Callable[..., Any] | None,
    shapes: Mapping[str, Sequence[int]],
    followed: Sequence[Carried] = (),
) -> tuple[torch.export.ExportedProgram, Results]:
    """Export one call; attributes hold what the forward left in them, or what they held before if it failed."""
    tensors = tuple(_fake_input(leaf, mode) for leaf in leaves if isinstance(leaf, torch.Tensor))
    results = Results(attributes=Attributes(followed), buffers=Buffers(shared_memory(model)))
    call = _Call(model, leaves, in_spec, loss_fn, results)
    device = tensors[0].device if tensors else torch.device("cpu")
    faked = _weights_faked(call, mode, device, shapes)
    marked = Marked()
    explained = errors_explained(type(model).__name__)
    with (
        faked,
        split_experts(model),
        marked.forwards(model),
        torch_quiet(),
        code_when_asked(),
        regions_kept(),
        explained,
    ):
        try:
            program = torch.export.export(call, tensors, strict=False)
        except BaseException:
            results.attributes.restore()
            raise
    marked.compare()
    return program, results


def _text(program: torch.export.ExportedProgram) -> str:
    return str(program.graph_module.code)


def _fake_input(leaf: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A tensor of its own for every argument, also where the caller passes one tensor twice."""
    with mode:
        fake = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
    return fake.requires_grad_(leaf.requires_grad)


@contextlib.contextmanager
def _weights_faked(
    call: _Call, mode: FakeTensorMode, device: torch.device, shapes: Mapping[str, Sequence[int]]
) -> Iterator[None]:
    """Fake parameters and buffers in place of the model's; those on the meta device move to ``device``."""
    made: dict[int, torch.Tensor] = {}

    def fake(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            place = device if tensor.device.type == "meta" else tensor.device
            shape = shapes.get(name.removeprefix(f"{_ROOT}."))
            with mode:
                if shape is None:
                    found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place)
                else:
                    found = torch.empty(list(shape), dtype=tensor.dtype, device=place)
            is_param = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(found, requires_grad=tensor.requires_grad) if is_param else found
        return made[id(tensor)]

    # Each module once, under one of its paths: what is swapped twice would be put back as a fake.
    swap = {
        (name := f"{path}.{key}" if path else key): fake(name, tensor)
        for path, module in call.named_modules()
        for key, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    }
    with reparametrize_module(call, swap):
        yield
