#!/usr/bin/env bash
# Sets everything up and trains SmolLM2-135M-Instruct to add six numbers step by step, on a CPU.
# Further arguments go to main_train: --resume, --config.run.steps=24, ...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
make_environment quickstart
# later starts load the compiled programs instead of compiling them again
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$PWD/.jax_cache}"
exec "$PYTHON" -m areal_jax.main_train --config=configs/quickstart.py --workdir=runs/quickstart "$@"
