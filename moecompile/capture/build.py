"""From the traced graph to a flat functional one.

Regions that set autocast or grad mode are inlined: autocast as explicit casts, missing gradients as explicit `detach`.
In-place updates become functional calls.  Assertions, copies and conversions without effect go; `view` becomes
`reshape`, which does not depend on strides that the real tensors may not have.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from moecompile import graph as ir
from moecompile import meta, ops
from moecompile.capture import functional
from moecompile.capture.autocast import Autocast, input_casts
from moecompile.capture.batch_norm import uses_batch, written_out
from moecompile.capture.buffers import storage_key
from moecompile.capture.custom_function import LINK
from moecompile.capture.functional import Handle
from moecompile.capture.identities import as_conversion, as_einsum, as_reshape, is_identity
from moecompile.capture.transpose import transpose
from moecompile.compat import FakeTensorMode, HigherOrderOperator, OpOverload, has_kernel
from moecompile.errors import CaptureError

aten = torch.ops.aten

_CHECKS = frozenset(
    {
        aten._assert_tensor_metadata.default,
        aten._assert_scalar.default,
        aten.sym_constrain_range.default,
        aten.sym_constrain_range_for_size.default,
        torch.sym_not,
    }
)
_KEPT_META = ("nn_module_stack", "stack_trace")


class Builder:
    """Copies traced graphs into ``graph``; ``root`` is the path of the user's model inside the traced module."""

    def __init__(self, graph: Graph, mode: FakeTensorMode, root: str, autocast: Autocast) -> None:
        self.graph = graph
        self.mode = mode
        self.root = root
        self.autocast = autocast
        self.track_grad = torch.is_grad_enabled()
        self.grad_enabled = self.track_grad
        self._differentiable: set[Node] = set()  # depends on something that requires a gradient
        self._without_grad: set[Node] = set()  # computed where gradients are off
        self._detached: dict[Node, Node] = {}
        self._weight_casts: dict[tuple[Node, torch.dtype], Node] = {}

    def placeholder(self, traced: Node, name: str, frozen: str, requires_grad: bool) -> Handle:
        node = self.graph.placeholder(name)
        node.target = node.name  # a.b_c and a_b.c are one identifier; generated code takes arguments by target
        node.meta["val"] = traced.meta["val"]
        if requires_grad:
            self._differentiable.add(node)
        return Handle(node, frozen=frozen)

    def inline(self, module: GraphModule, env: dict[Node, Any]) -> tuple[Any, ...]:
        """Copy the body of ``module``; ``env`` holds its placeholders and is filled. Returns its outputs as handles."""
        for node in module.graph.nodes:
            if node.op == "output":
                return tuple(env.get(item, item) if isinstance(item, Node) else item for item in node.args[0])
            if node.op == "call_function" and node.target not in _CHECKS:
                env[node] = self._copy(module, node, env)
        raise AssertionError("a graph without output")

    def final(self, handle: Handle) -> Node | None:
        """What a handle that was written into holds at the end; None for any other."""
        return self._value(handle) if handle.version else None

    def carries_gradient(self, node: Node) -> bool:
        """Whether a value depends on something that requires a gradient, in a capture that may ask for it."""
        return self.track_grad and node in self._differentiable and node not in self._without_grad

    def output(self, handle: Any) -> Any:
        """The node of a result of the whole graph."""
        return self._operand(handle) if isinstance(handle, Handle) else handle

    # One node ----------------------------------------------------------------------------------------------------

    def _copy(self, module: GraphModule, node: Node, env: dict[Node, Any]) -> Any:
        if isinstance(node.target, HigherOrderOperator):
            return self._region(module, node, env)
        if node.target is operator.getitem:
            return self._element(node, env)
        if node.target is LINK:
            return self._linked(node, env)
        if functional.writes_first_argument(node.target):
            return self._in_place(node, env)
        if uses_batch(node):
            return self._norm(node, env)
        if _writes_elsewhere(node.target):
            raise CaptureError(
                f"{meta.source(node)}: {node.target} writes its result into an argument (out=); assign the result."
            )
        source = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        given = env.get(source) if source is not None else None
        if source is not None and isinstance(given, Handle):
            if is_identity(node, source):
                # A literal in the forward is lifted to a constant; the tensor made from it is new in every call.
                fresh = node.target in (aten.lift_fresh.default, aten.lift_fresh_copy.default)
                return given if _same_storage(node, source) and not fresh else Handle(self._value(given))
            if node.target is aten.detach.default and self._value(given) not in self._differentiable:
                return given
            part = _part_of_stack(node, self._value(given))
            if part is not None:
                return Handle(part)
        return self._call(node, source, env)

    def _call(self, node: Node, source: Node | None, env: dict[Node, Any]) -> Handle:
        plain = _stride_free(node.target), node.args, node.kwargs
        target, args, kwargs = as_conversion(node) or as_reshape(node) or as_einsum(node) or plain
        args = map_arg(args, lambda item: self._operand(env[item]))
        kwargs = map_arg(kwargs, lambda item: self._operand(env[item]))
        args, kwargs = self._autocast(node, target, args, kwargs)
        _check_kernel(node, target)
        made = self._insert(node, target, args, kwargs, node.meta.get("val"))
        parent = env.get(source) if source is not None else None
        if isinstance(parent, Handle) and _same_storage(node, source):
            return Handle(made, parent, target, tuple(args[1:]), node, parent.owner.version)
        return Handle(made)

    def _element(self, node: Node, env: dict[Node, Any]) -> Any:
        source, index = node.args
        found = env[source]  # type: ignore[index]
        if isinstance(found, tuple):
            return found[index]  # type: ignore[index]
        made = self._insert(node, operator.getitem, (self._value(found), index), {}, node.meta.get("val"))
        view = functional.part_view(source, index) if found.parent is not None else None  # type: ignore[arg-type]
        if view is not None:
            return Handle(made, found.parent, view[0], view[1], node, found.version)
        return Handle(made)

    def _in_place(self, node: Node, env: dict[Node, Any]) -> Handle:
        if not isinstance(node.args[0], Node):
            raise CaptureError(
                f"{meta.source(node)}: {node.target} writes into several tensors at once; write into each of them."
            )
        handle: Handle = env[node.args[0]]
        here = self._value(handle)
        # torch.nn.utils.parametrize sets a parameter to itself.
        if node.target is aten.set_.source_Tensor and here is self._value(env[node.args[1]]):  # type: ignore[index]
            return handle
        hidden = self.track_grad and not self.grad_enabled and here not in self._without_grad
        if hidden and here in self._differentiable:
            raise CaptureError(
                f"{meta.source(node)}: a tensor that carries a gradient is changed in place under no_grad "
                f"({node.target}), so that value and gradient disagree; compute a new tensor instead."
            )
        wanted = node.meta["val"]
        args = map_arg(node.args[1:], lambda item: self._operand(env[item]))
        kwargs = map_arg(node.kwargs, lambda item: self._operand(env[item]))
        if node.target in (aten.copy_.default, aten.fill_.Tensor):
            value = self._fit(node, args[0], wanted)
        elif node.target is aten.fill_.Scalar:
            value = self._insert(node, aten.full_like.default, (self._operand(handle), args[0]), {}, wanted)
        else:
            target = functional.functional_form(node.target, node)  # type: ignore[arg-type]
            kwargs = {**functional.left_out(target, node), **kwargs}
            value = self._insert(node, target, (self._operand(handle), *args), kwargs)
            value = self._fit(node, value, wanted)
        functional.write(handle, value, node, self._emit)
        return handle

    def _norm(self, node: Node, env: dict[Node, Any]) -> Handle:
        """A norm by the statistics of the batch, written out, and its running statistics written back."""
        handles = {name: env[arg] for name, arg in ir.arguments(node).items() if isinstance(arg, Node)}
        operands = ir.arguments(node) | {name: self._operand(handle) for name, handle in handles.items()}

        def make(target: Any, *args: Any, **kwargs: Any) -> Node:
            return self._insert(node, target, args, kwargs)

        normed, news = written_out(node, operands, make, self._constant)
        for name, value in news.items():
            wanted = meta.tensor(self._value(handles[name]))
            functional.write(handles[name], self._fit(node, value, wanted), node, self._emit)
        return Handle(normed)

    def _linked(self, node: Node, env: dict[Node, Any]) -> tuple[Handle, ...]:
        """The values of a custom function, with the gradient that its backward defines."""
        values, seeds, inputs, gradients, where = cast("tuple[Any, ...]", map_arg(node.args, env.__getitem__))

        def insert(target: Any, args: Any, kwargs: Any, found: Any) -> Node:
            return self._insert(node, _stride_free(target), args, kwargs, found)

        pairs = [(self._value(grad), self._value(item)) for grad, item in zip(gradients, inputs, strict=True)]
        paths = transpose([seed.node for seed in seeds], pairs, self.mode, insert, self._constant, where)
        made = []
        for value, path, found in zip(map(self._operand, values), paths, node.meta["val"], strict=True):
            made.append(Handle(value if path is None else self._insert(node, ops.graft, (value, path), {}, found)))
        return tuple(made)

    def _fit(self, traced: Node, value: Any, wanted: torch.Tensor) -> Node:
        """``value`` in the type and shape of the tensor it is written to."""
        if not isinstance(value, Node):
            raise CaptureError(f"{meta.source(traced)}: {traced.target} writes {value!r}, where a tensor was expected.")
        found = meta.tensor(value)
        if found.dtype != wanted.dtype:
            value = self._insert(traced, aten._to_copy.default, (value,), {"dtype": wanted.dtype})
        if found.shape != wanted.shape:
            value = self._insert(traced, aten.expand.default, (value, list(wanted.shape)), {})
        assert isinstance(value, Node)
        return value

    def _region(self, module: GraphModule, node: Node, env: dict[Node, Any]) -> tuple[Any, ...]:
        """Inline a region under its own grad mode or autocast state."""
        name, args = str(node.target), node.args
        saved = self.grad_enabled, self.autocast, self._weight_casts
        if name == "wrap_with_set_grad_enabled":
            (enabled, body), operands = args[:2], args[2:]
            self.grad_enabled = bool(enabled) and self.track_grad
        elif name == "wrap_with_autocast":
            (device, dtype, enabled, _cache, body), operands = args[:5], args[5:]
            if not self.autocast.dtypes:
                self._weight_casts = {}  # torch forgets its casts when the outermost region ends
            self.autocast = self.autocast.inside(device, dtype, bool(enabled))  # type: ignore[arg-type]
        else:
            raise CaptureError(
                f"{meta.source(node)}: the forward uses {name}, which no pass can rewrite; write it with plain tensor "
                f"operations."
            )
        inner = getattr(module, str(body.target))  # type: ignore[union-attr]
        inputs = [item for item in inner.graph.nodes if item.op == "placeholder"]
        outputs = self.inline(inner, dict(zip(inputs, (env[item] for item in operands), strict=True)))  # type: ignore[index]
        self.grad_enabled, self.autocast, self._weight_casts = saved
        return outputs

    # Values ------------------------------------------------------------------------------------------------------

    def _value(self, handle: Handle) -> Node:
        return functional.current(handle, self._emit)

    def _operand(self, handle: Any) -> Any:
        """The handle's value as an operand here: detached where it was computed without gradients."""
        if not isinstance(handle, Handle):
            return handle
        node = self._value(handle)
        return self._constant(node) if self.grad_enabled and node in self._without_grad else node

    def _constant(self, node: Node) -> Node:
        """The value without its gradient."""
        if node not in self._differentiable:
            return node
        if node not in self._detached:
            made = self.graph.create_node("call_function", aten.detach.default, (node,), name="detach")
            made.meta = meta.copy_meta(node)
            self._detached[node] = made
        return self._detached[node]

    def _emit(self, traced: Node, target: Any, args: tuple[Any, ...]) -> Node:
        return self._insert(traced, target, args, {})

    def _insert(self, traced: Node, target: Any, args: Any, kwargs: Any, value: Any = None) -> Node:
        """Append one call; its fake value is ``value`` or computed."""
        node = self.graph.create_node("call_function", target, args, kwargs, name=_op_name(target))
        node.meta = {key: traced.meta[key] for key in _KEPT_META if key in traced.meta}
        if "nn_module_stack" in node.meta:
            node.meta["nn_module_stack"] = self._module_stack(node.meta["nn_module_stack"])
        node.meta["val"] = ir.compute(target, args, kwargs, self.mode) if value is None else value
        passes_gradient = target is not aten.detach.default and _may_carry_gradient(node.meta["val"])
        if passes_gradient and any(item in self._differentiable for item in node.all_input_nodes):
            self._differentiable.add(node)
        if self.track_grad and not self.grad_enabled:
            self._without_grad.add(node)
        return node

    def _module_stack(self, stack: dict[str, Any]) -> dict[str, Any]:
        """The enclosing modules by their path in the user's model; what wraps the model is left out."""
        kept = {}
        for key, (path, kind) in stack.items():
            if path == self.root or path.startswith(self.root + "."):
                kept[key] = (path[len(self.root) + 1 :], kind)
        return kept

    def _autocast(self, traced: Node, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        casts = input_casts(target, args, kwargs, self.autocast, self.mode) if self.autocast.dtypes else {}
        if not casts:
            return args, kwargs
        cast = {node: self._cast(traced, node, dtype) for node, dtype in casts.items()}
        return map_arg(args, lambda item: cast.get(item, item)), map_arg(kwargs, lambda item: cast.get(item, item))

    def _cast(self, traced: Node, node: Node, dtype: torch.dtype) -> Node:
        """Weights are cast once per region, as torch does: their gradients are then summed before the cast back."""
        shared = node.op == "placeholder" and node in self._differentiable and self.grad_enabled
        if shared and (node, dtype) in self._weight_casts:
            return self._weight_casts[node, dtype]
        made = self._insert(traced, aten._to_copy.default, (node,), {"dtype": dtype})
        if shared:
            self._weight_casts[node, dtype] = made
        return made


def _check_kernel(node: Node, target: Any) -> None:
    """`CaptureError` for an operator of another package that has no kernel where its tensors are."""
    found = [meta.tensor(item) for item in node.all_input_nodes if meta.is_tensor(item)]
    if isinstance(target, OpOverload) and found and not has_kernel(target, found[0].device.type):
        raise CaptureError(
            f"{meta.source(node)}: {target} has no kernel for {found[0].device.type}, where its arguments are; move model and "
            f"batch to a device that it has one for, or use another implementation there."
        )


def _op_name(target: Any) -> str:
    """The operator's name without overload; the graph numbers equal names."""
    name = target._schema.name.split("::")[1] if isinstance(target, OpOverload) else getattr(target, "__name__", "call")
    return name.strip("_") or "call"


def _stride_free(target: Any) -> Any:
    return aten.reshape.default if target in (aten.view.default, aten._unsafe_view.default) else target


def _part_of_stack(node: Node, stack: Node) -> Node | None:
    """The stacked tensor that ``node`` picks out of a stack again."""
    if node.target is not aten.select.int or stack.target is not aten.stack.default:
        return None
    parts, dim, index = stack.args[0], stack.args[1] if len(stack.args) > 1 else 0, node.args[2]
    if node.args[1] != dim or not isinstance(index, int):
        return None
    return parts[index]  # type: ignore[index, return-value]


def _same_storage(node: Node, source: Node | None) -> bool:
    """Whether the results of two traced nodes share memory; a tuple does when its first element does."""
    one, other = node.meta.get("val"), source.meta.get("val") if source is not None else None
    if isinstance(one, (tuple, list)) and one:
        one = one[0]
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return storage_key(one) == storage_key(other)


def _writes_elsewhere(target: Any) -> bool:
    return isinstance(target, OpOverload) and any(
        argument.alias_info is not None and argument.alias_info.is_write for argument in target._schema.arguments
    )


def _may_carry_gradient(value: Any) -> bool:
    items = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(item, torch.Tensor) and (item.is_floating_point() or item.is_complex()) for item in items)
