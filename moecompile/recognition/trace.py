"""Read one expert's body off the graph: `trace_body`.

The tracer walks back from the value an expert hands out to the rows it took in, and demands that every operator on the
way treats each row for itself.  The result is the same whether the experts are separate (no E axis) or batched.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch.fx import Node

from moecompile import meta
from moecompile.recognition import rowwise
from moecompile.recognition.axes import (
    aligned,
    axis_order,
    features,
    from_end,
    sizes,
    without_broadcast_expert,
)
from moecompile.recognition.body import PRODUCT, Body, NotRowwiseError, Setting, Step, Value, degree_of
from moecompile.recognition.products import labelled
from moecompile.recognition.weights import WeightReader

aten = torch.ops.aten
_CONVERSIONS = frozenset({aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten.clone.default})


def trace_body(exit_node: Node, axes: str, setting: Setting) -> Body:
    """The body that ends in ``exit_node`` with axes ``axes``; NotRowwiseError where a row is not for itself.

    A routing weight that cannot be moved behind the expert stays in front of it: the rows that come in are then scaled.
    """
    try:
        return _traced(exit_node, axes, setting, False)
    except NotRowwiseError as error:
        try:
            return _traced(exit_node, axes, setting, True)
        except NotRowwiseError:
            raise error from None


def _traced(exit_node: Node, axes: str, setting: Setting, scaled: bool) -> Body:
    tracer = _Tracer(setting, axes, scaled)
    result = tracer.rows(exit_node, axes)
    if tracer.entry is None:
        raise NotRowwiseError(exit_node, "takes no rows in")
    body = Body(exit_node, axes, *tracer.entry, tracer.steps, tracer.weights.leaves, tracer.coefficients, result)
    if body.coefficients and tracer.degree(result) != 1:
        raise NotRowwiseError(exit_node, "does not carry the routing weight as one factor")
    return body


class _Tracer:
    def __init__(self, setting: Setting, axes: str, scaled: bool) -> None:
        self.setting = setting
        self.scaled = scaled  # rows times a routing weight are what comes in
        self.batched = "E" in axes
        self.steps: list[Step] = []
        self.weights = WeightReader(setting, self.batched, self.steps)
        self.coefficients: list[tuple[Node, str]] = []
        self.entry: tuple[Node, str] | None = None
        self._seen: dict[tuple[Node, str], Any] = {}

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
            raise NotRowwiseError(node, f"({target}) does not treat each row for itself")
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
            raise NotRowwiseError(node, f"is a second input of the expert beside {self.entry[0].name}")
        if axes.count("F") != 1:
            raise NotRowwiseError(node, "has more than one feature axis")
        self.entry = (node, axes)
        return Value(-1)

    def _act(self, node: Any, axes: str, user: Node) -> Any:
        """An operand on the rows, with all row axes of the result."""
        if not isinstance(node, Node) or node in self.setting.static:
            raise NotRowwiseError(user, "has a weight where rows are expected")
        shape, out = meta.value(node), axes
        if isinstance(shape, torch.Tensor) and shape.dim() != len(out):
            raise NotRowwiseError(user, "aligns its operands across row axes")
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
        if self.scaled and self._scales_input(node):
            return self._enter(node, axes)
        args, factors = list(node.args), []
        for position, item in enumerate(args):
            if not isinstance(item, Node) or not meta.is_tensor(item):
                if isinstance(item, Node):
                    raise NotRowwiseError(node, "uses a number read out of a tensor")
                continue
            letters = aligned(item, node, axes)
            if item in self.setting.static:
                args[position] = self.weights.operand(item, letters, node)
            elif node.target is aten.mul.Tensor and self.setting.is_coefficient(item):
                factors.append((item, letters))
                args[position] = None
            else:
                args[position] = self._act(item, letters, node)
        if not factors:
            return self._step(node, node.target, *args, **node.kwargs)
        if len(factors) != 1:
            raise NotRowwiseError(node, "multiplies two routing weights")
        scaled = next(item for item in args if item is not None)
        if not isinstance(scaled, Value):
            raise NotRowwiseError(node, "multiplies a weight by a routing weight")
        if self.degree(scaled):
            raise NotRowwiseError(node, "applies the routing weight a second time")
        self.coefficients += factors
        step = Step(aten.alias.default, (scaled,), {}, node, True, degree=1)
        self.steps.append(step)
        return Value(len(self.steps) - 1)

    def _scales_input(self, node: Node) -> bool:
        """Whether a routing weight meets rows as they came in: only views and conversions were applied to them."""
        given = rowwise.tensor_inputs(node)
        rows = [item for item in given if not self.setting.is_coefficient(item)]
        if node.target is not aten.mul.Tensor or len(rows) != 1 or len(given) != 2:
            return False
        node = rows[0]
        while node not in self.setting.stops:
            if node.target not in rowwise.RESHAPES | rowwise.AXES | _CONVERSIONS or not isinstance(node.args[0], Node):
                return False
            node = node.args[0]
        return True

    def _product(self, node: Node, axes: str) -> Any:
        form = labelled(node)
        if form is None:
            raise NotRowwiseError(node, f"({node.target}) is a product of a form that is not read")
        kinds = dict(zip(form.out, axes, strict=True))
        weights = [item for item in form.operands if item[0] in self.setting.static]
        others = [item for item in form.operands if item[0] not in self.setting.static]
        if len(weights) != 1 or len(others) != 1:
            raise NotRowwiseError(node, f"({node.target}) multiplies rows with rows")
        (weight, weight_letters), (rows, row_letters) = weights[0], others[0]
        contracted = [one for one in row_letters if one in weight_letters and one not in form.out]
        made = [one for one in form.out if kinds[one] == "F"]
        if len(contracted) != 1 or len(made) != 1 or made[0] not in weight_letters or made[0] in row_letters:
            raise NotRowwiseError(node, f"({node.target}) is not one matrix applied to each row")
        letters = "".join("F" if one == contracted[0] else kinds.get(one, "?") for one in row_letters)
        letters = without_broadcast_expert(rows, letters)
        if "?" in letters or letters.count("R") < axes.count("R"):
            raise NotRowwiseError(node, f"({node.target}) mixes rows")
        taken = self.rows(rows, letters)
        matrix = self._matrix(weight, weight_letters, kinds, made[0], contracted[0], node)
        bias = None if form.bias is None else self.weights.operand(form.bias, aligned(form.bias, node, axes), node)
        return self._step(node, PRODUCT, taken, matrix, bias)

    def _matrix(self, weight: Node, letters: str, kinds: dict[str, str], made: str, taken: str, user: Node) -> Any:
        """The weight as ``[out, in]`` of one expert."""
        names = "".join("o" if one == made else "i" if one == taken else kinds.get(one, "?") for one in letters)
        if "?" in names:
            raise NotRowwiseError(user, "sums a weight over an axis of its own")
        ref, names = self.weights.expert_part(weight, names, user)
        if names == "io":
            ref = self.weights.step(user, aten.transpose.int, ref, -2, -1)
        return ref

    def _norm(self, node: Node, axes: str) -> Any:
        grouped = node.target is aten.group_norm.default  # one row in front, channels behind
        shape: Any = [0] if grouped else node.args[1]
        if axes[-len(shape) :] != "F" * len(shape) or (grouped and axes != "RF"):
            raise NotRowwiseError(node, "normalises over rows")
        args: list[Any] = list(node.args)
        args[0] = self._act(node.args[0], axes, node)
        for position in rowwise.NORMS[node.target]:
            if 0 <= position < len(args) and isinstance(args[position], Node):
                args[position] = self.weights.operand(args[position], "F" * len(shape), node)
        return self._step(node, node.target, *args)

    def _reshape(self, node: Node, axes: str) -> Any:
        source: Any = _before_reshapes(node)
        before, after = sizes(source), sizes(node)
        if before == after:
            return self.rows(source, axes)
        lead = len(axes) - axes.count("F")
        if axes != axes[:lead] + "F" * axes.count("F"):
            raise NotRowwiseError(node, "reshapes features that are not last")
        if before[:lead] == after[:lead] and len(before) > lead:  # features only
            taken = self.rows(source, axes[:lead] + "F" * (len(before) - lead))
            return self._shaped(node, taken, after[lead:])
        features = after[lead:]
        if before[len(before) - len(features) :] != features:
            raise NotRowwiseError(node, "moves elements between rows and features")
        if source in self.setting.stops and self.batched:
            return self._enter(node, axes)  # rows of all experts come in one behind the other
        expert = axes.find("E")
        kept = axes[: expert + 1]
        if before[: expert + 1] == after[: expert + 1]:
            rest = len(before) - len(features) - len(kept)
            if "R" in kept and rest != len(axes) - len(kept) - len(features):
                raise NotRowwiseError(node, "regroups rows around the expert axis")
            return self.rows(source, kept + "R" * rest + "F" * len(features))
        if (
            source.target is aten.repeat.default
            and expert == 0
            and list(source.args[1]) == [int(after[0])] + [1] * (len(before) - 1)
        ):
            return self.rows(source.args[0], "R" * (len(before) - len(features)) + "F" * len(features))
        raise NotRowwiseError(node, "regroups rows around the expert axis")

    def _shaped(self, node: Node, taken: Any, features: list[str]) -> Any:
        return self._step(node, aten.reshape.default, taken, [-1, *[int(size) for size in features]])

    def _axes(self, node: Node, axes: str) -> Any:
        source: Any = node.args[0]
        ndim, target = meta.tensor(source).dim(), node.target
        if target in (aten.expand.default, aten.expand_as.default):
            return self._expand(node, source, axes)
        if target is aten.unsqueeze.default:
            dim = int(node.args[1]) % (ndim + 1)  # type: ignore[arg-type]
            letters = axes[:dim] + axes[dim + 1 :]
            taken = self.rows(source, letters)
            return taken if axes[dim] != "F" else self._shaped(node, taken, features(node, axes))
        if target in (aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default):
            return self._squeeze(node, source, axes)
        order = axis_order(node, ndim)
        letters = "".join(axes[order.index(dim)] for dim in range(ndim))
        for kind in "RF":
            moved = [order[position] for position, letter in enumerate(axes) if letter == kind]
            if moved != sorted(moved):
                raise NotRowwiseError(node, "changes the order of rows or of features")
        return self.rows(source, letters)

    def _squeeze(self, node: Node, source: Node, axes: str) -> Any:
        ndim = meta.tensor(source).dim()
        named: Any = node.args[1] if len(node.args) > 1 else list(range(ndim))
        named = [named] if isinstance(named, int) else named
        gone = sorted(dim % ndim for dim in named if sizes(source)[dim] == "1")
        letters, rest = "", list(axes)
        for dim in range(ndim):
            letters += ("F" if "F" in letters else "R") if dim in gone else rest.pop(0)
        taken = self.rows(source, letters)
        return taken if letters.count("F") == axes.count("F") else self._shaped(node, taken, features(node, axes))

    def _expand(self, node: Node, source: Node, axes: str) -> Any:
        letters = aligned(source, node, axes)
        before, after = sizes(source), sizes(node)[len(axes) - len(letters) :]
        for letter, small, large in zip(letters, before, after, strict=True):
            if letter == "R" and small != large and not (self.batched and "E" not in letters):
                raise NotRowwiseError(node, "repeats rows")
        taken = self.rows(source, letters)
        if [size for size, letter in zip(before, letters, strict=True) if letter == "F"] == features(node, axes):
            return taken
        return self._step(node, aten.expand.default, taken, [-1, *[int(size) for size in features(node, axes)]])

    def _piece(self, node: Node, axes: str) -> Any:
        source: Any = node.args[0]
        whole: Any = source.args[0]
        target = source.target
        position = 1 if target is aten.unbind.int else 2
        dim = source.args[position] if len(source.args) > position else source.kwargs.get("dim", 0)
        dim = dim % meta.tensor(whole).dim()
        letters = axes[:dim] + "F" + axes[dim:] if target is aten.unbind.int else axes
        if letters[dim] != "F":
            raise NotRowwiseError(source, "splits rows")
        key = (source, letters)
        if key not in self._seen:
            args = [self._act(whole, letters, source), *source.args[1:position], from_end(letters, dim)]
            self._seen[key] = self._step(source, target, *args)
        return self._step(node, operator.getitem, self._seen[key], node.args[1])

    def _slice(self, node: Node, axes: str) -> Any:
        source: Any = node.args[0]
        dim = int(node.args[1]) % meta.tensor(source).dim() if len(node.args) > 1 else 0  # type: ignore[arg-type]
        letters = axes[:dim] + "F" + axes[dim:] if node.target is aten.select.int else axes
        if letters[dim] != "F" and sizes(source) == sizes(node):
            return self.rows(source, axes)
        if letters[dim] != "F" or any(isinstance(item, Node) for item in node.args[2:]):
            raise NotRowwiseError(node, "takes a part of the rows")
        return self._step(node, node.target, self._act(source, letters, node), from_end(letters, dim), *node.args[2:])

    def _reduction(self, node: Node, axes: str) -> Any:
        given = cast(tuple[Any, ...], node.args)
        source: Node = given[0]
        ndim = meta.tensor(source).dim()
        position = 2 if node.target is aten.linalg_vector_norm.default else 1
        dims = sorted(dim % ndim for dim in given[position])
        keep = bool(given[position + 1]) if len(given) > position + 1 else bool(node.kwargs.get("keepdim", False))
        letters = axes
        for dim in dims if not keep else ():
            letters = letters[:dim] + "F" + letters[dim:]
        if any(letters[dim] != "F" for dim in dims):
            raise NotRowwiseError(node, "reduces over rows")
        places = [from_end(letters, dim) for dim in dims]
        args = [self._act(source, letters, node), *given[1:position], places, *given[position + 1 :]]
        return self._step(node, node.target, *args, **node.kwargs)

    def _feature_dim(self, node: Node, axes: str, dim: Any) -> int:
        dim = int(dim) % len(axes)
        if axes[dim] != "F":
            raise NotRowwiseError(node, f"({node.target}) works across rows")
        return from_end(axes, dim)

    def _feature_dims(self, node: Node, axes: str, dims: Any) -> Any:
        if isinstance(dims, (list, tuple)):
            return [self._feature_dim(node, axes, dim) for dim in dims]
        return self._feature_dim(node, axes, dims)


def _before_reshapes(node: Node) -> Node:
    """The value that a chain of reshapes starts from, as far as they give the shape that it had."""
    source: Any = node.args[0]
    here, wanted = source, sizes(node)
    while here.target in rowwise.RESHAPES:
        here = here.args[0]
        if sizes(here) == wanted:
            return here  # type: ignore[no-any-return]
    return source  # type: ignore[no-any-return]
