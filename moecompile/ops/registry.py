"""How every op of the package is defined: schema, reference kernel, shape rule and gradient in one call.

The kernel is registered under CompositeExplicitAutograd, so it serves every device; a faster kernel for one
device registers itself under that device's key, or as an op of its own.  A gradient is written with ops
again, because the Python body of a kernel runs below autograd and below tracing.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import SymBool, Tensor

from moecompile.compat import OpOverload

NAMESPACE = "moe"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]

Op = Callable[..., Any]


def define(
    schema: str,
    kernel: Op,
    fake: Op,
    *,
    setup: Op | None = None,
    backward: Op | None = None,
    tags: tuple[torch.Tag, ...] = (),
) -> OpOverload[..., Any]:
    """Define `moe::<schema>` and return its overload.

    `fake` computes output shapes and never reads a size that is known only at run time.  `setup(ctx, inputs,
    output)` saves what `backward(ctx, *grads)` needs.  Without a `backward` the op must have no floating-
    point output.  `tags` say more about it, such as that it works element by element.
    """
    name = schema.split("(", 1)[0]
    qualified = f"{NAMESPACE}::{name}"
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))  # type: ignore[no-untyped-call]
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(qualified, fake, lib=LIBRARY)
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=setup, lib=LIBRARY)
    overload: OpOverload[..., Any] = getattr(getattr(torch.ops, NAMESPACE), name).default
    return overload


def require(condition: bool | SymBool, message: str) -> None:
    """Raise ValueError unless `condition` holds; one on symbolic sizes becomes a check at run time."""
    if isinstance(condition, bool):
        if not condition:
            raise ValueError(message)
    else:
        torch._check(condition, lambda: message)  # type: ignore[no-untyped-call]


def require_index_tensor(where: str, name: str, tensor: Tensor) -> None:
    """Counts, ids and row maps are int64 everywhere: no product of rows and width is taken in 32 bits."""
    require(
        tensor.dtype == torch.int64,
        f"moe::{where}: {name} has dtype {tensor.dtype}, but int64 is needed; convert it with .to(torch.int64).",
    )


def require_matrix(where: str, name: str, tensor: Tensor) -> None:
    require(
        tensor.dim() == 2,
        f"moe::{where}: {name} has shape {list(tensor.shape)}, but two dimensions are needed; flatten the "
        "leading ones.",
    )


def require_same_dtype(where: str, first: str, a: Tensor, second: str, b: Tensor) -> None:
    require(
        a.dtype == b.dtype,
        f"moe::{where}: {first} is {a.dtype} and {second} is {b.dtype}, but one dtype is needed; cast one "
        "of them first.",
    )


def accumulation_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype sums are taken in: float32, or float64 when an operand is float64."""
    dtype = torch.float32
    for tensor in tensors:
        if tensor is not None:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype
