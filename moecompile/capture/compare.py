"""Hold a capture against the plain model once, on fresh data: outputs, loss, every gradient, every buffer.

Export can be silently wrong (`watch` names the ways that are known), so the first capture of a model whose weights are
whole is tried: a copy of the model and the captured graph run on the same batch, drawn from the values of the caller's.
It costs two forwards and backwards, so large models are left out, as is what cannot be compared number by number.
``MOECOMPILE_COMPARE=0`` in the environment turns it off, ``MOECOMPILE_COMPARE=always`` compares large models, too.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from moecompile.capture.batch import batch_inputs, globalize
from moecompile.capture.captured import Captured
from moecompile.capture.results import find_loss
from moecompile.capture.surroundings import Surroundings
from moecompile.capture.where import forward_line
from moecompile.compat import tree_flatten, tree_unflatten
from moecompile.errors import CaptureError
from moecompile.fields import with_fields
from moecompile.program import InputKind, OutputKind

SWITCH = "MOECOMPILE_COMPARE"
_LOG = logging.getLogger("moecompile")
_MOST_FLOPS = 2e11  # a second or two on a few cores
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9}

Values = dict[str, Tensor]


def compare_capture(
    model: nn.Module,
    captured: Captured,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    num_data_ranks: int,
    batch_dims: Mapping[str, int | None] | None = None,
    loss_fn: Callable[..., Any] | None = None,
) -> str:
    """Compare; ``args`` and ``kwargs`` are what one rank passes. Returns why it was left out, '' when it was not.

    `CaptureError` where graph and model differ. Buffers are those after one forward: a checkpointed one runs again in the backward.
    """
    reason = _reason_against(model, captured, args, kwargs, num_data_ranks)
    if reason:
        return reason
    inputs = _fresh(model, args, kwargs, num_data_ranks, batch_dims)
    around = Surroundings(model, *([] if loss_fn is None else [loss_fn]))
    try:
        plain = copy.deepcopy(model)
        before = _buffers(plain)
        with torch.random.fork_rng(devices=[]):
            wanted, after = _of_model(plain, inputs, loss_fn)
    except Exception as error:
        return f"the plain model could not run on a batch drawn from this one ({type(error).__name__}: {error})"
    finally:
        around.restore()
    where = f"{forward_line(model)}: the captured graph of {type(model).__name__}"
    found, written = _of_graph(plain, captured, inputs, before)
    for name, value in after.items():
        if _difference(written.get(name, before[name]), value, {}) > _TOLERANCE.get(value.dtype, 1e-3):
            raise CaptureError(
                f"{where} lacks what the plain model's forward does to buffer {name!r}; compute a new tensor instead, or "
                f"update it outside forward, after the step."
            )
    for name, reference in wanted.items():
        error_ = _difference(found.get(name), reference, wanted)
        if error_ > _TOLERANCE.get(reference.dtype, 1e-3):
            raise CaptureError(
                f"{where} gives another {name} than the plain model (relative difference {error_:.1e}); report the model, or "
                f"set {SWITCH}=0 if it draws numbers that cannot be repeated."
            )
    return ""


def _reason_against(
    model: nn.Module, captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any], num_data_ranks: int
) -> str:
    """Why not to compare, '' for nothing."""
    switch = os.environ.get(SWITCH, "")
    if switch == "0":
        return f"{SWITCH}=0"
    tensors = [*model.parameters(), *model.buffers()]
    floats = [item for item in tensors if item.is_floating_point()]
    leaves = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    if any(item.device.type == "meta" for item in [*tensors, *leaves]):
        return "it is on the meta device"
    devices = {leaf.device.type for leaf in leaves}
    if any(torch.is_autocast_enabled(device) for device in devices) or any(
        item.dtype not in _TOLERANCE for item in floats
    ):
        return "rounding in low precision may change which experts are chosen"
    if any(map(_draws, captured.graph_module.graph.nodes)):
        return "it draws random numbers"
    flops = (
        12.0 * sum(item.numel() for item in floats) * max((leaf.numel() for leaf in leaves), default=0) * num_data_ranks
    )
    return "it is large" if flops > _MOST_FLOPS and switch != "always" else ""


def _draws(node: Node) -> bool:
    """Whether a call draws random numbers; a dropout that is off does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    off = not given.get("train", True) or given.get("p", 1.0) == 0
    return not off and ("dropout_p" not in names or bool(given.get("dropout_p", 0.0)))


