"""First weights of a model that was built on the meta device: the same for every layout, and never held whole.

Modules are initialised one after the other, on the CPU, from one random stream that starts at ``torch.initial_seed()``. Every
rank draws every module's weights, keeps its share and drops the rest, so no layout changes a weight; `initialize` is the
same walk with nothing dropped.

What initialises a module: ``init_fn(module)`` if given, in the order of ``model.modules()``; else ``_init_weights(module)`` of
the nearest module around it that has one (Hugging Face, and models in that style); else its own ``reset_parameters()``. The
latter two go children before parents, as constructors and Hugging Face do, so a plain model whose constructors draw in that
order gets the very weights it would have had on the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import swap_tensors

from .errors import CaptureError

InitFn = Callable[[nn.Module], Any]
Place = Callable[[str, Tensor], Tensor]


def initialize(model: nn.Module, init_fn: InitFn | None = None) -> nn.Module:
    """Give a meta-device model its weights on the CPU of this process, whole; returns the model.

    Raises CaptureError naming the parameters and buffers that nothing initialises.
    """
    materialize(model, {}, lambda name, whole: whole, init_fn)
    return model


def on_meta(model: nn.Module) -> bool:
    """Whether some parameter or buffer has no data yet."""
    return any(item.is_meta for _, item in _tensors(model))


def materialize(
    model: nn.Module, shapes: dict[str, tuple[int, ...]], place: Place, init_fn: InitFn | None = None
) -> None:
    """Initialise all meta tensors of the model; each keeps its identity and becomes ``place(name, whole)``.

    ``shapes`` are the whole shapes of tensors that were cut on meta already. Random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(torch.initial_seed())
        walk = _Walk(model, shapes, place, init_fn)
        walk.visit(model, None)
    walk.check()


def fill(original: Tensor, value: Tensor) -> None:
    """Give a tensor its data under its identity: optimizers and tied modules hold the object."""
    if not original.is_meta:
        original.data = value
        return
    made = nn.Parameter(value, original.requires_grad) if isinstance(original, nn.Parameter) else value
    made.__dict__.update(original.__dict__)
    swap_tensors(original, made)  # type: ignore[no-untyped-call]


