#!/usr/bin/env bash
# A run under a real Ray on this machine, of a head and three nodes with the labels of TPU nodes (tests/launch/ray_cluster.py).
#   bash launch/test_ray.sh          configs/tiny_cpu.py with two learner processes, two engines and an exporter; the node of an engine
#                                    is removed, then one of the learner's; the run must end with its report. About 10 minutes.
#   bash launch/test_ray.sh --stub   the same with roles that compute nothing. About 4 minutes.
# Ray is installed into .venv-ray; AREAL_JAX_RAY_PYTHON names an interpreter that has it already, and AREAL_JAX_PYTHON one
# for the roles. FOLDER names the folder of the run (a temporary one by default, removed at the end).
# Exit code 1 where a check fails, 2 where it cannot run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

refuse() {
  echo "error: $1" >&2
  exit 2
}

case "${1:-}" in
  '' | --stub) ;;
  *) refuse "usage: bash launch/test_ray.sh [--stub]" ;;
esac

find_ray() {
  RAY=${AREAL_JAX_RAY_PYTHON:-$PWD/.venv-ray/bin/python}
  if [ -n "${AREAL_JAX_RAY_PYTHON:-}" ]; then
    "$RAY" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("ray") is None)' 2>/dev/null ||
      refuse "AREAL_JAX_RAY_PYTHON=$RAY has no Ray: name an interpreter that has it, or unset the variable"
    return
  fi
  local mark
  mark=$(cksum <setup.py)
  grep -qxF "$mark" .venv-ray/installed 2>/dev/null && return
  echo 'installing areal_jax[dev,ray] into .venv-ray (once)'
  [ -x "$RAY" ] || "$(find_python)" -m venv .venv-ray
  PYTHON=$RAY install_project dev,ray || refuse 'areal_jax[dev,ray] cannot be installed: its message is above'
  echo "$mark" >.venv-ray/installed
}

source launch/environment.sh
find_ray
REMOVED=${FOLDER:+no}
FOLDER=${FOLDER:-$(mktemp -d)}
mkdir -p "$FOLDER"
code=0
RAY_DEDUP_LOGS=0 RAY_USAGE_STATS_ENABLED=0 "$RAY" -m tests.launch.ray_cluster --workdir="$FOLDER/run" "$@" || code=$?
if [ "$REMOVED" = no ] || [ $code != 0 ]; then echo "everything it left is in $FOLDER"; else rm -rf "$FOLDER"; fi
exit $code
