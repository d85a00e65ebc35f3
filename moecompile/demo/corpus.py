"""Real text that is on every machine: the source of Python's standard library, as bytes.

A batch depends on the step and on nothing else, so that every layout of ranks reads the same text, and a run that is taken
up again goes on where it stopped.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

VOCAB_SIZE = 256
# A stride that shares no factor with most text lengths walks over the whole text before it comes back.
_STRIDE = 1_000_003
_MAX_BYTES = 4_000_000


def load(max_bytes: int = _MAX_BYTES) -> Tensor:
    """The files of the standard library's top folder in order of name, uint8 [at most ``max_bytes``]."""
    folder = Path(sysconfig.get_path("stdlib"))
    parts, size = [], 0
    for path in sorted(folder.glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= max_bytes:
            break
    return torch.frombuffer(bytearray(b"\n".join(parts))[:max_bytes], dtype=torch.uint8)


def windows(text: Tensor, step: int, batch: int, seq_len: int) -> Tensor:
    """The global batch of one step: int64 [batch, seq_len + 1], each row a place in the text."""
    number = torch.arange(step * batch, (step + 1) * batch)
    start = number * _STRIDE % (text.numel() - seq_len - 1)
    return text[start[:, None] + torch.arange(seq_len + 1)].long()
