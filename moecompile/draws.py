"""Random ops as formulas over uniform numbers: what each of torch's draws makes of numbers in [0, 1).

A formula inserts nodes through a `Draw`, which says where uniform numbers come from. Torch's own generator gives other numbers of the
same distribution. A draw carries no gradient to what it is drawn by (probabilities, means, the tensor that is filled), as in torch.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.fx import Node

from . import meta
from .graph import arguments

aten = torch.ops.aten

_BITS = 24  # of a uniform number
_ALPHA = 1.7580993408473766  # SELU's, negated: what alpha dropout puts in the place of what it drops


class Draw(Protocol):
    """Where a formula inserts its nodes, and where it gets numbers."""

    def call(self, target: Any, *args: Any, like: Node, **kwargs: Any) -> Node:
        """A call with the module and line of ``like``."""

    def uniform(self, like: Node, node: Node) -> Node:
        """Numbers in [0, 1) of the shape of ``like``, float32; another stream in every call."""


def draws(node: Node) -> bool:
    """Whether there is a formula for a call, and the call draws numbers: a dropout that is off does not."""
    if node.target not in FORMULAS:
        return False
    given = arguments(node)
    if node.target in _DROPOUTS:
        return bool(given["train"]) and float(given["p"]) != 0.0
    if node.target is aten.rrelu.default:
        return bool(given["training"])
    return node.target not in _INTEGERS or _range(node) is not None


# ---- pieces ----------------------------------------------------------------------------------------------------------


def _as_type(node: Node, made: Node, draw: Draw) -> Node:
    wanted = meta.tensor(node).dtype
    return (
        made if meta.tensor(made).dtype == wanted else draw.call(aten._to_copy.default, made, like=node, dtype=wanted)
    )


def _blank(node: Node, draw: Draw, shape: list[Any] | None = None) -> Node:
    """A tensor whose shape alone counts: that of ``node``, or ``shape``."""
    found = meta.tensor(node)
    sizes = list(found.shape) if shape is None else shape
    return draw.call(aten.zeros.default, sizes, like=node, dtype=torch.float32, device=found.device)


def _shaped_like(node: Node, operands: list[Any], draw: Draw) -> Node:
    """An operand of the shape of the result, so that rows of an expert are known for such; else a tensor made for it."""
    fitting = (
        item for item in operands if isinstance(item, Node) and meta.tensor(item).shape == meta.tensor(node).shape
    )
    return next(fitting, None) or _blank(node, draw)


def _operand(node: Node, at: int = 0) -> Node:
    found = node.args[at]
    assert isinstance(found, Node)
    return found


def _fixed(value: Any, node: Node, draw: Draw) -> Any:
    """A number, or a tensor without its gradient."""
    return draw.call(aten.detach.default, value, like=node) if isinstance(value, Node) else value


def _scaled(made: Node, factor: Any, offset: Any, node: Node, draw: Draw) -> Node:
    """``made * factor + offset``, of numbers or tensors."""
    found = draw.call(aten.mul.Tensor, made, _fixed(factor, node, draw), like=node)
    return draw.call(aten.add.Tensor, found, _fixed(offset, node, draw), like=node)


def _above_zero(like: Node, node: Node, draw: Draw) -> Node:
    """Numbers in (0, 1]: what a logarithm may be taken of."""
    return draw.call(aten.rsub.Scalar, draw.uniform(like, node), 1.0, like=node)


def _standard_normal(like: Node, node: Node, draw: Draw) -> Node:
    """Box and Muller: two uniform numbers make one normal one."""
    first = _above_zero(like, node, draw)
    angle = draw.call(aten.mul.Tensor, draw.uniform(like, node), 2 * math.pi, like=node)
    radius = draw.call(
        aten.sqrt.default,
        draw.call(aten.mul.Tensor, draw.call(aten.log.default, first, like=node), -2.0, like=node),
        like=node,
    )
    return draw.call(aten.mul.Tensor, radius, draw.call(aten.cos.default, angle, like=node), like=node)


def _waiting_time(like: Node, node: Node, draw: Draw) -> Node:
    """Exponential numbers of rate 1, by inversion, and never 0, as in torch: models take their logarithm."""
    made = draw.call(aten.neg.default, draw.call(aten.log.default, _above_zero(like, node, draw), like=node), like=node)
    return draw.call(aten.clamp_min.default, made, 2.0**-25, like=node)


# ---- distributions ---------------------------------------------------------------------------------------------------


def _rand_like(node: Node, draw: Draw) -> Node:
    return _as_type(node, draw.uniform(_operand(node), node), draw)


def _rand(node: Node, draw: Draw) -> Node:
    return _as_type(node, draw.uniform(_blank(node, draw), node), draw)


def _uniform(node: Node, draw: Draw) -> Node:
    given = arguments(node)
    low, high = float(given["from"]), float(given["to"])
    return _as_type(node, _scaled(draw.uniform(_operand(node), node), high - low, low, node, draw), draw)


def _randn_like(node: Node, draw: Draw) -> Node:
    return _as_type(node, _standard_normal(_operand(node), node, draw), draw)


def _randn(node: Node, draw: Draw) -> Node:
    return _as_type(node, _standard_normal(_blank(node, draw), node, draw), draw)


def _normal(node: Node, draw: Draw) -> Node:
    """Of one mean and deviation, or of tensors of them."""
    given = arguments(node)
    mean, deviation = given["mean"], given["std"]
    like = _shaped_like(node, [given.get("self"), mean, deviation], draw)
    made = _standard_normal(like, node, draw)
    tensors = isinstance(mean, Node) or isinstance(deviation, Node)
    made = _as_type(node, made, draw) if tensors else made
    return _as_type(node, _scaled(made, deviation, mean, node, draw), draw)


def _log_normal(node: Node, draw: Draw) -> Node:
    given = arguments(node)
    made = _scaled(_standard_normal(_operand(node), node, draw), given["std"], given["mean"], node, draw)
    return _as_type(node, draw.call(aten.exp.default, made, like=node), draw)


def _exponential(node: Node, draw: Draw) -> Node:
    made = _waiting_time(_operand(node), node, draw)
    return _as_type(node, draw.call(aten.div.Tensor, made, float(arguments(node)["lambd"]), like=node), draw)


def _geometric(node: Node, draw: Draw) -> Node:
    """How many tries until the first success: the waiting time of a fitting rate, rounded up."""
    rate = -math.log1p(-min(float(arguments(node)["p"]), 1 - 2.0**-53))
    waited = draw.call(aten.div.Tensor, _waiting_time(_operand(node), node, draw), rate, like=node)
    return _as_type(node, draw.call(aten.ceil.default, waited, like=node), draw)


def _cauchy(node: Node, draw: Draw) -> Node:
    given = arguments(node)
    angle = _scaled(draw.uniform(_operand(node), node), math.pi, -math.pi / 2, node, draw)
    made = draw.call(aten.tan.default, angle, like=node)
    return _as_type(node, _scaled(made, given["sigma"], given["median"], node, draw), draw)


def _bernoulli(node: Node, draw: Draw) -> Node:
    source = _operand(node)
    chance: Any = arguments(node).get("p", source)
    op = aten.lt.Tensor if isinstance(chance, Node) else aten.lt.Scalar
    return _as_type(node, draw.call(op, draw.uniform(source, node), chance, like=node), draw)


# ---- integers and choices --------------------------------------------------------------------------------------------


def _range(node: Node) -> tuple[int, int] | None:
    """The lowest integer that is drawn and how many there are; None for more than a uniform number tells apart."""
    given = arguments(node)
    low, high = given.get("low", given.get("from", 0)), given.get("high", given.get("to"))
    fits = isinstance(low, int) and isinstance(high, int) and 0 < high - low <= 1 << _BITS
    return (low, high - low) if fits else None


def _integers(node: Node, draw: Draw) -> Node:
    found, source = _range(node), arguments(node).get("self")
    assert found is not None
    made = draw.uniform(source if isinstance(source, Node) else _blank(node, draw), node)
    wide = draw.call(aten._to_copy.default, made, like=node, dtype=torch.float64)
    made = draw.call(aten.floor.default, draw.call(aten.mul.Tensor, wide, found[1], like=node), like=node)
    whole = draw.call(aten._to_copy.default, made, like=node, dtype=torch.int64)
    return _as_type(node, draw.call(aten.add.Tensor, whole, found[0], like=node), draw)


def _permutation(node: Node, draw: Draw) -> Node:
    """The order of random numbers."""
    return _as_type(node, draw.call(aten.argsort.default, draw.uniform(_blank(node, draw), node), like=node), draw)


def _multinomial(node: Node, draw: Draw) -> Node:
    """Who comes first when each waits with the rate of its weight: the first ones without replacement, the winners of many races with."""
    given = arguments(node)
    weights, count = _fixed(given["self"], node, draw), given["num_samples"]
    if given["replacement"] and count > 1:
        shape = list(meta.tensor(weights).shape)
        each = draw.call(aten.unsqueeze.default, weights, -2, like=node)
        weights = draw.call(aten.expand.default, each, [*shape[:-1], count, shape[-1]], like=node)
    times = _waiting_time(weights, node, draw)
    speed = draw.call(aten.div.Tensor, weights, times, like=node)
    if count == 1:
        return draw.call(aten.argmax.default, speed, -1, True, like=node)
    if given["replacement"]:
        return draw.call(aten.argmax.default, speed, -1, like=node)
    chosen = draw.call(aten.topk.default, speed, count, like=node)
    return draw.call(operator.getitem, chosen, 1, like=node)


# ---- dropout ---------------------------------------------------------------------------------------------------------


def _dropped(node: Node, draw: Draw, like: Node) -> Node:
    """True where an element of ``like`` is kept."""
    return draw.call(aten.ge.Scalar, draw.uniform(like, node), float(arguments(node)["p"]), like=node)


def _of_channels(node: Node, draw: Draw) -> Node:
    """A tensor with one element for each channel of each sample."""
    source = _operand(node)
    shape = list(meta.tensor(source).shape)
    if len(shape) == 2:
        return source
    if all(isinstance(size, int) for size in shape):
        return _blank(node, draw, [*shape[:2], *[1] * (len(shape) - 2)])
    for dim in range(2, len(shape)):
        source = draw.call(aten.slice.Tensor, source, dim, 0, 1, like=node)
    return source


def _dropout(node: Node, draw: Draw) -> Node:
    source, rate = _operand(node), float(arguments(node)["p"])
    kept = _dropped(node, draw, source if node.target is aten.dropout.default else _of_channels(node, draw))
    scaled = draw.call(aten.mul.Tensor, source, 1.0 / (1.0 - rate) if rate < 1 else 0.0, like=node)
    return draw.call(aten.mul.Tensor, scaled, kept, like=node)


def _alpha_dropout(node: Node, draw: Draw) -> Node:
    """Dropped elements become SELU's lower limit, and all are moved so that mean and variance stay (arXiv 1706.02515)."""
    source, rate = _operand(node), float(arguments(node)["p"])
    if rate == 1:
        return draw.call(aten.mul.Tensor, source, 0.0, like=node)
    kept = _dropped(node, draw, source if node.target is aten.alpha_dropout.default else _of_channels(node, draw))
    kept = _as_type(node, kept, draw)
    factor = ((_ALPHA**2 * rate + 1) * (1 - rate)) ** -0.5
    offset = _scaled(kept, _ALPHA * factor, _ALPHA * factor * (rate - 1), node, draw)
    factors = draw.call(aten.mul.Tensor, kept, factor, like=node)
    return draw.call(aten.add.Tensor, draw.call(aten.mul.Tensor, source, factors, like=node), offset, like=node)


