"""Custom `autograd.Function`s as they occur in models, each with a gradient that its forward does not have by itself.

Every layer maps ``[rows, 8]`` to the same shape.  `EXACT` are captured with their own gradient, `REFUSED` cannot be.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

WIDTH = 8


class Layer(nn.Module):
    """Two linear maps around what the subclass does; the second keeps every part of it in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.apply_to(self.before(x)))

    def apply_to(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class _SquaredRelu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.relu().square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 3 * x.relu()  # 3 where the true factor is 2


class SquaredRelu(Layer):
    """An activation with a saved input and a factor of its own."""

    def apply_to(self, x: Tensor) -> Tensor:
        return _SquaredRelu.apply(x)


class _Reversed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.neg() * ctx.strength, None


class Reversal(Layer):
    """Gradient reversal with a number as argument."""

    def apply_to(self, x: Tensor) -> Tensor:
        return _Reversed.apply(x, 0.3)


class _Rounded(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class StraightThrough(Layer):
    """The gradient passes a rounding unchanged."""

    def apply_to(self, x: Tensor) -> Tensor:
        return _Rounded.apply(x)


class _Scaled(Function):
    @staticmethod
    def forward(x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
        return x * scale if bias is None else x * scale + bias

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, scale, bias = inputs
        ctx.save_for_backward(x, scale)
        ctx.biased = bias is not None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        of_x = grad * scale if ctx.needs_input_grad[0] else None
        of_scale = 2 * grad * x if ctx.needs_input_grad[1] else None  # summed over rows by autograd
        return of_x, of_scale, None


class SeparateContext(Layer):
    """`setup_context`, a gradient to be summed to its parameter's shape, an argument left out."""

    def apply_to(self, x: Tensor) -> Tensor:
        return _Scaled.apply(x, self.scale)


squared_relu = _SquaredRelu.apply
scaled = _Scaled.apply


class TakenBefore(Layer):
    """The functions were taken from their classes when the module was imported, as is usual."""

    def apply_to(self, x: Tensor) -> Tensor:
        return scaled(squared_relu(x), self.scale)


class FrozenArgument(SeparateContext):
    """The backward asks which inputs need a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale.requires_grad_(False)


class _TwoOutputs(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        product, order = x * y, x.argmax(-1)
        ctx.save_for_backward(x, y, product)
        ctx.mark_non_differentiable(order)
        return product, x + y, order

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor, third: Tensor) -> tuple[Tensor, Tensor]:
        x, y, product = ctx.saved_tensors
        return first * y + 2 * second, first.mul(x).add_(second) + first * product.tanh()


class SeveralOutputs(Layer):
    """Two differentiable outputs and one that is none, a saved output, an in-place update in the backward."""

    def apply_to(self, x: Tensor) -> Tensor:
        product, total, order = _TwoOutputs.apply(x, x.tanh())
        return product * 0.5 + total.sin() + F.one_hot(order, WIDTH)


class _Sampled(Function):
    """The gradient estimator of a sparse mixer: scores get a gradient that the product alone would not give them."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, weight: Tensor, ids: Tensor, gates: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(weight, ids, gates)
        return weight * mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, ids, gates = ctx.saved_tensors
        grad = grad * weight
        spread = gates * grad.mul(-1)
        spread.scatter_add_(dim=-1, index=ids, src=grad)
        return spread, None, None, None, None


class Estimator(Layer):
    def apply_to(self, x: Tensor) -> Tensor:
        gates = x.softmax(-1)
        ids = gates.argmax(-1, keepdim=True)
        return x * _Sampled.apply(x, gates.gather(-1, ids), ids, gates, (x[:, :1] > 0).to(x.dtype) + 0.5)


class MaskedScores(Layer):
    """Scores of minus infinity go in; their gradient is 0 times something finite."""

    def apply_to(self, x: Tensor) -> Tensor:
        return _Softmax.apply(x.masked_fill(x < x.mean(-1, keepdim=True), float("-inf")))


class _Softmax(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = (x - x.amax(-1, keepdim=True)).exp()
        y = y / y.sum(-1, keepdim=True)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y * (grad - (y * grad).sum(-1, keepdim=True)) * 1.5


class _Matmul(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, 0.5 * grad.t() @ x


class OwnLinear(Layer):
    """A linear layer with a backward written by hand."""

    def apply_to(self, x: Tensor) -> Tensor:
        return _Matmul.apply(x, self.before.weight) + _Matmul.apply(x, self.after.weight)


class _Again(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.ops.aten.gelu_backward(grad, x)


class OperatorBackward(Layer):
    """torch's own backward operator."""

    def apply_to(self, x: Tensor) -> Tensor:
        return _Again.apply(x)


class WithoutGrad(Layer):
    """Applied where gradients are off, and to values that have none."""

    def apply_to(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mask = _SquaredRelu.apply(x)
        return x * mask + _SquaredRelu.apply(x.detach())


class _Half(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = x.chunk(2, -1)
        return first.clone(), second.clone()

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return torch.cat([first, 2 * second], -1)


class OneOutputUsed(Layer):
    """The second half is thrown away: zeros come in for it."""

    def apply_to(self, x: Tensor) -> Tensor:
        first, _ = _Half.apply(x)
        return torch.cat([first, first.exp()], -1)


EXACT: list[type[Layer]] = [
    SquaredRelu,
    Reversal,
    StraightThrough,
    SeparateContext,
    TakenBefore,
    FrozenArgument,
    SeveralOutputs,
    Estimator,
    MaskedScores,
    OwnLinear,
    OperatorBackward,
    WithoutGrad,
    OneOutputUsed,
]


class _Clipped(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.1, 0.1)


class _Signed(_Clipped):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.sign()


class _Offset(_Clipped):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + 1


class _Normed(_Clipped):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / grad.norm()


class _Branching(_Clipped):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad if grad.sum() > 0 else -grad


class _Dirty(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class _TooFew(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


# function, its further arguments, part of the message
REFUSED: list[tuple[type[Function], tuple[Any, ...], str]] = [
    (_Clipped, (), "aten.clamp.default to the incoming gradient.*not linear"),
    (_Signed, (), "aten.sign.default to the incoming gradient.*not linear"),
    (_Offset, (), "aten.add.Tensor to the incoming gradient.*not linear"),
    (_Normed, (), "to the incoming gradient.*not linear"),
    (_Branching, (), "depends on tensor values"),
    (_Dirty, (), "mark_dirty.*new tensor"),
    (_TooFew, (2.0,), "returns 1 gradients for 2 arguments"),
]
