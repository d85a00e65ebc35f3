"""Products of fp32 matrices on the CPU: by oneDNN where it is faster than the BLAS that `torch.mm` calls.

MKL, the BLAS of the usual torch builds, keeps AMD processors at AVX2; oneDNN uses their AVX-512. It makes code for every new shape,
so this is for products whose shapes stay.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path

import torch
from torch import Tensor

from moecompile.compat import onednn_linear

MIN_SIZE = 64  # smaller products are not worth it


@functools.cache
def prefers_onednn() -> bool:
    """Whether this is a processor on which oneDNN's products are the faster ones. The same on all ranks of a host."""
    if onednn_linear is None or platform.machine() not in ("x86_64", "AMD64"):
        return False
    try:
        vendor = "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="ignore")
    except OSError:
        return False
    return vendor and torch.backends.cpu.get_cpu_capability() == "AVX512"


def mm(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] times b [K, N]; contiguous."""
    wide = a.dtype == b.dtype == torch.float32 and min(*a.shape, b.shape[1]) >= MIN_SIZE
    if wide and a.is_contiguous() and prefers_onednn():
        made: Tensor = onednn_linear(a, b.t(), None, "none", [], "")
        return made
    return torch.mm(a, b)
