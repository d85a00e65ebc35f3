"""What each optional pass is worth: one process, one model per pipeline, steps alternating.

    python -m benchmarks.compare_passes [--steps 12]

Steps of the pipelines follow each other within a second, so even a busy machine compares them within about one per cent.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import moecompile as mc
from benchmarks.workload import WithLoss, batch, build
from moecompile.compilation import default_pipeline

OPTIONAL = ("fuse-swiglu", "fuse-rms-norm", "fuse-rotary", "canonicalize")
WARMUP = 2


def pipelines() -> dict[str, str]:
    """The preset, the preset without each optional pass, and without all of them."""
    full = default_pipeline(mc.Plan(dp=1), step=True).split(",")
    found = {"preset": ",".join(full), "without all": ",".join(item for item in full if item not in OPTIONAL)}
    return found | {f"without {name}": ",".join(item for item in full if item != name) for name in OPTIONAL}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    models = {name: mc.parallelize(WithLoss(build()), mc.Plan(dp=1, passes=text)) for name, text in pipelines().items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for index in range(args.steps + WARMUP):
        ids, labels = batch(index, 0, 2)
        for name in models if index % 2 else reversed(models):
            start = time.thread_time()
            models[name](ids, labels).backward()
            times[name].append((time.thread_time() - start) * 1e3)
            models[name].zero_grad()
    for name, found in times.items():
        kept = found[WARMUP:]
        print(f"{name:24} CPU ms: median {statistics.median(kept):.1f}, least {min(kept):.1f}")


if __name__ == "__main__":
    main()
