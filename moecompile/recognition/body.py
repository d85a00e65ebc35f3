"""What one expert computes on its rows, read off the graph: `trace_body`.

The tracer walks back from the value an expert hands out to the rows it took in, and demands that every operator on the
way treats each row for itself.  Each axis of a value is named: E (expert), R (row) or F (feature).  The result is a list
of steps on rows ``[N, features...]``, the same whether the experts are separate (no E axis) or one batched product.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from moecompile import meta
from moecompile.recognition import rowwise
from moecompile.recognition.products import labelled

aten = torch.ops.aten
PRODUCT = "product"  # step target: rows times a weight [out, in], plus a bias or None


class NotRowwise(Exception):
    """A node is not a function of each row alone; ``why`` says so in words that follow the node's place."""

    def __init__(self, node: Node, why: str) -> None:
        super().__init__(f"{meta.where(node)} {why}")
        self.node, self.why = node, why


@dataclass(frozen=True)
class Value:
    """Result of a step; -1 is the rows that come in."""

    index: int


@dataclass(frozen=True)
class Leaf:
    """A weight: position in ``Body.leaves``."""

    index: int


@dataclass(frozen=True)
class Source:
    """Where a weight of the body comes from.

    own: the whole of ``node``.  slice: ``node[index]``.  block: rows ``index * size`` on of ``node``.  stacked: ``node``,
    whose axis ``index`` counts experts.
    """

    kind: str
    node: Node
    index: int = 0
    size: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one expert's part."""
        shape = tuple(int(size) for size in meta.tensor(self.node).shape)
        if self.kind == "own":
            return shape
        if self.kind == "block":
            return (self.size, *shape[1:])
        return shape[: self.index] + shape[self.index + 1 :] if self.kind == "stacked" else shape[1:]


