#!/usr/bin/env bash
# The pinned cases of launch/aot_cases.json, compiled for TPU slices and GPU nodes that are not there, against their
# bounds: bash launch/test_aot.sh [--only=NAME] [--json=DIR] [--record]. Minutes a case; no part of launch/test.sh.
# Uses the Python in AREAL_JAX_PYTHON (default python3) with the extras aot-tpu and aot-gpu (docs/pods.md).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${AREAL_JAX_PYTHON:-python3}" -m benchmarks.aot_cases "$@"