def _rrelu(node: Node, draw: Draw) -> Node:
    source, given = _operand(node), arguments(node)
    low, high = float(given["lower"]), float(given["upper"])
    slope = _as_type(node, _scaled(draw.uniform(source, node), high - low, low, node, draw), draw)
    negative = draw.call(aten.le.Scalar, source, 0, like=node)
    lower = draw.call(aten.mul.Tensor, source, slope, like=node)
    return draw.call(aten.where.self, negative, lower, source, like=node)


_DROPOUTS: dict[Any, Callable[[Node, Draw], Node]] = {
    aten.dropout.default: _dropout,
    aten.feature_dropout.default: _dropout,
    aten.alpha_dropout.default: _alpha_dropout,
    aten.feature_alpha_dropout.default: _alpha_dropout,
}
_INTEGERS: dict[Any, Callable[[Node, Draw], Node]] = {
    aten.randint.default: _integers,
    aten.randint.low: _integers,
    aten.randint_like.default: _integers,
    aten.randint_like.low_dtype: _integers,
    aten.random.to: _integers,
}
FORMULAS: dict[Any, Callable[[Node, Draw], Node]] = {
    **_DROPOUTS,
    **_INTEGERS,
    aten.rand.default: _rand,
    aten.rand_like.default: _rand_like,
    aten.uniform.default: _uniform,
    aten.randn.default: _randn,
    aten.randn_like.default: _randn_like,
    aten.normal_functional.default: _normal,
    aten.normal.Tensor_Tensor: _normal,
    aten.normal.Tensor_float: _normal,
    aten.normal.float_Tensor: _normal,
    aten.normal.float_float: _normal,
    aten.log_normal.default: _log_normal,
    aten.exponential.default: _exponential,
    aten.geometric.default: _geometric,
    aten.cauchy.default: _cauchy,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli,
    aten.bernoulli.Tensor: _bernoulli,
    aten.randperm.default: _permutation,
    aten.multinomial.default: _multinomial,
    aten.rrelu.default: _rrelu,
}
