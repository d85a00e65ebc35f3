"""What a rank says when a collective fails because another rank is gone.

The libraries report "connection closed by peer" or a timeout, on every rank but the one at fault.  Here such
errors are told from real ones, and the ranks that are still alive find out which is missing.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from moecompile.compat import Store

# What gloo, NCCL and the stores say when a peer is gone. Their Python types do not tell: gloo raises plain
# RuntimeError.
_PEER_GONE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket closed|remote process (has )?exited|"
    r"timed out waiting|timed out after|wait timeout|socket timeout|communicator was aborted|failed to recv",
    re.IGNORECASE,
)

# Note on an error that was raised on this rank only because another rank had it.
RELAYED = "raised here because another rank raised it"


class PeerError(RuntimeError):
    """A collective failed because a peer died, left or did not arrive in time.

    ``missing`` are the ranks known to be gone.
    """

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


def is_peer_fault(error: BaseException) -> bool:
    """Whether the error, or one it was raised from, is only the echo of another rank's failure."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, (PeerError, dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
            return True
        if isinstance(found, RuntimeError) and _PEER_GONE.search(str(found)):
            return True
        if RELAYED in getattr(found, "__notes__", ()):
            return True
        found = found.__cause__
    return False


def missing_ranks(
    store: Store | None, rank: int, waiting_for: Sequence[int], hang_up: Callable[[], None], patience: float = 1.0
) -> list[int]:
    """After a failed collective: which ranks do not report back within ``patience`` seconds.

    ``store`` is shared by all ranks and used for nothing else; every rank that fails calls this and thereby
    says that it is alive and whom it waited for. Then it calls ``hang_up``, which closes its connections, so
    that ranks that wait for this one fail and report, too. Ranks are followed through those they waited for:
    the rank named is the one at fault and not a neighbour that failed with it. An answer of [] means that all
    report, or that the store is gone.
    """
    if store is None:
        return []
    reachable = True
    try:
        store.set(str(rank), json.dumps(list(waiting_for)))
    except (RuntimeError, OSError):  # the process that held the store is gone, too
        reachable = False
    hang_up()
    end = time.monotonic() + patience
    while reachable:
        try:
            silent = _silent(store, waiting_for)
        except (RuntimeError, OSError):
            break
        if not silent or time.monotonic() > end:
            return sorted(silent)
        time.sleep(0.05)
    return []


def are_missing(ranks: Sequence[int]) -> str:
    """``rank 1 is missing``, ``ranks 1, 3 are missing``, or what is left to say where nobody is known to be."""
    if not ranks:
        return "a peer failed"
    listed = ", ".join(map(str, ranks))
    return f"rank {listed} is missing" if len(ranks) == 1 else f"ranks {listed} are missing"


def _silent(store: Store, start: Sequence[int]) -> set[int]:
    seen: set[int] = set()
    todo, silent = list(start), set()
    while todo:
        rank = todo.pop()
        if rank in seen:
            continue
        seen.add(rank)
        if store.check([str(rank)]):
            todo.extend(json.loads(store.get(str(rank))))
        else:
            silent.add(rank)
    return silent
