"""Run every rank's pipeline stages in one process, in lock step: the collectives within stages, and the messages between them.

Each rank takes its actions in order. A message that is never sent, one that nobody takes, and an order in which ranks wait for
each other are VerifyErrors that name rank, stage and microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moecompile.errors import VerifyError
from moecompile.mesh import Mesh
from moecompile.program import InputKind
from moecompile.runtime.simulator import Awaited, Run, Trace, finished, run
from moecompile.stages import Relayed, Stage

# Forward ("F") or backward ("B"), the stage, the microbatch.
Action = tuple[str, int, int]
_WORDS = {"F": "forward", "B": "backward"}


def simulate_stages(
    stages: Sequence[Stage],
    actions: Sequence[Sequence[Action]],
    feed: Sequence[Sequence[Mapping[str, Any]]],
    mesh: Mesh,
    *,
    trace: Trace | None = None,
) -> list[dict[tuple[int, int], Any]]:
    """What each rank computes of the whole program's outputs, by place and microbatch.

    ``actions[i]`` are those of the ranks with index i on pp; ``feed[rank][microbatch]`` the program's inputs by name.
    """
    box: dict[tuple[Any, ...], Any] = {}
    ranks = range(mesh.world_size)
    runs = [_rank(rank, stages, actions[mesh.axis_index("pp", rank)], feed[rank], mesh, box, trace) for rank in ranks]
    found = finished(runs)
    if box:
        rank, kind, stage, chunk, name = next(iter(box))
        raise VerifyError(
            f"simulate: '{name}' was sent to rank {rank} for the {_WORDS[kind]} of microbatch {chunk} on stage {stage}, which did not take "
            f"it ({len(box)} such messages in all); both ends of a cut must name the same values."
        )
    return found


def _rank(
    rank: int,
    stages: Sequence[Stage],
    actions: Sequence[Action],
    feed: Sequence[Mapping[str, Any]],
    mesh: Mesh,
    box: dict[tuple[Any, ...], Any],
    trace: Trace | None,
) -> Run:
    """One rank's actions; yields at collectives and where a message has to come first."""
    peers = mesh.group_ranks("pp", rank)
    kept: dict[tuple[int, int], dict[str, Any]] = {}
    carried: dict[int, dict[str, Any]] = {}  # what each stage's latest forward left in buffers
    read: dict[tuple[int, int], dict[str, Any]] = {}
    found: dict[tuple[int, int], Any] = {}
    for kind, at, chunk in actions:
        stage, ahead = stages[at], kind == "F"
        half = stage.forward if ahead else stage.backward
        if not ahead and (at, chunk) not in kept:
            raise VerifyError(
                f"simulate: rank {rank} runs the backward of microbatch {chunk} on stage {at}, whose forward it has not run; give each "
                "backward a place behind its forward."
            )
        values = {} if ahead else kept.pop((at, chunk))
        for item in stage.received if ahead else stage.received_grads:
            said = f"waits for '{item.name}', for the {_WORDS[kind]} of microbatch {chunk} on stage {at}"
            values[item.name] = yield Awaited(rank, (rank, kind, at, chunk, item.name), box, said)
        if half is not None:
            if ahead:
                read[at, chunk] = carried.get(at, {})
            fed, inputs = {**feed[chunk], **read[at, chunk]}, half.program.inputs
            given = [_there(values, i.name, at) if i.kind is InputKind.RELAYED else fed[i.name] for i in inputs]
            results = yield from run(half.program.graph_module, given, rank, mesh, trace)
            values.update(zip(half.returns, results, strict=True))
            made = set(half.returns)
            found |= {(place, chunk): values[name] for place, name in stage.outputs.items() if name in made}
        to = at + 1 if ahead else at - 1
        for item in stage.sent if ahead else stage.sent_grads:
            box[peers[to % len(peers)], kind, to, chunk, item.name] = _checked(values, item, at)
        if ahead:
            carried[at] = {name: values[new] for name, new in stage.carried.items()}
            kept[at, chunk] = {name: _there(values, name, at) for name in stage.saved}
    return found


def _there(values: Mapping[str, Any], name: str, stage: int) -> Any:
    if name not in values:
        raise VerifyError(f"simulate: stage {stage} reads '{name}', which it neither made nor received.")
    return values[name]


def _checked(values: Mapping[str, Any], item: Relayed, stage: int) -> torch.Tensor:
    found = values.get(item.name)
    if not isinstance(found, torch.Tensor) or tuple(found.shape) != item.shape or found.dtype != item.dtype:
        raise VerifyError(
            f"simulate: stage {stage} should hand on '{item.name}' {list(item.shape)}, but has {found!r}."
        )
    return found