@dataclass
class Step:
    """One call; ``args`` hold `Value`, `Leaf` and constants.  ``node`` is where it stood."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    node: Node
    on_rows: bool
    degree: int = 0  # how often the routing weight is a factor of the result

    def refers(self) -> list[Any]:
        found: list[Any] = []
        for item in (*self.args, *self.kwargs.values()):
            parts = item if isinstance(item, (list, tuple)) else (item,)
            found.extend(part for part in parts if isinstance(part, (Value, Leaf)))
        return found


@dataclass
class Body:
    """Steps from rows to rows.  ``entry`` and ``exit`` are the values in the graph that are the rows, with axis names.

    ``coefficients``: factors per row that the body multiplies in and that the steps leave out, with their axis names.
    """

    exit: Node
    exit_axes: str
    entry: Node
    entry_axes: str
    steps: list[Step] = field(default_factory=list)
    leaves: list[Source] = field(default_factory=list)
    coefficients: list[tuple[Node, str]] = field(default_factory=list)
    result: Any = None

    @property
    def batched(self) -> bool:
        return "E" in self.exit_axes

    def is_linear(self) -> bool:
        """Whether ``f(c * x) == c * f(x)`` for the whole body."""
        degrees: dict[Any, int] = {-1: 1}
        try:
            for index, step in enumerate(self.steps):
                degrees[index] = degree_of(step, lambda ref: degrees[ref.index]) if step.on_rows else 0
        except NotRowwise:
            return False
        return isinstance(self.result, Value) and degrees[self.result.index] == 1


@dataclass(frozen=True)
class Setting:
    """What the tracer knows about the region: weight-side values, those that all experts read, where rows come in."""

    static: frozenset[Node]
    shared: frozenset[Node]
    stops: frozenset[Node]
    num_experts: int
    is_coefficient: Callable[[Node], bool]
    constant: Callable[[Node], torch.Tensor | None]


def trace_body(exit_node: Node, axes: str, setting: Setting) -> Body:
    """The body that ends in ``exit_node``, whose axes are named by ``axes``; NotRowwise where a row is not for itself."""
    tracer = _Tracer(setting, exit_node, axes)
    result = tracer.rows(exit_node, axes)
    if tracer.entry is None:
        raise NotRowwise(exit_node, "takes no rows in")
    body = Body(exit_node, axes, *tracer.entry, tracer.steps, tracer.leaves, tracer.coefficients, result)
    if body.coefficients and tracer.degree(result) != 1:
        raise NotRowwise(exit_node, "does not carry the routing weight as one factor")
    return body


class _Tracer:
    def __init__(self, setting: Setting, exit_node: Node, axes: str) -> None:
        self.setting = setting
        self.batched = "E" in axes
        self.steps: list[Step] = []
        self.leaves: list[Source] = []
        self.coefficients: list[tuple[Node, str]] = []
        self.entry: tuple[Node, str] | None = None
        self._seen: dict[tuple[Node, str], Any] = {}
        self._static_seen: dict[Node, Any] = {}

    # Rows --------------------------------------------------------------------------------------------------------

    def rows(self, node: Node, axes: str) -> Any:
        """The reference to ``node``'s value as rows."""
        key = (node, axes)
        if key not in self._seen:
            self._seen[key] = self._rows(node, axes)
        return self._seen[key]

    def _rows(self, node: Node, axes: str) -> Any:
        if node in self.setting.stops or (self.batched and "E" not in axes):
            return self._enter(node, axes)
        target: Any = node.target
        if node.op != "call_function" or not rowwise.may_be_rowwise(node):
            raise NotRowwise(node, f"({target}) does not treat each row for itself")
        if target in rowwise.LINEARS:
            return self._product(node, axes)
        if target in rowwise.NORMS:
            return self._norm(node, axes)
        if target in rowwise.RESHAPES:
            return self._reshape(node, axes)
        if target in rowwise.AXES:
            return self._axes(node, axes)
        if target is operator.getitem:
            return self._piece(node, axes)
        if target in rowwise.SLICES:
            return self._slice(node, axes)
        if target in rowwise.REDUCTIONS:
            return self._reduction(node, axes)
        if target is aten.cat.default:
            dim = self._feature_dim(node, axes, node.args[1] if len(node.args) > 1 else 0)
            return self._step(node, aten.cat.default, [self._act(item, axes, node) for item in node.args[0]], dim)  # type: ignore[union-attr]
        if target is aten.type_as.default:
            return self._step(node, aten.to.dtype, self._act(node.args[0], axes, node), meta.tensor(node).dtype)
        if target is aten.glu.default or target in rowwise.OVER_FEATURES:
            position = rowwise.OVER_FEATURES.get(target, 1)
            args = list(node.args) + ([-1] if len(node.args) == 1 else [])
            args[position] = self._feature_dims(node, axes, args[position])  # type: ignore[index]
            return self._step(node, target, self._act(node.args[0], axes, node), *args[1:], **node.kwargs)
        return self._pointwise(node, axes)

    def _enter(self, node: Node, axes: str) -> Value:
        if self.entry is not None and self.entry != (node, axes):
            raise NotRowwise(node, f"is a second input of the expert beside {self.entry[0].name}")
        if axes.count("F") != 1:
            raise NotRowwise(node, "has more than one feature axis")
        self.entry = (node, axes)
        return Value(-1)

    def _act(self, node: Any, axes: str, user: Node) -> Any:
        """An operand on the rows, with all row axes of the result."""
        if not isinstance(node, Node) or node in self.setting.static:
            raise NotRowwise(user, "has a weight where rows are expected")
        shape, out = meta.value(node), axes
        if isinstance(shape, torch.Tensor) and shape.dim() != len(out):
            raise NotRowwise(user, "aligns its operands across row axes")
        return self.rows(node, axes)

    def _step(self, node: Node, target: Any, *args: Any, **kwargs: Any) -> Value:
        step = Step(target, args, dict(kwargs), node, True)
        step.degree = degree_of(step, self.degree)
        self.steps.append(step)
        return Value(len(self.steps) - 1)

    # Routing weights inside the expert ---------------------------------------------------------------------------

    def degree(self, ref: Any) -> int:
        return self.steps[ref.index].degree if ref.index >= 0 else 0

    # Operators ---------------------------------------------------------------------------------------------------

    def _pointwise(self, node: Node, axes: str) -> Any:
        args = list(node.args)
        factors = []
        for position, item in enumerate(args):
            if not isinstance(item, Node) or not meta.is_tensor(item):
                if isinstance(item, Node):
                    raise NotRowwise(node, "uses a number read out of a tensor")
                continue
            letters = _aligned(item, node, axes)
            if item in self.setting.static:
                args[position] = self._static_operand(item, letters, node)
            elif node.target is aten.mul.Tensor and self.setting.is_coefficient(item):
                factors.append((item, letters))
                args[position] = None
            else:
                args[position] = self._act(item, letters, node)
        if not factors:
            return self._step(node, node.target, *args, **node.kwargs)
        if len(factors) != 1:
            raise NotRowwise(node, "multiplies two routing weights")
        scaled = next(item for item in args if item is not None)
        if not isinstance(scaled, Value):
            raise NotRowwise(node, "multiplies a weight by a routing weight")
        if self.degree(scaled):
            raise NotRowwise(node, "applies the routing weight a second time")
        self.coefficients += factors
        step = Step(aten.alias.default, (scaled,), {}, node, True, degree=1)
        self.steps.append(step)
        return Value(len(self.steps) - 1)

    def _product(self, node: Node, axes: str) -> Any:
        form = labelled(node)
        if form is None:
            raise NotRowwise(node, f"({node.target}) is a product of a form that is not read")
        kinds = dict(zip(form.out, axes, strict=True))
        weights = [item for item in form.operands if item[0] in self.setting.static]
        others = [item for item in form.operands if item[0] not in self.setting.static]
        if len(weights) != 1 or len(others) != 1:
            raise NotRowwise(node, f"({node.target}) multiplies rows with rows")
        (weight, weight_letters), (rows, row_letters) = weights[0], others[0]
        contracted = [one for one in row_letters if one in weight_letters and one not in form.out]
        made = [one for one in form.out if kinds[one] == "F"]
        if len(contracted) != 1 or len(made) != 1 or made[0] not in weight_letters or made[0] in row_letters:
            raise NotRowwise(node, f"({node.target}) is not one matrix applied to each row")
        letters = "".join("F" if one == contracted[0] else kinds.get(one, "?") for one in row_letters)
        letters = _without_broadcast_expert(rows, letters)
        if "?" in letters or letters.count("R") < axes.count("R"):
            raise NotRowwise(node, f"({node.target}) mixes rows")
        taken = self.rows(rows, letters)
        matrix = self._matrix(weight, weight_letters, kinds, made[0], contracted[0], node)
        bias = None if form.bias is None else self._static_operand(form.bias, _aligned(form.bias, node, axes), node)
        return self._step(node, PRODUCT, taken, matrix, bias)

    def _matrix(self, weight: Node, letters: str, kinds: dict[str, str], made: str, taken: str, user: Node) -> Any:
        """The weight as ``[out, in]`` of one expert."""
        names = "".join("o" if one == made else "i" if one == taken else kinds.get(one, "?") for one in letters)
        if "?" in names:
            raise NotRowwise(user, "sums a weight over an axis of its own")
        ref, names = self._expert_part(weight, names, user)
        if names == "io":
            ref = self._static_step(user, aten.transpose.int, ref, -2, -1)
        return ref

    def _norm(self, node: Node, axes: str) -> Any:
        shape: Any = node.args[1]
        if axes[-len(shape) :] != "F" * len(shape):
            raise NotRowwise(node, "normalises over rows")
        args = list(node.args)
        args[0] = self._act(node.args[0], axes, node)
        for position in rowwise.NORMS[node.target]:
            if 0 <= position < len(args) and isinstance(args[position], Node):
                args[position] = self._static_operand(args[position], "F" * len(shape), node)
        return self._step(node, node.target, *args)

    def _reshape(self, node: Node, axes: str) -> Any:
        source: Any = node.args[0]
        before, after = _sizes(source), _sizes(node)
        lead = len(axes) - axes.count("F")
        if axes != axes[:lead] + "F" * axes.count("F"):
            raise NotRowwise(node, "reshapes features that are not last")
        if before[:lead] == after[:lead] and len(before) > lead:  # features only
            taken = self.rows(source, axes[:lead] + "F" * (len(before) - lead))
            return self._shaped(node, taken, after[lead:])
        features = after[lead:]
        if before[len(before) - len(features) :] != features:
            raise NotRowwise(node, "moves elements between rows and features")
        expert = axes.find("E")
        kept = axes[: expert + 1]
        if before[: expert + 1] == after[: expert + 1]:
            rest = len(before) - len(features) - len(kept)
            if "R" in kept and rest != len(axes) - len(kept) - len(features):
                raise NotRowwise(node, "regroups rows around the expert axis")
            return self.rows(source, kept + "R" * rest + "F" * len(features))
        if (
            source.target is aten.repeat.default
            and expert == 0
            and list(source.args[1]) == [int(after[0])] + [1] * (len(before) - 1)
        ):
            return self.rows(source.args[0], "R" * (len(before) - len(features)) + "F" * len(features))
        raise NotRowwise(node, "regroups rows around the expert axis")

    def _shaped(self, node: Node, taken: Any, features: list[str]) -> Any:
        return self._step(node, aten.reshape.default, taken, [-1, *[int(size) for size in features]])

    def _axes(self, node: Node, axes: str) -> Any:
        source: Any = node.args[0]
        ndim, target = meta.tensor(source).dim(), node.target
        if target is aten.expand.default:
            return self._expand(node, source, axes)
        if target is aten.unsqueeze.default:
            dim = int(node.args[1]) % (ndim + 1)  # type: ignore[arg-type]
            letters = axes[:dim] + axes[dim + 1 :]
            taken = self.rows(source, letters)
            return taken if axes[dim] != "F" else self._shaped(node, taken, _features(node, axes))
        if target in (aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default):
            return self._squeeze(node, source, axes)
        order = _order(node, ndim)
        letters = "".join(axes[order.index(dim)] for dim in range(ndim))
        for kind in "RF":
            moved = [order[position] for position, letter in enumerate(axes) if letter == kind]
            if moved != sorted(moved):
                raise NotRowwise(node, "changes the order of rows or of features")
        return self.rows(source, letters)

    def _squeeze(self, node: Node, source: Node, axes: str) -> Any:
        ndim = meta.tensor(source).dim()
        named: Any = node.args[1] if len(node.args) > 1 else list(range(ndim))
        named = [named] if isinstance(named, int) else named
        gone = sorted(dim % ndim for dim in named if _sizes(source)[dim] == "1")
        letters, rest = "", list(axes)
        for dim in range(ndim):
            letters += ("F" if "F" in letters else "R") if dim in gone else rest.pop(0)
        taken = self.rows(source, letters)
        return taken if letters.count("F") == axes.count("F") else self._shaped(node, taken, _features(node, axes))

    def _expand(self, node: Node, source: Node, axes: str) -> Any:
        letters = _aligned(source, node, axes)
        before, after = _sizes(source), _sizes(node)[len(axes) - len(letters) :]
        for letter, small, large in zip(letters, before, after, strict=True):
            if letter == "R" and small != large and not (self.batched and "E" not in letters):
                raise NotRowwise(node, "repeats rows")
        taken = self.rows(source, letters)
        if [size for size, letter in zip(before, letters, strict=True) if letter == "F"] == _features(node, axes):
            return taken
        return self._step(node, aten.expand.default, taken, [-1, *[int(size) for size in _features(node, axes)]])

    def _piece(self, node: Node, axes: str) -> Any:
        source: Any = node.args[0]
        whole: Any = source.args[0]
        target = source.target
        position = 1 if target is aten.unbind.int else 2
        dim = source.args[position] if len(source.args) > position else source.kwargs.get("dim", 0)
        dim = dim % meta.tensor(whole).dim()
        letters = axes[:dim] + "F" + axes[dim:] if target is aten.unbind.int else axes
        if letters[dim] != "F":
            raise NotRowwise(source, "splits rows")
        key = (source, letters)
        if key not in self._seen:
            args = [self._act(whole, letters, source), *source.args[1:position], _from_end(letters, dim)]
            self._seen[key] = self._step(source, target, *args)
        return self._step(node, operator.getitem, self._seen[key], node.args[1])

    def _slice(self, node: Node, axes: str) -> Any:
        source: Any = node.args[0]
        dim = int(node.args[1]) % meta.tensor(source).dim() if len(node.args) > 1 else 0  # type: ignore[arg-type]
        letters = axes[:dim] + "F" + axes[dim:] if node.target is aten.select.int else axes
        if letters[dim] != "F" and _sizes(source) == _sizes(node):
            return self.rows(source, axes)
        if letters[dim] != "F" or any(isinstance(item, Node) for item in node.args[2:]):
            raise NotRowwise(node, "takes a part of the rows")
        return self._step(node, node.target, self._act(source, letters, node), _from_end(letters, dim), *node.args[2:])

    def _reduction(self, node: Node, axes: str) -> Any:
        source: Any = node.args[0]
        ndim = meta.tensor(source).dim()
        norm = node.target is aten.linalg_vector_norm.default
        position = 2 if norm else 1
        dims = sorted(dim % ndim for dim in node.args[position])  # type: ignore[union-attr]
        keep = (
            bool(node.args[position + 1]) if len(node.args) > position + 1 else bool(node.kwargs.get("keepdim", False))
        )
        letters = axes
        for dim in dims if not keep else ():
            letters = letters[:dim] + "F" + letters[dim:]
        if any(letters[dim] != "F" for dim in dims):
            raise NotRowwise(node, "reduces over rows")
        args = [
            self._act(source, letters, node),
            *node.args[1:position],
            [_from_end(letters, dim) for dim in dims],
            *node.args[position + 1 :],
        ]
        return self._step(node, node.target, *args, **node.kwargs)

    def _feature_dim(self, node: Node, axes: str, dim: Any) -> int:
        dim = int(dim) % len(axes)
        if axes[dim] != "F":
            raise NotRowwise(node, f"({node.target}) works across rows")
        return _from_end(axes, dim)

    def _feature_dims(self, node: Node, axes: str, dims: Any) -> Any:
        if isinstance(dims, (list, tuple)):
            return [self._feature_dim(node, axes, dim) for dim in dims]
        return self._feature_dim(node, axes, dims)

    # Weights -----------------------------------------------------------------------------------------------------

    def _static_operand(self, node: Node, letters: str, user: Node) -> Any:
        """A weight that meets rows elementwise, as features of one expert."""
        ref, names = self._expert_part(node, letters, user)
        if "R" in names:
            raise NotRowwise(user, "adds or multiplies a weight that has rows of its own")
        return ref

    def _expert_part(self, node: Node, letters: str, user: Node) -> tuple[Any, str]:
        """One expert's part of a weight-side value without row axes of size 1, and the names of its axes."""
        shape = meta.tensor(node).shape
        if "E" in letters and shape[letters.index("E")] == self.setting.num_experts:
            at = letters.index("E")
            ref, names = self._leaf(Source("stacked", node, at)), letters[:at] + letters[at + 1 :]
            sizes = [size for dim, size in enumerate(shape) if dim != at]
        else:
            ref, names, sizes = self.static(node), letters.replace("E", "R"), list(shape)
        kept = [(name, size) for name, size in zip(names, sizes, strict=True) if not (name == "R" and size == 1)]
        if len(kept) < len(sizes):
            ref = self._static_step(user, aten.reshape.default, ref, [int(size) for _, size in kept])
        return ref, "".join(name for name, _ in kept)

    def static(self, node: Node) -> Any:
        """The reference to a weight-side value of one expert."""
        if node not in self._static_seen:
            self._static_seen[node] = self._static(node)
        return self._static_seen[node]

    def _static(self, node: Node) -> Any:
        part = self._part_of_shared(node)
        if part is not None:
            return part
        if node.op == "placeholder" or self.batched or node in self.setting.shared:
            return self._leaf(Source("own", node))
        target, ndim = (
            node.target,
            meta.tensor(node.args[0]).dim() if isinstance(node.args[0], Node) and meta.is_tensor(node.args[0]) else 0,
        )
        inputs = [item for item in node.all_input_nodes]
        if not inputs:
            return self._leaf(Source("own", node))
        if target is aten.t.default:
            return self._static_step(node, aten.transpose.int, self.static(inputs[0]), -2, -1)
        if target is aten.transpose.int:
            dims = [int(dim) % ndim - ndim for dim in node.args[1:3]]  # type: ignore[arg-type]
            return self._static_step(node, target, self.static(inputs[0]), *dims)
        if target in rowwise.RESHAPES or target in (aten.squeeze.dim, aten.unsqueeze.default):
            return self._static_step(node, aten.reshape.default, self.static(inputs[0]), list(meta.tensor(node).shape))
        if target in rowwise.SLICES:
            dim = int(node.args[1]) % ndim - ndim  # type: ignore[arg-type]
            return self._static_step(node, target, self.static(inputs[0]), dim, *node.args[2:])
        if target in (aten.matmul.default, aten.mm.default) or rowwise.is_pointwise(target):
            sizes = {meta.tensor(item).dim() for item in inputs}
            if len(sizes) == 1:
                args = [self.static(item) if isinstance(item, Node) else item for item in node.args]
                return self._static_step(node, target, *args, **node.kwargs)
        raise NotRowwise(node, f"({target}) computes an expert weight in a way that is not read")

    def _part_of_shared(self, node: Node) -> Any:
        """``w[e]``, ``w.unbind()[e]``, ``w[e * n : (e + 1) * n]`` of a weight that every expert reads a part of."""
        if self.batched or node.op != "call_function" or not node.args:
            return None
        source: Any = node.args[0]
        if not isinstance(source, Node):
            return None
        if node.target is operator.getitem and source.target in rowwise.PIECES:
            dim = source.args[1 if source.target is aten.unbind.int else 2 :]
            if source.args[0] not in self.setting.shared or (dim and dim[0] != 0):
                return None
            if source.target is aten.unbind.int:
                return self._leaf(Source("slice", source.args[0], int(node.args[1])))  # type: ignore[arg-type]
            return self._block(source.args[0], int(node.args[1]) * int(meta.tensor(node).shape[0]), node)  # type: ignore[arg-type]
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
                    ref
                    if picked.dim() == 0
                    else self._static_step(node, aten.unsqueeze.default, ref, -meta.tensor(node).dim())
                )
        return None

    def _block(self, source: Node, start: int, node: Node) -> Any:
        size = int(meta.tensor(node).shape[0])
        if start % size or int(meta.tensor(source).shape[0]) != size * self.setting.num_experts:
            return None
        return self._leaf(Source("block", source, start // size, size))

    def _leaf(self, source: Source) -> Leaf:
        if source not in self.leaves:
            self.leaves.append(source)
        return Leaf(self.leaves.index(source))

    def _static_step(self, node: Node, target: Any, *args: Any, **kwargs: Any) -> Value:
        self.steps.append(Step(target, args, dict(kwargs), node, False))
        return Value(len(self.steps) - 1)


def degree_of(step: Step, degree: Callable[[Value], int]) -> int:
    """How often a factor of the operands is one of the result; an operator that is not linear in it cannot let it pass."""
    degrees = [degree(ref) for ref in step.refers() if isinstance(ref, Value)]
    if not any(degrees):
        return 0
    target, args = step.target, step.args
    if target is aten.mul.Tensor and sum(degrees) == 1:
        return 1
    if target in (aten.div.Tensor, aten.true_divide.Tensor) and sum(degrees) == 1 and isinstance(args[0], Value) and degree(args[0]):
        return 1
    if target in (aten.add.Tensor, aten.sub.Tensor) and all(degrees) and all(isinstance(arg, Value) for arg in args[:2]):
        return 1
    if target is aten.cat.default and all(degrees):
        return 1
    if target in _LINEAR_STEPS or (target is PRODUCT and args[2] is None):
        return 1
    raise NotRowwise(step.node, f"({target}) applies a nonlinear function to rows already scaled by the routing weight")


_LINEAR_STEPS = frozenset(
    {
        aten.clone.default,
        aten.contiguous.default,
        aten.detach.default,
        aten.alias.default,
        aten.to.dtype,
        aten.to.dtype_layout,
        aten._to_copy.default,
        aten.dropout.default,
        aten.neg.default,
        aten.reshape.default,
        aten.expand.default,
        aten.sum.dim_IntList,
        aten.mean.dim,
        operator.getitem,
        *rowwise.PIECES,
        *rowwise.SLICES,
    }
)


def _sizes(node: Node) -> list[str]:
    """Sizes as text: equal symbols are equal text, and nothing is guessed about unknown ones."""
    return [str(size) for size in meta.tensor(node).shape]


def _features(node: Node, axes: str) -> list[str]:
    return [size for size, letter in zip(_sizes(node), axes, strict=True) if letter == "F"]


def _from_end(axes: str, dim: int) -> int:
    """Position of a feature axis among the features, from the end."""
    return -axes[dim:].count("F")


def _order(node: Node, ndim: int) -> list[int]:
    """Where each axis of a transposed value comes from."""
    order = list(range(ndim))
    if node.target is aten.permute.default:
        return [dim % ndim for dim in node.args[1]]  # type: ignore[union-attr]
    one, other = (0, ndim - 1) if node.target is aten.t.default else (int(dim) % ndim for dim in node.args[1:3])  # type: ignore[arg-type]
    if ndim > 1:
        order[one], order[other] = order[other], order[one]
    return order


def _aligned(operand: Node, result: Node, axes: str) -> str:
    """Axis names of an operand that is broadcast to the result: an axis of size 1 does not count experts."""
    ndim = meta.tensor(operand).dim()
    return _without_broadcast_expert(operand, axes[len(axes) - ndim :]) if ndim else ""


def _without_broadcast_expert(operand: Node, letters: str) -> str:
    sizes = meta.tensor(operand).shape
    return "".join(
        "R" if letter == "E" and str(size) == "1" else letter for letter, size in zip(letters, sizes, strict=True)
    )
