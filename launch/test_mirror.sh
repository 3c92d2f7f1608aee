#!/usr/bin/env bash
# A run whose checkpoints go to S3, with moto's server on this machine: kill -9, the directory deleted, resume, evaluation and
# export from the bucket; connections that are cut, a full bucket, no permission. About 5 minutes on two cores.
#   bash launch/test_mirror.sh
# areal_jax[dev,mirror] and moto are installed into .venv-mirror (300 MB in addition); AREAL_JAX_MIRROR_PYTHON names an
# interpreter that has them. Exit code 1 where a check fails, 2 where it cannot run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

PYTHON=${AREAL_JAX_MIRROR_PYTHON:-$PWD/.venv-mirror/bin/python}
mark=$(cksum <setup.py)
if [ -z "${AREAL_JAX_MIRROR_PYTHON:-}" ] && ! grep -qxF "$mark" .venv-mirror/installed 2>/dev/null; then
  echo 'installing areal_jax[dev,mirror] and moto into .venv-mirror (once)'
  [ -x "$PYTHON" ] || "$(find_python)" -m venv .venv-mirror
  if ! install_project dev,mirror || ! run_pip .venv-mirror/install.log install 'moto[server]>=5'; then
    echo 'error: the packages cannot be installed: the message is above' >&2
    exit 2
  fi
  echo "$mark" >.venv-mirror/installed
fi
exec "$PYTHON" -m pytest -q -n0 -m slow tests/app/workdir/test_mirror_s3.py
