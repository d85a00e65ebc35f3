"""From an exported program to the final graph, with a description of every placeholder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from moecompile import graph as ir
from moecompile import meta
from moecompile.capture.autocast import Autocast
from moecompile.capture.build import Builder
from moecompile.capture.captured import Captured
from moecompile.capture.causal_mask import use_causal_attention
from moecompile.capture.functional import Handle
from moecompile.capture.results import Results
from moecompile.capture.row_counts import sum_masks
from moecompile.compat import FakeTensorMode, TreeSpec
from moecompile.errors import CaptureError
from moecompile.program import Input, InputKind, Output, OutputKind


def first_names(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> the first name of the same tensor."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        names[name] = first.setdefault(id(tensor), name)
    return names


class Lifter:
    """Builds the final graph of one capture.

    ``root`` is the name of the user's model inside the exported module, ``names`` comes from `first_names`, and
    ``leaves`` with ``leaf_names`` are those of the flattened call.
    """

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        mode: FakeTensorMode,
        root: str,
        names: dict[str, str],
        leaves: list[Any],
        leaf_names: list[str],
    ) -> None:
        self.program = program
        self.root = root
        self.names = names
        self.leaf_names = leaf_names
        self.leaves = leaves
        self.graph = Graph()
        self.inputs: dict[Node, Input] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.buffers: dict[str, tuple[Handle, Node]] = {}  # with the placeholder
        devices = {meta.tensor(node).device.type for node in program.graph.nodes if meta.is_tensor(node)}
        self.builder = Builder(self.graph, mode, root, Autocast.ambient(devices))

    def finish(self, name: str, results: Results, in_spec: TreeSpec) -> Captured:
        """Copy the exported graph, clean it up and describe it; ``name`` becomes the graph module's class name."""
        values = self.builder.inline(self.program.graph_module, self._placeholders(results.buffers.shared))
        nodes, outputs = [self.builder.output(item) for item in values], list(results.outputs)
        assigned = {item.name for item in outputs if item.kind is OutputKind.BUFFER}
        for fqn, (handle, _) in self.buffers.items():
            written = self.builder.final(handle)
            if written is not None and fqn not in assigned:
                nodes.append(written)
                outputs.append(Output(OutputKind.BUFFER, fqn))
        self._check_written(nodes, outputs)
        self.graph.output(tuple(nodes))
        buffers = [node for node, item in zip(nodes, outputs, strict=True) if item.kind is OutputKind.BUFFER]
        sum_masks(self.graph, buffers, self.builder.mode)
        ir.eliminate_dead(self.graph)
        use_causal_attention(self.graph, lambda node: self.constants.get(node.name))
        ir.eliminate_dead(self.graph)
        self._drop_unused()
        assert results.out_spec is not None
        inputs = list(self.inputs.values())
        return Captured(
            graph_module=ir.as_module(self.graph, name=name),
            inputs=inputs,
            outputs=outputs,
            in_spec=in_spec,
            out_spec=results.out_spec,
            out_template=results.template,
            loss_index=results.loss_index,
            shared=self._shared(),
            constants={item.name: self.constants[item.name] for item in inputs if item.name in self.constants},
        )

    def _check_written(self, nodes: list[Any], outputs: list[Output]) -> None:
        """`CaptureError` for a buffer through which the gradient of the next step would go into this one."""
        pairs = list(zip(nodes, outputs, strict=True))
        read = ir.ancestors(
            *(node for node, item in pairs if item.kind is not OutputKind.BUFFER and isinstance(node, Node))
        )
        for node, item in pairs:
            carries = item.kind is OutputKind.BUFFER and self.builder.carries_gradient(node)
            if carries and self.buffers[item.name][1] in read:
                raise CaptureError(
                    f"{meta.source(node)}: the forward writes into buffer {item.name!r} a value that carries a gradient, and reads "
                    f"the buffer for its result, so that the backward of the next step would go through this one; detach() what "
                    f"is written, or write it under torch.no_grad()."
                )

    def _placeholders(self, shared: Mapping[str, str]) -> dict[Node, Any]:
        """Parameters, buffers, constants, then the call's tensors; tied parameters become one.

        ``shared`` are buffers that may not be written.
        """
        env: dict[Node, Any] = {}
        made: dict[str, Handle] = {}
        traced = [node for node in self.program.graph.nodes if node.op == "placeholder"]
        tensor_leaves = (index for index, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor))
        for spec, node in zip(self.program.graph_signature.input_specs, traced, strict=True):
            kind, target = spec.kind.name, (spec.target or "").removeprefix(f"{self.root}.")
            if kind == "USER_INPUT":
                env[node] = self._call_input(node, next(tensor_leaves))
            elif kind == "CONSTANT_TENSOR":
                env[node] = self._constant(node, target, self.program.constants[spec.target or ""])
            elif kind in ("PARAMETER", "BUFFER"):
                first = self.names[target]
                if first not in made:
                    made[first] = self._weight(node, first, kind == "PARAMETER", first in shared)
                env[node] = made[first]
            else:
                raise CaptureError(f"the model holds a {kind.lower()} ({spec.target}), which no pass can shard.")
        return env

    def _weight(self, node: Node, fqn: str, is_param: bool, shared: bool) -> Handle:
        value = meta.tensor(node)
        requires_grad = is_param and value.requires_grad
        frozen = f"{'parameter' if is_param else 'buffer'} {fqn!r}" if is_param or shared else ""
        handle = self.builder.placeholder(node, _identifier(fqn), frozen, requires_grad)
        if not is_param:
            self.buffers[fqn] = handle, handle.node
        kind = InputKind.PARAM if is_param else InputKind.BUFFER
        self.inputs[handle.node] = Input(
            kind, handle.node.name, (fqn,), tuple(value.shape), requires_grad=requires_grad
        )
        return handle

    def _constant(self, node: Node, target: str, value: torch.Tensor) -> Handle:
        handle = self.builder.placeholder(node, f"constant_{_identifier(target)}", f"attribute {target!r}", False)
        self.constants[handle.node.name] = value
        self.inputs[handle.node] = Input(InputKind.CONSTANT, handle.node.name, shape=tuple(value.shape))
        return handle

    def _call_input(self, node: Node, leaf: int) -> Handle:
        value, name = meta.tensor(node), self.leaf_names[leaf]
        handle = self.builder.placeholder(node, _identifier(name), f"its input {name!r}", value.requires_grad)
        self.inputs[handle.node] = Input(
            InputKind.BATCH,
            handle.node.name,
            shape=tuple(value.shape),
            requires_grad=value.requires_grad,
            leaf=leaf,
        )
        return handle

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


def _identifier(name: str) -> str:
    return re.sub(r"\W+", "_", name).strip("_") or "value"
