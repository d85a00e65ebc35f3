"""The `moe::` ops: schema, shape rule, gradient and plain-torch meaning of each, under one name per op.

`ops.permute` is `torch.ops.moe.permute.default`, and so on: the names are what graphs hold as targets.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moecompile.compat import OpOverload
from moecompile.ops import cpu
from moecompile.ops.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from moecompile.ops.exchange import combine, dispatch, exchange_counts, set_size_checks, sizes_to_host
from moecompile.ops.experts import grouped_linear, grouped_linear_wgrad, grouped_sum
from moecompile.ops.fused import (
    rms_norm,
    rms_norm_backward,
    rotary,
    silu_mul,
    silu_mul_backward,
    swiglu,
    swiglu_backward,
)
from moecompile.ops.graft import graft
from moecompile.ops.random import fold_seed, global_rows, uniform, uniform_rows
from moecompile.ops.ring import (
    attention_part,
    attention_part_backward,
    merge_attention,
    merge_attention_backward,
    rotate,
)
from moecompile.ops.routing import gather_rows, permute, permute_local, unpermute, unpermute_backward
from moecompile.ops.sharding import local_place, local_slice, own_index
from moecompile.ops.uneven import all_gather_rows, gathered_sizes_to_host, reduce_scatter_rows
from moecompile.ops.zigzag import zigzag_exchange, zigzag_place, zigzag_slice

# Position of the mesh axis (when bound: the process-group name) among the arguments of each collective.
AXIS_ARGUMENT: Mapping[OpOverload[..., Any], int] = MappingProxyType(
    {
        exchange_counts: 2,
        dispatch: 4,
        combine: 4,
        all_reduce: 2,
        all_gather: 2,
        all_to_all: 4,
        reduce_scatter: 2,
        rotate: 3,
        zigzag_exchange: 5,
        all_gather_rows: 3,
        reduce_scatter_rows: 3,
    }
)
# The gradient of each collective is the op that is its transpose.
TRANSPOSE: Mapping[OpOverload[..., Any], OpOverload[..., Any]] = MappingProxyType(
    {
        dispatch: combine,
        combine: dispatch,
        all_reduce: all_reduce,
        all_gather: reduce_scatter,
        all_to_all: all_to_all,
        reduce_scatter: all_gather,
        rotate: rotate,
        zigzag_exchange: zigzag_exchange,
        all_gather_rows: reduce_scatter_rows,
        reduce_scatter_rows: all_gather_rows,
    }
)
COLLECTIVES: frozenset[OpOverload[..., Any]] = frozenset(AXIS_ARGUMENT)

__all__ = [
    "AXIS_ARGUMENT",
    "COLLECTIVES",
    "TRANSPOSE",
    "all_gather",
    "all_gather_rows",
    "all_reduce",
    "all_to_all",
    "attention_part",
    "attention_part_backward",
    "combine",
    "cpu",
    "dispatch",
    "exchange_counts",
    "fold_seed",
    "gather_rows",
    "gathered_sizes_to_host",
    "global_rows",
    "graft",
    "grouped_linear",
    "grouped_linear_wgrad",
    "grouped_sum",
    "local_place",
    "local_slice",
    "merge_attention",
    "merge_attention_backward",
    "own_index",
    "permute",
    "permute_local",
    "reduce_scatter",
    "reduce_scatter_rows",
    "rms_norm",
    "rms_norm_backward",
    "rotary",
    "rotate",
    "set_size_checks",
    "silu_mul",
    "silu_mul_backward",
    "sizes_to_host",
    "swiglu",
    "swiglu_backward",
    "uniform",
    "uniform_rows",
    "unpermute",
    "unpermute_backward",
    "zigzag_exchange",
    "zigzag_place",
    "zigzag_slice",
]