class _Walk:
    """One pass over a model; each meta tensor is whole only while its module is initialised."""

    def __init__(
        self, model: nn.Module, shapes: dict[str, tuple[int, ...]], place: Place, init_fn: InitFn | None
    ) -> None:
        self.place, self.init_fn = place, init_fn
        self.seen: set[nn.Module] = set()
        self.names: dict[int, str] = {}  # of the tensors to initialise, by identity
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.missing: dict[int, str] = {}
        for name, item in _tensors(model):
            if item.is_meta and id(item) not in self.names:
                self.names[id(item)] = self.missing[id(item)] = name
                self.shapes[id(item)] = shapes.get(name, tuple(item.shape))

    def visit(self, module: nn.Module, owner: nn.Module | None) -> None:
        """Initialise a module and all below it."""
        if module in self.seen or not self._has_work(module):
            return
        self.seen.add(module)
        owner = module if callable(getattr(module, "_init_weights", None)) else owner
        if self.init_fn is None and hasattr(module, "reset_lora_parameters"):
            raise CaptureError(
                f"{type(module).__name__} adapts a layer on the meta device, and nothing says how adapters start; add adapters to a "
                "model with weights, or pass init_fn to parallelize."
            )
        start = torch.get_rng_state()
        below = [item for child in module.children() for _, item in _tensors(child)]
        parent_first = self.init_fn is not None
        alone = self._initialize([(module, owner)], below) if parent_first else True
        if alone:
            for child in module.children():
                self.visit(child, owner)
        if not parent_first:
            alone = self._initialize([(module, owner)], below)
        if not alone:
            # It reaches into the modules below, which therefore have to be whole beside it.
            torch.set_rng_state(start)
            parents_first = [(member, None) for member in module.modules()]
            family = parents_first if parent_first else list(_with_owners(module, owner))
            self.seen.update(member for member, _ in family)
            self._initialize(family, [])

    def _has_work(self, module: nn.Module) -> bool:
        return any(id(item) in self.names for _, item in _tensors(module))

    def _initialize(self, modules: Sequence[tuple[nn.Module, nn.Module | None]], below: Sequence[Tensor]) -> bool:
        """Run the initialisers on whole tensors and keep the shares; False, with nothing kept, if they reached ``below``."""
        watch = _Watch(below)
        with self._whole([module for module, _ in modules]) as temporary:
            for module, owner in modules:
                with watch:
                    self._run(module, owner)
                if watch.touched:
                    return False
            found = {key: self._value(key, original, items) for key, (original, items) in temporary.items()}
        for key, value in found.items():
            if value is not None:
                fill(temporary[key][0], self.place(self.names[key], value))
                self.missing.pop(key, None)
        return True

    def _run(self, module: nn.Module, owner: nn.Module | None) -> None:
        """The module's initialiser; what ``_init_weights`` leaves open is taken from ``reset_parameters``."""
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if self.init_fn is not None:
            self.init_fn(module)
            return
        if owner is not None:
            owner._init_weights(module)  # type: ignore[operator]
        if reset is None:
            return
        done = [item for _, item in _direct(module) if not _open(item)] if owner is not None else []
        if owner is None or any(_open(item) for _, item in _direct(module)):
            kept = [item.clone() for item in done]
            reset()
            for item, value in zip(done, kept, strict=True):
                item.copy_(value)

    @contextlib.contextmanager
    def _whole(self, modules: Sequence[nn.Module]) -> Iterator[dict[int, tuple[Tensor, list[tuple[nn.Module, str]]]]]:
        """Put whole CPU tensors in place of the modules' own; yields the originals by identity with their places."""
        temporary: dict[int, tuple[Tensor, list[tuple[nn.Module, str]]]] = {}
        stand_ins: dict[int, Tensor] = {}
        originals: list[tuple[dict[str, Any], str, Tensor]] = []
        for module in modules:
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for table in tables:
                for name, item in table.items():
                    if item is None:
                        continue
                    originals.append((table, name, item))
                    if id(item) in self.names:
                        temporary.setdefault(id(item), (item, []))[1].append((module, name))
                    if id(item) not in stand_ins:
                        stand_ins[id(item)] = self._stand_in(item)
                    table[name] = stand_ins[id(item)]
        try:
            yield temporary
        finally:
            for table, name, item in originals:
                table[name] = item

    def _stand_in(self, item: Tensor) -> Tensor:
        """A whole tensor to initialise: marked as open, or with its value where that is known."""
        shape = self.shapes.get(id(item), tuple(item.shape))
        known = not item.is_meta and tuple(item.shape) == shape
        value = item.detach().cpu().clone() if known else _opened(torch.empty(shape, dtype=item.dtype))
        return nn.Parameter(value, item.requires_grad) if isinstance(item, nn.Parameter) else value

    def _value(self, key: int, original: Tensor, places: list[tuple[nn.Module, str]]) -> Tensor | None:
        """What an initialiser left; None where it left the tensor open."""
        module, name = places[0]
        table = module._parameters if name in module._parameters else module._buffers
        value = table[name]
        if value is None or _open(value):
            return None
        if tuple(value.shape) != self.shapes[key]:
            raise CaptureError(
                f"'{self.names[key]}' was built with shape {list(self.shapes[key])}, but its initialiser leaves {list(value.shape)}; "
                "initialise parameters in place."
            )
        return value.detach().to(original.dtype)

    def check(self) -> None:
        """Refuse a model of which something is still open."""
        if self.missing:
            names = list(self.missing.values())
            listed = ", ".join(f"'{name}'" for name in names[:4]) + (f" and {len(names) - 4} more" if names[4:] else "")
            raise CaptureError(
                f"the model is on the meta device and nothing initialises {listed}; give the module a reset_parameters() that fills it, "
                "pass init_fn to parallelize, or build the tensor with device='cpu'."
            )


class _Watch(TorchFunctionMode):
    """Notices any use of certain tensors, even of their shapes: they are shares or have no data."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._watched = {id(item) for item in tensors}
        self.touched = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._watched:
            flat = [*args, *(kwargs or {}).values()]
            for item in flat:
                for one in item if isinstance(item, (list, tuple)) else (item,):
                    self.touched = self.touched or id(one) in self._watched
        return func(*args, **(kwargs or {}))


def _with_owners(module: nn.Module, owner: nn.Module | None) -> Iterator[tuple[nn.Module, nn.Module | None]]:
    """A module and all below it, children first, each with the module whose ``_init_weights`` serves it."""
    seen: set[nn.Module] = set()

    def below(module: nn.Module, owner: nn.Module | None) -> Iterator[tuple[nn.Module, nn.Module | None]]:
        if module in seen:
            return
        seen.add(module)
        owner = module if callable(getattr(module, "_init_weights", None)) else owner
        for child in module.children():
            yield from below(child, owner)
        yield module, owner

    return below(module, owner)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _direct(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _mark(dtype: torch.dtype) -> float | int | None:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return None if dtype == torch.bool else torch.iinfo(dtype).max - 6


def _opened(value: Tensor) -> Tensor:
    """Fill with a mark that no initialiser leaves. A bool has no room for one: false, as most masks start."""
    mark = _mark(value.dtype)
    return value.fill_(False if mark is None else mark)


def _open(value: Tensor) -> bool:
    """Whether an element still has the mark; a bool whether nobody has written it."""
    if value.is_meta:
        return True
    mark = _mark(value.dtype)
    if mark is None:
        return value._version <= 1
    found = value.isnan() if value.dtype.is_floating_point or value.dtype.is_complex else value == mark
    return bool(found.any())
