"""The module that ``parallelize`` returns: the user's model, with every call answered by a compiled program."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import grads, meta_init, optimizer_guard
from .balance import Balance
from .capture import batch_inputs
from .compat import tree_flatten
from .compilation import Request, compile_call, microbatch_sizes
from .compiled import CompiledCall
from .errors import CaptureError
from .expert_copies import refuse_copies
from .mesh import Mesh
from .model_watch import ModelWatch
from .optimizer_state import cut_loaded
from .part_guard import guard
from .plan import Plan
from .program import Program
from .reduction import reduce_flat
from .runtime import control
from .runtime.process_groups import ProcessGroups
from .staged import StagedCall
from .stages import holders
from .state import State, fill_meta, save_pretrained
from .uneven import UnevenCall
from .verify.order import agreement
from .weights import Weights, is_share

_LOG = logging.getLogger("moecompile")
_MANY_SHAPES = 4
_SMALL = 4096  # elements of a tensor that is compared among ranks in every call


class ParallelModel(nn.Module):
    """Behaves like the model it was made from: same call, same return structure, same parameter names.

    Parameters, buffers and submodules are the user's own objects. After the first call each cut parameter holds this rank's
    share. Made by `moecompile.parallelize`; not to be built by hand.
    """

    _state: _State

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        loss_fn: Callable[..., Any] | None = None,
        init_fn: meta_init.InitFn | None = None,
    ) -> None:
        super().__init__()
        self.__dict__["_module"] = model
        # one set of dictionaries: names, modes and moves of the plain model are those of this one
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self.training = model.training
        mesh = Mesh(plan)
        self.__dict__["_state"] = _State(plan, mesh, ProcessGroups(mesh, _device(model)), loss_fn)
        self._state.weights = Weights(model, mesh, self._state.groups.rank)
        self._state.layout = State(self._state.weights, self._state.groups)
        self._state.balance = Balance(model)
        self._state.init_fn = init_fn

    # -- what a plain module would answer ------------------------------------------------------------------------------
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if (
                name == "_ddp_params_and_buffers_to_ignore"
            ):  # all that DistributedDataParallel asks of a module before it communicates
                raise TypeError(
                    "a parallel model reduces its own gradients, and DistributedDataParallel around it would wait for parameters that "
                    "other ranks hold; use it as it is (with Accelerate: prepare the optimizer and the loader, not the model)."
                ) from None
            if name in _REFUSED:
                raise AttributeError(
                    f"'{name}' would run the plain model's own code on this rank's share of the weights; {_REFUSED[name]}"
                ) from None
            found = getattr(self.__dict__["_module"], name)
            return partial(save_pretrained, self._state.layout) if name == "save_pretrained" else found

    def train(self, mode: bool = True) -> ParallelModel:
        self.__dict__["_module"].train(mode)
        self.training = mode
        return self

    @property
    def plain(self) -> nn.Module:
        """The user's own module, whose weights are this rank's share after the first call."""
        module: nn.Module = self.__dict__["_module"]
        return module

    @property
    def program(self) -> Program:
        """The program of the latest call."""
        if self._state.latest is None:
            raise CaptureError(
                "the model has not been called yet, so there is no program; call it once or pass example=."
            )
        return self._state.latest.program

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Calls inside leave gradients of this rank alone in ``.grad``; the first backward of one outside takes the mean of all of it."""
        before, self._state.sync = self._state.sync, False
        try:
            yield
        finally:
            self._state.sync = before

    # -- state ---------------------------------------------------------------------------------------------------------
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The plain model's names and global shapes; what is cut is a DTensor, or a `PartTensor` where that cannot say how it lies.

        ``torch.distributed.checkpoint`` saves and loads it under any plan; `moecompile.full_state_dict` makes it plain.
        """
        found = self.plain.state_dict(*args, **kwargs)
        self._state.layout.spread_all(found, kwargs.get("prefix", args[1] if len(args) > 1 else ""))
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a plain model's whole state, or the ``state_dict()`` of any plan, into the parameters in place.

        ``strict`` also refuses a state in which an expert stands twice.
        """
        if assign:
            raise ValueError(
                "load_state_dict(assign=True) would replace the parameters that the plan has cut; use assign=False."
            )
        found = OrderedDict(state_dict)
        found._metadata = getattr(state_dict, "_metadata", None)  # type: ignore[attr-defined]
        if strict:
            refuse_copies(self._state.weights, found)
        self._state.layout.split_all(found)
        fill_meta(self.plain, found)
        return self.plain.load_state_dict(found, strict=strict)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Loading through a module around this one: its children find their parts in the same dictionary afterwards.
        self._state.layout.split_all(state_dict, prefix)
        self.plain._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ParallelModel:
        """``to()``, ``half()`` and their like work on this rank's share, which then makes up new stacks."""
        state, before, biases = self._state, _device(self.plain), self._state.balance.kept()
        self.plain._apply(fn, recurse)  # type: ignore[no-untyped-call]
        state.balance.restore(biases)
        state.weights.restack()
        if state.watch is not None:
            state.watch.learn_parts(self.plain)
        if _device(self.plain).type != before.type:
            self._regroup()
        return self

    def _regroup(self) -> None:
        """Communicate on another kind of device from now on."""
        state = self._state
        state.groups = ProcessGroups(state.mesh, _device(self.plain))
        state.layout.use(state.groups)
        for handle in filter(None, state.marked.values()):
            handle.remove()
        state.cache.clear()
        state.marked.clear()
        self._mark_cut_gradients()

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModel:
        raise TypeError(
            "a parallel model cannot be copied: it holds process groups and this rank's share of the weights; copy the plain model before "
            "parallelize, or load full_state_dict(model) into a plain one. For an average of weights clone model.parameters() after the "
            "first call and lerp the clones: a share averages as the whole does."
        )

    # -- a call ------------------------------------------------------------------------------------------------------
    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledCall | UnevenCall:
        """Agree with the other ranks on the call, and return its program, compiled on first sight."""
        state = self._state
        signature, error, compiled, data = "", None, None, (0, 0, 0)
        try:
            signature = call_signature(self.plain, args, kwargs) + ("" if state.sync else "\nno_sync")
            signature += self._changes()
            microbatch_sizes(args, kwargs, state.plan)
            data = self._data(args, kwargs)
        except Exception as found:
            error = found
        if state.control:
            control.agree(state.groups, signature, error, data)
        elif error is not None:
            raise error
        compiled = state.cache.get(signature)
        if compiled is None:
            compiled = self._compile(args, kwargs, signature)
            state.cache[signature] = compiled
            state.warn_about_shapes(args, kwargs)
        state.latest = compiled
        return compiled

    def _changes(self) -> str:
        """What the user changed on the model since the first call, as a part of the call's signature."""
        watch = self._state.watch
        if watch is None:
            return ""
        watch.check()
        return "".join(f"\n{line}" for line in watch.changes())

    def _data(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int, int]:
        """This rank's data rank; digests of its CPU tensors where other ranks have to pass the same ones, and of small ones without batch
        dim, which are the same on all ranks.
        """
        plan, rank = self._state.plan, self._state.groups.rank
        leaves, _ = tree_flatten((args, kwargs))
        split = batch_inputs(args, kwargs, plan.batch_dims)
        held = {at: leaf for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.device.type == "cpu"}
        common = _digest(leaf for at, leaf in held.items() if at not in split and leaf.numel() <= _SMALL)
        alone = plan.num_data_ranks == plan.world_size
        return plan.data_rank(rank), 0 if alone else _digest(held.values()), common

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any], signature: str) -> CompiledCall | UnevenCall:
        """Compile the call. A rank on which that fails says so to the others before any of them goes on."""
        state, error, programs = self._state, None, list[Program]()
        sizes = microbatch_sizes(args, kwargs, state.plan)
        even = [number for _, number in sizes] == [state.plan.microbatches]
        try:
            shapes = {name: state.weights.global_shape(name) for name in state.weights.shapes} if state.cache else None
            for rows, _ in sizes:
                request = Request(args, kwargs, state.plan, state.loss_fn, None if even else rows)
                first = not programs
                programs.append(compile_call(self.plain, request, shapes=shapes, synced=state.sync, compare=first))
                if programs[0].plan.microbatches == 1:
                    break
        except Exception as found:
            error = found
        text = "" if error is not None else "\n".join(agreement(program) for program in programs)
        if meta_init.on_meta(self.plain):
            text += f"\ntorch.initial_seed() {torch.initial_seed()}, from which the weights are drawn"
        if state.control:
            control.agree(state.groups, text, error)
        if error is not None:
            raise error
        program = programs[0]
        state.balance.learn(program)
        state.weights.cut(program.inputs)
        state.weights.hold(holders(program))
        if meta_init.on_meta(self.plain):
            meta_init.materialize(self.plain, state.weights.shapes, state.layout.keep(args, kwargs), state.init_fn)
        state.weights.restack()
        cut_loaded(state.layout)
        optimizer_guard.watch(state.layout)
        self._mark_cut_gradients()
        if state.watch is None:
            guard(self.plain, state.layout)
            state.watch = ModelWatch(self.plain)
        return self._bound(programs, sizes)

    def _bound(self, programs: list[Program], sizes: list[tuple[int, int]]) -> CompiledCall | UnevenCall:
        """What runs a call with microbatches of so many rows, and so many of each kind."""
        state = self._state
        kind = CompiledCall if programs[0].layout is None else StagedCall
        finish = self._average_accumulated if state.sync else self._leave_unreduced
        numbers = [number for _, number in sizes] if programs[0].plan.microbatches > 1 else [1]
        calls = [
            kind(program, state.groups, state.weights, synced=state.sync, before_hand_out=finish, parts=number)
            for program, number in zip(programs, numbers, strict=True)
        ]
        if numbers == [programs[0].plan.microbatches]:
            return calls[0]
        return UnevenCall(calls, [rows for rows, _ in sizes])

    def _mark_cut_gradients(self) -> None:
        state = self._state
        for name, param in self.plain.named_parameters():
            axis = state.weights.spread_axis(name)
            if axis and name not in state.marked:
                group = state.groups.group(axis) if state.groups.size(axis) > 1 else None
                counts, dims = state.weights.counts(name), state.weights.cut_dims(name)
                state.marked[name] = grads.mark(param, group, counts=counts, dims=dims) if param.requires_grad else None

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch.compile(model) would trace the compiler
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._state
        grads.in_optimizer(False)  # it may have stopped with an error
        compiled = self.prepare(args, kwargs)
        leaves, _ = tree_flatten((args, kwargs))
        result = compiled(leaves)
        state.calls += 1
        if torch.is_grad_enabled():
            state.balance.add(*compiled.counts())
        return result

    def _leave_unreduced(self) -> None:
        """A backward under ``no_sync`` leaves in ``.grad`` what is this rank's alone."""
        layout, groups = self._state.layout, self._state.groups
        layout.unreduced = layout.unreduced or any(
            groups.size(axis) > 1 for axis in self._summed_over().values() if axis
        )

    def _average_accumulated(self) -> None:
        """The first backward outside ``no_sync`` takes the mean of what was left in ``.grad``, before its own is added.

        That is of every parameter that any call has trained: some may be frozen by now.
        """
        state = self._state
        if state.layout.unreduced:
            held = ((axis, param.grad) for param, axis in self._summed_over().items() if param.grad is not None)
            reduce_flat(held, state.groups, mean=True)
        state.layout.unreduced = False

    def _summed_over(self) -> dict[nn.Parameter, str]:
        return {param: axis for call in self._state.cache.values() for param, axis in call.summed_over().items()}