def _fresh(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    num_data_ranks: int,
    batch_dims: Mapping[str, int | None] | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A global batch whose numbers are drawn from those of this rank's."""
    whole, spec = tree_flatten(globalize(args, kwargs, num_data_ranks, batch_dims, forward=model.forward))
    own, _ = tree_flatten((args, kwargs))
    generator = torch.Generator().manual_seed(0)
    for index in batch_inputs(args, kwargs, batch_dims, forward=model.forward):
        values = own[index].detach().flatten()
        if values.numel():
            picks = torch.randint(values.numel(), tuple(whole[index].shape), generator=generator).to(values.device)
            whole[index] = values[picks].requires_grad_(own[index].requires_grad)
    rebuilt: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(whole, spec)
    return rebuilt


def _buffers(plain: nn.Module) -> Values:
    return {name: buffer.detach().clone() for name, buffer in plain.named_buffers()}


def _of_model(plain: nn.Module, inputs: Any, loss_fn: Callable[..., Any] | None) -> tuple[Values, Values]:
    """Results, and the buffers after the forward."""
    args, kwargs = inputs
    output = plain(*args, **kwargs)
    loss = find_loss(output) if loss_fn is None else loss_fn(output, *args, **kwargs)
    outputs = [leaf for leaf in tree_flatten(with_fields(output))[0] if isinstance(leaf, Tensor)]
    after = _buffers(plain)
    return _values(plain, outputs, loss), after


def _of_graph(plain: nn.Module, captured: Captured, inputs: Any, before: Values) -> tuple[Values, Values]:
    """Results, and what the graph says of the buffers that it writes."""
    known = {**dict(plain.named_parameters()), **before}
    leaves, _ = tree_flatten(inputs)
    values = []
    for item in captured.inputs:
        if item.kind in (InputKind.PARAM, InputKind.BUFFER):
            values.append(known[item.fqns[0]])
        else:
            values.append(captured.constants[item.name] if item.kind is InputKind.CONSTANT else leaves[item.leaf])
    results = torch.fx.Interpreter(captured.graph_module).run(*values)
    outputs = [result for item, result in zip(captured.outputs, results, strict=True) if item.leaf >= 0]
    loss = None if captured.loss_index is None else results[captured.loss_index]
    pairs = zip(captured.outputs, results, strict=True)
    written = {item.name: result.detach() for item, result in pairs if item.kind is OutputKind.BUFFER}
    return _values(plain, outputs, loss), written


def _values(plain: nn.Module, outputs: Sequence[Tensor], loss: Tensor | None) -> Values:
    """Outputs, loss and gradients by name. Without a loss, all outputs together are one."""
    found = {f"output {at}": out.detach() for at, out in enumerate(outputs)}
    if loss is None:
        floats = [out for out in outputs if out.is_floating_point() and out.requires_grad]
        loss = torch.stack([(out * out.detach().cos()).sum().double() for out in floats]).sum() if floats else None
    else:
        found["loss"] = loss.detach()
    params = {name: param for name, param in plain.named_parameters() if param.requires_grad}
    if torch.is_grad_enabled() and loss is not None and loss.requires_grad and params:
        grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        for (name, param), grad in zip(params.items(), grads, strict=True):
            found[f"gradient of {name}"] = torch.zeros_like(param) if grad is None else grad
    return found


def _difference(found: Tensor | None, reference: Tensor, all_of_them: Values) -> float:
    """Relative to the reference; a gradient that is small among the others is held against their norm."""
    if found is None or found.shape != reference.shape or found.dtype != reference.dtype:
        return float("inf")
    if not reference.is_floating_point():
        return float(not torch.equal(found, reference))
    if torch.equal(torch.isnan(found), torch.isnan(reference)):
        found, reference = found.nan_to_num(), reference.nan_to_num()
    scale = float(reference.norm())
    grads = [item for name, item in all_of_them.items() if name.startswith("gradient") and item.is_floating_point()]
    largest = max((float(item.nan_to_num().norm()) for item in grads), default=0.0)
    return (
        float((found - reference).norm()) / max(scale, 1e-3 * largest, 1e-30)
        if not torch.equal(found, reference)
        else 0.0
    )


def log_left_out(reason: str) -> None:
    """For those who look: a capture that was not compared."""
    if reason:
        _LOG.info("the capture is not compared with the plain model: %s.", reason)
