"""`mark_moe`: a user names router and experts of a layer that is written in a way nobody recognises.

For the time of a capture the module's forward is the plain form: tokens choose, every expert computes on its tokens,
weighted sums come back.  What stands there is then recognised and proved like any other layer.  That it means what the
module's own forward means is tried once on random numbers, values and gradients both.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moecompile.capture.where import forward_line
from moecompile.compat import tree_flatten, tree_unflatten
from moecompile.errors import CaptureError

_KEY = "_moecompile_mark"
_MOST_ROWS = 8  # of dim 0 of what a comparison runs on
_TOLERANCE = 1e-8


@dataclass
class Mark:
    """What is known of one marked module. Functions take the module first, so that a copy of it can be used, too."""

    router: Callable[[Any, Tensor], tuple[Tensor, Tensor]]
    expert: Callable[[Any, int, Tensor], Tensor]
    num_experts: int
    tokens: Callable[..., Tensor]
    finish: Callable[..., Any]
    check: bool
    checked: bool = False

    def forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The plain form of the layer."""
        tokens = self.tokens(module, *args, **kwargs)
        ids, probs = self.router(module, tokens)
        if tokens.dim() != 2 or ids.dim() != 2 or ids.shape != probs.shape or ids.shape[0] != tokens.shape[0]:
            raise CaptureError(
                f"{forward_line(module)}: mark_moe: tokens {list(tokens.shape)}, ids {list(ids.shape)} and probs "
                f"{list(probs.shape)} do not fit; tokens are [T, H], the router returns ids and probs of [T, K]."
            )
        mixed: Tensor | None = None
        for index in range(self.num_experts):
            rows, choice = torch.where(ids == index)
            out = self.expert(module, index, tokens[rows]) * probs[rows, choice].unsqueeze(-1)
            if mixed is None:
                mixed = out.new_zeros(tokens.shape[0], out.shape[-1])
            mixed = mixed.index_add(0, rows, out.to(mixed.dtype))
        return self.finish(module, mixed, *args, **kwargs)


def mark_moe(
    module: nn.Module,
    *,
    router: str | Callable[[Any, Tensor], tuple[Tensor, Tensor]],
    experts: str | Callable[[Any, int, Tensor], Tensor],
    num_experts: int | None = None,
    tokens: Callable[..., Tensor] | None = None,
    finish: Callable[..., Any] | None = None,
    check: bool = True,
) -> nn.Module:
    """Say where router and experts of an MoE layer are, for a layer whose forward is not recognised. Returns ``module``.

    ``router``: name of a submodule that maps tokens ``[T, H]`` to ``(ids, probs)``, both ``[T, K]``, or
    ``router(module, tokens)``.  ``experts``: name of a `ModuleList` whose members map rows ``[N, H]`` to ``[N, H]``, or
    ``experts(module, index, rows)`` together with ``num_experts``.  ``tokens(module, *args, **kwargs)`` makes the tokens
    from the arguments of forward, by default the first one with its leading dims joined.
    ``finish(module, mixed, *args, **kwargs)`` makes forward's return value from the weighted sum ``[T, H]``, by default
    in the shape of the first argument.

    The module's own forward stays what runs outside of captures.  When the model is captured first, both are compared on
    random numbers, values and gradients; ``check=False`` leaves that out, for a forward that needs a special device.
    """
    expert: Callable[[Any, int, Tensor], Tensor]
    if isinstance(experts, str):
        path, members = experts, module.get_submodule(experts)
        if not isinstance(members, nn.ModuleList) or len(members) == 0:
            raise CaptureError(
                f"mark_moe: {type(module).__name__}.{experts} is a {type(members).__name__}, and a ModuleList of experts "
                f"is needed; pass a function experts(module, index, rows) and num_experts instead."
            )
        num_experts = len(members)

        def of_list(owner: Any, index: int, rows: Tensor) -> Tensor:
            found: Tensor = owner.get_submodule(path)[index](rows)
            return found

        expert = of_list
    else:
        expert = experts
    if num_experts is None:
        raise CaptureError("mark_moe: a function for the experts does not tell how many there are; pass num_experts.")
    mark = Mark(_named(module, router), expert, num_experts, tokens or _rows, finish or _like_first, check)
    vars(module)[_KEY] = mark
    return module


def _named(module: nn.Module, router: Any) -> Any:
    if not isinstance(router, str):
        return router
    module.get_submodule(router)  # raises for a name that is not there
    return lambda owner, rows: owner.get_submodule(router)(rows)


