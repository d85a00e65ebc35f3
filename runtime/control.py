"""One small exchange at the start of a call, so that a fault only one rank sees is raised on all.

Without it the rank that raises leaves the others waiting in a collective until they time out, and ranks that
were given different shapes or models compute garbage together.
"""

from __future__ import annotations

import hashlib
from collections import Counter

import torch
import torch.distributed as dist

from moecompile.errors import CaptureError, PassError, PlanError, VerifyError
from moecompile.ops import transport
from moecompile.runtime.faults import RELAYED, PeerError, are_missing, is_peer_fault, missing_ranks
from moecompile.runtime.process_groups import ProcessGroups

_RAISABLE: tuple[type[Exception], ...] = (CaptureError, PassError, PlanError, VerifyError, ValueError, TypeError)
_MAX_TEXT = 4000


def agree(
    groups: ProcessGroups, signature: str, error: Exception | None = None, data: tuple[int, int, int] = (0, 0, 0)
) -> None:
    """Return on all ranks if all came with the same signature and no error, else raise on all.

    ``data`` is this rank's data rank, a digest of what it passes, of which ranks of one data rank must pass the same, and one of what
    all ranks must pass alike.
    ``signature`` describes the call, one fact a line, without anything that may differ between ranks.  A rank
    that has an ``error`` raises that error; the others raise one of the same type that names the rank and its
    message.  Different signatures raise CaptureError with the lines that differ.  A rank that does not come
    is a PeerError after the plan's timeout.  Costs one all-gather of six integers when all is well.
    """
    try:
        group = groups.control
        texts = None if group is None else _exchange(group, groups.mesh.world_size, signature, error, data)
    except RuntimeError as failure:
        if not is_peer_fault(failure):
            raise
        raise _peer_fault(groups) from failure
    if error is not None:
        raise error
    if texts is not None:
        errors, signatures = texts
        raise _relayed(*errors[0]) if errors else _disagreement(signatures)


Errors = list[tuple[int, str, str]]


def _exchange(
    group: dist.ProcessGroup, world_size: int, signature: str, error: Exception | None, passed: tuple[int, int, int]
) -> tuple[Errors, list[str]] | None:
    """None when all agree, else every rank's error (rank, type, message) and every rank's signature."""
    digest = int.from_bytes(hashlib.blake2b(signature.encode(), digest_size=8).digest(), "big", signed=True)
    text = signature if error is None else f"{_type_name(error)}\n{error}"
    data = text.encode()[:_MAX_TEXT]
    mine = torch.tensor([digest, error is not None, len(data), *passed], dtype=torch.int64)
    heads = _all_gather(group, world_size, mine)
    columns = (list(column) for column in zip(*(head.tolist() for head in heads), strict=True))
    digests, flags, lengths, data_ranks, contents, common = columns
    if len(set(digests)) == 1 and not any(flags):
        _check_data(data_ranks, contents)
        _check_common(common)
        return None
    # All ranks see the same heads, so all come here together.
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
    bodies = _all_gather(group, world_size, padded)
    texts = [bytes(body.tolist())[:n].decode(errors="replace") for body, n in zip(bodies, lengths, strict=True)]
    errors: Errors = []
    for rank, flag in enumerate(flags):
        if flag:
            kind, _, message = texts[rank].partition("\n")
            errors.append((rank, kind, message))
    return errors, texts


def _check_data(data_ranks: list[int], contents: list[int]) -> None:
    """Raise, on all ranks alike, where ranks of one data rank pass other tensors."""
    for rank, (data_rank, content) in enumerate(zip(data_ranks, contents, strict=True)):
        first = data_ranks.index(data_rank)
        if content != contents[first]:
            raise CaptureError(
                f"ranks {first} and {rank} pass different tensors, but both are data rank {data_rank}: the ranks of tp, cp and pp compute "
                f"on one batch together; give every rank the slice number plan.data_rank(rank) of plan.num_data_ranks."
            )


def _check_common(contents: list[int]) -> None:
    """Raise, on all ranks alike, where a tensor that is not cut differs between ranks."""
    for rank, content in enumerate(contents):
        if content != contents[0]:
            raise CaptureError(
                f"ranks 0 and {rank} pass different values in a tensor without batch dim, which all ranks have in common; pass the same "
                "on all ranks, or name its batch dim in batch_dims."
            )


def _all_gather(group: dist.ProcessGroup, world_size: int, mine: torch.Tensor) -> list[torch.Tensor]:
    out = mine.new_empty(world_size, *mine.shape)
    transport.all_gather(out.view(-1), mine, group)
    return list(out)


def _type_name(error: Exception) -> str:
    """The nearest type that can be raised elsewhere from a message alone."""
    return next((kind.__name__ for kind in _RAISABLE if isinstance(error, kind)), "RuntimeError")


def _relayed(rank: int, kind: str, message: str) -> Exception:
    raised = next((known for known in _RAISABLE if known.__name__ == kind), RuntimeError)(f"rank {rank}: {message}")
    raised.add_note(RELAYED)
    return raised


def _disagreement(signatures: list[str]) -> CaptureError:
    """Compare each odd rank with the majority, line by line."""
    common = Counter(signatures).most_common(1)[0][0]
    odd = [rank for rank, text in enumerate(signatures) if text != common]
    usual = signatures.index(common)
    here, there = signatures[odd[0]].splitlines(), common.splitlines()
    own = [line for line in here if line not in there] or here
    theirs = [line for line in there if line not in here] or there
    return CaptureError(
        f"the ranks were not given the same call: rank {', '.join(map(str, odd))} has {'; '.join(own[:3])}, "
        f"but rank {usual} has {'; '.join(theirs[:3])}; give every rank the same model and settings, and "
        "batches of one shape."
    )


def _peer_fault(groups: ProcessGroups) -> PeerError:
    others = [rank for rank in range(groups.mesh.world_size) if rank != groups.rank]
    missing = missing_ranks(groups.fault_store, groups.rank, others, groups.hang_up)
    return PeerError(
        f"rank {groups.rank}: the control exchange at the start of the call failed: {are_missing(missing)} "
        f"(it died, or did not arrive within timeout={groups.mesh.plan.timeout:g} s); look for its own "
        "error first, or raise Plan(timeout=...).",
        missing,
    )
