#!/usr/bin/env bash
# Everything that only a GPU shows, in at most 8 minutes: bash launch/test_gpu.sh --json=FILE [--minutes=8] [--tiny].
# --plan=measure takes 590 s: synchronous against asynchronous runs, training, decoding, experts, sets of XLA's flags.
# Uses the Python in AREAL_JAX_PYTHON (default python3), which needs jax for CUDA and a few packages (docs/gpu.md);
# installs nothing and needs no network. --wheels=FOLDER takes what is missing from a folder of launch/gpu_wheels.sh.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${AREAL_JAX_PYTHON:-python3}" -m benchmarks.gpu "$@"
