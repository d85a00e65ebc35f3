"""All passes, in the order in which a pipeline usually has them, and the preset pipelines."""

from __future__ import annotations

from types import MappingProxyType

from moecompile.pass_base import Pass

from .canonicalize import Canonicalize
from .cast_grads import CastGrads
from .cast_router import CastRouter
from .differentiate import Differentiate
from .fuse_experts import FuseExperts
from .fuse_rms_norm import FuseRmsNorm
from .fuse_rotary import FuseRotary
from .fuse_swiglu import FuseSwiglu
from .insert_dispatch import InsertDispatch
from .keep_attention import KeepAttention
from .lower_ops import LowerOps
from .normalize_loss import NormalizeLoss
from .recognize_moe import RecognizeMoe
from .record_metrics import RecordMetrics
from .seed_random import SeedRandom
from .shard_dense import ShardDense
from .shard_experts import ShardExperts
from .shard_linears import ShardLinears
from .shard_params import ShardParams
from .shard_sequence import ShardSequence
from .split_stages import SplitStages
from .sync_grads import SyncGrads
from .sync_loss import SyncLoss

ALL_PASSES: tuple[type[Pass], ...] = (
    RecognizeMoe,
    CastRouter,
    SeedRandom,
    NormalizeLoss,
    RecordMetrics,
    ShardDense,
    ShardSequence,
    ShardLinears,
    ShardExperts,
    InsertDispatch,
    FuseSwiglu,
    FuseRmsNorm,
    FuseRotary,
    SplitStages,
    Differentiate,
    SyncLoss,
    CastGrads,
    ShardParams,
    SyncGrads,
    Canonicalize,
    LowerOps,
    FuseExperts,
    KeepAttention,
)
PASSES = MappingProxyType({kind.name: kind for kind in ALL_PASSES})

# what a call under grad that returns a loss runs; any other call leaves out the passes of the step level
STEP = (
    "recognize-moe,seed-random,normalize-loss,record-metrics,shard-dense,shard-sequence,shard-linears,shard-experts,insert-dispatch,"
    "fuse-swiglu,fuse-rms-norm,fuse-rotary,split-stages,differentiate,sync-loss,sync-grads,canonicalize,lower-ops,fuse-experts,"
    "keep-attention"
)
