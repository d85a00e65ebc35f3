#!/bin/sh
# Tests and figures of one GPU, in a few minutes: run from the repository root on a machine with CUDA.
#   sh benchmarks/gpu/run.sh [output folder]
set -eu
out=${1:-out/gpu}
python=${PYTHON:-python3}
mkdir -p "$out"
PYTHONPATH=. "$python" -m pytest -q -m gpu tests/gpu -p no:cacheprovider 2>&1 | tee "$out/tests.log" || status=1
PYTHONPATH=. "$python" -m benchmarks.gpu.moe_layer --json "$out/moe_layer.json"
exit "${status:-0}"
