#!/usr/bin/env bash
# The fast tests with the newest packages that setup.py allows, jax 0.12 among them, on Python 3.12 or 3.13.
# They are installed into .venv-newest, and upgraded once a week. Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

# Prints an interpreter of Python 3.13 or 3.12: from the PATH, else one that pyenv or uv has installed.
find_new_python() {
  local candidates=(python3.13 python3.12 python3)
  if command -v pyenv >/dev/null; then
    candidates+=("$(pyenv root)"/versions/3.13.*/bin/python "$(pyenv root)"/versions/3.12.*/bin/python)
  fi
  if command -v uv >/dev/null; then
    candidates+=("$(uv python find 3.13 2>/dev/null || true)" "$(uv python find 3.12 2>/dev/null || true)")
  fi
  for candidate in "${candidates[@]}"; do
    # venv and ensurepip: some systems leave them out of their Python
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info < (3, 14))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "error: Python 3.12 or 3.13 is needed for the newest jax; there is none on the PATH, nor one of pyenv or uv:" \
    "install one, for example with 'pyenv install 3.13' or 'uv python install 3.13'" >&2
  exit 1
}

PYTHON=$PWD/.venv-newest/bin/python
mark=$(cksum <setup.py)
if ! grep -qxF "$mark" .venv-newest/installed 2>/dev/null || [ -z "$(find .venv-newest/installed -mtime -7)" ]; then
  found=$(find_new_python)
  echo "installing areal_jax[dev] with the newest packages into .venv-newest"
  [ -x "$PYTHON" ] || "$found" -m venv .venv-newest
  install_project dev --upgrade --upgrade-strategy eager
  echo "$mark" >.venv-newest/installed
fi
"$PYTHON" -c 'import platform, jax, jaxlib; print("Python", platform.python_version(), "jax", jax.__version__, "jaxlib", jaxlib.__version__)'
if [ $# -eq 0 ]; then set -- -m "not slow"; fi
exec "$PYTHON" -m pytest -n "${TEST_PROCESSES:-2}" --dist loadfile --no-loadscope-reorder "$@"
