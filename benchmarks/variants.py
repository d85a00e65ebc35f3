"""The contestants of the step benchmark: each builds the workload its own way and returns how to make one step."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import moecompile as mc
from benchmarks.workload import WithLoss, adamw, build

# one step: this rank's ids and labels in, its loss out, weights updated
Step = Callable[[Tensor, Tensor], Tensor]


def _plain_step(model: torch.nn.Module) -> Step:
    optimizer = adamw(model.parameters())

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        loss = model(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def eager() -> Step:
    """Hugging Face's loop over experts, one process."""
    return _plain_step(WithLoss(build("eager")))


def grouped() -> Step:
    """Hugging Face's grouped_mm experts, one process."""
    return _plain_step(WithLoss(build("grouped_mm")))


def compiled() -> Step:
    """grouped_mm experts under torch.compile, one process."""
    return _plain_step(torch.compile(WithLoss(build("grouped_mm"))))


def ours(dispatch: str = "alltoall") -> Step:
    """moecompile on as many ranks as there are, experts over all of them."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return _plain_step(mc.parallelize(WithLoss(build()), mc.Plan(dp=ranks, ep=ranks, dispatch=dispatch)))


def ours_allgather() -> Step:
    """The same with the backend that moves every token once instead of every routed row: fewer bytes if top_k > ep."""
    return ours("allgather")


def ddp() -> Step:
    """DistributedDataParallel over grouped_mm: every rank holds all experts."""
    dist.init_process_group("gloo")
    model = WithLoss(build("grouped_mm"))
    return _plain_step(torch.nn.parallel.DistributedDataParallel(model))


def fsdp2() -> Step:
    """fully_shard over each layer and the root, grouped_mm experts."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = torch.distributed.init_device_mesh("cpu", (dist.get_world_size(),))
    model = WithLoss(build("grouped_mm"))
    for layer in model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _plain_step(model)


def hf_ep() -> Step:
    """Hugging Face's own expert parallelism: FSDP2 with the experts spread over the same ranks."""
    from transformers import DistributedConfig, Qwen3MoeForCausalLM

    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        build("grouped_mm").save_pretrained(folder[0])
    dist.barrier()
    model = Qwen3MoeForCausalLM.from_pretrained(
        folder[0],
        distributed_config=DistributedConfig(fsdp_size=ranks, ep_size=ranks),
        experts_implementation="grouped_mm",
        attn_implementation="sdpa",
        dtype=torch.float32,
    )
    dist.barrier()
    if dist.get_rank() == 0:
        for file in Path(folder[0]).iterdir():
            file.unlink()
        Path(folder[0]).rmdir()
    return _plain_step(WithLoss(model.train()))


# name: (how to build it, number of processes)
VARIANTS: dict[str, tuple[Callable[[], Step], int]] = {
    "hf-eager": (eager, 1),
    "hf-grouped_mm": (grouped, 1),
    "hf-compile": (compiled, 1),
    "ours-1": (ours, 1),
    "ddp": (ddp, 2),
    "fsdp2": (fsdp2, 2),
    "hf-ep2": (hf_ep, 2),
    "ours-ep2": (ours, 2),
    "ours-ep2-allgather": (ours_allgather, 2),
}
