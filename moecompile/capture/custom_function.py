"""Custom `autograd.Function`s as plain operators.

Export runs such a function's forward and forgets its backward.  While a model is traced, `applied` takes the place of
``Function.apply``: it traces the user's forward and the user's backward on a stand-in for the incoming gradient, and
ties both together with one `link` call.  When the graph is built, `capture.transpose` turns each link into operators
whose gradient is the user's backward.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from moecompile.capture.where import current_line
from moecompile.compat import SingleLevelFunction
from moecompile.errors import CaptureError


def _nothing(ctx: Any, *args: Any) -> tuple[None, ...]:
    """The traced graph is never differentiated as it is."""
    return (None,) * 5


_LIBRARY = torch.library.Library("moe_capture", "DEF")  # type: ignore[no-untyped-call]
_SCHEMA = "link(Tensor[] values, Tensor[] seeds, Tensor[] inputs, Tensor[] gradients, str where) -> Tensor[]"
_LIBRARY.define(_SCHEMA)  # type: ignore[no-untyped-call]
_LIBRARY.impl("link", lambda values, *rest: [item.clone() for item in values], "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake(
    "moe_capture::link", lambda values, *rest: list(map(torch.empty_like, values)), lib=_LIBRARY
)
torch.library.register_autograd("moe_capture::link", _nothing, lib=_LIBRARY)
# `gradients`, those of `inputs`, were computed from `seeds`, which stand for the gradients of `values`.
LINK = torch.ops.moe_capture.link.default

_Function = torch.autograd.Function


class _Context:
    """What forward and backward of a custom function see as ``ctx``; other attributes are the user's own."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()
        self.dirty: tuple[Any, ...] = ()
        self.non_differentiable: tuple[Any, ...] = ()
        self.materialize_grads = True

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """Forward-mode derivatives are not asked for."""

    def mark_dirty(self, *tensors: Any) -> None:
        self.dirty = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.non_differentiable = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize_grads = value


def applied(function: type[_Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The traced outputs of ``function.apply(*args, **kwargs)``, with links where a gradient is to be defined."""
    separate = function.setup_context is not _Function.setup_context
    if separate:
        bound = inspect.signature(function.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        args, kwargs = bound.args, {}
    tracks = torch.is_grad_enabled()
    needs = tuple(tracks and isinstance(arg, Tensor) and arg.requires_grad for arg in args)
    ctx: Any = _Context(needs)
    with torch.no_grad():
        outputs = function.forward(*args) if separate else function.forward(ctx, *args, **kwargs)
        if separate:
            function.setup_context(ctx, args, outputs)
    if ctx.dirty:
        raise CaptureError(
            f"{current_line()}: the custom autograd.Function {function.__name__} writes into its input (mark_dirty), and "
            f"a captured step has no such side effect; let its forward return a new tensor."
        )
    if not any(needs):
        return outputs
    several = isinstance(outputs, (tuple, list))
    found = list(outputs) if several else [outputs]
    seeds = [torch.zeros_like(out) if _has_gradient(out, ctx) else None for out in found]
    pairs = _gradients(function, ctx, args, found, seeds)
    wanted = [at for at, seed in enumerate(seeds) if seed is not None]
    if pairs and wanted:
        where = f"{current_line()}: the backward of the custom autograd.Function {function.__name__}"
        inputs, grads = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        linked = LINK([found[at] for at in wanted], [seeds[at] for at in wanted], inputs, grads, where)
        for at, out in zip(wanted, linked, strict=True):
            found[at] = out
    return tuple(found) if several else found[0]


def _has_gradient(out: Any, ctx: _Context) -> bool:
    """Whether a gradient of this output reaches the backward."""
    floating = isinstance(out, Tensor) and (out.is_floating_point() or out.is_complex())
    return floating and not any(out is item for item in ctx.non_differentiable)


def _gradients(
    function: type[_Function], ctx: _Context, args: tuple[Any, ...], outputs: list[Any], seeds: Sequence[Tensor | None]
) -> list[tuple[Tensor, Tensor]]:
    """Run the user's backward on the seeds: each input that wants a gradient, with the gradient in its shape."""
    backward: Any = function.vjp if function.backward is _Function.backward else function.backward
    with torch.no_grad():
        incoming: list[Tensor | None] = []
        for out, seed in zip(outputs, seeds, strict=True):
            if seed is not None:
                incoming.append(seed.clone())  # a copy: a backward may write into what it is given
            elif isinstance(out, Tensor) and ctx.materialize_grads:
                incoming.append(torch.zeros_like(out))
            else:
                incoming.append(None)
        found = backward(ctx, *incoming)
        found = tuple(found) if isinstance(found, (tuple, list)) else (found,)
        if len(found) < len(args) or any(item is not None for item in found[len(args) :]):
            raise CaptureError(
                f"{current_line()}: the backward of {function.__name__} returns {len(found)} gradients for {len(args)} "
                f"arguments of its forward; return one for each argument, None where there is none."
            )
        pairs = []
        for arg, grad, wanted in zip(args, found, ctx.needs_input_grad, strict=False):
            if wanted and grad is not None:
                pairs.append((arg, _in_shape_of(arg, grad).to(arg.dtype)))
    return pairs


def _in_shape_of(arg: Tensor, grad: Tensor) -> Tensor:
    """What autograd makes of a gradient that is larger than its input: the sum over what was broadcast."""
    if grad.shape == arg.shape:
        return grad
    ahead = grad.dim() - arg.dim()
    spread = [ahead + dim for dim, size in enumerate(arg.shape) if size == 1 and grad.shape[ahead + dim] != 1]
    return grad.sum([*range(ahead), *spread]).reshape(arg.shape)


@contextlib.contextmanager
def functions_traced() -> Iterator[None]:
    """Within, custom functions are traced by `applied`; torch's own keep their backward by themselves.

    A model may have taken ``Function.apply`` from the class long before (``swish = Swish.apply``): that method stays what it is, and
    ends in the `apply` of a base class, which has none of its own otherwise.
    """
    plain = _Function.__dict__["apply"]
    base: Any = SingleLevelFunction

    def apply(cls: type[_Function], *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith("torch.") and cls.__module__ != "torch.utils.checkpoint":
            return plain.__get__(None, cls)(*args, **kwargs)
        return ended(cls, *args, **kwargs)

    def ended(cls: type[_Function], *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            return _checkpointed(*args)
        if cls.__module__ == "torch.utils.checkpoint":  # keeps the inputs of a non-reentrant one, in torch 2.11
            return torch.empty(0)
        if cls.__module__.startswith("torch."):
            return super(base, cls).apply(*args, **kwargs)
        return applied(cls, args, kwargs)

    _Function.apply = classmethod(apply)  # type: ignore[assignment]
    base.apply = classmethod(ended)
    try:
        yield
    finally:
        _Function.apply = plain  # type: ignore[method-assign]
        del base.apply


def _checkpointed(function: Any, preserve: bool, *args: Any) -> Any:
    """Reentrant activation checkpointing: what it computes; when to compute it again is for a pass to choose.

    As in eager mode, nothing inside gets a gradient unless an argument asks for one.
    """
    wanted = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
    with torch.set_grad_enabled(torch.is_grad_enabled() and wanted):
        return function(*args)