def _rows(module: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _like_first(module: Any, mixed: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return mixed.reshape(*x.shape[:-1], mixed.shape[-1])


# ---- at capture ----------------------------------------------------------------------------------------------------------


class Marked:
    """The calls that marked modules of one model got while it was traced."""

    def __init__(self) -> None:
        self.calls: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    @contextlib.contextmanager
    def forwards(self, model: nn.Module) -> Iterator[None]:
        """Within, marked modules run their plain form."""
        found = [(module, vars(module)[_KEY]) for module in model.modules() if _KEY in vars(module)]
        saved = [(module, vars(module).get("forward")) for module, _ in found]
        try:
            for module, mark in found:
                vars(module)["forward"] = self._recorded(module, mark)
            yield
        finally:
            for module, before in saved:
                vars(module).pop("forward", None)
                if before is not None:
                    vars(module)["forward"] = before

    def _recorded(self, module: nn.Module, mark: Mark) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            self.calls.setdefault(module, (args, kwargs))
            return mark.forward(module, *args, **kwargs)

        return forward

    def compare(self) -> None:
        """Hold each marked module's plain form against its own forward, once; `CaptureError` where they differ."""
        for module, (args, kwargs) in self.calls.items():
            mark: Mark = vars(module)[_KEY]
            if mark.check and not mark.checked:
                _compare(module, mark, args, kwargs)
                mark.checked = True


def _compare(module: nn.Module, mark: Mark, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    where = f"{forward_line(module)}: mark_moe of {type(module).__name__}"
    generator = torch.Generator().manual_seed(0)
    leaves, spec = tree_flatten((args, kwargs))
    try:
        own = _with_random_weights(module, generator)
        inputs = tree_unflatten([_random_like(leaf, generator) for leaf in leaves], spec)
        wanted = _results(own, lambda *a, **k: own(*a, **k), inputs)
        found = _results(own, lambda *a, **k: mark.forward(own, *a, **k), inputs)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{where}: its own forward could not be compared with router and experts on random numbers ({error}); make "
            f"it run in float64 on the CPU, or pass check=False."
        ) from error
    for name, reference in wanted.items():
        other = found.get(name)
        scale = float(reference.abs().max()) if reference.numel() else 0.0
        if (
            other is None
            or other.shape != reference.shape
            or float((other - reference).abs().max()) > _TOLERANCE * max(scale, 1.0)
        ):
            raise CaptureError(
                f"{where}: {name} of the marked router and experts is not that of the module's own forward; name the parts so "
                f"that forward is finish(sum_k probs[t, k] * expert_ids[t, k](tokens[t]))."
            )


def _with_random_weights(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """A copy in float64 on the CPU whose parameters are random: the real ones may be on meta, or only a part."""
    own = copy.deepcopy(module)
    own._apply(lambda item: torch.empty(item.shape, dtype=torch.float64 if item.is_floating_point() else item.dtype))  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for _, param in own.named_parameters():
            if param.is_floating_point():
                param.normal_(0, 0.5, generator=generator)
        for name, buffer in own.named_buffers():
            source = module.get_buffer(name)
            if source.device.type == "meta":
                buffer.zero_()
            else:
                buffer.copy_(source)
    return own


def _random_like(leaf: Any, generator: torch.Generator) -> Any:
    """A real value for a traced one: floats at random, of at most a few rows; integers zero, masks true."""
    if not isinstance(leaf, Tensor):
        return leaf
    shape = [min(int(size), _MOST_ROWS) if dim == 0 else int(size) for dim, size in enumerate(leaf.shape)]
    if leaf.is_floating_point():
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.ones(shape, dtype=leaf.dtype) if leaf.dtype == torch.bool else torch.zeros(shape, dtype=leaf.dtype)


def _results(module: nn.Module, call: Callable[..., Any], inputs: Any) -> dict[str, Tensor]:
    """Outputs and all gradients of one call."""
    args, kwargs = inputs
    leaves, spec = tree_flatten((args, kwargs))
    floats = [leaf.clone().requires_grad_() if _is_float(leaf) else leaf for leaf in leaves]
    args, kwargs = tree_unflatten(floats, spec)
    torch.manual_seed(0)
    outs = [item for item in tree_flatten(call(*args, **kwargs))[0] if _is_float(item)]
    weighed = [(out * torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).reshape(out.shape)).sum() for out in outs]
    known = {name: param for name, param in module.named_parameters() if param.requires_grad}
    known |= {f"argument {at}": leaf for at, leaf in enumerate(floats) if _is_float(leaf)}
    grads = torch.autograd.grad(weighed, list(known.values()), allow_unused=True)
    found = {f"output {at}": out.detach() for at, out in enumerate(outs)}
    for (name, item), grad in zip(known.items(), grads, strict=True):
        found[f"the gradient of {name}"] = torch.zeros_like(item) if grad is None else grad
    return found


def _is_float(item: Any) -> bool:
    return isinstance(item, Tensor) and item.is_floating_point()
