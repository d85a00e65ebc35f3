"""The only file that touches torch's private API.

Every name taken from a private module is imported here, under a public-looking name and with one line that
says why no public way exists, so that a new torch release breaks one file only.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

# What torch's own wrapper subclasses put in place of __torch_function__.
from torch._C import _disabled_torch_function_impl

# A graph can hold only a group's name, and nothing public finds the group again.
# torch.distributed has these, but does not export them to type checkers.
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore

# Maps over experts are traced as loops: where vmap looks up what runs it, and how it reads its arguments.
from torch._functorch import apis as _vmap_apis
from torch._functorch import eager_transforms as _transforms

# Writes in place undone under autograd, as AOTAutograd does it: the public functionalize does not let a gradient be taken inside.
from torch._functorch._aot_autograd.functional_utils import from_fun as _from_functional
from torch._functorch._aot_autograd.functional_utils import to_fun as _to_functional

# Traced backward nodes know their forward op only through these hooks.
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks as _setup_hooks
from torch._functorch.vmap import _process_batched_inputs

# Joint tracing needs a tracing context, which only AOTAutograd sets otherwise.
from torch._guards import TracingContext as TracingContext
from torch._guards import tracing as tracing

# The types of call_function targets: torch.ops hands out instances only.
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket

# An operator whose results have sizes that depend on values; caught to name the line that calls it.
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException

# Shapes without data, and sizes known only at run time.
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

# An operator without a fake rule; caught to name the line that calls it.
from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException
from torch._subclasses.functional_tensor import FunctionalTensorMode as _FunctionalTensorMode

# What `Function.apply` ends in, whenever it was taken from its class.
from torch.autograd.function import _SingleLevelFunction

# Ranks leave word in the default store after a failure; init_process_group keeps it to itself.
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    _get_default_store,
    _resolve_process_group,
)

# A dim that holds several projections side by side, each of them cut; DTensor has no public placement for it.
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx import Node

# Modules that generate their code when it is first asked for: most graphs between passes never run.
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode as get_proxy_mode
from torch.fx.experimental.proxy_tensor import make_fx as make_fx

# Export raises it for a branch on a value; only its private name can be caught.
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode as GuardOnDataDependentSymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv as ShapeEnv
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

# What export's dead-code elimination leaves; the public has_side_effect adds for good.
from torch.fx.node import _side_effectful_functions

# Swaps parameters for fake ones around an export; functional_call does so around one call only.
from torch.nn.utils.stateless import _reparametrize_module

# What an operator calls inside can be watched from here only.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# The pytrees of torch.export's calling convention.
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import keystr as keystr
from torch.utils._pytree import register_pytree_node as register_pytree_node
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten
from torch.utils._pytree import treespec_dumps as treespec_dumps
from torch.utils._pytree import treespec_loads as treespec_loads

# The lower bound of a symbolic size can be raised in the shape environment only.
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

# Renamed in 2.13, where the old names warn; 2.11 has only the old ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

LazyGraphModule = _LazyGraphModule
reparametrize_module = _reparametrize_module
SingleLevelFunction = _SingleLevelFunction
StridedShard = _StridedShard


def code_when_asked() -> AbstractContextManager[None]:
    """Inside, torch makes graph modules that generate their code when it is first asked for."""
    return _use_lazy_graph_module(True)


def empty_fake(
    mode: FakeTensorMode, shape: Sequence[Any], stride: Sequence[Any], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """What ``empty_strided`` gives under the mode, without the way there through the dispatcher; no dispatch mode may be active.

    A mode of torch functions that the caller is in (such as one that replaces types) does not see the call.
    """
    with torch._C.DisableTorchFunction():
        return FakeTensor(mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)


def resolve_process_group(name: str) -> dist.ProcessGroup:
    """The process group of that name; raises where none is registered."""
    return _resolve_process_group(name)  # type: ignore[arg-type]


def default_store() -> Store:
    """The key-value store of the default process group."""
    return _get_default_store()


def profiler_enabled() -> bool:
    """Whether a profiler records on this thread; nothing public tells."""
    return torch.autograd._profiler_enabled()  # type: ignore[attr-defined]


def has_autocast_rule(target: OpOverload, device_type: str) -> bool:
    """Whether autocast on that device treats the operator; only the dispatcher knows."""
    key = getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}", None)
    return key is not None and bool(target.has_kernel_for_dispatch_key(key))


def pretend_at_least(sizes: Iterable[Any], lower: int) -> None:
    """Let tracing take each unbacked size for at least ``lower``, so that tests against smaller numbers are decided."""
    for size in sizes:
        for symbol in free_unbacked_symbols(size):
            env = size.node.shape_env
            known = env.var_to_range.get(symbol)
            upper = known.upper if known is not None else int_oo
            if known is None or known.lower < lower:
                env.var_to_range[symbol] = ValueRanges(lower, upper if upper >= lower else int_oo)
                env._version_counter += 1  # answers are cached per version


def setup_stacktrace_preservation_hooks(roots: list[Any]) -> None:
    """Give nodes traced during backward the metadata of their forward op; AOTAutograd does so inside its own entry points only."""
    _setup_hooks([root for root in roots if root is not None])


def without_new_symbols(mode: FakeTensorMode) -> AbstractContextManager[None]:
    """Values computed beside a trace may make unbacked sizes of their own, which no trace has to account for."""
    assert mode.shape_env is not None
    return mode.shape_env.ignore_fresh_unbacked_symbols()


def wrapper_tensor(cls: type[torch.Tensor], shape: Iterable[int], like: torch.Tensor) -> Any:
    """A tensor subclass of that shape without memory of its own; the documented way to make one has a private name."""
    return torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=like.dtype, device=like.device)


@contextmanager
def regions_kept() -> Iterator[None]:
    """Within, regions of a grad mode or of autocast stay in exported graphs although nobody reads a result of theirs: they may write."""
    regions = {torch.ops.higher_order.wrap_with_set_grad_enabled, torch.ops.higher_order.wrap_with_autocast}
    added = regions - _side_effectful_functions
    _side_effectful_functions.update(added)
    try:
        yield
    finally:
        _side_effectful_functions.difference_update(added)


@contextmanager
def without_autocast() -> Iterator[None]:
    """A captured graph holds its casts: neither rewriting nor running it may cast a second time."""
    active = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    with ExitStack() as stack:
        for device in active:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _overload(target: OpOverload) -> str:
    return f".{target._schema.overload_name}" if target._schema.overload_name else ""


def has_kernel(target: OpOverload, device: str) -> bool:
    """Whether an operator can run on a device; the dispatcher is asked by the name of a key, which the public API cannot."""
    keys = (
        device.upper(),
        "CompositeExplicitAutograd",
        "CompositeImplicitAutograd",
        "CompositeExplicitAutogradNonFunctional",
    )
    return any(
        torch._C._dispatch_has_kernel_for_dispatch_key(str(target._schema.name) + _overload(target), key)
        for key in keys
    )


def rename_node(node: Node, name: str) -> None:
    """Give a node another name, made unique; assigning ``node.name`` would leave the graph's table of names behind."""
    node._rename(name)


