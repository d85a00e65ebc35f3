"""A call whose batch the plan's microbatches do not divide: some have one row more than the others, and each kind has its program.

What one process computes over the step: token means over all valid tokens, every other term of the loss as the mean over rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import meta
from .compiled import CompiledCall
from .errors import CaptureError, PlanError
from .placement.types import Shard
from .program import AUX, InputKind, Output, OutputKind, Program


class UnevenCall:
    """Runs calls for some microbatches each, one after the other, and adds them up. ``rows`` are those of each one's microbatches."""

    def __init__(self, calls: Sequence[CompiledCall], rows: Sequence[int]) -> None:
        self.calls, self.rows = list(calls), list(rows)
        self.first = self.calls[0]
        _check_same([call.program for call in calls])
        _check_results(self.first)

    @property
    def program(self) -> Program:
        """That of the larger microbatches."""
        return self.first.program

    @property
    def metrics(self) -> dict[tuple[str, str], tuple[Tensor, tuple[str, ...]]]:
        return self.first.metrics

    def counts(self) -> tuple[dict[str, Tensor], dict[str, Output]]:
        return self.first.counts()

    def summed_over(self) -> dict[nn.Parameter, str]:
        return self.first.summed_over()

    def __call__(self, leaves: Sequence[Any]) -> Any:
        sizes = [rows * call.parts for call, rows in zip(self.calls, self.rows, strict=True)]
        chunks = [call.cut(part) for call, part in zip(self.calls, self._split(leaves, sizes), strict=True)]
        counted = [call.count(chunk) for call, chunk in zip(self.calls, chunks, strict=True)]
        totals = {name: torch.stack([found[name] for found in counted]).sum() for name in counted[0]}
        found = []
        for call, chunk, rows in zip(self.calls, chunks, self.rows, strict=True):
            # a program divides by the plan's number of microbatches, as if each had an equal share of the rows
            factor = rows * self.program.plan.microbatches / sum(sizes)
            found.append(self._weighted(call.run_all(chunk, call.scales(totals, factor)), factor))
        shares = [size / sum(sizes) for size in sizes]
        outputs = [
            self._joined(item, values, shares)
            for item, values in zip(self.program.outputs, zip(*found, strict=True), strict=True)
        ]
        return self.first.hand_out(outputs)

    def _split(self, leaves: Sequence[Any], sizes: list[int]) -> list[list[Any]]:
        """The arguments for each kind of microbatches."""
        cut = {at: leaves[at].split(sizes, dim) for at, dim in self.first.batch_dims().items()}
        return [
            [cut[at][index] if at in cut else leaf for at, leaf in enumerate(leaves)] for index in range(len(sizes))
        ]

    def _weighted(self, outputs: Sequence[Any], factor: float) -> list[Any]:
        """Not in place: one gradient may be that of several parameters."""
        return [
            value * factor if value is not None and _is_term(item) else value
            for item, value in zip(self.program.outputs, outputs, strict=True)
        ]

    def _joined(self, item: Output, values: Sequence[Any], shares: list[float]) -> Any:
        """One output of the call: results by row are put together, other ones averaged, all else is added up."""
        if values[0] is None:
            return None
        if item.kind is OutputKind.BUFFER:
            return values[-1]
        if item.kind is not OutputKind.USER:
            return sum(values[1:], start=values[0])
        if isinstance(dict(item.placements).get("dp"), Shard):
            return self.first.join(item, values)
        return sum(
            (value * share for value, share in zip(values[1:], shares[1:], strict=True)), start=values[0] * shares[0]
        )


def _is_term(item: Output) -> bool:
    """Whether an output is a part of the loss, or a gradient of it."""
    return item.kind in (OutputKind.LOSS, OutputKind.GRAD) or item.what == AUX


def _check_same(programs: Sequence[Program]) -> None:
    """CaptureError unless the programs of all kinds cut weights in one way and return the same."""
    described = [
        (
            [
                (item.fqns, item.placements)
                for item in program.inputs
                if item.kind in (InputKind.PARAM, InputKind.BUFFER)
            ],
            program.outputs,
        )
        for program in programs
    ]
    if any(other != described[0] for other in described[1:]):
        raise CaptureError(
            f"microbatches={programs[0].plan.microbatches} do not divide the batch, and the model is another one for the smaller of them; "
            f"pass a multiple of {programs[0].plan.microbatches} rows."
        )


def _check_results(call: CompiledCall) -> None:
    """PlanError for a result that cannot be described when microbatches of several sizes are put together."""
    for node, item in zip(call.program.output_nodes(), call.program.outputs, strict=True):
        placed = dict(item.placements)
        batch = placed.get("dp")
        cut = [
            axis
            for axis in ("cp", "tp")
            if isinstance(found := placed.get(axis), Shard) and isinstance(batch, Shard) and found.dim == batch.dim
        ]
        if item.kind is OutputKind.USER and any(call.groups.size(axis) > 1 for axis in cut):
            number = call.program.plan.microbatches
            raise PlanError(
                f"{meta.where(node)} is returned cut over {cut[0]} along the dim of the batch, and microbatches={number} of several sizes "
                f"do not make one tensor of it; pass a multiple of {number} rows, or return it as [batch, sequence, ...]."
            )