def refuse_parallel(model: nn.Module) -> None:
    """CaptureError where a model that shall be made parallel is so already, or holds a rank's share of one that is."""
    parallel = any(isinstance(module, ParallelModel) for module in model.modules())
    share = next((name for name, item in model.named_parameters() if is_share(item)), None)
    if parallel or share is not None:
        found = "a parallel model" if parallel else f"this rank's share of '{share}', which another plan has cut"
        raise CaptureError(
            f"{type(model).__name__}: the model to make parallel holds {found}; pass a plain model, and bring the weights in with "
            "load_state_dict(full_state_dict(model))."
        )


def _digest(tensors: Iterable[Tensor]) -> int:
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(found.digest(), "big", signed=True)


class _State:
    """What belongs to the wrapper and not to the model."""

    def __getstate__(self) -> Any:
        raise TypeError(
            "a parallel model cannot be pickled: it holds process groups and this rank's share of the weights; save "
            "full_state_dict(model), or model.state_dict() with torch.distributed.checkpoint."
        )

    weights: Weights
    layout: State
    balance: Balance
    init_fn: meta_init.InitFn | None

    def __init__(self, plan: Plan, mesh: Mesh, groups: ProcessGroups, loss_fn: Callable[..., Any] | None) -> None:
        self.plan, self.mesh, self.groups, self.loss_fn = plan, mesh, groups, loss_fn
        self.cache: dict[str, CompiledCall | UnevenCall] = {}
        self.latest: CompiledCall | UnevenCall | None = None
        self.watch: ModelWatch | None = None
        self.marked: dict[str, Any] = {}
        self.sync = True
        self.calls = 0
        self.control = True
        self._sizes: Counter[tuple[str, int]] = Counter()
        self._seen: dict[tuple[int, int], set[int]] = {}

    def warn_about_shapes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Name the dimension that keeps changing, once, when a model has been captured more than a few times for it."""
        leaves, _ = tree_flatten((args, kwargs))
        for index, leaf in enumerate(leaves):
            for dim, size in enumerate(leaf.shape if isinstance(leaf, Tensor) else ()):
                sizes = self._seen.setdefault((index, dim), set())
                sizes.add(int(size))
                if len(sizes) == _MANY_SHAPES + 1:
                    _LOG.warning(
                        "the model has been captured for %d sizes of dim %d of argument %d (%s); pad it to a few sizes, since every "
                        "new size costs a capture.",
                        len(sizes), dim, index, ", ".join(map(str, sorted(sizes))),
                    )  # fmt: skip


_REFUSED = {
    "generate": "gather the weights with moecompile.full_state_dict(model), load them into a plain model and generate there.",
    "push_to_hub": "save with moecompile.full_state_dict(model) and push from a plain model.",
}


def _device(model: nn.Module) -> torch.device:
    found = next(iter(model.parameters()), None)
    return torch.device("cpu") if found is None or found.device.type == "meta" else found.device


def call_signature(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """All that a captured program depends on, one fact a line, equal on ranks that make the same call."""
    leaves, spec = tree_flatten((args, kwargs))
    lines = [f"arguments {spec}"]
    for leaf in leaves:
        lines.append(
            f"{leaf.dtype}{list(leaf.shape)} on {leaf.device.type}{' with gradient' if leaf.requires_grad else ''}"
            if isinstance(leaf, Tensor)
            else repr(leaf)
        )
    lines.append(f"grad {torch.is_grad_enabled()}, deterministic {torch.are_deterministic_algorithms_enabled()}")
    lines.append(f"new tensors {torch.get_default_dtype()} on {torch.get_default_device().type}")
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            lines.append(f"autocast {device} {torch.get_autocast_dtype(device)}")
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        digest.update(f"{name} {type(module).__name__} {module.training}\n".encode())
    for name, param in model.named_parameters():
        digest.update(f"{name} {param.dtype} {param.requires_grad}\n".encode())
    lines.append(f"model {type(model).__name__} {digest.hexdigest()}")
    return "\n".join(lines)