no_torch_function: Any = _disabled_torch_function_impl

# One call for a list of tensors; optimizers use them, the public API has none.
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
# What GradScaler calls; only a tensor subclass sees it.
unscale_and_check_ = torch._amp_foreach_non_finite_check_and_unscale_


def without_torch_function() -> AbstractContextManager[None]:
    """Treat tensor subclasses as plain tensors inside; what torch's own subclasses use."""
    return torch._C.DisableTorchFunctionSubclass()


def functionalized(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` without writes in place, which may take gradients of its arguments."""

    def run(*args: Any) -> Any:
        without_other = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize))
        with _FunctionalTensorMode(), without_other:
            return tree_map(_from_functional, function(*tree_map(_to_functional, args)))

    return run


def batched_inputs(in_dims: Any, args: Any, func: Any) -> Any:
    """Number of entries, dim of each leaf, leaves and structure of what a vmap maps over; its own reading of in_dims."""
    return _process_batched_inputs(in_dims, args, func)


@contextmanager
def replace_transforms(vmap: Any, derivative: Any) -> Iterator[None]:
    """Inside, every vmap is ``vmap(func, in_dims, out_dims, randomness, chunk_size, *args, **kwargs)``, and ``derivative()``
    is called where grad, vjp, jvp and their like begin."""
    names = {(_vmap_apis, "vmap_impl"): vmap}
    names |= {(_transforms, f"{kind}_increment_nesting"): derivative for kind in ("grad", "jvp")}
    saved = {key: getattr(*key) for key in names}
    try:
        for (module, name), new in names.items():
            setattr(module, name, new)
        yield
    finally:
        for (module, name), old in saved.items():
            setattr(module, name, old)


# oneDNN's product of fp32 matrices, which torch itself calls for low precision only. Inductor's CPU code calls it.
onednn_linear: Any = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)
