"""From a user's model and one call to a flat functional graph: `capture_model`.

The call is at the global batch shape; only shapes, types and devices of its tensors are used.  Parameters are replaced by
fake ones while tracing, so that a model on the meta device is captured for the device of its inputs, and nothing runs.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from moecompile import graph as ir
from moecompile import meta
from moecompile.capture.autocast import Autocast
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
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Captured:
    """One call of a model as a graph.

    Placeholders of ``graph_module`` line up with ``inputs`` and its output tuple with ``outputs``.  ``in_spec`` flattens
    ``(args, kwargs)``; ``out_spec`` with ``out_template`` rebuilds the return value: the template holds its leaves that
    are no tensors.  ``loss_index`` is the loss's place in ``outputs``, None for a call that returns no loss.  ``shared``
    maps a parameter or buffer name to the other names of the same tensor.  ``constants`` holds the value of each CONSTANT
    input by its name.
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


class _Call(nn.Module):
    """The traced module: takes the call's tensors, calls the model, returns the tensors of its result."""

    def __init__(self, model: nn.Module, arguments: Arguments, loss_fn: Callable[..., Any] | None) -> None:
        super().__init__()
        self.model = model
        self._arguments = [tree_flatten(arguments)]
        self._loss_fn = loss_fn
        self.out_spec: TreeSpec | None = None
        self.out_template: list[Any] = []
        self.results: list[Output] = []
        self.loss_index: int | None = None

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ((leaves, spec),) = self._arguments
        supply = iter(tensors)
        args, kwargs = tree_unflatten(
            [next(supply) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec
        )
        with watched(self.model, list(tensors)):
            output = self.model(*args, **kwargs)
            loss = None if self._loss_fn is None else self._loss_fn(output, *args, **kwargs)
        return self._collect(output, loss)

    def _collect(self, output: Any, loss: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Split the return value into tensors and the rest, and note which tensor is the loss."""
        leaves, self.out_spec = tree_flatten(output)
        _check_leaves(leaves, type(self.model).__name__)
        tensors, self.results = [], []
        if self._loss_fn is not None:
            tensors.append(_checked_loss(loss))
            self.results.append(Output(OutputKind.LOSS, name="loss"))
        found = find_loss(output) if loss is None else None
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                is_loss = leaf is found and not any(item.kind is OutputKind.LOSS for item in self.results)
                self.results.append(Output(OutputKind.LOSS if is_loss else OutputKind.USER, leaf=index))
                tensors.append(leaf)
        kinds = [item.kind for item in self.results]
        self.loss_index = kinds.index(OutputKind.LOSS) if OutputKind.LOSS in kinds else None
        self.out_template = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return tuple(tensors)


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
    fakes = [_fake_input(leaf, mode) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    call = _Call(model, tree_unflatten(fakes, in_spec), loss_fn)
    tensors = tuple(leaf for leaf in fakes if isinstance(leaf, torch.Tensor))
    device = tensors[0].device if tensors else torch.device("cpu")
    names = _shared_names(model)
    with _weights_faked(call, mode, device), split_experts(model), _errors_explained(model):
        program = _export(call, tensors)
    if call.out_spec is None:
        raise AssertionError("export did not call the model")
    lifter = _Lifter(program, mode, names, _leaf_names(model, args, kwargs), leaves)
    return lifter.finish(call, in_spec)


def _export(call: _Call, tensors: tuple[torch.Tensor, ...]) -> Any:
    """Export under `LoopCapture`. Its report about values that a guard wanted is replaced by our own sentence."""
    with LoopCapture():
        return torch.export.export(call, tensors, strict=False)


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


@contextlib.contextmanager
def _errors_explained(model: nn.Module) -> Iterator[None]:
    """Turn what export raises into one sentence that names the user's line."""
    try:
        yield
    except CaptureError:
        raise
    except GuardOnDataDependentSymNode as error:
        raise CaptureError(
            f"{raising_line(error)}: a branch or a size depends on tensor values, which are not known when the model is "
            f"captured; write it without a branch (torch.where, masks), or move the decision outside the model."
        ) from error
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise CaptureError(
            f"{raising_line(error)}: capture of {type(model).__name__} stopped with {type(error).__name__}: {first}; check "
            f"that the plain model runs on these inputs, and report what it uses here if it does."
        ) from error


def _shared_names(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> the first name of the same tensor."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        names[name] = first.setdefault(id(tensor), name)
    return names


def _leaf_names(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """A readable name for each leaf of the call: the parameter of forward it belongs to, and its place in there."""
    try:
        positional = [
            name
            for name, item in inspect.signature(model.forward).parameters.items()
            if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        positional = []
    names = []
    for path, _ in tree_flatten_with_path((args, kwargs))[0]:
        is_keyword, key = path[0].idx == 1, path[1]
        first = key.key if is_keyword else positional[key.idx] if key.idx < len(positional) else f"arg{key.idx}"
        names.append(first + keystr(tuple(path[2:])))
    return names


def _check_leaves(leaves: list[Any], model: str) -> None:
    for leaf in leaves:
        if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise CaptureError(f"{model}.forward returns a number read out of a tensor; return the tensor itself.")
        if not isinstance(leaf, torch.Tensor) and any(isinstance(item, torch.Tensor) for item in _members(leaf)):
            raise CaptureError(
                f"{model}.forward returns a {type(leaf).__name__} that holds tensors; return tensors in tuples, lists, dicts "
                f"or dataclasses (a cache: pass use_cache=False)."
            )
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise CaptureError(f"{model}.forward returns no tensor; return the loss or the output.")


def _members(value: Any) -> Iterator[Any]:
    """The values in an object's attributes, and in its lists one level down."""
    for item in vars(value).values() if hasattr(value, "__dict__") else ():
        yield item
        if isinstance(item, (list, tuple)):
            for part in item:
                yield part
                yield from vars(part).values() if hasattr(part, "__dict__") else ()


def _checked_loss(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0 or not loss.is_floating_point():
        found = (
            f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        )
        raise CaptureError(
            f"loss_fn returned {found}, but a 0-d floating tensor is needed; reduce it with sum() or mean()."
        )
    return loss


def _identifier(name: str) -> str:
    return re.sub(r"\W+", "_", name).strip("_") or "value"


class _Lifter:
    """Builds the final graph and describes its placeholders."""

    def __init__(
        self, program: Any, mode: FakeTensorMode, names: dict[str, str], leaf_names: list[str], leaves: list[Any]
    ) -> None:
        self.program = program
        self.names = names
        self.leaf_names = leaf_names
        self.leaves = leaves
        self.graph = Graph()
        self.inputs: dict[Node, Input] = {}
        self.constants: dict[str, torch.Tensor] = {}
        devices = {node.meta["val"].device.type for node in program.graph.nodes if meta.is_tensor(node)}
        self.builder = Builder(self.graph, mode, _ROOT, Autocast.ambient(devices))

    def finish(self, call: _Call, in_spec: TreeSpec) -> Captured:
        """Copy the exported graph, clean it up and describe it."""
        outputs = self.builder.inline(self.program.graph_module, self._placeholders())
        self.graph.output(tuple(self.builder.output(item) for item in outputs))
        ir.eliminate_dead(self.graph)
        use_causal_attention(self.graph, self._constant_value)
        ir.eliminate_dead(self.graph)
        self._refuse_numbers()
        self._drop_unused()
        module = GraphModule({}, self.graph, type(call.model).__name__)
        assert call.out_spec is not None
        return Captured(
            graph_module=module,
            inputs=list(self.inputs.values()),
            outputs=call.results,
            in_spec=in_spec,
            out_spec=call.out_spec,
            out_template=tuple(call.out_template),
            loss_index=call.loss_index,
            shared=self._shared(),
            constants={
                item.name: self.constants[item.name] for item in self.inputs.values() if item.name in self.constants
            },
        )

    def _placeholders(self) -> dict[Node, Any]:
        """Parameters, buffers, constants, then the call's tensors; tied parameters become one."""
        env: dict[Node, Any] = {}
        handles: dict[str, Any] = {}
        specs = zip(self.program.graph_signature.input_specs, self._traced_placeholders(), strict=True)
        tensor_leaves = iter(index for index, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor))
        for spec, node in specs:
            kind = spec.kind.name
            if kind == "USER_INPUT":
                env[node] = self._call_input(node, next(tensor_leaves))
                continue
            target = spec.target.removeprefix(_ROOT + ".")
            if kind == "CONSTANT_TENSOR" and target not in self.names:
                env[node] = self._constant(node, target)
            elif kind in ("PARAMETER", "BUFFER", "CONSTANT_TENSOR"):
                first = self.names[target]
                if first not in handles:
                    handles[first] = self._weight(node, first, kind == "PARAMETER")
                env[node] = handles[first]
            else:
                raise CaptureError(
                    f"the model holds a {kind.lower()} ({spec.target}), which no pass can shard; remove it."
                )
        return env

    def _traced_placeholders(self) -> list[Node]:
        return [node for node in self.program.graph.nodes if node.op == "placeholder"]

    def _weight(self, node: Node, fqn: str, is_param: bool) -> Any:
        value = node.meta["val"]
        frees = is_param and value.requires_grad
        handle = self.builder.placeholder(
            node, _identifier(fqn), f"{'parameter' if is_param else 'buffer'} {fqn!r}", frees
        )
        kind = InputKind.PARAM if is_param else InputKind.BUFFER
        self.inputs[handle.node] = Input(kind, handle.node.name, (fqn,), tuple(value.shape), requires_grad=frees)
        return handle

    def _constant(self, node: Node, target: str) -> Any:
        handle = self.builder.placeholder(node, f"constant_{_identifier(target)}", f"constant {target!r}", False)
        name = handle.node.name
        self.constants[name] = self.program.constants[
            node.target_name if hasattr(node, "target_name") else self._fqn(node)
        ]
        self.inputs[handle.node] = Input(InputKind.CONSTANT, name, shape=tuple(node.meta["val"].shape))
        return handle

    def _fqn(self, node: Node) -> str:
        return str(self.program.graph_signature.inputs_to_lifted_tensor_constants[node.name])

    def _call_input(self, node: Node, leaf: int) -> Any:
        value, name = node.meta["val"], self.leaf_names[leaf]
        handle = self.builder.placeholder(node, _identifier(name), f"its input {name!r}", value.requires_grad)
        self.inputs[handle.node] = Input(
            InputKind.BATCH, handle.node.name, shape=tuple(value.shape), requires_grad=value.requires_grad, leaf=leaf
        )
        return handle

    def _constant_value(self, node: Node) -> torch.Tensor | None:
        return self.constants.get(node.name)

    def _refuse_numbers(self) -> None:
        for node in ir.find(self.graph, torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default):
            if not any(
                meta.is_tensor(item) and meta.tensor(item).dtype == torch.int64 for item in node.all_input_nodes
            ):
                raise CaptureError(
                    f"{meta.source(node)}: the forward computes with a number read out of a tensor, which is not known when "
                    f"the model is captured; keep it a tensor."
                )

    def _drop_unused(self) -> None:
        """Buffers and constants that nothing reads leave the graph; parameters and the call's tensors stay."""
        for node, item in list(self.inputs.items()):
            if item.kind in (InputKind.BUFFER, InputKind.CONSTANT) and not node.users:
                self.graph.erase_node(node)
                del self.inputs[node]

    def _shared(self) -> dict[str, tuple[str, ...]]:
        shared: dict[str, list[str]] = {}
        for name, first in self.names.items():
            if name != first:
                shared.setdefault(first, []).append(name)
        return {first: tuple(others) for first, others in shared.items()}
