"""Kinds of the op zoo that are refused, and in which words: what a graph cannot hold, and what the proof cannot read (see `REFUSED`)."""

from __future__ import annotations

_DRAWS = {"dp1": "", "*": "whose random numbers would differ from those of one process"}
_FOUR_RANKS = "dp4 ep2 etp2"  # one sequence a rank: a dim of size 1 may be any

# By plan, as `Kind.refused` says; under `_FOUR_RANKS` alone stand false alarms and ops whose rule does not localise a call.
REFUSED: dict[str, dict[str, str]] = {
    "beta random": _DRAWS,
    "poisson random": _DRAWS,
    "nn.Embedding max_norm": {"*": "writes into parameter 'part.weight'"},
    "nn.Transformer": {"*": "a branch, a size or a number depends on tensor values"},
    "hook": {"*": "hooks the gradient of a tensor"},
    "func.grad": {"*": "takes a derivative with torch.func"},
    "func.jvp": {"*": "takes a derivative with torch.func"},
    "func.vjp": {"*": "takes a derivative with torch.func"},
    "func.jacrev of rows": {"*": "takes a derivative with torch.func"},
    "argmax of the batch": {"*": "Could not guard on data-dependent expression"},
    "soft slots": {_FOUR_RANKS: "takes a sum still to be taken over the ranks"},
}
