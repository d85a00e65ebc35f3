"""Weight-side values of an expert, followed back to the parameters: `WeightReader`."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from moecompile import meta
from moecompile.recognition import rowwise
from moecompile.recognition.body import Leaf, NotRowwiseError, Setting, Source, Step, Value

aten = torch.ops.aten


class WeightReader:
    """Reads what one expert's operators use beside rows; appends to the steps and leaves of a body.

    Steps on weights are written for one expert's part and count axes from the end, so that they hold for the stack too.
    """

    def __init__(self, setting: Setting, batched: bool, steps: list[Step]) -> None:
        self.setting = setting
        self.batched = batched
        self.steps = steps
        self.leaves: list[Source] = []
        self._seen: dict[Node, Any] = {}

    def operand(self, node: Node, letters: str, user: Node) -> Any:
        """A weight that meets rows elementwise, as features of one expert."""
        ref, names = self.expert_part(node, letters, user)
        if "R" in names:
            raise NotRowwiseError(user, "adds or multiplies a weight that has rows of its own")
        return ref

    def expert_part(self, node: Node, letters: str, user: Node) -> tuple[Any, str]:
        """One expert's part of a weight-side value without row axes of size 1, and the names of its axes."""
        shape = meta.tensor(node).shape
        if "E" in letters and shape[letters.index("E")] == self.setting.num_experts:
            at = letters.index("E")
            ref: Any = self._leaf(Source("stacked", node, at))
            names = letters[:at] + letters[at + 1 :]
            sizes = [size for dim, size in enumerate(shape) if dim != at]
        else:
            ref, names, sizes = self.static(node), letters.replace("E", "R"), list(shape)
        kept = [(name, size) for name, size in zip(names, sizes, strict=True) if not (name == "R" and size == 1)]
        if len(kept) < len(sizes):
            ref = self.step(user, aten.reshape.default, ref, [int(size) for _, size in kept])
        return ref, "".join(name for name, _ in kept)

    def static(self, node: Node) -> Any:
        """The reference to a weight-side value of one expert."""
        if node not in self._seen:
            self._seen[node] = self._static(node)
        return self._seen[node]

    def _static(self, node: Node) -> Any:
        part = self._part_of_shared(node)
        if part is not None:
            return part
        if node.op == "placeholder" or self.batched or self.setting.one(node) in self.setting.shared:
            return self._leaf(Source("own", self.setting.one(node)))
        target, ndim = (
            node.target,
            meta.tensor(node.args[0]).dim() if isinstance(node.args[0], Node) and meta.is_tensor(node.args[0]) else 0,
        )
        inputs = list(node.all_input_nodes)
        if not inputs:
            return self._leaf(Source("own", node))
        if target in (aten.t.default, aten.mT.default) or (target is aten.numpy_T.default and ndim == 2):
            return self.step(node, aten.transpose.int, self.static(inputs[0]), -2, -1)
        if target is aten.transpose.int:
            dims = [int(dim) % ndim - ndim for dim in node.args[1:3]]  # type: ignore[arg-type]
            return self.step(node, target, self.static(inputs[0]), *dims)
        if target in rowwise.RESHAPES or target in (aten.squeeze.dim, aten.unsqueeze.default):
            return self.step(node, aten.reshape.default, self.static(inputs[0]), list(meta.tensor(node).shape))
        if target in rowwise.SLICES:
            dim = int(node.args[1]) % ndim - ndim  # type: ignore[arg-type]
            return self.step(node, target, self.static(inputs[0]), dim, *node.args[2:])
        if target in (aten.matmul.default, aten.mm.default) or rowwise.is_pointwise(target):
            sizes = {meta.tensor(item).dim() for item in inputs}
            if len(sizes) == 1:
                args = [self.static(item) if isinstance(item, Node) else item for item in node.args]
                return self.step(node, target, *args, **node.kwargs)
        raise NotRowwiseError(node, f"({target}) computes an expert weight in a way that is not read")

    def _part_of_shared(self, node: Node) -> Any:
        """``w[e]``, ``w.unbind()[e]``, ``w[e * n : (e + 1) * n]`` of a weight that every expert reads a part of."""
        if self.batched or node.op != "call_function" or not node.args:
            return None
        source: Any = node.args[0]
        if not isinstance(source, Node):
            return None
        if node.target is operator.getitem and source.target in rowwise.PIECES:
            dim = source.args[1 if source.target is aten.unbind.int else 2 :]
            whole = self.setting.one(source.args[0])  # type: ignore[arg-type]
            if whole not in self.setting.shared or (dim and dim[0] != 0):
                return None
            if source.target is aten.unbind.int:
                return self._leaf(Source("slice", whole, int(node.args[1])))  # type: ignore[arg-type]
            return self._block(whole, int(node.args[1]) * int(meta.tensor(node).shape[0]), node)  # type: ignore[arg-type]
        source = self.setting.one(source)
        if source not in self.setting.shared:
            return None
        if node.target is aten.select.int and node.args[1] == 0:
            return self._leaf(Source("slice", source, int(node.args[2]) % int(meta.tensor(source).shape[0])))  # type: ignore[arg-type]
        if node.target is aten.slice.Tensor and node.args[1] == 0 and (len(node.args) < 5 or node.args[4] == 1):
            return self._block(source, int(node.args[2] or 0), node)  # type: ignore[arg-type]
        if node.target is aten.narrow.default and node.args[1] == 0:
            return self._block(source, int(node.args[2]), node)  # type: ignore[arg-type]
        if node.target is aten.index.Tensor and len(node.args[1]) == 1:  # type: ignore[arg-type]
            picked = self.setting.constant(node.args[1][0])  # type: ignore[index, arg-type]
            if picked is not None and picked.numel() == 1:
                ref = self._leaf(Source("slice", source, int(picked)))
                return (
                    ref if picked.dim() == 0 else self.step(node, aten.unsqueeze.default, ref, -meta.tensor(node).dim())
                )
        return None

    def _block(self, source: Node, start: int, node: Node) -> Any:
        size = int(meta.tensor(node).shape[0])
        if start % size or int(meta.tensor(source).shape[0]) % size:
            return None
        return self._leaf(Source("block", source, start // size, size))

    def _leaf(self, source: Source) -> Leaf:
        if source not in self.leaves:
            self.leaves.append(source)
        return Leaf(self.leaves.index(source))

    def step(self, node: Node, target: Any, *args: Any, **kwargs: Any) -> Value:
        self.steps.append(Step(target, args, dict(kwargs), node, False))
        return Value(len(self.steps) - 1)
